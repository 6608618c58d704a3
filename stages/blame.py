"""Which request killed the engine, when many were being computed. Integers only."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping


class Blame:
    """An engine that dies in a computation may have died of one of its requests. The rules:

    A request is struck when an engine dies while computing it, and cleared when it yields a token. Computing is a
    function of what the request is, so one that kills an engine kills the next one at the same token. One that is
    struck twice at the same token, the second time alone, is guilty. If others were computed beside it, all that are
    struck twice are on probation: they are submitted one by one, each when the one before it has yielded a token or
    ended, and all others wait. The one that is being tried when an engine dies while computing it is guilty.
    """

    def __init__(self) -> None:
        self._struck: dict[int, int] = {}
        """How many tokens it had when it was struck."""
        self._probation: deque[int] = deque()
        """The first one is being tried."""
        self._acquitted: set[int] = set()
        """In this probation: they may run beside the one that is tried."""

    def died(self, running: Mapping[int, int]) -> int | None:
        """An engine died while it computed `running`: for each request, how many tokens it had yielded. Returns the
        guilty one, if that is known."""
        twice = [rid for rid, tokens in running.items() if self._struck.get(rid) == tokens]
        self._struck.update(running)
        if self._probation:
            guilty = self._probation[0] if self._probation[0] in twice else None
        elif len(running) == 1:
            guilty = twice[0] if twice else None
        else:
            guilty = None
            self._probation.extend(twice)
        if guilty is not None:
            self.clear(guilty)
        return guilty

    def clear(self, rid: int) -> bool:
        """It has yielded a token, or it has ended. True when others may run now that had to wait."""
        self._struck.pop(rid, None)
        if rid not in self._probation:
            return False
        first = self._probation[0] == rid
        self._probation.remove(rid)
        self._acquitted.add(rid)
        if not self._probation:
            self._acquitted.clear()
        return first

    def holds(self, rid: int) -> bool:
        """It must wait until others have been tried."""
        return bool(self._probation) and rid != self._probation[0] and rid not in self._acquitted
