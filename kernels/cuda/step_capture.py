"""The buffers of a captured decode step: token ids, positions and block tables at fixed places on the device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.attention_batch import AttentionBatch
from deepinfer.kernels.cuda.attention_rows import make_rows
from deepinfer.kernels.cuda.decode_plan import workspace_floats
from deepinfer.kernels.cuda.launcher import Backend
from deepinfer.kernels.cuda.paged_attention import CudaAttention
from deepinfer.kernels.graphs import Graph

PADDING = -1
"""The position of a row that is not used."""


class CudaStepCapture:
    """See `kernels.graphs.StepCapture`. Steps run one after another, so one workspace, as large as the largest of them
    needs, serves the attention of all."""

    def __init__(self, backend: Backend, attention: CudaAttention, max_rows: int, max_context: int) -> None:
        self._backend, self._attention = backend, attention
        spec, most = attention.spec, max(attention.widest_partitions(max_context).values())
        self._room_floats = workspace_floats(max_rows, spec.num_q_heads, spec.head_dim, most)
        self._room: Tensor | None = None

    def buffers(self, rows: int, context: int) -> CudaStepBuffers:
        if self._room is None:
            # by the stream that the steps run on, to which the allocator then counts it
            self._room = torch.empty(self._room_floats, device=self._backend.device)
        return CudaStepBuffers(self._attention, self._backend.device, rows, context, self._room)

    def capture(self, function: Callable[[], None]) -> Graph:
        return self._backend.capture(function)


class CudaStepBuffers:
    """See `kernels.graphs.StepBuffers`.

    All inputs are one tensor, so that a step copies once. The grid of the attention is as wide as any context of up to
    `context` tokens needs; what a step's contexts do not need of it leaves at once. What passes between the kernels
    lies in `room`, which is there for every step.
    """

    def __init__(self, attention: CudaAttention, device: str, rows: int, context: int, room: Tensor) -> None:
        self._attention, self._context = attention, context
        groups, width = attention.num_groups, attention.blocks_of(context)
        flags = -(-rows // 4)
        size = 2 * rows + flags + groups * rows * width
        self._staged = torch.zeros(size, dtype=torch.int32, pin_memory=device != "cpu")
        self._inputs = torch.zeros(size, dtype=torch.int32, device=device)
        self._host_ids, self._host_positions, _, self._host_tables = _parts(self._staged, rows, flags, groups)
        self._host_positions.fill_(PADDING)
        self.token_ids, positions, nonfinite, tables = _parts(self._inputs, rows, flags, groups)
        self._inputs.copy_(self._staged)
        each = np.arange(rows + 1)
        self.attention = AttentionBatch(self._host_positions, each[:-1], self._host_tables, each)
        self.attention.workspace = make_rows(
            attention.spec,
            positions,
            torch.arange(rows, dtype=torch.int32, device=device),
            tables,
            nonfinite.view(torch.uint8)[:rows],
            attention.widest_partitions(context),
            room=room,
        )
        self.attention.device_flags = self.attention.workspace.nonfinite_rows

    def fill(self, token_ids: Tensor, batch: AttentionBatch) -> None:
        """See `StepBuffers.fill`. The copy also clears the flags of rows that are not finite."""
        rows, tables = batch.num_rows, batch.block_tables[:, :, : self._host_tables.shape[2]]
        if not len(token_ids) == rows == batch.num_seqs <= len(self.token_ids):
            raise ValueError(
                f"{len(token_ids)} tokens in {rows} rows of {batch.num_seqs} sequences do not fit a step of "
                f"{len(self.token_ids)} rows"
            )
        if rows and int(batch.positions.max()) >= self._context:
            raise ValueError(f"position {batch.positions.max()} is past a context of {self._context} tokens")
        self._attention.check(batch)
        self._host_ids.zero_()
        self._host_positions.fill_(PADDING)
        self._host_ids[:rows] = token_ids
        self._host_positions[:rows] = torch.from_numpy(batch.positions)
        self._host_tables[:, :rows, : tables.shape[2]] = torch.from_numpy(tables)
        self._inputs.copy_(self._staged, non_blocking=True)


def _parts(ints: Tensor, rows: int, flags: int, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids [rows], positions [rows], flags, block tables [groups, rows, blocks]."""
    ids, positions, nonfinite, tables = ints.tensor_split((rows, 2 * rows, 2 * rows + flags))
    return ids, positions, nonfinite, tables.view(groups, rows, -1)
