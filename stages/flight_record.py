"""Which requests the running computations are for, in memory that outlives a process that dies in one."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

CAPACITY = 4096
"""Requests of one computation; of a larger batch the first ones are noted."""
LANES = 2
"""A decode step and a prefill chunk may be computed at the same time."""
_LANE_CELLS = 1 + CAPACITY
RECORD_BYTES = 8 * LANES * _LANE_CELLS


class FlightLane:
    """A count and as many request ids. Written by one thread."""

    def __init__(self, cells: memoryview) -> None:
        self._cells = cells

    def begin(self, rids: Sequence[int]) -> None:
        """The ids go first: until the count is there, they do not count."""
        noted = rids[:CAPACITY]
        for place, rid in enumerate(noted, 1):
            self._cells[place] = rid
        self._cells[0] = len(noted)

    def end(self) -> None:
        """Not to be called when the computation failed."""
        self._cells[0] = 0

    def running(self) -> list[int]:
        return self._cells[1 : 1 + self._cells[0]].tolist()

    def release(self) -> None:
        self._cells.release()


class FlightRecord:
    """int64 cells, written by an engine, read by its parent after its death. `descriptor` is a file of RECORD_BYTES
    that both have open; without one the record is this process's own."""

    def __init__(self, descriptor: int = -1) -> None:
        self._map = mmap.mmap(descriptor, RECORD_BYTES)
        self._cells = memoryview(self._map).cast("q")
        self.decode, self.prefill = (
            FlightLane(self._cells[first : first + _LANE_CELLS]) for first in range(0, LANES * _LANE_CELLS, _LANE_CELLS)
        )

    def running(self) -> list[int]:
        return [*self.decode.running(), *self.prefill.running()]

    def close(self) -> None:
        self.decode.release()
        self.prefill.release()
        self._cells.release()
        self._map.close()
