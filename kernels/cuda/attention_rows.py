"""The rows of a batch on the device, and room for what passes between the kernels of paged attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.attention import AttentionSpec
from deepinfer.kernels.cuda.decode_plan import workspace_floats


@dataclass
class AttentionRows:
    """One for all layers. A row whose position is -1 is padding: it stores nothing, and its output is zeros."""

    positions: Tensor
    """int32 [N]."""
    row_seq: Tensor
    """int32 [N]."""
    block_tables: tuple[Tensor, ...]
    """int32 [S, max_blocks] of each group of layers."""
    nonfinite_rows: Tensor
    """uint8 [N], not 0 where a key or value was NaN or infinite."""
    queries: Tensor
    """fp32 [N, query heads, head_dim], rotated."""
    partial_sums: Tensor
    """fp32 [N, query heads, partitions, head_dim]."""
    partial_softmax: Tensor
    """fp32 [N, query heads, partitions, 2]."""
    max_partitions: Mapping[int, int]
    """By window: how many partitions the grid has. No row needs more."""
    tiles: Tensor | None
    """int32 [T, 2], first and last + 1 row of each tile that is attended as a whole; None: each row for itself."""


def make_rows(
    spec: AttentionSpec,
    positions: Tensor,
    row_seq: Tensor,
    block_tables: Tensor,
    nonfinite_rows: Tensor,
    max_partitions: Mapping[int, int],
    tiles: Tensor | None = None,
    room: Tensor | None = None,
) -> AttentionRows:
    """All tensors on the device where the kernels run; `block_tables`: int32 [groups, S, max_blocks].

    `room`: fp32 [workspace_floats(...)] at least, which batches that are attended one after another may share. None:
    memory of its own.
    """
    rows, heads, dim, most = len(positions), spec.num_q_heads, spec.head_dim, max(max_partitions.values())
    size = workspace_floats(rows, heads, dim, most)
    if room is None:
        room = torch.empty(size, device=positions.device)
    queries, sums, softmax = room[:size].split((rows * heads * dim, rows * heads * most * dim, rows * heads * most * 2))
    return AttentionRows(
        positions,
        row_seq,
        block_tables.unbind(),
        nonfinite_rows,
        queries.view(rows, heads, dim),
        sums.view(rows, heads, most, dim),
        softmax.view(rows, heads, most, 2),
        max_partitions,
        tiles,
    )
