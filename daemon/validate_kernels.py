"""`deepinfer-daemon validate-kernels`: the kernels of this device against plain references, with numbers.

Every check states cosine, greatest absolute error and relative L2, against a reference that reads the same stored
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import torch
import torch.nn.functional as F

from deepinfer.daemon.bench.conditions import conditions
from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.attention import AttentionBatch, AttentionSpec, make_attention
from deepinfer.kernels.devices import DeviceError, open_device
from deepinfer.kernels.ops import Ops
from deepinfer.kernels.reference_attention import rotate
from deepinfer.stages.model import Executor, ForwardBatch, load_model, open_checkpoint, resolve_model
from deepinfer.stages.model.rope import rope_tables

MIN_COSINE = 0.99999
MAX_ABS_ERROR = 1e-3
BF16_ABS_ERROR = 2**-6
"""Where outputs are bf16: half of the distance between two of them from 2 to 4 is 2^-7, and as much for the rounding of
queries and weights."""
FORMATS = ("fp16", "int8", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3/fp8_e5m2", "int8/fp8_e5m2")
CONTEXTS = (1, 15, 16, 17, 100, 333)
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 2, 64, 16
GEMV_ROWS = (1, 4, 16)


class Check(NamedTuple):
    """`unequal_bytes` counts stored bytes that differ from the reference encoder's; 0 for checks that store nothing."""

    name: str
    cosine: float
    max_abs_error: float
    relative_l2: float
    unequal_bytes: int
    max_abs_limit: float
    limited: bool
    """False: shown for information, because another source of error is in it (a model's compute dtype)."""

    @property
    def passed(self) -> bool:
        within = self.cosine >= MIN_COSINE and self.max_abs_error <= self.max_abs_limit and self.unequal_bytes == 0
        return within or not self.limited


def run_validation(device: str, checkpoint: str | None, output: Path | None) -> int:
    """Prints a table; returns the exit code: 1 when a check is outside its limits."""
    try:
        ops = open_device(device)
    except DeviceError as error:
        raise click.ClickException(str(error)) from error
    backend = "cpu-native" if ops.name == "cpu" else ops.name
    click.echo(
        f"backend: {backend}; limits: cosine >= {MIN_COSINE}, max abs error <= {MAX_ABS_ERROR} "
        f"({BF16_ABS_ERROR} where outputs are bf16), bytes equal"
    )
    checks = []
    for check in _checks(ops, checkpoint):
        checks.append(check)
        verdict = "ok" if check.passed else "FAILED"
        click.echo(
            f"{check.name:66} cosine {check.cosine:.8f}  max abs {check.max_abs_error:.2e}  "
            f"rel L2 {check.relative_l2:.2e}  unequal bytes {check.unequal_bytes}  "
            f"{verdict if check.limited else 'for information'}"
        )
    if output is not None:
        rows = [{**check._asdict(), "passed": check.passed} for check in checks]
        report = {"backend": backend, **conditions(), "checkpoint": checkpoint, "checks": rows}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=1) + "\n")
        click.echo(f"written to {output}")
    return 0 if all(check.passed for check in checks) else 1


def _checks(ops: Ops, checkpoint: str | None) -> Iterator[Check]:
    with torch.inference_mode():
        for name in FORMATS:
            yield _attention(ops, name, batch_invariant=True)
        for name in FORMATS:
            yield _attention(ops, name, batch_invariant=False)
        if ops.name == "cpu":  # It multiplies in bf16 where activations are bf16 and the codes exact in it.
            for name in (*FORMATS, "bf16"):
                yield _attention(ops, name, batch_invariant=True, activations=torch.bfloat16)
        for rows in GEMV_ROWS:
            yield _w4(ops, rows)
        if checkpoint is not None:
            yield from _end_to_end(ops, checkpoint)


def _compare(
    name: str,
    got: torch.Tensor,
    expected: torch.Tensor,
    unequal_bytes: int = 0,
    limited: bool = True,
) -> Check:
    rounded = got.dtype == torch.bfloat16 and expected.dtype == torch.float32
    got, expected = got.double().cpu().flatten(), expected.double().cpu().flatten()
    error = got - expected
    cosine = torch.dot(got, expected) / (got.norm() * expected.norm())
    largest, relative = float(error.abs().max()), float(error.norm() / expected.norm())
    limit = BF16_ABS_ERROR if rounded else MAX_ABS_ERROR
    return Check(name, float(cosine), largest, relative, unequal_bytes, limit, limited)


