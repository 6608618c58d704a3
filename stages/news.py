"""What becomes of the engine's requests: noted in their clocks and in the counters, and told to admission."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from deepinfer.stages.memory.entries import Entry
from deepinfer.stages.messages import Finished, Message, Preempted, Resumed, TokenItem, Tokens
from deepinfer.stages.request import Request
from deepinfer.stages.runner import Outcome
from deepinfer.stages.stats import EngineCounters


class End(NamedTuple):
    """How a request ends. `code` and `error` are empty unless it ends with an error."""

    rid: int
    reason: str
    code: str = ""
    error: str = ""


class News:
    """Owned by decode, whose records of requests and whose counters it is shown. It decides nothing."""

    def __init__(
        self,
        tell: Callable[[Message], None],
        requests: Mapping[int, Request],
        counters: EngineCounters,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._tell = tell
        self._requests = requests
        self._counters = counters
        self._eos = eos_token_ids

    def admitted(self, rid: int, entry: Entry) -> None:
        """It holds blocks now, `entry.cached` tokens of which were found stored."""
        self._entered(rid)
        self._requests[rid].note_found(entry.cached)
        if not entry.parks:
            self._counters.prefix_cache_queries_total += entry.length
            self._counters.prefix_cache_hits_total += entry.cached

    def forked(self, rids: list[int], stored: int) -> None:
        """They begin on the `stored` tokens of another choice."""
        for rid in rids:
            self._entered(rid)
            self._requests[rid].note_found(stored)
        self._counters.requests_forked_total += len(rids)

    def _entered(self, rid: int) -> None:
        self._requests[rid].clock.admit()
        if self._requests[rid].clock.parked:
            self.unparked(rid)

    def parked(self, rid: int) -> None:
        self._requests[rid].clock.park()
        self._tell(Preempted(rid=rid))

    def unparked(self, rid: int) -> None:
        self._requests[rid].clock.unpark()
        self._tell(Resumed(rid=rid))

    def tokens(self, outcomes: Iterable[Outcome]) -> list[End]:
        """One message for all of a step; returns who ends with it."""
        items: list[TokenItem] = []
        ends: list[End] = []
        for outcome in outcomes:
            request = self._requests[outcome.rid]
            if outcome.item is None:
                ends.append(End(outcome.rid, "error", "non_finite_logits", outcome.error))
                continue
            request.append(outcome.item.token_id)
            request.clock.token()
            items.append(outcome.item)
            reason = request.finish_reason(self._eos)
            if reason is not None:
                ends.append(End(outcome.rid, reason))
        self._counters.generation_tokens_total += len(items)
        if items:
            self._tell(Tokens(items=items))
        return ends

    def finished(self, request: Request, end: End) -> None:
        self._counters.requests_finished_total += 1
        self._counters.requests_failed_total += end.reason == "error"
        self.refused(request, end)

    def refused(self, request: Request, end: End) -> None:
        """Told as an end, and counted as none: it was never one of the engine's."""
        timings = request.clock.timings()
        self._tell(Finished(**end._asdict(), cached_tokens=request.cached_tokens, timings=timings))
