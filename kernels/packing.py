"""Packs weights of files into the records of kernels: many matrices in one go, into one piece of memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numba
import numpy as np
import torch

from deepinfer.kernels.cpu import file_rows
from deepinfer.kernels.cpu.large_pages import untouched_bytes
from deepinfer.kernels.cpu.records import BLOCK, P_BF16, P_INT4, P_INT8, record_bytes
from deepinfer.kernels.cpu.repack import WORTH_WAKING
from deepinfer.kernels.cpu.tasks import Task, run_together
from deepinfer.kernels.stored_rows import StoredRows
from deepinfer.kernels.stored_words import StoredWords

_LINE = 64
_BATCH_BYTES = 64 << 20
"""Of records that are made in one go."""
_TYPES = {P_INT4: {"Q4_0", "Q4_1", "Q4_K"}, P_INT8: {"Q8_0"}}
_WIDE = {"Q4_K"}
"""Whose scales and minima need more than fp16."""

Stored = StoredRows | StoredWords
Take = Callable[[torch.Tensor, bool], None]
"""(records, uint8 [blocks, groups, bytes]; whether they are wide), as `records` has them, in the groups of the
weights."""


class _Job(NamedTuple):
    weights: Stored
    kind: int
    wide: bool
    take: Take

    @property
    def shape(self) -> tuple[int, int, int]:
        (rows, columns), group = self.weights.shape, self.weights.group
        return -(-rows // BLOCK), -(-columns // group), record_bytes(self.kind, group, self.wide)

    def tasks(self, records: torch.Tensor, room: int, faults: int) -> list[Task]:
        if isinstance(self.weights, StoredWords):
            return self.weights.tasks(self.kind, self.wide, records.data_ptr())
        units = {P_BF16: file_rows.pack_bf16_unit, P_INT8: file_rows.pack_int8_unit}
        unit = units.get(self.kind, file_rows.pack_int4_unit)()
        arguments = (*self.weights.arguments(), records.data_ptr(), room, faults, int(self.wide))
        return [Task(unit, self.shape[0], arguments)]


class _Waiting(threading.local):
    jobs: list[_Job] | None = None
    num_bytes = 0
    """Of their records."""


_waiting = _Waiting()


def pack_stored(weights: Stored, kind: int, take: Take) -> None:
    """Gives `take` the records of `weights`, at once or before `gathered` ends. Rows have codes of 4 bits in Q4 types,
    of 8 bits in Q8_0, and anything becomes bf16. Words have codes of 4 bits, and scales and minima that are finite.

    Raises NotFiniteError, for these weights or for others that waited, and ValueError for weights without such codes.
    """
    job = _Job(weights, kind, _is_wide(weights, kind), take)
    if _waiting.jobs is None:
        _run([job])
        return
    _waiting.jobs.append(job)
    _waiting.num_bytes += math.prod(job.shape)
    if _waiting.num_bytes >= _BATCH_BYTES:
        _run_waiting()


def _is_wide(weights: Stored, kind: int) -> bool:
    if isinstance(weights, StoredWords):
        if kind != P_INT4:
            raise ValueError(f"words of 4-bit codes have none for kind {kind}")
        return not weights.fit_half()
    types = weights.type_names
    without = types - _TYPES.get(kind, types)
    if without:
        raise ValueError(f"{', '.join(sorted(without))} has no codes for kind {kind}; {sorted(_TYPES[kind])} have")
    return kind != P_BF16 and bool(types & _WIDE)


@contextmanager
def gathered() -> Iterator[None]:
    """What this thread packs may wait for more of the kind: waking the other threads for every matrix can cost more
    than packing it."""
    _waiting.jobs, _waiting.num_bytes = [], 0
    try:
        yield
        _run_waiting()
    finally:
        _waiting.jobs = None


def _run_waiting() -> None:
    jobs, _waiting.jobs, _waiting.num_bytes = _waiting.jobs, [], 0
    if jobs:
        _run(jobs)


def _run(jobs: Sequence[_Job]) -> None:
    shapes = [job.shape for job in jobs]
    room_of = [-(-math.prod(shape) // _LINE) * _LINE for shape in shapes]
    memory = untouched_bytes(sum(room_of))
    made = [part[: math.prod(shape)].view(shape) for part, shape in zip(memory.split(room_of), shapes, strict=True)]
    workers = numba.get_num_threads() if len(memory) >= WORTH_WAKING else 1
    faults, room = np.zeros((len(jobs), 2), np.int64), np.empty(workers * file_rows.ROOM, np.uint8)
    tasks = [
        task
        for job, records, row in zip(jobs, made, faults, strict=True)
        for task in job.tasks(records, room.ctypes.data, row.ctypes.data)
    ]
    run_together(tasks, workers)
    for job, (strange, _) in zip(jobs, faults, strict=True):
        if strange and isinstance(job.weights, StoredRows):
            raise job.weights.not_finite(torch.bfloat16)
    again = []
    for job, records, (_, misfits) in zip(jobs, made, faults, strict=True):
        if misfits:
            again.append(job._replace(wide=True))
        else:
            job.take(records, job.wide)
    if again:
        _run(again)
