"""What a layer's kernel call needs, as one int64 vector, because every argument of a call costs
time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deepinfer.kernels.kv_formats import BlockLayout

if TYPE_CHECKING:  # torch stays out of processes that only compile
    from torch import Tensor

    from deepinfer.kernels.attention import AttentionSpec

(
    K_ADDRESS,
    V_ADDRESS,
    K_SCALES_ADDRESS,
    V_SCALES_ADDRESS,
    BLOCK_BYTES,
    BLOCK_SHIFT,
    NUM_Q_HEADS,
    NUM_KV_HEADS,
    WINDOW,
    Q_WEIGHT_ADDRESS,
    K_WEIGHT_ADDRESS,
    COS_ADDRESS,
    SIN_ADDRESS,
    KEY_BIAS_ADDRESS,
) = range(0, 8 * 14, 8)
"""Byte offsets, for `memory.load_int`: numba takes many times longer to compile an element of an array. Addresses are
those of block 0. The block size is 1 << BLOCK_SHIFT. Weights are 0 where there is no q/k norm, cos and sin where
nothing is rotated. The key bias is fp32 [kv heads, head_dim]; only kernels that are compiled for it read it."""


def layer_plan(
    layer: int, spec: AttentionSpec, layout: BlockLayout, pool: Tensor, cos: Tensor, sin: Tensor
) -> np.ndarray:
    """int64 [14] for one layer. Whoever holds it holds the pool, the RoPE tables and the spec's tensors too."""
    base, offsets = pool.data_ptr(), layout.layer_offsets(layer)
    weights = (0, 0) if spec.qk_norm is None else tuple(weight.data_ptr() for weight in spec.qk_norm[layer])
    bias, tables = spec.split_key_bias(layer), spec.tables_of(layer, cos, sin)
    return np.array(
        [
            base + offsets.k,
            base + offsets.v,
            base + offsets.k_scales,
            base + offsets.v_scales,
            layout.row_bytes,
            layout.block_size.bit_length() - 1,
            spec.num_q_heads,
            spec.num_kv_heads,
            spec.windows[layer],
            *weights,
            *((0, 0) if tables is None else (table.data_ptr() for table in tables)),
            0 if bias is None else bias.data_ptr(),
        ],
        dtype=np.int64,
    )
