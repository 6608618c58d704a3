"""The one thread that computes.

GNU OpenMP keeps a team of workers for every thread that has ever entered a parallel region. With a second team there
are more workers than cores, and it then lets all of them sleep between regions instead of spinning for a moment: a
decode step of 30 layers, then some 240 regions, was seen to take 12 ms instead of 7. So loading, prefill and decode all
compute here, one after the other, which on the CPU they do anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ComputeThread:
    """Owned by the engine host, used by the loader, prefill and decode. Calls from several threads run in turn."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self.working = False
        self.progress = 0
        """Calls that have begun."""

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `function`, or what it raised."""
        return self._pool.submit(self._call, partial(function, *args, **kwargs)).result()

    def _call(self, function: Callable[[], T]) -> T:
        self.progress += 1
        self.working = True
        try:
            return function()
        finally:
            self.working = False

    def close(self) -> None:
        self._pool.shutdown()
