"""`bench kernels` on CUDA: the 4-bit GEMV for the matrices of models, and a whole decode step of a 3B-shaped model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from deepinfer.daemon.bench.timing import Measure, copy_measure, in_rounds, prepare, repeated, spread
from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.attention import AttentionBatch
from deepinfer.kernels.linear import Linear
from deepinfer.kernels.ops import Ops
from deepinfer.stages.model import Executor, ForwardBatch
from deepinfer.stages.model.config import ModelConfig, RopeConfig
from deepinfer.stages.model.embedding import DenseEmbedding
from deepinfer.stages.model.model import Layer, Model
from deepinfer.stages.model.step_graphs import StepGraphs

ROWS = (1, 2, 4, 8, 16)
GROUP = 32
BLOCK_SIZE = 16
DISTINCT_LAYERS = 6
"""Layers of the step that have weights of their own; they take turns. Together they are larger than a GPU's cache."""


class Shape(NamedTuple):
    name: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """[outputs, inputs] of the fused linear forms of a layer."""
        q, kv = self.query_heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (q + 2 * kv, self.hidden),
            "o": (self.hidden, q),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }


SHAPES = (
    Shape("0.5B", 24, 896, 14, 2, 64, 4864, 151936),
    Shape("3B", 36, 2048, 16, 2, 128, 11008, 151936),
    Shape("7B", 28, 3584, 28, 4, 128, 18944, 152064),
)
"""Of the Qwen2.5 models of these sizes."""


def bench_gemv(ops: Ops, shape: Shape, matrix: str, rounds: int, cold_bytes: int) -> list[dict[str, Any]]:
    """A row for each number of rows. So many equal matrices are multiplied in turn that they are `cold_bytes`."""
    outputs, inputs = shape.matrices[matrix]
    first = _w4(ops, outputs, inputs, 0)
    count = max(1, -(-cold_bytes // first.weight_bytes))
    linears = [first, *(_w4(ops, outputs, inputs, seed) for seed in range(1, count))]
    arms: dict[str, Measure] = {"copy": copy_measure(ops, cold_bytes)}
    for rows in ROWS:
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).bfloat16().to(ops.device)
        arms[str(rows)] = prepare(ops, _all_of(linears, x))
    samples = in_rounds(arms, rounds)
    copies = [2 * cold_bytes / seconds for seconds in samples["copy"]]
    return [
        {
            "model": shape.name,
            "matrix": matrix,
            "outputs": outputs,
            "inputs": inputs,
            "rows": rows,
            "microseconds": spread([1e6 * seconds / count for seconds in samples[str(rows)]]),
            "gb_per_s": spread([count * first.weight_bytes / s / 1e9 for s in samples[str(rows)]]),
            "of_copy": spread(
                [count * first.weight_bytes / s / c for s, c in zip(samples[str(rows)], copies, strict=True)]
            ),
        }
        for rows in ROWS
    ]


def bench_step(ops: Ops, shape: Shape, context: int, rounds: int, cold_bytes: int, kv: str = "fp16") -> dict[str, Any]:
    """A decode step of one row, from token id to logits: computed as it comes, and replayed from a graph.

    `of_roofline` is the time in which a copy moves as many bytes as a step reads of weights, keys and values, over the
    time of the step.
    """
    model = random_model(ops, shape)
    config, pair = model.config, resolve_kv_format(kv)
    layout = pair.layout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE)
    blocks = -(-context // BLOCK_SIZE)
    pool = torch.zeros(blocks, layout.block_bytes, dtype=torch.uint8, device=ops.device)
    tables = model.rope_tables(context)
    attention = ops.attention("auto", model.attention_spec(), layout, pair, pool, *tables, False)
    capture = ops.step_capture(attention, 1, context)
    arms: dict[str, Measure] = {"copy": copy_measure(ops, cold_bytes)}
    graphs = None if capture is None else StepGraphs(capture, 1, context)
    for name, executor in (
        ("computed", Executor(model, attention)),
        ("replayed", Executor(model, attention, graphs)),
    ):
        arms[name] = repeated(ops, _one_step(executor, blocks, context))
        for _ in range(3):
            arms[name]()
    samples = in_rounds(arms, rounds)
    read = model.step_weight_bytes + context * layout.block_bytes // BLOCK_SIZE
    ideal = [read / (2 * cold_bytes / seconds) for seconds in samples["copy"]]
    return {
        "model": shape._asdict(),
        "context": context,
        "format": pair.name,
        "distinct_layers": DISTINCT_LAYERS,
        "bytes_read": read,
        **{
            name: {
                "milliseconds": spread([1e3 * seconds for seconds in samples[name]]),
                "of_roofline": spread([i / s for i, s in zip(ideal, samples[name], strict=True)]),
            }
            for name in ("computed", "replayed")
        },
    }


def random_model(ops: Ops, shape: Shape) -> Model:
    """4-bit layers in groups of 32 with minima, an 8-bit head, a bf16 embedding; all weights random."""
    config = ModelConfig(
        "qwen2", shape.layers, shape.hidden, shape.query_heads, shape.kv_heads, shape.head_dim, shape.inner,
        shape.vocab, 32768, 1e-6, RopeConfig(), (0,) * shape.layers, False, (0,),
    )  # fmt: skip
    norm = torch.ones(shape.hidden, device=ops.device)
    distinct = []
    for number in range(min(DISTINCT_LAYERS, shape.layers)):
        forms = {name: _w4(ops, *size, 10 * number) for name, size in shape.matrices.items()}
        distinct.append(Layer(norm, forms["qkv"], forms["o"], norm, forms["gate_up"], forms["down"], None, None))
    layers = tuple(distinct[number % len(distinct)] for number in range(shape.layers))
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-127, 128, (shape.vocab, shape.hidden), generator=generator, dtype=torch.int8)
    head = ops.w8a16(codes, torch.full((shape.vocab, shape.hidden // 32), 2.0**-12), torch.float32)
    table = torch.randn(1024, shape.hidden, generator=generator).bfloat16().to(ops.device)
    return Model(config, "bf16", DenseEmbedding(table), layers, norm, head, False, "inline", ops)


def _w4(ops: Ops, outputs: int, inputs: int, seed: int) -> Linear:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scales = torch.full((outputs, inputs // GROUP), 2.0**-9)
    return ops.w4a16(codes, scales, -7.5 * scales, None, GROUP, True, False)


def _all_of(linears: list[Linear], x: torch.Tensor) -> Callable[[], None]:
    def multiply() -> None:
        for linear in linears:
            linear(x)

    return multiply


def _one_step(executor: Executor, blocks: int, context: int) -> Callable[[], None]:
    """The last token of a context, and the id of its highest logit on the host: what a greedy request waits for."""
    batch = AttentionBatch([context - 1], [0], np.arange(blocks)[None], [0, 1])
    forward = ForwardBatch(torch.tensor([5], dtype=torch.int32), batch, torch.tensor([0]))

    def step() -> None:
        batch.workspace = None
        int(executor.forward(forward).argmax())

    return step
