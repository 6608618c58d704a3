"""Whose turn it is: connections that wait with equal priority take turns, however many requests each of them has."""

from __future__ import annotations

from collections import Counter

TICKS = 1 << 20
"""One turn of a connection that waits alone. Integers, so that equal turns are equal."""


class _Lane:
    """Of one priority."""

    def __init__(self) -> None:
        self.now = 0
        self.next: dict[bytes, int] = {}
        """By connection, the first turn that its next request may have."""
        self.waiting: Counter[bytes] = Counter()


class Turns:
    """Fair queueing (Demers, Keshav, Shenker 1989): a request gets a number when it comes, and lower numbers go first.
    The numbers of one connection are `TICKS` apart; time moves by `TICKS` while each connection that waits has one
    request started. So a newcomer comes after what others were to have next, and before the rest of theirs.
    """

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}

    def take(self, priority: int, connection: bytes) -> int:
        """The number of a new request. It waits until `leave`."""
        lane = self._lanes.setdefault(priority, _Lane())
        turn = max(lane.now, lane.next.get(connection, 0))
        lane.next[connection] = turn + TICKS
        lane.waiting[connection] += 1
        return turn

    def leave(self, priority: int, connection: bytes, started: bool) -> None:
        """It waits no more: it was started, or has gone without."""
        lane = self._lanes[priority]
        if started:
            lane.now += TICKS // len(lane.waiting)
        lane.waiting[connection] -= 1
        if lane.waiting[connection]:
            return
        del lane.waiting[connection]
        if not lane.waiting:  # Nobody is owed anything.
            del self._lanes[priority]
        elif len(lane.next) > 2 * len(lane.waiting) + 64:
            lane.next = {who: turn for who, turn in lane.next.items() if turn > lane.now or who in lane.waiting}
