"""One stream as its events arrive: checks their order, collects the answer. No sockets, no threads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from deepinfer.clients.errors import ClientClosedError, DeepInferError, ProtocolViolationError
from deepinfer.clients.events import (
    Accepted,
    Choice,
    Completion,
    Done,
    Event,
    Preempted,
    Resumed,
    Token,
    read_logprobs,
)


class _Answer:
    """What has come of one choice."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[Any] = []
        self.paused = False

    def end(self, raw: Mapping[str, Any], whole: Mapping[str, Any], seed: int) -> Choice:
        """`raw` says how it ended; `whole` is empty, or has what was not streamed."""
        return Choice(
            text=whole.get("text", "".join(self.parts)),
            ids=tuple(whole.get("ids", self.ids)),
            finish_reason=raw["finish_reason"],
            timings=raw["timings"],
            seed=seed,
            logprobs=read_logprobs(whole.get("logprobs")) if whole else tuple(self.logprobs),
            stop=raw.get("stop"),
        )


class StreamState:
    """Owned by one stream of a client; `feed` takes its events in the order in which they came."""

    def __init__(self, streaming: bool) -> None:
        self._streaming = streaming
        self._next_seq = 0
        self._answers: defaultdict[int, _Answer] = defaultdict(_Answer)
        self._accepted: Accepted | None = None
        self._completion: Completion | None = None
        self._preemptions = 0
        self.error: DeepInferError | None = None

    @property
    def ended(self) -> bool:
        return self._completion is not None or self.error is not None

    @property
    def may_be_quiet(self) -> bool:
        """True while silence is legitimate: queued, preempted, or an answer that comes as a whole."""
        answers = self._answers.values()
        waiting = self._accepted is not None and not any(answer.ids for answer in answers)
        return waiting or any(answer.paused for answer in answers) or not self._streaming

    @property
    def text(self) -> str:
        """What has come so far, of the first choice."""
        return "".join(self._answers[0].parts)

    def feed(self, raw: Mapping[str, Any]) -> Event | None:
        """The event that the stream yields; None for one that this client does not know.

        Raises what an `error` event says, or ProtocolViolationError.
        """
        try:
            return self._read(raw)
        except DeepInferError as error:
            self.error = error
        except (KeyError, TypeError, ValueError) as error:
            self.error = ProtocolViolationError(f"a {raw['event']} event has a wrong field: {error!r}")
        raise self.error

    def fail(self, error: DeepInferError) -> DeepInferError:
        self.error = error
        return error

    def leave(self) -> None:
        """Nobody will read the rest."""
        if not self.ended:
            self.error = ClientClosedError("this stream was left before its end")

    def completion(self) -> Completion:
        """Raises the error that ended the stream."""
        if self.error is not None:
            raise self.error
        if self._completion is None:
            raise RuntimeError("the stream has not ended")
        return self._completion

    def _read(self, raw: Mapping[str, Any]) -> Event | None:
        kind = raw["event"]
        if kind == "error":
            self._check_end(raw)
            raise DeepInferError.from_event(raw)
        self._check_seq(raw)
        reader = _READERS.get(kind)
        return reader(self, raw) if reader is not None else None

    def _check_seq(self, raw: Mapping[str, Any]) -> None:
        if raw.get("seq") != self._next_seq:
            raise ProtocolViolationError(
                f"stream event {raw.get('seq')!r} ({raw['event']}) came where {self._next_seq} was due"
            )
        self._next_seq += 1

    def _check_end(self, raw: Mapping[str, Any]) -> None:
        """An error before `accepted` ends no stream and has no numbers."""
        if raw.get("seq") is not None:
            self._check_seq(raw)
            self._check_count(raw)

    def _check_count(self, raw: Mapping[str, Any]) -> None:
        if raw.get("events") != self._next_seq:
            raise ProtocolViolationError(f"the stream had {raw.get('events')!r} events, {self._next_seq} came")

    def _read_accepted(self, raw: Mapping[str, Any]) -> Event:
        self._accepted = Accepted(
            seq=raw["seq"],
            prompt_tokens=raw["prompt_tokens"],
            model=raw["model"],
            seed=raw["seed"],
            max_new_tokens=raw["max_new_tokens"],
            n=raw.get("n", 1),
        )
        return self._accepted

    def _read_token(self, raw: Mapping[str, Any]) -> Event:
        token = Token(
            seq=raw["seq"],
            text=raw["text"],
            ids=tuple(raw["ids"]),
            index=raw["index"],
            logprobs=read_logprobs(raw.get("logprobs")),
            choice=raw.get("choice", 0),
        )
        answer = self._answers[token.choice]
        if token.index != len(answer.ids):
            raise ProtocolViolationError(f"token {token.index} came where {len(answer.ids)} was due")
        answer.paused = False
        answer.parts.append(token.text)
        answer.ids.extend(token.ids)
        answer.logprobs.extend(token.logprobs)
        return token

    def _read_preempted(self, raw: Mapping[str, Any]) -> Event:
        event = Preempted(seq=raw["seq"], reason=raw.get("reason", ""), choice=raw.get("choice", 0))
        self._answers[event.choice].paused = True
        self._preemptions += 1
        return event

    def _read_resumed(self, raw: Mapping[str, Any]) -> Event:
        event = Resumed(seq=raw["seq"], choice=raw.get("choice", 0))
        self._answers[event.choice].paused = False
        return event

    def _read_done(self, raw: Mapping[str, Any]) -> Event:
        """What belongs to one answer is in `choices`, or in the event itself where there is only one."""
        self._check_count(raw)
        accepted = self._accepted
        ends = raw.get("choices", (raw,))
        seed = None if accepted is None else accepted.seed
        choices = tuple(
            self._answers[index].end(end, {} if self._streaming else end, end.get("seed", seed))
            for index, end in enumerate(ends)
        )
        first = choices[0]
        self._completion = Completion(
            text=first.text,
            ids=first.ids,
            finish_reason=first.finish_reason,
            usage=raw["usage"],
            timings=first.timings,
            model=raw["model"] if accepted is None else accepted.model,
            seed=first.seed,
            preemptions=self._preemptions,
            logprobs=first.logprobs,
            stop=first.stop,
            choices=choices,
        )
        return Done(
            seq=raw["seq"],
            text="" if self._streaming else first.text,
            finish_reason=first.finish_reason,
            usage=raw["usage"],
            timings=first.timings,
            stop=first.stop,
            choices=choices,
        )


_READERS = {
    "accepted": StreamState._read_accepted,
    "token": StreamState._read_token,
    "preempted": StreamState._read_preempted,
    "resumed": StreamState._read_resumed,
    "done": StreamState._read_done,
}
