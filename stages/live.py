"""One accepted request as admission sees it: tokens become text, text becomes events, events wait to be sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from deepinfer.stages.clock import RequestClock, monotonic
from deepinfer.stages.messages import Finished, SamplingParams, Submit, TokenItem
from deepinfer.stages.protocol_errors import ProtocolError, RequestId
from deepinfer.stages.protocol_events import StreamEncoder, TokenLogprob
from deepinfer.stages.telemetry import RequestRecord
from deepinfer.stages.text import IncrementalDetokenizer, StopMatcher

ENDED_BY_ERROR = {"deadline_exceeded": "deadline_ms passed before the stream was complete"}
"""Cancel reasons that are an error to the client, and the sentence for it."""


class Route(NamedTuple):
    """Where answers go: the connection, and whether a REQ socket waits there."""

    identity: bytes
    req: bool

    def frames(self, payload: bytes) -> list[bytes]:
        return [self.identity, b"", payload] if self.req else [self.identity, payload]


class LiveRequest:
    """Owned by admission from `accepted` until its terminal event has left.

    Events are encoded when they are sent, so that waiting tokens can still be joined into one event and the sequence
    numbers stay contiguous.
    """

    def __init__(
        self,
        rid: int,
        route: Route,
        client_id: RequestId,
        model: str,
        prompt: bytes,
        params: SamplingParams,
        stream: bool,
        silent_ids: frozenset[int],
        detokenizer: IncrementalDetokenizer,
        stops: StopMatcher,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        self.rid = rid
        self.route = route
        self.client_id = client_id
        self.prompt = prompt
        self.params = params
        self.generated: list[int] = []
        self.clock = RequestClock()
        self.submitted = False
        """An engine that has not died has it."""
        self.cancelled = ""
        """The reason of the first `Cancel`: whoever works on it, it will end so."""
        self._priority = priority
        self._cache_salt = cache_salt
        self._stream = stream
        self._model = model
        self._silent_ids = silent_ids
        self._detokenizer = detokenizer
        self._stops = stops
        self._encoder = StreamEncoder(client_id)
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._pending: list[_PendingToken | Callable[[], bytes]] = []
        self._unsent: bytes | None = None
        self.over = False
        """The terminal event is pending or sent."""
        self.recorded = False
        self._ending: Finished | ProtocolError | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    @property
    def stopped(self) -> bool:
        """A stop string has matched: tokens that still arrive are not part of the answer."""
        return self._stops.matched is not None

    def submission(self) -> Submit:
        """For an engine: the first one, or one that goes on from where another has died. Admission does not know when a
        request was admitted to the pool, only when its first token came."""
        return Submit(
            rid=self.rid,
            prompt=self.prompt,
            params=self.params,
            generated=np.asarray(self.generated, dtype="<i4").tobytes(),
            clock=msgspec.structs.replace(self.clock, admitted=self.clock.first_token),
            priority=self._priority,
            cache_salt=self._cache_salt,
        )

    # --- what happens to it -----------------------------------------------------------------------------------

    def accept(self) -> None:
        self._event(
            lambda: self._encoder.accepted(
                prompt_tokens=self.prompt_tokens,
                model=self._model,
                seed=self.params.seed,
                max_new_tokens=self.params.max_new_tokens,
            )
        )

    def preempted(self, reason: str | None = None) -> None:
        """Once, until it is resumed: an engine may die while the request is swapped out."""
        if not self.clock.parked:
            self.clock.park()
            self._event(lambda: self._encoder.preempted(reason))

    def resumed(self) -> None:
        self.clock.unpark()
        self._event(self._encoder.resumed)

    def token(self, item: TokenItem) -> None:
        """Ignored once a stop string has matched or the request is over."""
        if self.stopped or self.over:
            return
        self.generated.append(item.token_id)
        self.clock.token()
        new = [] if item.token_id in self._silent_ids else [item.token_id]
        text = self._detokenizer.push(new)
        if len(self.generated) > self.params.min_new_tokens:
            text, _ = self._stops.push(text)
        self._emit(text, [item.token_id], item.index, self._logprob(item))

    def finish(self, finished: Finished) -> None:
        """The engine's last word about it. Nothing after it is listened to."""
        if self.over:
            return
        if finished.reason == "error":
            self.fail(ProtocolError(finished.code, finished.error))
        elif finished.reason in ENDED_BY_ERROR:
            self.fail(ProtocolError(finished.reason, ENDED_BY_ERROR[finished.reason]))
        else:
            self._flush_text()
            self.over = True
            self._ending = finished
            self._pending.append(lambda: self._done(finished))

    def fail(self, error: ProtocolError) -> None:
        if not self.over:
            self.over = True
            self._ending = error
            self._pending.append(lambda: self._encoder.error(error))

    def record(self) -> RequestRecord:
        """What is told of it when it ends. Seconds as the front saw them."""
        ending = self._ending
        finished = ending if isinstance(ending, Finished) else None
        code = ending.code if isinstance(ending, ProtocolError) else None
        clock, tokens = self.clock, len(self.generated)
        first, last = clock.first_token, clock.last_token
        return RequestRecord(
            request=self.rid,
            id=self.client_id,
            finish_reason=self._finish_reason(finished) if finished else "error" if code else "disconnected",
            code=code,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=finished.cached_tokens if finished else 0,
            completion_tokens=tokens,
            ttft_s=None if first is None else first - clock.submitted,
            tpot_s=None if first is None or last is None or tokens < 2 else (last - first) / (tokens - 1),
            e2e_s=monotonic() - clock.submitted,
            timings=finished.timings if finished else None,
        )

    def _finish_reason(self, finished: Finished) -> str:
        return "stop" if self.stopped else finished.reason

    def drop_pending_tokens(self) -> None:
        """Give back the memory of events that will never be read."""
        self._pending = [event for event in self._pending if not isinstance(event, _PendingToken)]

    def _flush_text(self) -> None:
        text, _ = self._stops.push(self._detokenizer.flush())
        text += self._stops.flush() if not self.stopped else ""
        if text:
            self._emit(text, [], len(self.generated), None)

    def _emit(self, text: str, ids: list[int], index: int, logprob: TokenLogprob | None) -> None:
        if not self._stream:
            self._text.append(text)
            if logprob is not None:
                self._logprobs.append(logprob)
            return
        last = self._pending[-1] if self._pending else None
        if isinstance(last, _PendingToken):
            last.join(text, ids, logprob)
        else:
            self._pending.append(_PendingToken(text, ids, index, logprob))

    def _event(self, encode: Callable[[], bytes]) -> None:
        if self._stream and not self.over:
            self._pending.append(encode)

    def _logprob(self, item: TokenItem) -> TokenLogprob | None:
        return None if item.logprob is None else TokenLogprob(item.token_id, item.logprob, item.top)

    def _done(self, finished: Finished) -> bytes:
        whole: dict = {}
        if not self._stream:
            whole = {
                "text": "".join(self._text),
                "ids": self.generated,
                "model": self._model,
                "seed": self.params.seed,
                "logprobs": self._logprobs if self.params.logprobs is not None else None,
            }
        return self._encoder.done(
            self._finish_reason(finished),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=finished.cached_tokens,
            completion_tokens=len(self.generated),
            timings=finished.timings,
            stop=self._stops.matched,
            **whole,
        )

    # --- sending ----------------------------------------------------------------------------------------------

    def next_event(self) -> bytes | None:
        """The event to be sent now; the same one until `sent` is called. None when there is nothing to send."""
        if self._unsent is None and self._pending:
            event = self._pending.pop(0)
            self._unsent = self._encode_token(event) if isinstance(event, _PendingToken) else event()
        return self._unsent

    def sent(self) -> None:
        self._unsent = None

    @property
    def delivered(self) -> bool:
        return self.over and self._unsent is None and not self._pending

    @property
    def pending_ids(self) -> int:
        """Tokens whose events have not been encoded."""
        return sum(len(event.ids) for event in self._pending if isinstance(event, _PendingToken))

    def _encode_token(self, event: _PendingToken) -> bytes:
        return self._encoder.token(event.text, event.ids, event.index, event.logprobs or None)


class _PendingToken:
    """Tokens and text that have not been encoded yet."""

    def __init__(self, text: str, ids: list[int], index: int, logprob: TokenLogprob | None) -> None:
        self._parts = [text]
        self.ids = ids
        self.index = index
        self.logprobs = [] if logprob is None else [logprob]

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def join(self, text: str, ids: list[int], logprob: TokenLogprob | None) -> None:
        self._parts.append(text)
        self.ids.extend(ids)
        if logprob is not None:
            self.logprobs.append(logprob)
