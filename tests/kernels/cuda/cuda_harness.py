"""Pools with a stored context, attended by the CUDA kernels and by the plain torch reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from kernel_harness import rope_tables

from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.attention import AttentionBatch, AttentionSpec
from deepinfer.kernels.cuda.paged_attention import CudaAttention
from deepinfer.kernels.reference_attention import ReferenceAttention

FORMATS = ("bf16", "fp16", "int8", "e4m3", "e5m2", "e4m3/e5m2", "int8/e4m3", "fp16/e5m2")


class Stored:
    """Sequences whose contexts are in the pool but for their last `new` tokens, whose projections are at hand.

    What no context uses is 0xff: NaN in every float format, in codes and in scales.
    """

    def __init__(
        self, fmt, lengths, heads=(4, 2), head_dim=64, block_size=16, new=1, window=0, seed=0, qk_norm=False, bias=0.0
    ):
        generator = torch.Generator().manual_seed(seed)
        self.fmt = resolve_kv_format(fmt)
        self.new = [min(new, length) for length in lengths]
        num_q, num_kv = heads
        norm = tuple(torch.rand(2, head_dim, generator=generator) + 0.5) if qk_norm else None
        self.spec = AttentionSpec(
            2, num_q, num_kv, head_dim, head_dim**-0.5, (0, window), 1e-6, (norm, norm) if norm else None
        )
        if bias:
            one = bias * torch.randn(num_kv * head_dim, generator=generator)
            self.spec = replace(self.spec, key_bias=(None, one))
        self.layout = self.fmt.layout(2, num_kv, head_dim, block_size)
        counts = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(counts) + 2, generator=generator).to(torch.int32).numpy()
        tables = np.full((len(lengths), max(counts)), -1, dtype=np.int32)
        for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
            tables[row, :count] = order[end - count : end]
        self.lengths, self.tables = lengths, tables
        self.contents = torch.full((len(order), self.layout.block_bytes), 0xFF, dtype=torch.uint8)
        self.cos, self.sin = rope_tables(max(lengths), head_dim)
        for row in range(len(lengths)):
            self._fill(row, generator)
        self.qkv = torch.randn(sum(self.new), (num_q + 2 * num_kv) * head_dim, generator=generator)

    def _fill(self, row, generator):
        old, layout = self.lengths[row] - self.new[row], self.layout
        positions = torch.arange(old)
        blocks = torch.from_numpy(self.tables[row]).long()[positions // layout.block_size]
        slots = positions % layout.block_size
        reference = self.reference(self.contents)
        for layer in range(2):
            for side, codec in enumerate((layout.k, layout.v)):
                x = torch.randn(old, layout.num_kv_heads, layout.head_dim, generator=generator)
                codes, scales = codec.encode(x)
                reference._codes(layer, side)[blocks, :, slots] = codes
                if scales is not None:
                    reference._scales(layer, side)[blocks, :, slots] = scales.unsqueeze(-1).view(torch.uint8)

    def reference(self, pool):
        return ReferenceAttention(self.spec, self.layout, pool, self.cos, self.sin, batch_invariant=True)

    def cuda(self, backend, pool, batch_invariant=True):
        return CudaAttention(backend, self.spec, self.layout, pool, self.cos, self.sin, batch_invariant)

    def batch(self):
        rows = zip(self.lengths, self.new, strict=True)
        positions = np.concatenate([np.arange(length - new, length) for length, new in rows])
        row_seq = np.repeat(np.arange(len(self.lengths)), self.new)
        return AttentionBatch(positions, row_seq, self.tables, np.cumsum([0, *self.new]))

    def run(self, attention, layer=1, dtype=torch.float32):
        """(output [rows, Hq * D], the batch) of the new tokens."""
        batch = self.batch()
        out = torch.full((len(self.qkv), self.spec.num_q_heads * self.spec.head_dim), 7.0, dtype=dtype)
        attention.forward(layer, self.qkv.to(dtype), batch, out)
        return out, batch

    def both(self, backend, layer=1, dtype=torch.float32, batch_invariant=True):
        """(output of the reference, of the kernels, pool of the reference, of the kernels)."""
        pools = self.contents.clone(), self.contents.clone()
        expected, _ = self.run(self.reference(pools[0]), layer, dtype)
        got, _ = self.run(self.cuda(backend, pools[1], batch_invariant), layer, dtype)
        return expected, got, *pools


RELATIVE = {torch.float32: 2.0**-19, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def close(got, expected):
    """Whether rows of numbers are right to the last bits of their dtype."""
    limit = RELATIVE[got.dtype] * expected.abs() + 2.0**-24
    return bool(((got.float() - expected).abs() <= 1.01 * limit).all())


def check_close(expected, got, limit=1e-3):
    """The limits of accuracy: cosine at least 0.99999, largest absolute error at most `limit`."""
    expected, got = expected.double(), got.double()
    cosine = torch.nn.functional.cosine_similarity(expected.flatten(), got.flatten(), dim=0).item()
    error = (expected - got).abs().max().item()
    assert cosine >= 0.99999, f"cosine {cosine}, max abs error {error}"
    assert error <= limit, f"cosine {cosine}, max abs error {error}"
