"""Paged attention in plain torch: slow, readable, the yardstick of every fused kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.attention import AttentionBatch, AttentionSpec
from deepinfer.kernels.codecs import Codec
from deepinfer.kernels.cpu.tasks import refuse_recording
from deepinfer.kernels.encoder_counts import EncoderCounts
from deepinfer.kernels.kv_formats import BlockLayout
from deepinfer.kernels.reference_codecs import sanitize


class ReferenceAttention(EncoderCounts):
    """See `PagedAttention`. The context is gathered and decoded to a dense fp32 copy for each sequence.

    With `batch_invariant`, rows are reduced one at a time, so that a row's result depends on its context
    alone.
    """

    name = "torch reference"

    def __init__(
        self,
        spec: AttentionSpec,
        layout: BlockLayout,
        pool: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch_invariant: bool,
    ) -> None:
        super().__init__(spec.num_layers)
        self._spec, self._layout, self._pool = spec, layout, pool
        self._cos, self._sin = cos, sin
        self._rows_at_once = 1 if batch_invariant else 64

    def forward(self, layer: int, qkv: Tensor, batch: AttentionBatch, out: Tensor) -> None:
        """See `PagedAttention.forward`."""
        refuse_recording("the reference attention")
        batch.check(self._layout, len(self._pool), self._cos.shape[-2])
        q, k, v = self._project(layer, qkv, torch.from_numpy(batch.positions).long())
        self._store(layer, k, v, batch)
        for first, end in batch.row_tiles(self._rows_at_once).tolist():
            out[first:end] = self._attend(layer, q[first:end], batch, first, end).to(out.dtype)

    def _project(self, layer: int, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split qkv to fp32 [N, heads, D], normalise, rotate."""
        spec = self._spec
        heads = qkv.float().unflatten(-1, (-1, spec.head_dim))
        q, k, v = heads.split([spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if spec.qk_norm is not None:
            q_weight, k_weight = spec.qk_norm[layer]
            q, k = _rms(q, q_weight, spec.rms_norm_eps), _rms(k, k_weight, spec.rms_norm_eps)
        tables = spec.tables_of(layer, self._cos, self._sin)
        if tables is None:
            return q, k, v
        cos, sin = (table[positions].unsqueeze(1) for table in tables)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _store(self, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        positions = torch.from_numpy(batch.positions).long()
        tables = torch.from_numpy(batch.block_tables[self._layout.group_of(layer)]).long()
        blocks = tables[torch.from_numpy(batch.row_seq).long(), positions // self._layout.block_size]
        slots = positions % self._layout.block_size
        nonfinite = torch.from_numpy(batch.nonfinite_rows)
        for side, x in ((0, k), (1, v)):
            codec = (self._layout.k, self._layout.v)[side]
            _, saturated, bad = sanitize(codec, x)
            self.count(layer, saturated, int(bad.sum()))
            nonfinite |= bad.flatten(1).any(dim=1)
            codes, scales = codec.encode(x)
            self._codes(layer, side)[blocks, :, slots] = codes
            if scales is not None:
                self._scales(layer, side)[blocks, :, slots] = scales.unsqueeze(-1).view(torch.uint8)

    def _attend(self, layer: int, q: Tensor, batch: AttentionBatch, first: int, end: int) -> Tensor:
        """Rows first .. end of one sequence: fp32 [rows, Hq * D]."""
        spec, window = self._spec, self._spec.windows[layer]
        positions = torch.from_numpy(batch.positions[first:end]).long()
        context = int(positions[-1]) + 1
        start = max(0, int(positions[0]) - window + 1) if window else 0
        table = torch.from_numpy(batch.block_tables[self._layout.group_of(layer), batch.row_seq[first]]).long()
        k, v = (self._gather(layer, side, table, start, context) for side in (0, 1))
        bias, tables = spec.split_key_bias(layer), spec.tables_of(layer, self._cos, self._sin)
        if bias is not None and tables is not None:
            k = k + rotate(bias.unsqueeze(1), *(table[start:context] for table in tables))
        group = spec.num_q_heads // spec.num_kv_heads
        grouped = q.unflatten(1, (spec.num_kv_heads, group)).permute(1, 0, 2, 3) * spec.scale
        scores = torch.einsum("hrgd,htd->hrgt", grouped, k)
        if spec.soft_cap:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        tokens = torch.arange(start, context)
        visible = tokens <= positions.unsqueeze(1)
        if window:
            visible &= tokens > positions.unsqueeze(1) - window
        scores = torch.where(visible[None, :, None, :], scores, torch.tensor(-torch.inf))
        mixed = torch.einsum("hrgt,htd->hrgd", scores.softmax(dim=-1), v)
        return mixed.permute(1, 0, 2, 3).flatten(1)

    def _gather(self, layer: int, side: int, table: Tensor, start: int, end: int) -> Tensor:
        """Decoded tokens start .. end of one context: fp32 [Hkv, tokens, D]."""
        block_size = self._layout.block_size
        blocks = table[start // block_size : -(-end // block_size)]
        codec: Codec = (self._layout.k, self._layout.v)[side]
        codes = self._codes(layer, side)[blocks]
        scales = None
        if codec.scaled:
            scales = self._scales(layer, side)[blocks].contiguous().view(torch.float16).squeeze(-1)
        decoded = codec.decode(codes, scales).permute(1, 0, 2, 3).flatten(1, 2)
        skip = start % block_size
        return decoded[:, skip : skip + end - start]

    def _codes(self, layer: int, side: int) -> Tensor:
        """uint8 view [num_blocks, Hkv, block_size, D * itemsize] of the pool."""
        layout, offsets = self._layout, self._layout.layer_offsets(layer)
        start, size = (offsets.k, layout.k_bytes) if side == 0 else (offsets.v, layout.v_bytes)
        return self._pool[:, start : start + size].unflatten(1, (layout.num_kv_heads, layout.block_size, -1))

    def _scales(self, layer: int, side: int) -> Tensor:
        """uint8 view [num_blocks, Hkv, block_size, 2] of the pool."""
        layout, offsets = self._layout, self._layout.layer_offsets(layer)
        start = offsets.k_scales if side == 0 else offsets.v_scales
        size = layout.num_kv_heads * layout.block_size * 2
        return self._pool[:, start : start + size].unflatten(1, (layout.num_kv_heads, layout.block_size, 2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the half-split form: x fp32 [..., D], cos and sin fp32 [..., D / 2] of broadcastable shapes."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight
