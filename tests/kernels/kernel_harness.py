"""Small pools and batches for the kernel tests."""

from __future__ import annotations

import numpy as np
import torch

from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.attention import AttentionBatch, AttentionSpec, make_attention


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(got, expected, dtype):
    """Whether rows of numbers are right to the last bits of `dtype`."""
    limit = 2e-6 if dtype == torch.float32 else 2.0**-8
    return got.dtype == dtype and torch.allclose(got.float(), expected, atol=limit / 10, rtol=limit)


def rope_tables(max_positions, head_dim, theta=10000.0):
    inverse = theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.arange(max_positions).float()[:, None] * inverse
    return angles.cos(), angles.sin()


def write_values(name, values):
    """Pass values [N, D] as the V of one KV head through the fused kernel: what the pool then holds.

    Returns (codes uint8 [N, D * itemsize], scale bits int16 [N], attention, batch).
    """
    rows, head_dim = values.shape
    fmt = resolve_kv_format(name)
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


class Case:
    """A pool, a spec, and sequences with random projections: the same content for every backend."""

    def __init__(
        self,
        fmt="fp16",
        heads=(4, 2),
        head_dim=16,
        block_size=16,
        lengths=(40,),
        window=0,
        seed=0,
        dtype=None,
        qk_norm=False,
    ):
        generator = torch.Generator().manual_seed(seed)
        self.fmt, self.lengths, self.block_size = resolve_kv_format(fmt), lengths, block_size
        num_q, num_kv = heads
        self.num_blocks = sum(-(-length // block_size) for length in lengths) + 3
        self.layout = self.fmt.layout(2, num_kv, head_dim, block_size)
        norm = None
        if qk_norm:
            norm = tuple(tuple(torch.rand(2, head_dim, generator=generator) + 0.5) for _ in range(2))
        self.spec = AttentionSpec(2, num_q, num_kv, head_dim, head_dim**-0.5, (0, window), 1e-6, norm)
        self.cos, self.sin = rope_tables(max(lengths), head_dim)
        order = torch.randperm(self.num_blocks, generator=generator).tolist()
        width = -(-max(lengths) // block_size)
        self.tables = []
        for length in lengths:
            count = -(-length // block_size)
            self.tables.append([order.pop() for _ in range(count)] + [0] * (width - count))
        self.unused = order
        columns = (num_q + 2 * num_kv) * head_dim
        self.qkv = [torch.randn(length, columns, generator=generator).to(dtype or torch.float32) for length in lengths]

    def pool(self, fill=0):
        return torch.full((self.num_blocks, self.layout.block_bytes), fill, dtype=torch.uint8)

    def attention(self, backend, pool):
        return make_attention(backend, self.spec, self.layout, self.fmt, pool, self.cos, self.sin, batch_invariant=True)

    def forward(self, attention, pieces, layer=1):
        """Attend rows first .. end of sequences, given as [(sequence, first, end)]: one output for each."""
        rows = torch.cat([self.qkv[seq][first:end] for seq, first, end in pieces])
        sizes = [end - first for _, first, end in pieces]
        batch = AttentionBatch(
            np.concatenate([np.arange(first, end) for _, first, end in pieces]),
            np.repeat(np.arange(len(pieces)), sizes),
            [self.tables[seq] for seq, _, _ in pieces],
            np.cumsum([0, *sizes]),
        )
        out = torch.full((len(rows), self.spec.num_q_heads * self.spec.head_dim), 7.0, dtype=rows.dtype)
        attention.forward(layer, rows, batch, out)
        return list(out.split(sizes))

    def everything(self):
        return [(seq, 0, length) for seq, length in enumerate(self.lengths)]


def assert_bit_equal_in_any_chunking(case):
    """Rows of the compiled attention: all sequences together, and each alone in chunks of several sizes."""
    together = case.forward(case.attention("numba", case.pool()), case.everything())
    for seq, length in enumerate(case.lengths):
        for chunk in (1, 5, 16, 17):
            attention = case.attention("numba", case.pool(255))
            pieces = [(seq, first, min(first + chunk, length)) for first in range(0, length, chunk)]
            alone = torch.cat([case.forward(attention, [piece])[0] for piece in pieces])
            assert torch.equal(alone, together[seq])
