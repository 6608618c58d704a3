"""The one thread that computes.

GNU OpenMP keeps a team of workers for every thread that has ever entered a parallel region. With a second team there
are more workers than cores, and it then lets all of them sleep between regions instead of spinning for a moment: a
decode step of 30 layers, then some 240 regions, was seen to take 12 ms instead of 7. So loading, prefill and decode all
compute here, one after the other, which on the CPU they do anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _Result(NamedTuple):
    value: Any = None
    error: BaseException | None = None


class _Call(NamedTuple):
    function: Callable[[], Any]
    answer: SimpleQueue[_Result]


class ComputeThread:
    """Owned by the engine host, used by the loader, prefill and decode. Calls from several threads run in turn.

    Queues of one kind of lock each, because every decode step is handed over and back: the future of an executor takes
    several locks, and half as much time again."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()
        self.working = False
        self.progress = 0
        """Calls that have begun."""

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `function`, or what it raised."""
        answer: SimpleQueue[_Result] = SimpleQueue()
        self._calls.put(_Call(partial(function, *args, **kwargs), answer))
        result = answer.get()
        if result.error is not None:
            try:
                raise result.error
            finally:
                del result  # The error knows this frame: they would keep one another, and what was being computed.
        return result.value

    def close(self) -> None:
        """After all calls that have been made."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self.progress += 1
            self.working = True
            result = _outcome(call.function)
            self.working = False
            call.answer.put(result)
            del call, result  # What was computed is the caller's alone, also while the next call is waited for.


def _outcome(function: Callable[[], Any]) -> _Result:
    try:
        return _Result(function())
    except BaseException as error:  # noqa: BLE001 - whoever called gets it
        return _Result(error=error)
