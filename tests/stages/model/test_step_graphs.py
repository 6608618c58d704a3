"""Decode steps replayed from graphs, through the host shim, beside the same steps computed as they come."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tiny import save_tiny_llama

from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.attention import AttentionBatch
from deepinfer.kernels.cuda import step_capture
from deepinfer.kernels.devices import open_device
from deepinfer.stages.model import Executor, ForwardBatch, load_model, open_checkpoint
from deepinfer.stages.model.step_graphs import StepGraphs

BLOCK_SIZE, NUM_BLOCKS, MAX_ROWS, MAX_CONTEXT, SMALLEST = 8, 32, 5, 40, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Batch-invariant, so that padding a step must not change a bit."""
    checkpoint = open_checkpoint(save_tiny_llama(tmp_path_factory.mktemp("tiny"), head_dim=64))
    return load_model(checkpoint, "bf16", batch_invariant=True, ops=open_device("host-emulation"))


class Side:
    """One executor with a pool of its own. What nobody has stored is NaN."""

    def __init__(self, model, fmt, graphs):
        config, pair = model.config, resolve_kv_format(fmt)
        layout = pair.layout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE)
        self.pool = torch.full((NUM_BLOCKS, layout.block_bytes), 0xFF, dtype=torch.uint8)
        attention = model.ops.attention(
            "auto", model.attention_spec(), layout, pair, self.pool, *model.rope_tables(MAX_CONTEXT), True
        )
        capture = model.ops.step_capture(attention)
        self.graphs = StepGraphs(capture, MAX_ROWS, MAX_CONTEXT, SMALLEST) if graphs else None
        self.executor = Executor(model, attention, self.graphs)


