"""Recorded decode steps, replayed with the time of every task."""

from __future__ import annotations

from typing import NamedTuple

import numba
from torch import Tensor

from deepinfer.daemon.bench.profile.labels import now
from deepinfer.kernels.attention_batch import AttentionBatch
from deepinfer.kernels.cpu.step_programs import Compute, StepPrograms
from deepinfer.kernels.cpu.timed_tasks import TimedProgram


class Item(NamedTuple):
    """A task, or a call of Python between tasks. Times in nanoseconds of time.CLOCK_MONOTONIC."""

    begin: int
    end: int
    busy: float
    """Nanoseconds that a thread worked on it, on average: the rest it waited for the others, or came late."""
    program: int
    """Which program it is a task of; -1: a call."""


class Replay(NamedTuple):
    begin: int
    end: int
    items: list[Item]
    """In the order of the recording."""
    batch: AttentionBatch


class TimedSteps(StepPrograms):
    """The first step of each number of rows is recorded and run as the engine does it; the next ones leave `last`."""

    last: Replay | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._timed: dict[tuple[int, int], list] = {}

    def run(self, token_ids: Tensor, batch: AttentionBatch, compute: Compute) -> Tensor:
        key = self.key_of(batch)
        step = self._steps.get(key)
        if step is None:
            self.last = None
            return super().run(token_ids, batch, compute)
        parts = self._timed.get(key)
        if parts is None:
            parts = [
                TimedProgram(part) if isinstance(part, list) else part
                for part in [*step.recorder.steps, *step.recorder.last]
            ]
            self._timed[key] = parts
        workers, calls = numba.get_num_threads(), {}
        begin = now()
        self.check(batch)
        step.fill(token_ids, batch)
        for index, part in enumerate(parts):
            if isinstance(part, TimedProgram):
                part.run(workers)
            else:
                called = now()
                part()
                calls[index] = (called, now())
        batch.nonfinite_rows[:] = step.batch.nonfinite_rows
        end = now()
        items: list[Item] = []
        for index, part in enumerate(parts[: len(step.recorder.steps)]):
            if isinstance(part, TimedProgram):
                items += _items(part, index)
            else:
                first, last = calls[index]
                items.append(Item(first, last, last - first, -1))
        self.last = Replay(begin, end, items, batch)
        return step.logits


def _items(program: TimedProgram, number: int) -> list[Item]:
    begin, end, busy = (part.tolist() for part in program.times())
    return [Item(a, b, c, number) for a, b, c in zip(begin, end, busy, strict=True)]
