"""What moved between pool and host memory from one snapshot of the engine to the next, as one event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROUTINE = frozenset({"preempted", "resumed", "swap"})
"""Events that may come by the hundred a second: they must not push all others out of what is kept or shown."""
MOVED = {
    "requests_out": "requests_swapped_total",
    "bytes_out": "kv_cpu_offload_bytes_total",
    "seconds_out": "cpu_offload_seconds",
    "requests_in": "requests_resumed_total",
    "bytes_in": "kv_cpu_reload_bytes_total",
    "seconds_in": "cpu_reload_seconds",
    "rejected": "kv_cpu_offload_rejected_total",
    "failed": "kv_cpu_offload_failed_total",
}
"""Field of the event: counter of the engine."""


class SwapWatch:
    """The counters never fall: the board goes on counting when an engine is replaced."""

    def __init__(self) -> None:
        self._seen: dict[str, int | float] = dict.fromkeys(MOVED, 0)

    def moved(self, stats: Mapping[str, Any]) -> dict[str, int | float] | None:
        """What is new in `stats`; None when nothing moved."""
        now = {field: stats.get(counter, self._seen[field]) for field, counter in MOVED.items()}
        new = {field: value - self._seen[field] for field, value in now.items()}
        self._seen = now
        return new if any(new.values()) else None
