"""The ways to the device: decode, prefill and offload each have a stream, and wait for one another by events.

The right to touch a KV block travels in messages, and a stage sends such a message after its work for the block has
been started on its stream. So it is enough that every piece of work begins, on the device, after what the other lanes
had finished starting by then. Who passes a block on, to whom and why, does not matter here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

from deepinfer.kernels.ops import Ops
from deepinfer.kernels.streams import Stream
from deepinfer.stages.compute import ComputeThread

P = ParamSpec("P")
T = TypeVar("T")


class Lane:
    """One stage's way to the device. Used by one stage at a time.

    `thread` computes; None means: in the thread that calls.
    """

    def __init__(self, stream: Stream, thread: ComputeThread | None) -> None:
        self.others: tuple[Lane, ...] = ()
        self._stream, self._thread = stream, thread
        self._finished: Any = None

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `function`, or what it raised."""
        call = partial(self._in_order, partial(function, *args, **kwargs))
        return call() if self._thread is None else self._thread.run(call)

    def _in_order(self, function: Callable[[], T]) -> T:
        for lane in self.others:
            finished = lane._finished
            if finished is not None:
                self._stream.wait(finished)
        try:
            with self._stream:
                return function()
        finally:
            self._finished = self._stream.record()


class Lanes:
    """The three lanes of an engine, owned by its host. On the CPU decode and prefill share the thread `compute`, one
    after the other; `stages.compute` says why."""

    def __init__(self, ops: Ops, compute: ComputeThread) -> None:
        other = ComputeThread() if ops.overlaps else compute
        self._threads = (compute, other)
        self.decode, self.prefill = Lane(ops.new_stream("decode"), compute), Lane(ops.new_stream("prefill"), other)
        self.offload = Lane(ops.new_stream("offload"), None)
        lanes = (self.decode, self.prefill, self.offload)
        for lane in lanes:
            lane.others = tuple(other for other in lanes if other is not lane)

    def pulse(self) -> tuple[bool, int]:
        """Whether anything is being computed, and how often that has begun. From any thread."""
        return any(thread.working for thread in self._threads), sum(thread.progress for thread in self._threads)

    def close(self) -> None:
        for thread in self._threads:
            thread.close()
