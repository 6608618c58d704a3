"""The prefill stage: computes the chunks it is sent and samples the first token of each completed prompt."""

from __future__ import annotations

from collections.abc import Mapping

import zmq

from deepinfer.stages.messages import ChunkDone, ChunkItem, PrefillChunk
from deepinfer.stages.request import Request
from deepinfer.stages.runner import ModelRunner, Span
from deepinfer.stages.stage import Stage, monotonic


class PrefillStage(Stage):
    """Owns nothing that lasts. Between a PrefillChunk and its ChunkDone it alone writes the blocks of the requests
    named there, and reads their records."""

    name = "prefill"

    def __init__(
        self,
        context: zmq.Context,
        inbox: str,
        outboxes: Mapping[str, str],
        runner: ModelRunner,
        requests: Mapping[int, Request],
    ) -> None:
        super().__init__(context, inbox, outboxes)
        self._runner = runner
        self._requests = requests
        self.on(PrefillChunk, self._on_chunk)

    def _on_chunk(self, message: PrefillChunk) -> None:
        began = monotonic()
        spans = [self._span(item) for item in message.items]
        outcomes = self._runner.run(spans)
        self.send(
            "decode",
            ChunkDone(
                items=message.items,
                sampled=[outcome.item for outcome in outcomes if outcome.item is not None],
                errors={outcome.rid: outcome.error for outcome in outcomes if outcome.error},
                seconds=monotonic() - began,
            ),
        )

    def _span(self, item: ChunkItem) -> Span:
        forks = tuple(self._requests[rid] for rid in item.forks)
        return Span(self._requests[item.rid], item.start, item.count, item.last, forks)
