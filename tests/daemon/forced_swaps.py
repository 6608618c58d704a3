"""Swaps at moments that a test chooses, instead of those at which the pool is full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepinfer.daemon.engine import Engine
from deepinfer.stages.memory.entries import State


def force_swaps(engine: Engine, when: Callable[[Any], bool], blocks: int | None = None) -> list[int]:
    """Swap out every running request for which `when(entry)` holds, in the decode thread, between two steps: all of it,
    or under `--offload-unit block` only so many of its blocks."""
    residency = engine.host.residency
    original = residency.moves
    swapped: list[int] = []

    def moves() -> Any:
        decided = original()
        for entry in list(residency.entries.values()):
            if entry.state in (State.DECODE, State.PREFILL) and not entry.locked and when(entry):
                swapped.append(entry.rid)
                residency.departures.start_swap_out(entry, decided, blocks)
        return decided

    residency.moves = moves
    return swapped
