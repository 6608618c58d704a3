"""Streams: the order in which a device does what several threads start on it."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol


class Stream(Protocol):
    """What is started inside `with stream:` is done in order, beside what is started on other streams."""

    name: str

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def record(self) -> Any:
        """An event: everything that was started on this stream so far is done."""
        ...

    def wait(self, event: Any) -> None:
        """What is started on this stream from now on begins after `event`. The caller does not wait."""
        ...


class AtOnce:
    """The CPU's stream: a call has done its work when it returns."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def record(self) -> None:
        return None

    def wait(self, event: Any) -> None:
        return None
