"""`bench kernels`: paged decode, every format in turn, beside a copy of the device's memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from deepinfer.daemon.bench.timing import Measure, copy_measure, in_rounds, prepare, spread
from deepinfer.kernels import BlockLayout, resolve_kv_format
from deepinfer.kernels.attention import AttentionBatch, AttentionSpec
from deepinfer.kernels.graphs import StepBuffers
from deepinfer.kernels.ops import Ops

FORMATS = ("fp16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3/fp8_e5m2")
BLOCK_SIZE = 16
COPY = "copy"


class Heads(NamedTuple):
    model: str
    query: int
    kv: int
    dim: int


HEADS = (Heads("0.5B", 14, 2, 64), Heads("3B", 16, 2, 128), Heads("7B", 28, 4, 128))
"""Of the Qwen2.5 models of these sizes."""


def bench_attention(
    ops: Ops, heads: Heads, context: int, batch: int, rounds: int, cold_bytes: int, formats: tuple[str, ...] = FORMATS
) -> list[dict[str, Any]]:
    """A row for each format: GB/s of keys and values, of the copy's GB/s in the same round, and speed against fp16.

    So many layers, each with a pool of its own, are attended in turn that a call reads `cold_bytes` of fp16: no cache
    holds what it reads.
    """
    per_layer = batch * context * heads.kv * heads.dim * 4
    layers = max(1, -(-cold_bytes // per_layer))
    sizes: dict[str, int] = {}
    arms: dict[str, Measure] = {COPY: copy_measure(ops, cold_bytes)}
    for name in formats:
        layout = resolve_kv_format(name).layout(layers, heads.kv, heads.dim, BLOCK_SIZE)
        sizes[name] = batch * context * layout.block_bytes // BLOCK_SIZE
        arms[name] = _decode(ops, name, layout, heads, context, batch)
    samples = in_rounds(arms, rounds)
    copies = [2 * cold_bytes / seconds for seconds in samples[COPY]]
    return [
        {
            "heads": heads._asdict(),
            "context": context,
            "batch": batch,
            "layers": layers,
            "format": name,
            "microseconds_per_layer": spread([1e6 * seconds / layers for seconds in samples[name]]),
            "gb_per_s": spread([sizes[name] / seconds / 1e9 for seconds in samples[name]]),
            "copy_gb_per_s": spread([rate / 1e9 for rate in copies]),
            "of_copy": spread([size / s / rate for size, s, rate in _paired(sizes[name], samples[name], copies)]),
            "speed_of_fp16": spread([a / b for a, b in zip(samples[formats[0]], samples[name], strict=True)]),
        }
        for name in formats
    ]


def _paired(size: int, seconds: list[float], rates: list[float]) -> list[tuple[int, float, float]]:
    return [(size, one, rate) for one, rate in zip(seconds, rates, strict=True)]


def _decode(ops: Ops, name: str, layout: BlockLayout, heads: Heads, context: int, batch: int) -> Measure:
    spec = AttentionSpec(layout.num_layers, heads.query, heads.kv, heads.dim, heads.dim**-0.5, (0,) * layout.num_layers)
    blocks = batch * -(-context // BLOCK_SIZE)
    pool = _block(layout).to(ops.device).expand(blocks, -1).contiguous()
    angles = torch.arange(context)[:, None] * 10000.0 ** (-torch.arange(0, heads.dim, 2) / heads.dim)
    tables = angles.cos().float(), angles.sin().float()
    attention = ops.attention("auto", spec, layout, resolve_kv_format(name), pool, *tables, False)
    rows = _last_tokens(blocks, context, batch)
    capture, buffers = ops.step_capture(attention, batch, context), None
    if capture is not None:
        buffers = capture.buffers(batch, context)
        buffers.fill(torch.zeros(batch, dtype=torch.int32), rows)
    width = (heads.query + 2 * heads.kv) * heads.dim
    qkv = torch.randn(batch, width, generator=torch.Generator().manual_seed(1)).bfloat16().to(ops.device)
    out = torch.empty(batch, heads.query * heads.dim, dtype=torch.bfloat16, device=ops.device)

    def step(buffers: StepBuffers | None = buffers) -> None:
        for layer in range(layout.num_layers):
            attention.forward(layer, qkv, rows if buffers is None else buffers.attention, out)

    return prepare(ops, step)


def _block(layout: BlockLayout) -> torch.Tensor:
    """uint8 [block_bytes]: normal random keys and values, the same in every layer."""
    generator = torch.Generator().manual_seed(0)
    codes, scales = [], []
    for codec in (layout.k, layout.v):
        x = torch.randn(layout.num_kv_heads, layout.block_size, layout.head_dim, generator=generator)
        stored, factor = codec.encode(x)
        codes.append(stored.flatten())
        if factor is not None:
            scales.append(factor.contiguous().view(torch.uint8).flatten())
    return torch.cat((*codes, *scales)).repeat(layout.num_layers)


def _last_tokens(blocks: int, context: int, batch: int) -> AttentionBatch:
    """The last token of each of `batch` sequences, whose blocks lie in random order."""
    tables = np.random.default_rng(2).permutation(blocks).reshape(batch, -1)
    each = np.arange(batch + 1)
    return AttentionBatch(np.full(batch, context - 1), each[:-1], tables, each)
