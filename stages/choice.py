"""One answer to a request: its tokens become text, until a stop string or the engine ends it."""

from __future__ import annotations

from deepinfer.stages.clock import RequestClock
from deepinfer.stages.messages import Finished, SamplingParams, TokenItem
from deepinfer.stages.protocol_events import ChoiceEnd, TokenLogprob
from deepinfer.stages.text import IncrementalDetokenizer, StopMatcher


class PendingToken:
    """Tokens and text of one choice that have not been encoded yet."""

    def __init__(self, choice: Choice, index: int) -> None:
        self.choice = choice
        self.index = index
        self._parts: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.size = 0
        """What it takes of the memory, by the weight of one likely token that is told: a token itself has four."""

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def join(self, text: str, ids: list[int], logprob: TokenLogprob | None) -> int:
        """Returns the size of what is joined."""
        self._parts.append(text)
        self.ids.extend(ids)
        if logprob is not None:
            self.logprobs.append(logprob)
        size = _size(ids, logprob)
        self.size += size
        return size


def _size(ids: list[int], logprob: TokenLogprob | None) -> int:
    return 4 * len(ids) + (0 if logprob is None else len(logprob.top))


class Choice:
    """Owned by its `LiveRequest`. For the engine it is a request of its own, with the id `rid`."""

    def __init__(
        self,
        rid: int,
        params: SamplingParams,
        silent_ids: frozenset[int],
        detokenizer: IncrementalDetokenizer,
        stops: StopMatcher,
    ) -> None:
        self.rid = rid
        self.params = params
        self.generated: list[int] = []
        self.clock = RequestClock()
        self.submitted = False
        """An engine that has not died has it."""
        self.cancelled = ""
        """The reason of the first `Cancel`: whoever works on it, it will end so."""
        self.finished: Finished | None = None
        """The engine's last word about it."""
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.waiting: PendingToken | None = None
        """What further tokens can be joined to."""
        self._silent_ids = silent_ids
        self._detokenizer = detokenizer
        self._stops = stops

    @property
    def stopped(self) -> bool:
        """A stop string has matched: tokens that still arrive are not part of the answer."""
        return self._stops.matched is not None

    def finish_reason(self, finished: Finished) -> str:
        return "stop" if self.stopped else finished.reason

    def push(self, item: TokenItem) -> str:
        """The text that this token adds."""
        self.generated.append(item.token_id)
        self.clock.token()
        new = [] if item.token_id in self._silent_ids else [item.token_id]
        text = self._detokenizer.push(new)
        if len(self.generated) > self.params.min_new_tokens:
            text, _ = self._stops.push(text)
        return text

    def flush(self) -> str:
        """The text that was held back, now that nothing follows."""
        text, _ = self._stops.push(self._detokenizer.flush())
        return text + (self._stops.flush() if not self.stopped else "")

    def end(self, whole: bool) -> ChoiceEnd:
        """After `finished`. `whole`: with all that was not streamed."""
        if self.finished is None:
            raise RuntimeError(f"choice {self.rid} has not finished")
        return ChoiceEnd(
            finish_reason=self.finish_reason(self.finished),
            completion_tokens=len(self.generated),
            timings=self.finished.timings,
            seed=self.params.seed,
            stop=self._stops.matched,
            text="".join(self.text) if whole else None,
            ids=self.generated if whole else None,
            logprobs=self.logprobs if whole and self.params.logprobs is not None else None,
        )