def _attention(ops: Ops, name: str, batch_invariant: bool, activations: torch.dtype = torch.float32) -> Check:
    """Write and attend: ragged contexts, blocks in random order, NaN patterns in every slot that is not used. Every row
    as a decode step has it, or as the device computes prompts when it is free to. The reference computes in fp32 from
    the same numbers, whatever the activations are."""
    fmt = resolve_kv_format(name)
    layout = fmt.layout(1, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
    spec = AttentionSpec(1, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, (0,))
    random = np.random.default_rng(5)
    num_blocks = sum(-(-context // BLOCK_SIZE) for context in CONTEXTS) + 3
    qkv = torch.randn(sum(CONTEXTS), (HEADS + 2 * KV_HEADS) * HEAD_DIM, generator=torch.Generator().manual_seed(5))
    qkv = qkv.to(activations)
    order = random.permutation(num_blocks).astype(np.int32)

    def run(on: Ops | None) -> tuple[torch.Tensor, torch.Tensor]:
        device = "cpu" if on is None else on.device
        pool = torch.full((num_blocks, layout.block_bytes), 0x7F, dtype=torch.uint8, device=device)
        cos, sin = _rope(max(CONTEXTS))
        if on is None:
            attend = make_attention("reference", spec, layout, fmt, pool, cos, sin, False)
        else:
            attend = on.attention("auto", spec, layout, fmt, pool, cos, sin, batch_invariant)
        given = qkv.float() if on is None else qkv.to(device)
        out = torch.empty(len(qkv), HEADS * HEAD_DIM, dtype=given.dtype, device=device)
        attend.forward(0, given, _batch(order), out)
        return out.cpu(), pool.cpu()

    expected, expected_pool = run(None)
    got, got_pool = run(ops)
    unequal = int((got_pool != expected_pool).sum())
    rows = "row by row" if batch_invariant else "prompts"
    rows += ", bf16" if activations == torch.bfloat16 else ""
    return _compare(f"KV write and paged attention, {rows}, {name}", got, expected, unequal)


def _rope(positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return angles.cos().float(), angles.sin().float()


def _batch(order: np.ndarray) -> AttentionBatch:
    """All contexts as whole prompts: every row is a query with a context of its own."""
    widest = -(-max(CONTEXTS) // BLOCK_SIZE)
    tables = np.zeros((len(CONTEXTS), widest), dtype=np.int32)
    first = 0
    for row, context in enumerate(CONTEXTS):
        count = -(-context // BLOCK_SIZE)
        tables[row, :count] = order[first : first + count]
        first += count
    positions = np.concatenate([np.arange(context) for context in CONTEXTS])
    return AttentionBatch(positions, np.repeat(np.arange(len(CONTEXTS)), CONTEXTS), tables, np.cumsum([0, *CONTEXTS]))


def _w4(ops: Ops, rows: int) -> Check:
    """The batched 4-bit matmul against the same codes, scales and minima in float64."""
    generator = torch.Generator().manual_seed(rows)
    outputs, inputs, group = 128, 256, 32
    # Powers of two for scales: what a kernel's 16-bit scales would round is not what is looked for here.
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scales = 2.0 ** torch.randint(-12, -9, (outputs, inputs // group), generator=generator).float()
    minima = -8 * scales
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    weights = codes.double().unflatten(1, (-1, group)) * scales.double()[..., None] + minima.double()[..., None]
    y = ops.w4a16(codes, scales, minima, None, group, True, False)(x.to(ops.device))
    expected = (x.double() @ weights.flatten(1).T).bfloat16()
    return _compare(f"batched W4A16 matmul, {rows} rows", y, expected)


def _end_to_end(ops: Ops, name: str) -> Iterator[Check]:
    """The logits of one token of a whole model: paged and native against a dense torch attention, same weights."""
    checkpoint = open_checkpoint(resolve_model(name))
    model = load_model(checkpoint, "auto", ops=ops)
    config = model.config
    tokens = torch.arange(100, 164, dtype=torch.int32)
    expected: torch.Tensor | None = None
    for kv in ("auto", *FORMATS[:4]):
        fmt = resolve_kv_format(kv, compute_dtype=model.compute_dtype)
        layout = fmt.layout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE)
        pool = torch.zeros(8, layout.block_bytes, dtype=torch.uint8, device=ops.device)
        cos, sin = rope_tables(config.rope, config.head_dim, 128)
        native = ops.attention("auto", model.attention_spec(), layout, fmt, pool, cos, sin, False)
        if expected is None:
            dense = DenseAttention(model.attention_spec(), cos, sin)
            expected = Executor(model, dense).forward(_forward(tokens))
        logits = Executor(model, native).forward(_forward(tokens))
        same = "same" if int(logits.argmax()) == int(expected.argmax()) else "another"
        yield _compare(f"{name}, {kv}, logits, {same} argmax", logits, expected, limited=False)


class DenseAttention:
    """What the paged path is compared with: torch's scaled dot product over the whole prompt, nothing stored."""

    name = "torch SDPA, dense"
    kv_saturated_total = kv_nonfinite_total = 0

    def __init__(self, spec: AttentionSpec, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._spec, self._cos, self._sin = spec, cos, sin

    def kv_counts(self) -> list[tuple[int, int]]:
        return [(0, 0)] * self._spec.num_layers

    def forward(self, layer: int, qkv: torch.Tensor, batch: AttentionBatch, out: torch.Tensor) -> None:
        """One sequence from its first token on; see `PagedAttention.forward`."""
        spec, rows = self._spec, len(qkv)
        heads = qkv.float().unflatten(-1, (-1, spec.head_dim))
        q, k, v = heads.split([spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if spec.qk_norm is not None:
            q, k = (
                F.rms_norm(x, x.shape[-1:], weight.to(x.device), spec.rms_norm_eps)
                for x, weight in zip((q, k), spec.qk_norm[layer], strict=True)
            )
        cos, sin = (table[:rows, None].to(qkv.device) for table in (self._cos, self._sin))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True)
        out.copy_(attended.transpose(0, 1).flatten(1))


def _forward(tokens: torch.Tensor) -> ForwardBatch:
    count = len(tokens)
    batch = AttentionBatch(np.arange(count), np.zeros(count), np.arange(8)[None], [0, count])
    return ForwardBatch(tokens, batch, torch.tensor([count - 1]))
