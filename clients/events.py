"""What a stream yields, and what is left of it at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithms; `top` holds (token id, logprob) of the likeliest tokens, best first."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """`text` is what this event adds to the answer: empty but for tokens (and `Done` without streaming)."""

    seq: int
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted(Event):
    """`n`: how many answers there will be; `choice` in what follows says which one is meant."""

    prompt_tokens: int
    model: str
    seed: int
    max_new_tokens: int
    n: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Token(Event):
    """`index` is the place of `ids[0]` among the generated tokens. A character may end in a later event."""

    ids: tuple[int, ...]
    index: int
    logprobs: tuple[Logprob, ...] = ()
    choice: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted(Event):
    """It pauses, and nothing of it is lost. `reason` is empty when it gave its memory to others, or engine_restart."""

    reason: str = ""
    choice: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    choice: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer. finish_reason: stop, length, cancelled or kv_exhausted. `stop` is the stop string that matched;
    `timings` are in seconds."""

    text: str
    ids: tuple[int, ...]
    finish_reason: str
    timings: Mapping[str, float]
    seed: int
    logprobs: tuple[Logprob, ...] = ()
    stop: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Event):
    """`usage` is that of the whole request; finish_reason, timings and stop are those of the first of `choices`."""

    finish_reason: str
    usage: Mapping[str, int]
    timings: Mapping[str, float]
    stop: str | None = None
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer, or several: then everything but `usage` and `preemptions` is that of the first of `choices`.

    `timings` are in seconds; `preemptions` counts the pauses that were announced.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: str
    usage: Mapping[str, int]
    timings: Mapping[str, float]
    model: str
    seed: int
    preemptions: int = 0
    logprobs: tuple[Logprob, ...] = field(default=())
    stop: str | None = None
    choices: tuple[Choice, ...] = ()


class GenerateOptions(TypedDict, total=False):
    """The fields of `generate` beside the prompt; docs/protocol.md has their ranges and defaults."""

    model: str
    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    n: int
    stop: str | list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int
    stream: bool
    priority: int
    deadline_ms: int
    cache_salt: str
    add_special_tokens: bool


def read_logprobs(raw: Any) -> tuple[Logprob, ...]:
    return tuple(
        Logprob(entry["id"], entry["logprob"], tuple((id, value) for id, value in entry.get("top", ())))
        for entry in raw or ()
    )
