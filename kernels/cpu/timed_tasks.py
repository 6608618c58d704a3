"""Programs of which every task's time is known: when each thread began it, and when that thread had done its share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np
from numba import prange

from deepinfer.kernels.cpu.jit import compiled
from deepinfer.kernels.cpu.tasks import COUNTER_INTS, TASK_INTS, Program, Task, take_units, wait_for_others

_CLOCK = time.CLOCK_MONOTONIC
_TIME_INTS = 2
"""Of a C timespec: seconds and nanoseconds."""
_NOTE_INTS = 2 * _TIME_INTS + 1
"""Begin, end, and units that were taken."""

_clock_gettime = numba.types.ExternalFunction("clock_gettime", numba.int32(numba.int32, numba.int64))


@compiled(numba.void(numba.int64[:, ::1], numba.int64[:, ::1], numba.int64, numba.int64[:, :, ::1]), parallel=True)
def _run_timed(tasks, counters, num_workers, notes):  # type: ignore[no-untyped-def]
    for worker in prange(num_workers):
        for index in range(len(tasks)):
            task = tasks.ctypes.data + 8 * index * TASK_INTS
            counter = counters.ctypes.data + 8 * index * COUNTER_INTS
            note = notes.ctypes.data + 8 * _NOTE_INTS * (worker * len(tasks) + index)
            _clock_gettime(_CLOCK, note)
            taken = take_units(task, counter, worker)
            _clock_gettime(_CLOCK, note + 8 * _TIME_INTS)
            notes[worker, index, 2 * _TIME_INTS] = taken
            wait_for_others(task, counter)


class TaskTimes(NamedTuple):
    """Of every task, int64 [tasks], in nanoseconds of time.CLOCK_MONOTONIC."""

    begin: np.ndarray
    """When the first thread came to it: everything before is done."""
    end: np.ndarray
    """When the last unit was done; never later than the next task's begin."""
    busy: np.ndarray
    """How long a thread worked on it, on average over all threads, also over those that came too late."""


class TimedProgram(Program):
    """As `Program`, and it knows the times of the last run."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        super().__init__(tasks)
        self._notes = np.zeros((0, len(tasks), _NOTE_INTS), np.int64)

    def run(self, num_workers: int) -> None:
        if len(self._notes) != num_workers:
            self._notes = np.zeros((num_workers, *self._notes.shape[1:]), np.int64)
        self._counters.fill(0)
        _run_timed(self._tasks, self._counters, num_workers, self._notes)

    def times(self) -> TaskTimes:
        notes = self._notes
        begins, ends = (notes[..., at] * 1_000_000_000 + notes[..., at + 1] for at in (0, _TIME_INTS))
        took_part = notes[..., -1] > 0
        begin = begins.min(axis=0)
        end = np.where(took_part, ends, 0).max(axis=0)
        # Whoever comes to the next task knows that this one is done, even if the thread that did it was put aside
        # before it could look at the clock.
        end[:-1] = np.minimum(end[:-1], begin[1:])
        shares = np.where(took_part, np.minimum(ends, end) - begins, 0)
        return TaskTimes(begin, end, np.maximum(shares, 0).mean(axis=0))
