"""How long the parts of an engine's start took, and how fast weights were read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepinfer.stages.clock import monotonic


class StartTimes:
    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = monotonic()
        yield
        self._seconds[name] = monotonic() - began

    def describe(self, file_bytes: int) -> dict[str, Any]:
        """As `status` has it: seconds of each part, and MB a second of the `file_bytes` that became weights."""
        rate = file_bytes / 1e6 / max(self._seconds["weights"], 1e-9)
        seconds = {name: round(value, 3) for name, value in self._seconds.items()}
        return {"seconds": seconds, "weights_mb_per_s": round(rate, 1)}


def in_words(load: dict[str, Any]) -> str:
    """What `StartTimes.describe` says, for people."""
    parts = [f"{name.replace('_', ' ')} {seconds:.2f} s" for name, seconds in load["seconds"].items()]
    return f"{', '.join(parts)}; weights at {load['weights_mb_per_s']:,.0f} MB/s"
