"""From request rows to sampled tokens: the one path that prefill chunks and decode steps share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from deepinfer.kernels.attention import AttentionBatch
from deepinfer.stages.flight_record import FlightLane, FlightRecord
from deepinfer.stages.lanes import Lane
from deepinfer.stages.messages import TokenItem
from deepinfer.stages.model import Executor, ForwardBatch
from deepinfer.stages.model.sampler import Sampled, Sampler, SampleRow
from deepinfer.stages.request import Request


@dataclass(slots=True)
class Span:
    """Rows [start, start + count) of a request's tokens; with `sample`, the last of them yields a token."""

    request: Request
    start: int
    count: int
    sample: bool
    forks: tuple[Request, ...] = ()
    """With `sample`: they have the same tokens, and each draws its own token from the same logits."""

    @property
    def samplers(self) -> tuple[Request, ...]:
        return (self.request, *self.forks) if self.sample else ()


class Outcome(NamedTuple):
    rid: int
    item: TokenItem | None
    error: str
    """Why this request cannot go on; the others of the batch are not touched."""


class ModelRunner:
    """Stateless between calls. Decode and prefill have one each, over the same model."""

    def __init__(self, executor: Executor, sampler: Sampler, lane: Lane, record: FlightLane | None = None) -> None:
        self.executor = executor
        self.sampler = sampler
        self._lane = lane
        self._record = record if record is not None else FlightRecord().decode

    def copy_blocks(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Row `source` of the pool to row `destination`, for each pair, in the order of the passes around it."""
        self._lane.run(_copy_blocks, pool, pairs)

    def run(self, spans: Sequence[Span]) -> list[Outcome]:
        """One forward pass over all spans; an outcome for each that samples, and for each that failed."""
        return self._lane.run(self._run, spans)

    def _run(self, spans: Sequence[Span]) -> list[Outcome]:
        self._record.begin([span.request.rid for span in spans])
        forward = build_batch(spans)
        logits = self.executor.forward(forward)
        broken = _broken_spans(spans, forward.attention.nonfinite_rows)
        sampling = [request for span in spans for request in span.samplers]
        sampled = self.sampler.sample(logits, [_sample_row(request) for request in sampling]) if sampling else []
        outcomes = [
            _outcome(request, result)
            for request, result in zip(sampling, sampled, strict=True)
            if request.rid not in broken
        ]
        outcomes.extend(Outcome(rid, None, error) for rid, error in broken.items())
        self._record.end()
        return outcomes


def _broken_spans(spans: Sequence[Span], nonfinite: np.ndarray) -> dict[int, str]:
    """`nonfinite`: bool per row of the pass. Such keys or values were stored as zeros: nobody else is hurt."""
    broken: dict[int, str] = {}
    if not nonfinite.any():
        return broken
    first = 0
    for span in spans:
        if nonfinite[first : first + span.count].any():
            for request in (span.request, *span.forks):
                broken[request.rid] = "the model produced keys or values that are not finite"
        first += span.count
    return broken


def build_batch(spans: Sequence[Span]) -> ForwardBatch:
    """Rows of one request are neighbours, in ascending positions; the block tables are cut to the longest context."""
    counts = np.array([span.count for span in spans], dtype=np.int32)
    starts = np.zeros(len(spans) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    width = max(span.request.num_blocks for span in spans)
    tokens = np.concatenate([span.request.tokens[span.start : span.start + span.count] for span in spans])
    positions = np.concatenate([np.arange(s.start, s.start + s.count, dtype=np.int32) for s in spans])
    tables = np.zeros((len(spans[0].request.table), len(spans), width), dtype=np.int32)
    for row, span in enumerate(spans):
        used = span.request.num_blocks
        tables[:, row, :used] = span.request.table[:, :used]
    last_rows = [int(starts[i + 1]) - 1 for i, span in enumerate(spans) for _ in span.samplers]
    return ForwardBatch(
        token_ids=torch.from_numpy(tokens),
        attention=AttentionBatch(
            positions=torch.from_numpy(positions),
            row_seq=torch.from_numpy(np.repeat(np.arange(len(spans), dtype=np.int32), counts)),
            block_tables=torch.from_numpy(tables),
            seq_starts=torch.from_numpy(starts),
        ),
        logits_rows=torch.tensor(last_rows, dtype=torch.int64),
    )


def _copy_blocks(pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    for source, destination in pairs:
        pool[destination].copy_(pool[source])


def _sample_row(request: Request) -> SampleRow:
    return SampleRow(request.params, len(request.generated), request.prompt, request.generated)


def _outcome(request: Request, result: Sampled) -> Outcome:
    if result.error:
        return Outcome(request.rid, None, result.error)
    item = TokenItem(request.rid, result.token_id, len(request.generated), result.logprob, result.top)
    return Outcome(request.rid, item, "")
