"""Threads that each compute alone: many small torch operations are slow when every one of them wakes all cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """A context manager. While it is open, torch computes every operation in the thread that calls it, and `map` deals
    out items to as many threads as torch had; afterwards all is as before."""

    def __enter__(self) -> Workers:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(self._threads)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """In the order of `items`. Raises the first error, when what had begun has ended."""
        return list(self._pool.map(torch.inference_mode()(function), items))
