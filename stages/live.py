"""One accepted request as admission sees it: tokens become text, text becomes events, events wait to be sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from deepinfer.stages.choice import Choice, PendingToken
from deepinfer.stages.clock import RequestClock, monotonic
from deepinfer.stages.messages import Finished, Fork, Submit, TokenItem
from deepinfer.stages.protocol_errors import ProtocolError, RequestId
from deepinfer.stages.protocol_events import StreamEncoder, TokenLogprob
from deepinfer.stages.telemetry import RequestRecord

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

    Its `choices` have consecutive ids in the engine, the first of which is `rid`. Events are encoded when they are
    sent, so that waiting tokens can still be joined into one event and the sequence numbers stay contiguous.
    """

    def __init__(
        self,
        route: Route,
        client_id: RequestId,
        model: str,
        prompt: bytes,
        choices: Sequence[Choice],
        stream: bool,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        self.rid = choices[0].rid
        self.route = route
        self.client_id = client_id
        self.prompt = prompt
        self.choices = choices
        self.priority = priority
        self.turn = 0
        """Its place among those that wait; see `turns`."""
        self.waits = False
        """It has a turn and was not started yet."""
        self._cache_salt = cache_salt
        self._stream = stream
        self._model = model
        self._encoder = StreamEncoder(client_id)
        self._pending: list[PendingToken | Callable[[], bytes]] = []
        self.pending_size = 0
        """Of the tokens whose events have not been encoded; see `PendingToken.size`."""
        self._unsent: bytes | None = None
        self.over = False
        """The terminal event is pending or sent."""
        self.recorded = False
        self._error: ProtocolError | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    @property
    def unfinished(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.finished is None]

    def choice(self, rid: int) -> Choice:
        return self.choices[rid - self.rid]

    def submissions(self, choices: Sequence[Choice]) -> list[Submit]:
        """For an engine: the first one, or one that goes on from where another has died. Choices that have not begun
        go as forks of one request."""
        if not choices or any(choice.generated for choice in choices):
            return [self._submission(choice) for choice in choices]
        first, *others = choices
        forks = tuple(Fork(choice.rid, choice.params.seed, _clock(choice)) for choice in others)
        return [msgspec.structs.replace(self._submission(first), forks=forks)]

    def _submission(self, choice: Choice) -> Submit:
        return Submit(
            rid=choice.rid,
            prompt=self.prompt,
            params=choice.params,
            generated=np.asarray(choice.generated, dtype="<i4").tobytes(),
            clock=_clock(choice),
            priority=self.priority,
            cache_salt=self._cache_salt,
            turn=self.turn,
        )

    # --- what happens to it -----------------------------------------------------------------------------------

    def accept(self) -> None:
        params = self.choices[0].params
        self._event(
            lambda: self._encoder.accepted(
                prompt_tokens=self.prompt_tokens,
                model=self._model,
                seed=params.seed,
                max_new_tokens=params.max_new_tokens,
                n=len(self.choices),
            )
        )

    def preempted(self, choice: Choice, reason: str | None = None) -> None:
        """Once, until it is resumed: an engine may die while the request is swapped out."""
        if not choice.clock.parked:
            choice.clock.park()
            self._event(lambda: self._encoder.preempted(reason, self._label(choice)), choice)

    def resumed(self, choice: Choice) -> None:
        choice.clock.unpark()
        self._event(lambda: self._encoder.resumed(self._label(choice)), choice)

    def hears(self, choice: Choice) -> bool:
        """Whether further tokens of this choice are part of its answer."""
        return not (choice.stopped or choice.finished is not None or self.over)

    def token(self, choice: Choice, item: TokenItem) -> None:
        """Only while it `hears`."""
        self._emit(choice, choice.push(item), [item.token_id], item.index, _logprob(item))

    def finish(self, finished: Finished) -> None:
        """The engine's last word about one choice. Nothing after it is listened to."""
        choice = self.choice(finished.rid)
        if self.over or choice.finished is not None:
            return
        choice.finished = finished
        if finished.reason == "error":
            self.fail(ProtocolError(finished.code, finished.error))
            return
        if finished.reason in ENDED_BY_ERROR:
            self.fail(ProtocolError(finished.reason, ENDED_BY_ERROR[finished.reason]))
            return
        text = choice.flush()
        if text:
            self._emit(choice, text, [], len(choice.generated), None)
        if not self.unfinished:
            self.over = True
            self._pending.append(self._done)

    def fail(self, error: ProtocolError) -> None:
        """One error ends all choices."""
        if not self.over:
            self.over = True
            self._error = error
            self._pending.append(lambda: self._encoder.error(error))

    def record(self) -> RequestRecord:
        """What is told of it when it ends: the tokens of all choices, everything else of the first one. Seconds as the
        front saw them."""
        choice = self.choices[0]
        clock, tokens = choice.clock, len(choice.generated)
        first, last = clock.first_token, clock.last_token
        finished = choice.finished if self.over and self._error is None else None
        code = None if self._error is None else self._error.code
        return RequestRecord(
            request=self.rid,
            id=self.client_id,
            finish_reason=choice.finish_reason(finished) if finished else "error" if code else "disconnected",
            code=code,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=finished.cached_tokens if finished else 0,
            completion_tokens=sum(len(each.generated) for each in self.choices),
            ttft_s=None if first is None else first - clock.submitted,
            tpot_s=None if first is None or last is None or tokens < 2 else (last - first) / (tokens - 1),
            e2e_s=monotonic() - clock.submitted,
            timings=finished.timings if finished else None,
        )

    def drop_pending_tokens(self) -> None:
        """Give back the memory of events that will never be read. Nobody else may hold it: a token that waits and its
        choice know each other, and such a pair would be kept until the next collection of garbage."""
        self.pending_size = 0
        for choice in self.choices:
            choice.waiting = None
        self._pending = [event for event in self._pending if not isinstance(event, PendingToken)]

    def _emit(self, choice: Choice, text: str, ids: list[int], index: int, logprob: TokenLogprob | None) -> None:
        if not self._stream:
            choice.text.append(text)
            if logprob is not None:
                choice.logprobs.append(logprob)
            return
        if choice.waiting is None:
            choice.waiting = PendingToken(choice, index)
            self._pending.append(choice.waiting)
        self.pending_size += choice.waiting.join(text, ids, logprob)

    def _event(self, encode: Callable[[], bytes], choice: Choice | None = None) -> None:
        if self._stream and not self.over:
            self._pending.append(encode)
            if choice is not None:
                choice.waiting = None

    def _label(self, choice: Choice) -> int | None:
        """What says in an event of which choice it is: nothing where there is only one."""
        return choice.rid - self.rid if len(self.choices) > 1 else None

    def _done(self) -> bytes:
        first = self.choices[0].finished
        return self._encoder.done(
            [choice.end(not self._stream) for choice in self.choices],
            prompt_tokens=self.prompt_tokens,
            cached_tokens=0 if first is None else first.cached_tokens,
            model=None if self._stream else self._model,
        )

    # --- sending ----------------------------------------------------------------------------------------------

    def next_event(self) -> bytes | None:
        """The event to be sent now; the same one until `sent` is called. None when there is nothing to send."""
        if self._unsent is None and self._pending:
            event = self._pending.pop(0)
            self._unsent = self._encode_token(event) if isinstance(event, PendingToken) else event()
        return self._unsent

    def sent(self) -> None:
        self._unsent = None

    @property
    def delivered(self) -> bool:
        return self.over and self._unsent is None and not self._pending

    def _encode_token(self, event: PendingToken) -> bytes:
        if event.choice.waiting is event:
            event.choice.waiting = None
        self.pending_size -= event.size
        return self._encoder.token(
            event.text, event.ids, event.index, event.logprobs or None, self._label(event.choice)
        )


def _clock(choice: Choice) -> RequestClock:
    """Admission does not know when a request was admitted to the pool, only when its first token came."""
    return msgspec.structs.replace(choice.clock, admitted=choice.clock.first_token)


def _logprob(item: TokenItem) -> TokenLogprob | None:
    return None if item.logprob is None else TokenLogprob(item.token_id, item.logprob, item.top)
