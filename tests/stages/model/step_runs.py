"""Decode steps that are replayed beside the same steps computed as they come, over random sequences."""

from __future__ import annotations

import random

import numpy as np
import torch

from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.attention import AttentionBatch
from deepinfer.stages.model import Executor, ForwardBatch
from deepinfer.stages.model.step_graphs import StepGraphs

BLOCK_SIZE, NUM_BLOCKS, MAX_ROWS, MAX_CONTEXT, SMALLEST = 8, 32, 5, 40, 8


class Side:
    """One executor with a pool of its own, with graphs or programs if asked. What nobody has stored is NaN."""

    def __init__(self, model, fmt, graphs, groups=()):
        config, pair = model.config, resolve_kv_format(fmt)
        layout = pair.layout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, groups)
        self.pool = torch.full((NUM_BLOCKS * layout.num_groups, layout.row_bytes), 0xFF, dtype=torch.uint8)
        attention = model.ops.attention(
            "auto", model.attention_spec(), layout, pair, self.pool, *model.rope_tables(MAX_CONTEXT), True
        )
        capture = model.ops.step_capture(attention, MAX_ROWS, MAX_CONTEXT)
        if not graphs:
            self.graphs, self.executor = None, Executor(model, attention)
        elif capture is None:
            self.graphs = model.ops.step_programs(attention, -(-MAX_CONTEXT // BLOCK_SIZE))
            self.executor = Executor(model, attention, programs=self.graphs)
        else:
            self.graphs = StepGraphs(capture, MAX_ROWS, MAX_CONTEXT, SMALLEST)
            self.executor = Executor(model, attention, self.graphs)


class Sequences:
    """Tokens and block tables, which change between steps as they do in the engine. A table has a row of the pool for
    each group, block after block."""

    def __init__(self, seed, groups=1):
        self.random, self.groups = random.Random(seed), groups
        self.free = list(range(groups * NUM_BLOCKS))
        self.random.shuffle(self.free)
        self.tokens, self.tables = {}, {}

    def start(self, length):
        name = max(self.tokens, default=0) + 1
        self.tokens[name], self.tables[name] = [self.random.randrange(264) for _ in range(length)], []
        self.grow(name)
        return name

    def grow(self, name):
        while len(self.tables[name]) < self.groups * -(-len(self.tokens[name]) // BLOCK_SIZE):
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
        width = max(len(self.tables[name]) for name, *_ in spans) // self.groups
        tables = np.zeros((self.groups, len(spans), width), dtype=np.int32)
        for row, (name, *_) in enumerate(spans):
            table = np.array(self.tables[name]).reshape(-1, self.groups).T
            tables[:, row, : table.shape[1]] = table
        attention = AttentionBatch(
            np.concatenate([np.arange(first, end) for _, first, end in spans]),
            np.repeat(np.arange(len(spans)), sizes),
            tables,
            np.cumsum([0, *sizes]),
        )
        ids = np.concatenate([self.tokens[name][first:end] for name, first, end in spans]).astype(np.int32)
        return ForwardBatch(torch.from_numpy(ids), attention, torch.from_numpy(np.cumsum(sizes) - 1))


def random_run(model, fmt, seed, steps=30, groups=()):
    """Runs both ways of computing. The graphs, and whether logits, flags and pools were the same at every step."""
    plain, graphed = sides = Side(model, fmt, graphs=False, groups=groups), Side(model, fmt, graphs=True, groups=groups)
    sequences = Sequences(seed, len(groups) or 1)
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
