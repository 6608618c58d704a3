"""What the daemon's counters tell of single swaps, and of moves beside others."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

SWAP_COUNTERS = {
    "out": ("kv_cpu_offload_bytes_total", "kv_cpu_offload_copies_total", "cpu_offload_seconds"),
    "in": ("kv_cpu_reload_bytes_total", "kv_cpu_reload_copies_total", "cpu_reload_seconds"),
}

MOVES = (
    ("preempted", "requests_swapped_total", "cpu_offload_seconds"),
    ("resumed", "requests_resumed_total", "cpu_reload_seconds"),
)
"""Event, counter of moves, counter of seconds."""


class Way:
    """What single swaps took in one direction."""

    def __init__(self, name: str) -> None:
        self._keys = SWAP_COUNTERS[name]
        self._swaps: list[list[float]] = []
        """Bytes, copies and seconds of each."""

    def note(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Counters around one swap."""
        self._swaps.append([after[key] - before[key] for key in self._keys])

    def report(self, plain: float) -> dict[str, Any]:
        """`plain`: bytes per second of a plain copy. Medians, because a swap in which the system gave the core to
        others for some milliseconds says nothing of swaps. The blocks of a request that is alone in the pool are
        neighbours: one run of rows."""
        sizes, copies, seconds = zip(*self._swaps, strict=True)
        rate = statistics.median(size / took for size, took in zip(sizes, seconds, strict=True))
        return {
            "bytes_per_swap": statistics.mean(sizes),
            "copies_per_swap": statistics.mean(copies),
            "runs_of_rows_per_swap": 1,
            "ms_per_swap": 1000 * statistics.median(seconds),
            "least_ms": 1000 * min(seconds),
            "most_ms": 1000 * max(seconds),
            "bytes_per_s": rate,
            "times_a_plain_copy": plain / rate,
        }


def seconds_of_a_move(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """From the first slice to the last one, on the average, by the event that tells of it."""
    took = {}
    for event, moves, seconds in MOVES:
        count = after[moves] - before[moves]
        took[event] = (after[seconds] - before[seconds]) / count if count else 0.0
    return took
