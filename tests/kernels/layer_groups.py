"""Three layers, the middle one with a window, over a pool with one table for all of them or one for each group."""

from __future__ import annotations

import numpy as np
import torch

from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.attention import AttentionBatch, AttentionSpec

GROUPS = ((0, 2), (1,))
BLOCK_SIZE, HEADS = 16, (4, 2)


class Grouped:
    def __init__(self, fmt, head_dim=16, lengths=(40, 23, 100), seed=0):
        self.fmt, self.lengths, self.longest = resolve_kv_format(fmt), lengths, max(lengths)
        self.head_dim, self._seed = head_dim, seed
        self.spec = AttentionSpec(3, *HEADS, head_dim, head_dim**-0.5, (0, 20, 0))
        generator = torch.Generator().manual_seed(seed)
        columns = (HEADS[0] + 2 * HEADS[1]) * head_dim
        self.qkv = [torch.randn(3, length, columns, generator=generator) for length in lengths]

    def layout(self, groups=()):
        return self.fmt.layout(3, HEADS[1], self.head_dim, BLOCK_SIZE, groups)

    def _blocks(self):
        return [-(-length // BLOCK_SIZE) for length in self.lengths]

    def pool(self, groups=()):
        """What nobody has stored is NaN."""
        rows = (sum(self._blocks()) + 2) * (len(groups) or 1)
        return torch.full((rows, self.layout(groups).row_bytes), 0xFF, dtype=torch.uint8)

    def tables(self, groups=()):
        """int32 [groups, sequences, blocks], no row twice."""
        count = len(groups) or 1
        rows = np.random.default_rng(self._seed).permutation(len(self.pool(groups))).tolist()
        tables = np.zeros((count, len(self.lengths), max(self._blocks())), np.int32)
        for seq, blocks in enumerate(self._blocks()):
            for group in range(count):
                tables[group, seq, :blocks] = [rows.pop() for _ in range(blocks)]
        return tables

    def batch(self, pieces, tables):
        """`pieces`: (sequence, first, end)."""
        sizes = [end - first for _, first, end in pieces]
        return AttentionBatch(
            np.concatenate([np.arange(first, end) for _, first, end in pieces]),
            np.repeat(np.arange(len(pieces)), sizes),
            tables[:, [seq for seq, *_ in pieces]],
            np.cumsum([0, *sizes]),
        )

    def run(self, make, groups=(), stored_elsewhere=False):
        """Prompts in two chunks, then steps of a row for each sequence: all outputs. `make`: (case, layout, pool) ->
        attention. `stored_elsewhere`: the prompts are stored in the rows of another group."""
        attention, tables = make(self, self.layout(groups), self.pool(groups)), self.tables(groups)
        outputs = []
        ends = [length - 3 for length in self.lengths]
        chunks = [[(seq, 0, end // 2), (seq, end // 2, end)] for seq, end in enumerate(ends)]
        steps = [[(seq, end + i, end + i + 1) for seq, end in enumerate(ends)] for i in range(3)]
        for number, pieces in enumerate([*zip(*chunks, strict=True), *steps]):
            batch = self.batch(pieces, tables[::-1] if stored_elsewhere and number < 2 else tables)
            for layer in range(3):
                qkv = torch.cat([self.qkv[seq][layer, first:end] for seq, first, end in pieces])
                out = torch.full((len(qkv), HEADS[0] * self.head_dim), 7.0)
                attention.forward(layer, qkv, batch, out)
                outputs.append(out)
        return torch.cat(outputs)
