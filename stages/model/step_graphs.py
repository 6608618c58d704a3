"""Decode steps as captured graphs: one for each bucket of rows and of context, captured when it is first needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from deepinfer.kernels.attention import AttentionBatch
from deepinfer.kernels.graphs import Graph, StepBuffers, StepCapture

SMALLEST_CONTEXT = 512
"""Tokens of the first bucket of contexts; each further one is twice as large."""

Compute = Callable[[torch.Tensor, AttentionBatch], torch.Tensor]
"""(token ids int32 [N] on the device, the rows) -> logits [N, vocab]. Never waits for the device."""


def doublings(first: int, last: int) -> list[int]:
    """The sizes of buckets: `first`, twice that and so on, and `last`."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(2 * sizes[-1])
    return [min(size, last) for size in sizes]


class _Step(NamedTuple):
    buffers: StepBuffers
    logits: torch.Tensor
    graph: Graph


class StepGraphs:
    """Owned by one executor, and used by one thread at a time.

    Args:
        capture: what the device offers.
        max_rows, max_context: the limits of the engine, which are the last buckets.
    """

    def __init__(
        self, capture: StepCapture, max_rows: int, max_context: int, smallest_context: int = SMALLEST_CONTEXT
    ) -> None:
        self._capture = capture
        self._max_rows, self._max_context, self._smallest_context = max_rows, max_context, smallest_context
        self._steps: dict[tuple[int, int], _Step] = {}
        self._logits: torch.Tensor | None = None
        """[max_rows, vocab], for all graphs: memory of their pool that one holds on to is lost to the others."""
        self.replays = 0

    @property
    def row_buckets(self) -> list[int]:
        return doublings(1, self._max_rows)

    @property
    def captured(self) -> list[tuple[int, int]]:
        """(rows, context) of every graph."""
        return sorted(self._steps)

    def takes(self, batch: AttentionBatch, num_logits: int) -> bool:
        """Whether this is a decode step within the limits: one row for each sequence, and the logits of all."""
        rows = batch.num_rows
        if not 0 < rows == num_logits == batch.num_seqs or rows > self._max_rows:
            return False
        return int(batch.positions.max()) < self._max_context

    def run(self, token_ids: torch.Tensor, batch: AttentionBatch, compute: Compute) -> torch.Tensor:
        """Logits [N, vocab] of a step that `takes` said yes to; theirs until the next step.

        The first step of a bucket is computed as it is, which compiles whatever is missing, and captured after that.
        """
        key = self._bucket(batch)
        step = self._steps.get(key)
        buffers = self._capture.buffers(*key) if step is None else step.buffers
        buffers.fill(token_ids, batch)
        if step is None:
            logits = compute(buffers.token_ids, buffers.attention)
            self._steps[key] = self._captured(buffers, self._logits_like(logits), compute)
        else:
            step.graph.replay()
            self.replays += 1
            logits = step.logits
        flags = buffers.attention.device_flags
        batch.device_flags = None if flags is None else flags[: batch.num_rows]
        return logits[: batch.num_rows]

    def _captured(self, buffers: StepBuffers, logits: torch.Tensor, compute: Compute) -> _Step:
        def step() -> None:
            logits.copy_(compute(buffers.token_ids, buffers.attention))

        return _Step(buffers, logits, self._capture.capture(step))

    def _logits_like(self, logits: torch.Tensor) -> torch.Tensor:
        if self._logits is None:
            self._logits = logits.new_empty(self._max_rows, logits.shape[1])
        return self._logits[: len(logits)]

    def _bucket(self, batch: AttentionBatch) -> tuple[int, int]:
        rows = next(size for size in doublings(1, self._max_rows) if size >= batch.num_rows)
        longest = int(batch.positions.max())
        contexts = doublings(self._smallest_context, self._max_context)
        return rows, next(context for context in contexts if context > longest)
