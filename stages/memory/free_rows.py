"""The free rows of the host arena, as runs of neighbours, so that a payload lies in as few runs as can be."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise


class FreeRows:
    """Rows 0 to `count` - 1, all free at first. A run never goes from one piece of `piece` rows into the next."""

    def __init__(self, count: int, piece: int) -> None:
        self.count = count
        self._piece = piece
        self._runs = [range(first, min(first + piece, count)) for first in range(0, count, piece)]
        """Ascending, and never two that could be one."""

    def take(self, count: int) -> list[int]:
        """`count` of them, ascending; there must be as many. From the shortest run that holds all; where none does,
        from the longest ones. The lowest of equals goes first: memory that was never touched stays so."""
        rows: list[int] = []
        while len(rows) < count:
            left = count - len(rows)
            fitting = [run for run in self._runs if len(run) >= left]
            run = min(fitting, key=len) if fitting else max(self._runs, key=len)
            rows += run[:left]
            self._shorten(run, left)
        self.count -= count
        rows.sort()
        return rows

    def _shorten(self, run: range, count: int) -> None:
        place = self._runs.index(run)
        self._runs[place : place + 1] = [run[count:]] if count < len(run) else []

    def give_back(self, rows: Sequence[int]) -> None:
        """In any order."""
        ascending = sorted(rows)
        breaks = [i for i, (a, b) in enumerate(pairwise(ascending), 1) if b != a + 1 or b % self._piece == 0]
        for begin, end in pairwise([0, *breaks, len(ascending)]):
            if begin < end:
                self._join(range(ascending[begin], ascending[end - 1] + 1))
        self.count += len(ascending)

    def _join(self, run: range) -> None:
        place = bisect(self._runs, run.start, key=lambda other: other.start)
        begin, end = place, place
        if place < len(self._runs) and self._runs[place].start == run.stop and run.stop % self._piece:
            run, end = range(run.start, self._runs[place].stop), place + 1
        if place and self._runs[place - 1].stop == run.start and run.start % self._piece:
            run, begin = range(self._runs[place - 1].start, run.stop), place - 1
        self._runs[begin:end] = [run]
