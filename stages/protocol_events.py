"""Everything the daemon sends to a client, as msgpack maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from deepinfer.stages.clock import Timings
from deepinfer.stages.protocol_errors import ProtocolError, RequestId

_encoder = msgspec.msgpack.Encoder()


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural logarithms. `top` holds the likeliest tokens, best first, as (id, logprob)."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    v: int
    id: RequestId | None = None


class StreamEvent(Event, frozen=True, kw_only=True):
    seq: int


class Accepted(StreamEvent, frozen=True, kw_only=True, tag="accepted"):
    prompt_tokens: int
    model: str
    seed: int
    max_new_tokens: int
    n: int = 1


class Token(StreamEvent, frozen=True, kw_only=True, tag="token"):
    """`ids` may be empty (text that had been held back) and `text` too (a character that is not complete)."""

    text: str
    ids: Sequence[int]
    index: int
    logprobs: Sequence[TokenLogprob] | None = None
    choice: int | None = None
    """Here and below: absent where there is only one."""


class Preempted(StreamEvent, frozen=True, kw_only=True, tag="preempted"):
    """`reason` is absent when it gave its memory to others."""

    reason: str | None = None
    choice: int | None = None


class Resumed(StreamEvent, frozen=True, kw_only=True, tag="resumed"):
    choice: int | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    total_tokens: int


class ChoiceEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one answer ended. The fields from `text` on are there only when the request said `stream: false`."""

    finish_reason: str
    completion_tokens: int
    timings: Timings
    seed: int
    stop: str | None = None
    text: str | None = None
    ids: Sequence[int] | None = None
    logprobs: Sequence[TokenLogprob] | None = None


class Done(StreamEvent, frozen=True, kw_only=True, tag="done"):
    """What belongs to one answer is here where there is only one, and in `choices` otherwise. The fields from `text` to
    `seed` are there only when the request said `stream: false`."""

    finish_reason: str | None = None
    usage: Usage
    timings: Timings | None = None
    events: int
    stop: str | None = None
    text: str | None = None
    ids: Sequence[int] | None = None
    logprobs: Sequence[TokenLogprob] | None = None
    model: str | None = None
    seed: int | None = None
    choices: Sequence[ChoiceEnd] | None = None


class Error(Event, frozen=True, kw_only=True, tag="error"):
    """`seq` and `events` are there only when it ends a stream that had been accepted."""

    code: str
    message: str
    retry: bool
    field: str | None = None
    value: str | None = None
    allowed: str | None = None
    details: Mapping[str, Any] | None = None
    seq: int | None = None
    events: int | None = None


class Reply(Event, frozen=True, kw_only=True, tag="reply"):
    op: str
    data: Mapping[str, Any]


def encode_error(error: ProtocolError, *, seq: int | None = None) -> bytes:
    """With `seq` the error ends that stream, and its event count is seq + 1."""
    return _encoder.encode(
        Error(
            v=1,
            id=error.id,
            code=error.code,
            message=_sendable(error.message),
            retry=error.retry,
            field=error.field,
            value=error.value,
            allowed=error.allowed,
            details=error.details,
            seq=seq,
            events=None if seq is None else seq + 1,
        )
    )


def _sendable(text: str) -> str:
    """It may name a file whose name is no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def encode_reply(op: str, id: RequestId | None, data: Mapping[str, Any]) -> bytes:
    return _encoder.encode(Reply(v=1, id=id, op=op, data=data))


class StreamEncoder:
    """Numbers the events of one stream. Encode an event when it is sent: coalesced deltas take one number.

    `done` and `error` end the stream; a further event is a RuntimeError, so no second terminal one leaves.
    """

    def __init__(self, id: RequestId) -> None:
        self.id = id
        self.seq = 0
        self.ended = False

    def accepted(self, *, prompt_tokens: int, model: str, seed: int, max_new_tokens: int, n: int = 1) -> bytes:
        return self._encode(
            Accepted(
                prompt_tokens=prompt_tokens,
                model=model,
                seed=seed,
                max_new_tokens=max_new_tokens,
                n=n,
                **self._next(),
            )
        )

    def token(
        self,
        text: str,
        ids: Sequence[int],
        index: int,
        logprobs: Sequence[TokenLogprob] | None = None,
        choice: int | None = None,
    ) -> bytes:
        """`index` is that of the first of `ids` among the generated tokens; without ids, of the next one."""
        seq = self._take_number()
        event = Token(v=1, id=self.id, seq=seq, text=text, ids=ids, index=index, logprobs=logprobs, choice=choice)
        return self._encode(event)

    def preempted(self, reason: str | None = None, choice: int | None = None) -> bytes:
        return self._encode(Preempted(reason=reason, choice=choice, **self._next()))

    def resumed(self, choice: int | None = None) -> bytes:
        return self._encode(Resumed(choice=choice, **self._next()))

    def done(
        self, choices: Sequence[ChoiceEnd], *, prompt_tokens: int, cached_tokens: int, model: str | None = None
    ) -> bytes:
        """`model` only for a request with `stream: false`."""
        completion_tokens = sum(choice.completion_tokens for choice in choices)
        usage = Usage(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )
        head = self._next()
        self.ended = True
        if len(choices) > 1:
            return self._encode(Done(usage=usage, events=self.seq, model=model, choices=choices, **head))
        only = choices[0]
        return self._encode(
            Done(
                finish_reason=only.finish_reason,
                usage=usage,
                timings=only.timings,
                events=self.seq,
                stop=only.stop,
                text=only.text,
                ids=only.ids,
                logprobs=only.logprobs,
                model=model,
                seed=None if only.text is None else only.seed,
                **head,
            )
        )

    def error(self, error: ProtocolError) -> bytes:
        """Takes the stream's id, whatever the error's own is."""
        error.id = self.id
        seq = self._take_number()
        self.ended = True
        return encode_error(error, seq=seq)

    def _next(self) -> dict[str, Any]:
        return {"v": 1, "id": self.id, "seq": self._take_number()}

    def _take_number(self) -> int:
        if self.ended:
            raise RuntimeError(f"stream {self.id!r} has already sent its terminal event")
        seq = self.seq
        self.seq += 1
        return seq

    def _encode(self, event: StreamEvent) -> bytes:
        return _encoder.encode(event)
