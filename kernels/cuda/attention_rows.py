"""The rows of a batch on the device, and room for what passes between the kernels of paged attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.attention import AttentionSpec


@dataclass
class AttentionRows:
    """One for all layers. A row whose position is -1 is padding: it stores nothing, and its output is zeros."""

    positions: Tensor
    """int32 [N]."""
    row_seq: Tensor
    """int32 [N]."""
    block_tables: Tensor
    """int32 [S, max_blocks]."""
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


def make_rows(
    spec: AttentionSpec,
    positions: Tensor,
    row_seq: Tensor,
    block_tables: Tensor,
    nonfinite_rows: Tensor,
    max_partitions: Mapping[int, int],
) -> AttentionRows:
    """All tensors on the device where the kernels run."""
    rows, heads, most, device = len(positions), spec.num_q_heads, max(max_partitions.values()), positions.device
    return AttentionRows(
        positions,
        row_seq,
        block_tables,
        nonfinite_rows,
        torch.empty(rows, heads, spec.head_dim, device=device),
        torch.empty(rows, heads, most, spec.head_dim, device=device),
        torch.empty(rows, heads, most, 2, device=device),
        max_partitions,
    )
