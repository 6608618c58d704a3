"""A stream of the host shim: work is done at once, and what each stream has waited for is remembered.

Times are vector clocks: for each stream, how many of its events are known to be over. So a test can tell whether the
events alone order two accesses, whatever the threads happened to do.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import NamedTuple

_current = threading.local()


class HostEvent(NamedTuple):
    clock: dict[str, int]


class HostStream:
    """See `kernels.streams.Stream`. Used by one thread at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._clock: dict[str, int] = {name: 0}

    def __enter__(self) -> HostStream:
        _current.stream = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.stream = None

    @staticmethod
    def current() -> HostStream | None:
        """The stream that this thread is inside of."""
        return getattr(_current, "stream", None)

    @property
    def now(self) -> int:
        """The number of the event that will cover what is started now."""
        return self._clock[self.name] + 1

    def knows(self, name: str, number: int) -> bool:
        """Whether what is started here now comes after event `number` of stream `name`."""
        return self._clock.get(name, 0) >= number

    def record(self) -> HostEvent:
        self._clock[self.name] += 1
        return HostEvent(dict(self._clock))

    def wait(self, event: HostEvent) -> None:
        for name, number in event.clock.items():
            self._clock[name] = max(number, self._clock.get(name, 0))
