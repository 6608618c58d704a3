"""Small pools and batches for the kernel tests."""

from __future__ import annotations

import numpy as np
import torch

from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.attention import AttentionBatch, AttentionSpec, make_attention


def rope_tables(max_positions, head_dim):
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.arange(max_positions).float()[:, None] * inverse
    return angles.cos(), angles.sin()


def write_values(name, values):
    """Pass values [N, D] as the V of one KV head through the fused kernel: what the pool then holds.

    Returns (codes uint8 [N, D * itemsize], scale bits int16 [N], attention, batch).
    """
    rows, head_dim = values.shape
    fmt = resolve_kv_format(f"fp32/{name}")
    layout = fmt.layout(1, 1, head_dim, 16)
    num_blocks = -(-rows // 16)
    pool = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8)
    spec = AttentionSpec(1, 1, 1, head_dim, 1.0, (0,))
    attention = make_attention("numba", spec, layout, fmt, pool, *rope_tables(rows, head_dim), True)
    batch = AttentionBatch(np.arange(rows), [0] * rows, [list(range(num_blocks))], [0, rows])
    qkv = torch.cat((torch.zeros(rows, 2 * head_dim, dtype=values.dtype), values), dim=1)
    attention.forward(0, qkv, batch, torch.empty(rows, head_dim, dtype=values.dtype))
    offsets = layout.layer_offsets(0)
    codes = pool[:, offsets.v : offsets.v + layout.v_bytes].reshape(num_blocks * 16, -1)[:rows]
    scales = pool[:, offsets.v_scales : offsets.v_scales + 32].reshape(-1)
    scales = scales.view(torch.int16)[:rows] if fmt.v.scaled else scales
    return codes, scales, attention, batch