class Sequences:
    """Tokens and block tables, which change between steps as they do in the engine."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.free = list(range(NUM_BLOCKS))
        self.random.shuffle(self.free)
        self.tokens, self.tables = {}, {}

    def start(self, length):
        name = max(self.tokens, default=0) + 1
        self.tokens[name], self.tables[name] = [self.random.randrange(264) for _ in range(length)], []
        self.grow(name)
        return name

    def grow(self, name):
        while len(self.tables[name]) * BLOCK_SIZE < len(self.tokens[name]):
            self.tables[name].append(self.free.pop())

    def end(self, name):
        self.free[:0] = self.tables.pop(name)
        del self.tokens[name]

    def move(self, name, pools):
        """To other blocks, as after a swap."""
        old, new = self.tables[name], [self.free.pop() for _ in self.tables[name]]
        for pool in pools:
            pool[new] = pool[old]
            pool[old] = 0xFF
        self.tables[name] = new
        self.free[:0] = old

    def batch(self, spans):
        """`spans`: (name, first token, end)."""
        sizes = [end - first for _, first, end in spans]
        tables = np.zeros((len(spans), max(len(self.tables[name]) for name, *_ in spans)), dtype=np.int32)
        for row, (name, *_) in zip(tables, spans, strict=True):
            row[: len(self.tables[name])] = self.tables[name]
        attention = AttentionBatch(
            np.concatenate([np.arange(first, end) for _, first, end in spans]),
            np.repeat(np.arange(len(spans)), sizes),
            tables,
            np.cumsum([0, *sizes]),
        )
        ids = np.concatenate([self.tokens[name][first:end] for name, first, end in spans]).astype(np.int32)
        return ForwardBatch(torch.from_numpy(ids), attention, torch.from_numpy(np.cumsum(sizes) - 1))


def random_run(model, fmt, seed, steps=30):
    """Runs both ways of computing. The graphs, and whether logits, flags and pools were the same at every step."""
    plain, graphed = sides = Side(model, fmt, graphs=False), Side(model, fmt, graphs=True)
    sequences = Sequences(seed)
    choose = sequences.random

    def accept(spans, logits):
        for (name, *_), row in zip(spans, logits, strict=True):
            sequences.tokens[name].append(int(row.argmax()))
            sequences.grow(name)

    for _ in range(steps):
        if len(sequences.tokens) < MAX_ROWS and choose.random() < 0.5 and len(sequences.free) > 10:
            name = sequences.start(choose.choice([1, 7, 8, 9, 14, 25]))
            spans = [(name, 0, len(sequences.tokens[name]))]
            accept(spans, plain.executor.forward(sequences.batch(spans)))
            graphed.pool.copy_(plain.pool)
        running = list(sequences.tokens)
        for name in running:
            if len(sequences.tokens[name]) > MAX_CONTEXT - 2 or choose.random() < 0.03:
                sequences.end(name)
            elif choose.random() < 0.1 and len(sequences.free) > 10:
                sequences.move(name, (plain.pool, graphed.pool))
        running = [name for name in sequences.tokens if choose.random() < 0.8]
        choose.shuffle(running)
        if not running:
            continue
        spans = [(name, len(sequences.tokens[name]) - 1, len(sequences.tokens[name])) for name in running]
        batches = [sequences.batch(spans) for _ in sides]
        logits = [side.executor.forward(batch).clone() for side, batch in zip(sides, batches, strict=True)]
        flags = [batch.attention.nonfinite_rows.tolist() for batch in batches]
        if not (torch.equal(*logits) and flags[0] == flags[1] and torch.equal(plain.pool, graphed.pool)):
            return False, graphed.graphs
        accept(spans, logits[0])
    return True, graphed.graphs


@pytest.mark.parametrize("fmt", ["int8", "e4m3/e5m2"])
def test_replayed_steps_are_bit_equal_to_computed_ones_in_logits_and_in_the_pool(model, fmt):
    same, graphs = random_run(model, fmt, seed=3)
    assert same
    rows, contexts = (set(values) for values in zip(*graphs.captured, strict=True))
    assert rows >= {1, 2, 4}
    assert len(contexts) >= 3
    assert graphs.replays >= 10


def test_a_step_replayed_with_stale_inputs_shows(model, monkeypatch):
    """The control: without the copy of the inputs, the run above must notice."""
    fill = step_capture.CudaStepBuffers.fill
    filled = set()

    def fill_once(self, token_ids, batch):
        if self not in filled:
            fill(self, token_ids, batch)
        filled.add(self)

    monkeypatch.setattr(step_capture.CudaStepBuffers, "fill", fill_once)
    assert not random_run(model, "int8", seed=3)[0]


@pytest.mark.parametrize("part", ["token_ids", "positions", "block_tables"])
def test_every_input_that_a_replay_does_not_get_shows(model, monkeypatch, part):
    fill = step_capture.CudaStepBuffers.fill

    def all_but_one(self, token_ids, batch):
        workspace = self.attention.workspace
        memory = self.token_ids if part == "token_ids" else getattr(workspace, part)
        before = memory.clone()
        fill(self, token_ids, batch)
        memory.copy_(before)

    monkeypatch.setattr(step_capture.CudaStepBuffers, "fill", all_but_one)
    assert not random_run(model, "int8", seed=3)[0]


def test_padding_that_is_no_padding_shows_in_the_pool(model, monkeypatch):
    """The control of the rows that are not used: at position 0 instead of -1 they write into block 0."""
    monkeypatch.setattr(step_capture, "PADDING", 0)
    assert not random_run(model, "int8", seed=3)[0]


def test_a_row_that_is_not_finite_is_flagged_in_its_own_step_only(model):
    side, sequences = Side(model, "int8", graphs=True), Sequences(0)
    for length in (3, 5, 9):
        name = sequences.start(length)
        side.executor.forward(sequences.batch([(name, 0, length)]))
        sequences.tokens[name].append(1)
    spans = [(name, length, length + 1) for name, length in zip((1, 2, 3), (3, 5, 9), strict=True)]
    side.executor.forward(sequences.batch(spans))

    flagged = []
    for bad in (True, False):
        batch = sequences.batch(spans)
        embedding = model.embedding
        table = embedding._table
        kept = table[7].clone()
        with torch.inference_mode():
            table[7] = float("nan") if bad else kept
            batch.token_ids[1] = 7 if bad else 1
            side.executor.forward(batch)
            table[7] = kept
        flagged.append(batch.attention.nonfinite_rows.tolist())
    assert flagged == [[False, True, False], [False, False, False]]
    assert side.graphs.replays == 2


@pytest.mark.parametrize(
    ("positions", "tables", "message"),
    [
        ([3, 5], [[0], [NUM_BLOCKS]], "outside the pool"),
        ([3, 32], [[0] * 5, [1] * 5], "past a context"),
        ([3, -1], [[0], [1]], "outside"),
        ([3, 4, 5], [[0], [1], [2]], "do not fit"),
    ],
)
def test_inputs_that_do_not_fit_a_captured_step_are_refused(model, positions, tables, message):
    buffers = Side(model, "int8", graphs=True).graphs._capture.buffers(2, 32)
    rows = len(positions)
    batch = AttentionBatch(positions, np.arange(rows), tables, np.arange(rows + 1))
    with pytest.raises(ValueError, match=message):
        buffers.fill(torch.zeros(rows, dtype=torch.int32), batch)


def test_prefill_chunks_and_steps_past_the_limits_are_not_taken(model):
    graphs = Side(model, "int8", graphs=True).graphs
    one_each = AttentionBatch([3, 5], [0, 1], [[0], [1]], [0, 1, 2])
    assert graphs.takes(one_each, 2)
    assert not graphs.takes(one_each, 1)
    assert not graphs.takes(AttentionBatch([3, 4], [0, 0], [[0]], [0, 2]), 2)
    many = np.arange(MAX_ROWS + 1)
    assert not graphs.takes(AttentionBatch(many, many, many[:, None], np.arange(MAX_ROWS + 2)), MAX_ROWS + 1)
    assert not graphs.takes(AttentionBatch([MAX_CONTEXT], [0], [[0] * 6], [0, 1]), 1)
