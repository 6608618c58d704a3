"""Decode steps of the CPU as recorded programs: one for each number of rows, recorded when it is first needed.

A step of 30 layers is hundreds of tasks: one compiled call runs them all, without Python between them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numba
import torch
from torch import Tensor

from deepinfer.kernels.attention_batch import AttentionBatch
from deepinfer.kernels.cpu.packed_matmul import ROW_TILE
from deepinfer.kernels.cpu.tasks import NotRecordableError, Recorder, Recording, recording

log = logging.getLogger(__name__)

Compute = Callable[[Tensor, AttentionBatch], Tensor]
"""(token ids int32 [N], the rows) -> logits [N, vocab]."""


class Step:
    """The inputs of a step of `rows` rows, always in the same memory, and the program that reads them. `segments`: see
    `NumbaAttention.segments`."""

    def __init__(self, rows: int, groups: int, table_width: int, segments: int, compute: Compute) -> None:
        self.token_ids = torch.zeros(rows, dtype=torch.int32)
        each = torch.arange(rows + 1, dtype=torch.int32)
        tables = torch.zeros((groups, rows, table_width), dtype=torch.int32)
        self.batch = AttentionBatch(torch.zeros(rows, dtype=torch.int32), each[:-1], tables, each)
        self.batch.segments = segments
        with recording() as recorder:
            self.logits = compute(self.token_ids, self.batch)
        self.recorder: Recorder = recorder
        self._recording = Recording(recorder)

    def fill(self, token_ids: Tensor, batch: AttentionBatch) -> None:
        """Its inputs become these."""
        self.token_ids.copy_(token_ids)
        self.batch.positions[:] = batch.positions
        self.batch.block_tables[:, :, : batch.table_width] = batch.block_tables
        self.batch.nonfinite_rows.fill(False)

    def run(self, token_ids: Tensor, batch: AttentionBatch, workers: int) -> None:
        self.fill(token_ids, batch)
        self._recording.run(workers)
        batch.nonfinite_rows[:] = self.batch.nonfinite_rows


@dataclass
class StepPrograms:
    """Owned by one executor, and used by one thread at a time.

    check: raises ValueError for a batch whose rows would read or write where they must not.
    segments: of `NumbaAttention`; steps that split contexts otherwise are other programs.
    groups: block tables that a sequence has.
    table_width: blocks of the longest context.
    """

    check: Callable[[AttentionBatch], None]
    segments: Callable[[AttentionBatch], int]
    groups: int
    table_width: int
    replays: int = 0

    def __post_init__(self) -> None:
        self._steps: dict[tuple[int, int], Step] = {}
        self._refused = ""

    @property
    def captured(self) -> list[tuple[int, int]]:
        """(rows, most blocks of a context) of every program."""
        return [(rows, self.table_width) for rows in sorted({rows for rows, _ in self._steps})]

    @property
    def in_use(self) -> bool:
        """False once a step was found to contain what cannot be recorded."""
        return not self._refused

    def takes(self, batch: AttentionBatch, num_logits: int) -> bool:
        """Whether this is a decode step: one row for each sequence, and the logits of all."""
        rows = batch.num_rows
        if self._refused or not 0 < rows == num_logits == batch.num_seqs or rows > ROW_TILE:
            return False
        return batch.table_width <= self.table_width

    def key_of(self, batch: AttentionBatch) -> tuple[int, int]:
        """By which a program is found: rows, and segments of their contexts."""
        return batch.num_rows, self.segments(batch)

    def run(self, token_ids: Tensor, batch: AttentionBatch, compute: Compute) -> Tensor:
        """Logits [N, vocab] of a step that `takes` said yes to; theirs until the next step."""
        self.check(batch)
        key = self.key_of(batch)
        step = self._steps.get(key)
        if step is None:
            try:
                rows, segments = key
                step = self._steps[key] = Step(rows, self.groups, self.table_width, segments, compute)
            except NotRecordableError as error:
                self._refused = str(error)
                log.warning("decode steps run call by call: %s", error)
                return compute(token_ids, batch)
        step.run(token_ids, batch, numba.get_num_threads())
        self.replays += 1
        return step.logits
