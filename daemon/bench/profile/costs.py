"""What an operator cannot do without: the bytes that it must move, and the arithmetic of a matmul or of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from deepinfer.kernels.attention import AttentionSpec
from deepinfer.kernels.attention_batch import AttentionBatch
from deepinfer.kernels.kv_formats import BlockLayout


class Cost(NamedTuple):
    bytes: int
    """Weights, stored keys and values, and what goes in and comes out, each once."""
    flops: int
    """A multiplication and an addition are two. 0: nothing worth counting."""


CostOf = Callable[[tuple, Any, Any], Cost]
"""(arguments, result, AttentionBatch or None) -> cost."""


def tensors_cost(args: tuple, result: Any, batch: AttentionBatch | None) -> Cost:
    return Cost(sum(part.nbytes for part in (*args, result) if isinstance(part, torch.Tensor)), 0)


def linear_cost(linear: Any) -> CostOf:
    def cost(args: tuple, result: Any, batch: AttentionBatch | None) -> Cost:
        rows, width = args[0].shape
        outputs = result.shape[-1]
        return Cost(linear.step_bytes + tensors_cost(args, result, batch).bytes, 2 * rows * width * outputs)

    return cost


def attention_cost(spec: AttentionSpec, layout: BlockLayout) -> CostOf:
    """Each sequence's stored context is read once; each row multiplies with what it attends to, keys and values."""
    token_bytes = layout.layer_bytes // layout.block_size

    def cost(args: tuple, result: Any, batch: AttentionBatch | None) -> Cost:
        if batch is None:
            raise ValueError("attention was called without a batch")
        window = spec.windows[args[0]]
        attended = batch.positions.astype(np.int64) + 1
        last = attended[batch.seq_starts[1:] - 1]
        if window:
            first = attended[batch.seq_starts[:-1]]
            last = np.minimum(last, window + last - first)
            attended = np.minimum(attended, window)
        passed = tensors_cost(args, result, batch).bytes
        flops = 4 * spec.num_q_heads * spec.head_dim * int(attended.sum())
        return Cost(token_bytes * int(last.sum()) + passed, flops)

    return cost
