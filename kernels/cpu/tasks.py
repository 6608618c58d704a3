"""What the CPU kernels run on: tasks cut into units, which the threads take one by one.

A task is a compiled function, its arguments and a number of units. A program is a list of tasks in one parallel
region: the threads go through it together, and the next task begins when every unit of the one before is done. A
thread that the system has put aside holds nobody up but in the unit that it is in: the others do its share. Which
thread does a unit never changes what it computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import prange

from deepinfer.kernels.cpu.jit import compiled, compiled_unit, helper
from deepinfer.kernels.cpu.memory import add_int, call_unit, load_int, look_int, relax

MAX_ARGUMENTS = 16
_FUNCTION, _UNITS, _FIRST_ARGUMENT = range(3)
_NEXT, _DONE = range(2)
COUNTER_INTS = 8
"""int64 in a cache line: each task's counters have their own."""
TASK_INTS = MAX_ARGUMENTS + _FIRST_ARGUMENT
_SHARES = 64
"""Into about so many parts a task of many units is divided: to take one costs as much as the norm of a short row."""
_SPINS = 2000
"""Looks at a counter before a waiting thread lets others have its core."""

unit = compiled_unit
"""Compiles f(arguments address, unit, worker). Its arguments are int64 at that address; read them with `load_int`."""

_yield_core = numba.types.ExternalFunction("sched_yield", numba.int32())


class NotRecordableError(Exception):
    """Something in a decode step cannot be part of a program."""


class Task(NamedTuple):
    function: int
    """Address of a function that `unit` compiled."""
    units: int
    arguments: Sequence[int]
    """At most `MAX_ARGUMENTS` of 64 bits. Whoever runs the task keeps what they point to."""


@helper
def take_units(task, counter, worker):  # type: ignore[no-untyped-def]
    """A thread's share of a task: units until none is left, of many a few at a time. Returns how many it took."""
    function, units = load_int(task + 8 * _FUNCTION), load_int(task + 8 * _UNITS)
    step, taken = max(1, units // _SHARES), 0
    first = add_int(counter + 8 * _NEXT, step)
    while first < units:
        end = min(first + step, units)
        for mine in range(first, end):
            call_unit(function, task + 8 * _FIRST_ARGUMENT, mine, worker)
        add_int(counter + 8 * _DONE, end - first)
        taken += end - first
        first = add_int(counter + 8 * _NEXT, step)
    return taken


@helper
def wait_for_others(task, counter):  # type: ignore[no-untyped-def]
    """Until every unit of the task is done."""
    units, spins = load_int(task + 8 * _UNITS), 0
    while look_int(counter + 8 * _DONE) < units:
        relax()
        spins += 1
        if spins == _SPINS:
            spins = 0
            _yield_core()


@compiled(numba.void(numba.int64[:, ::1], numba.int64[:, ::1], numba.int64, numba.boolean), parallel=True)
def _run(tasks, counters, num_workers, in_order):  # type: ignore[no-untyped-def]
    """Serves both orders, because functions for all threads take longer to compile than any unit."""
    for worker in prange(num_workers):
        for index in range(len(tasks)):
            task = tasks.ctypes.data + 8 * index * TASK_INTS
            counter = counters.ctypes.data + 8 * index * COUNTER_INTS
            take_units(task, counter, worker)
            if in_order:
                wait_for_others(task, counter)


@compiled(numba.void(numba.int64[:, ::1]))
def _run_alone(tasks):  # type: ignore[no-untyped-def]
    for index in range(len(tasks)):
        task = tasks.ctypes.data + 8 * index * TASK_INTS
        for mine in range(load_int(task + 8 * _UNITS)):
            call_unit(load_int(task + 8 * _FUNCTION), task + 8 * _FIRST_ARGUMENT, mine, 0)


def bits(value: float) -> int:
    """A float as an argument; `memory.load_float` at its address reads it back."""
    return int(np.float32(value).view(np.int32))


def _table(tasks: Sequence[Task]) -> np.ndarray:
    table = np.zeros((len(tasks), TASK_INTS), np.int64)
    for row, task in zip(table, tasks, strict=True):
        row[_FUNCTION], row[_UNITS] = task.function, task.units
        row[_FIRST_ARGUMENT : _FIRST_ARGUMENT + len(task.arguments)] = task.arguments
    return table


def run_together(tasks: Sequence[Task], num_workers: int) -> None:
    """Once, now. No task waits for one before it: a thread that finds no more units in one goes on to the next."""
    if num_workers == 1:
        _run_alone(_table(tasks))
    else:
        _run(_table(tasks), np.zeros((len(tasks), COUNTER_INTS), np.int64), num_workers, False)


class Program:
    """Tasks that run one after the other, any number of times."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = _table(tasks)
        self._counters = np.zeros((len(tasks), COUNTER_INTS), np.int64)

    def run(self, num_workers: int) -> None:
        if num_workers == 1:
            _run_alone(self._tasks)
            return
        self._counters.fill(0)
        _run(self._tasks, self._counters, num_workers, True)


class Recorder:
    """Takes down what a decode step does: tasks, calls of Python between them, and the memory that they use."""

    def __init__(self) -> None:
        self.steps: list[list[Task] | Callable[[], object]] = []
        self.last: list[Callable[[], object]] = []
        self.kept: list[Any] = []
        self.taken = 0
        """Tasks and calls so far."""

    def task(self, task: Task) -> None:
        self.taken += 1
        if not self.steps or not isinstance(self.steps[-1], list):
            self.steps.append([])
        self.steps[-1].append(task)  # type: ignore[union-attr]

    def keep(self, *owners: Any) -> None:
        """Until the recording is dropped: tasks know nothing but addresses."""
        self.kept.extend(owners)

    def call(self, function: Callable[[], object]) -> None:
        self.taken += 1
        self.steps.append(function)

    def afterwards(self, function: Callable[[], object]) -> None:
        """A call that nothing of the step waits for: it does not part the tasks before it from those behind it."""
        self.last.append(function)


class Recording:
    """What a recorder took down, to be done again any number of times. Owns the memory that the tasks use."""

    def __init__(self, recorder: Recorder) -> None:
        self._kept = recorder.kept
        self._steps = [Program(step) if isinstance(step, list) else step for step in [*recorder.steps, *recorder.last]]

    def run(self, num_workers: int) -> None:
        for step in self._steps:
            if isinstance(step, Program):
                step.run(num_workers)
            else:
                step()


class _Current(threading.local):
    recorder: Recorder | None = None


_current = _Current()


def recorder() -> Recorder | None:
    """Of this thread, while it records."""
    return _current.recorder


def refuse_recording(what: str) -> None:
    """Called by what is no task. Raises NotRecordableError while this thread records."""
    if _current.recorder is not None:
        raise NotRecordableError(f"{what} cannot be part of a recorded step")


@contextmanager
def recording() -> Iterator[Recorder]:
    """Tasks of this thread are taken down and not run."""
    made = _current.recorder = Recorder()
    try:
        yield made
    finally:
        _current.recorder = None


@contextmanager
def not_recording() -> Iterator[None]:
    """Tasks of this thread are run, even while it records."""
    paused, _current.recorder = _current.recorder, None
    try:
        yield
    finally:
        _current.recorder = paused


def run_tasks(tasks: Sequence[Task], num_workers: int, *owners: Any) -> None:
    """Now, or when the recording that is going on is replayed; `owners` hold the memory that the tasks use."""
    taker = recorder()
    if taker is None:
        Program(tasks).run(num_workers)
        return
    for task in tasks:
        taker.task(task)
    taker.keep(*owners)
