"""Drives an Executor over a small pool the way the stages do: whole prompts, chunks, decode steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.attention import AttentionBatch, make_attention
from deepinfer.stages.model import Executor, ForwardBatch, Model

BLOCK_SIZE = 16


class Runner:
    """Every sequence has its own blocks; `feed` appends tokens to several of them in one forward."""

    def __init__(
        self,
        model: Model,
        backend: str = "reference",
        kv_format: str = "auto",
        sequences: int = 1,
        max_tokens: int = 256,
    ):
        config = model.config
        fmt = resolve_kv_format(kv_format, model.compute_dtype)
        layout = fmt.layout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE)
        per_sequence = -(-max_tokens // BLOCK_SIZE)
        self.pool = torch.zeros(sequences * per_sequence, layout.block_bytes, dtype=torch.uint8)
        cos, sin = model.rope_tables(max_tokens)
        self.attention = make_attention(
            backend, model.attention_spec(), layout, fmt, self.pool, cos, sin, batch_invariant=False
        )
        self.executor = Executor(model, self.attention)
        blocks = torch.randperm(len(self.pool), generator=torch.Generator().manual_seed(0))
        self.tables = blocks.reshape(sequences, per_sequence).int()
        self.lengths = [0] * sequences

    def feed(self, parts: dict[int, Sequence[int]], all_rows: bool = False) -> torch.Tensor:
        """Logits of the last token of each part (in the order given), or of every row."""
        positions, row_seq, starts, ids = [], [], [0], []
        for index, (sequence, tokens) in enumerate(parts.items()):
            begin = self.lengths[sequence]
            positions += range(begin, begin + len(tokens))
            row_seq += [index] * len(tokens)
            ids += tokens
            starts.append(len(ids))
            self.lengths[sequence] += len(tokens)
        batch = AttentionBatch(positions, row_seq, self.tables[list(parts)], starts)
        rows = torch.arange(len(ids)) if all_rows else torch.tensor(starts[1:]) - 1
        return self.executor.forward(ForwardBatch(torch.tensor(ids, dtype=torch.int32), batch, rows))

    def greedy(self, prompt: Sequence[int], new_tokens: int, stop: Sequence[int] = ()) -> list[int]:
        """Like transformers' generate: ends after `new_tokens` or with an id of `stop`."""
        out = [int(self.feed({0: prompt})[0].argmax())]
        while len(out) < new_tokens and out[-1] not in stop:
            out.append(int(self.feed({0: out[-1:]})[0].argmax()))
        return out
