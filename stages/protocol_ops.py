"""The operations of the client protocol: which fields each takes, and how every one of them is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from deepinfer.stages import protocol_fields as fields
from deepinfer.stages.protocol_fields import Parser, Refused
from deepinfer.stages.protocol_limits import MAX_INTEGER, Limits
from deepinfer.stages.protocol_requests import (
    Cancel,
    ChatMessage,
    Detokenize,
    Generate,
    Metrics,
    Models,
    Ping,
    Status,
    Tokenize,
)

BULK_FIELDS = frozenset({"prompt", "prompt_ids", "messages", "text", "ids"})
"""They may be as long as a prompt may be; everything else of a request map has to be small."""

_map = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


class Op(NamedTuple):
    """`one_of` lists fields of which exactly one must be there; `ids` is what a second frame fills."""

    build: Callable[..., Any]
    parsers: Mapping[str, Parser]
    needs_id: bool = False
    one_of: tuple[str, ...] = ()
    ids: str | None = None
    min_ids: int = 0


def _chat_message(raw: msgspec.Raw, limits: Limits) -> ChatMessage:
    allowed = "a map of role and content"
    if fields.header_count(raw, "map") not in (1, 2, 3):
        raise Refused("invalid_type", allowed)
    given = fields.decode_as(_map, raw, allowed)
    for name in given.keys() - _MESSAGE.keys():
        raise Refused("unknown_field", allowed, path=f".{fields.shorten(name)}")
    values = []
    for name, parser in _MESSAGE.items():
        if name not in given:
            raise Refused("missing_field", allowed, path=f".{name}")
        try:
            values.append(parser(given[name], limits))
        except Refused as refused:
            value = refused.value or fields.render(given[name])
            raise Refused(refused.code, refused.allowed, path=f".{name}", value=value) from None
    return ChatMessage(*values)


def _messages(raw: msgspec.Raw, limits: Limits) -> tuple[ChatMessage, ...]:
    entries = fields.elements(raw, 1, limits.max_messages, "maps of role and content")
    messages = fields.each(_chat_message, entries, limits)
    total = sum(len(message.content) for message in messages)
    if total > limits.max_prompt_chars:
        allowed = f"at most {limits.max_prompt_chars} characters in all messages together"
        raise Refused("too_large", allowed, value=f"{total} characters")
    return messages


_MESSAGE: dict[str, Parser] = {
    "role": fields.choice("system", "user", "assistant", "tool"),
    "content": fields.text(0, lambda at: at.max_prompt_chars),
}

_GENERATE: dict[str, Parser] = {
    "prompt": fields.text(1, lambda at: at.max_prompt_chars),
    "prompt_ids": fields.token_ids(1),
    "messages": _messages,
    "model": fields.text(1, 256),
    "max_new_tokens": fields.integer(1, lambda at: at.max_new_tokens),
    "min_new_tokens": fields.integer(0, lambda at: at.max_new_tokens),
    "temperature": fields.number(0, 10),
    "top_k": fields.integer(0, 2**31 - 1),
    "top_p": fields.number(0, 1, above=True),
    "min_p": fields.number(0, 1),
    "repetition_penalty": fields.number(0, 10, above=True),
    "presence_penalty": fields.number(-2, 2),
    "frequency_penalty": fields.number(-2, 2),
    "logit_bias": fields.logit_bias,
    "seed": fields.integer(0, MAX_INTEGER),
    "n": fields.integer(1, lambda at: at.max_choices),
    "stop": fields.stops,
    "stop_token_ids": fields.stop_token_ids,
    "ignore_eos": fields.boolean(),
    "logprobs": fields.integer(0, lambda at: at.max_logprobs),
    "stream": fields.boolean(),
    "priority": fields.integer(-100, 100),
    "cache_salt": fields.text(0, 128),
    "deadline_ms": fields.integer(1, lambda at: at.max_deadline_ms),
    "add_special_tokens": fields.boolean(),
}

_TOKENIZE: dict[str, Parser] = {
    "text": fields.text(0, lambda at: at.max_prompt_chars),
    "messages": _messages,
    "add_special_tokens": fields.boolean(),
}

_DETOKENIZE: dict[str, Parser] = {"ids": fields.token_ids(0), "skip_special_tokens": fields.boolean()}

OPS: dict[str, Op] = {
    "generate": Op(Generate, _GENERATE, True, ("prompt", "prompt_ids", "messages"), "prompt_ids", 1),
    "cancel": Op(Cancel, {}, True),
    "status": Op(Status, {}),
    "models": Op(Models, {}),
    "tokenize": Op(Tokenize, _TOKENIZE, False, ("text", "messages")),
    "detokenize": Op(Detokenize, _DETOKENIZE, False, ("ids",), "ids"),
    "metrics": Op(Metrics, {}),
    "ping": Op(Ping, {}),
}
