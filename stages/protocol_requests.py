"""The requests of the client protocol as typed structs, validated before they are built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from deepinfer.stages.messages import SamplingParams
from deepinfer.stages.protocol_errors import RequestId


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of `prompt`, `prompt_ids` (int32 `[n]`) and `messages` is set.

    None in an optional field means that the client left it out; `to_sampling_params` fills in the rest.
    """

    id: RequestId
    prompt: str | None = None
    prompt_ids: np.ndarray | None = None
    messages: tuple[ChatMessage, ...] | None = None
    model: str | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    stream: bool = True
    priority: int = 0
    deadline_ms: int | None = None
    cache_salt: str = ""
    add_special_tokens: bool = True


class Cancel(msgspec.Struct, frozen=True, kw_only=True):
    """`id` is that of the stream, on the same connection."""

    id: RequestId


class Status(msgspec.Struct, frozen=True, kw_only=True):
    id: RequestId | None = None


class Models(msgspec.Struct, frozen=True, kw_only=True):
    id: RequestId | None = None


class Tokenize(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of `text` and `messages` is set."""

    id: RequestId | None = None
    text: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    add_special_tokens: bool = True


class Detokenize(msgspec.Struct, frozen=True, kw_only=True):
    """`ids` is int32 `[n]`, n may be 0."""

    id: RequestId | None = None
    ids: np.ndarray
    skip_special_tokens: bool = True


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    id: RequestId | None = None


class Ping(msgspec.Struct, frozen=True, kw_only=True):
    id: RequestId | None = None


Request = Generate | Cancel | Status | Models | Tokenize | Detokenize | Metrics | Ping


def to_sampling_params(
    generate: Generate,
    defaults: Mapping[str, Any],
    seed: int,
    max_new_tokens: int,
) -> SamplingParams:
    """Fills what the client left out: from `defaults` (the checkpoint's generation config), else neutrally.

    A checkpoint that says `do_sample: false`, or that gives no temperature, is greedy. `seed` is used when
    the client chose none, `max_new_tokens` likewise.
    """
    return SamplingParams(
        temperature=_first(generate.temperature, _default_temperature(defaults)),
        top_k=_first(generate.top_k, defaults.get("top_k"), 0),
        top_p=_first(generate.top_p, defaults.get("top_p"), 1.0),
        min_p=_first(generate.min_p, defaults.get("min_p"), 0.0),
        repetition_penalty=_first(generate.repetition_penalty, defaults.get("repetition_penalty"), 1.0),
        presence_penalty=generate.presence_penalty,
        frequency_penalty=generate.frequency_penalty,
        logit_bias=generate.logit_bias,
        seed=_first(generate.seed, seed),
        stop_token_ids=generate.stop_token_ids,
        ignore_eos=generate.ignore_eos,
        min_new_tokens=generate.min_new_tokens,
        max_new_tokens=_first(generate.max_new_tokens, max_new_tokens),
        logprobs=generate.logprobs,
    )


def _default_temperature(defaults: Mapping[str, Any]) -> float:
    if defaults.get("do_sample") is False:
        return 0.0
    return _first(defaults.get("temperature"), 0.0)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
