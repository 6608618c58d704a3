"""From a valid `generate` to a request that the engine can run: prompt ids, sampling parameters, room.

Everything that the protocol's field checks cannot know is decided here: what the text is in tokens, and whether the
request could run alone on an empty pool.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from deepinfer.stages.choice import Choice
from deepinfer.stages.live import LiveRequest, Route
from deepinfer.stages.messages import SamplingParams
from deepinfer.stages.model import Tokenizer
from deepinfer.stages.model.tokenizer import ChatTemplateError
from deepinfer.stages.protocol import (
    MAX_INTEGER,
    ChatMessage,
    Generate,
    ProtocolError,
    RequestId,
    to_sampling_params,
)
from deepinfer.stages.text import IncrementalDetokenizer, StopMatcher, byte_fallback_ids


class Capacity(NamedTuple):
    """What a request may need; known when the engine is ready."""

    context: int
    tokens: int
    """That one request can have stored, alone in the pool."""
    vocab_size: int
    """Ids that both the tokenizer and the model know."""


class Intake:
    """Owned by admission, with the tokenizer. Raises ProtocolError for what must be refused."""

    def __init__(self, tokenizer: Tokenizer, model: str) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self._eos = frozenset(tokenizer.eos_token_ids)
        vocabulary = tokenizer.vocabulary()
        self._byte_ids = byte_fallback_ids(vocabulary)
        self._silent: dict[int, bool] = {}
        """What the detokenizers have found of ids, for all of them."""
        self._longest_token = max(len(token) for token in vocabulary)
        """Characters, at least: the spellings of byte tokens are no shorter than what they stand for."""

    def check_model(self, op: Generate) -> None:
        """Only one model is served; a request may say which one it means."""
        if op.model is not None and op.model != self.model:
            raise ProtocolError(
                "unknown_model",
                f"model: {op.model!r} is not served here; this daemon serves {self.model!r}",
                field="model",
                value=op.model,
                allowed=self.model,
                id=op.id,
            )

    def live_request(self, rid: int, route: Route, op: Generate, capacity: Capacity) -> LiveRequest:
        """Checked and ready to be submitted. `rid` is the id of its first choice."""
        prompt = self._prompt_ids(op, capacity)
        params = self._params(op, len(prompt), capacity)
        silent = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        choices = [
            Choice(
                rid=rid + index,
                params=msgspec.structs.replace(params, seed=(params.seed + index) % (MAX_INTEGER + 1)),
                silent_ids=silent,
                detokenizer=IncrementalDetokenizer(self.tokenizer.decode, self._byte_ids, self._silent),
                stops=StopMatcher(op.stop),
            )
            for index in range(op.n)
        ]
        return LiveRequest(
            route=route,
            client_id=op.id,
            model=self.model,
            prompt=prompt.astype("<i4", copy=False).tobytes(),
            choices=choices,
            stream=op.stream,
            priority=op.priority,
            cache_salt=op.cache_salt,
        )

    def encode(
        self, id: RequestId | None, text: str | None, chat: Sequence[ChatMessage] | None, add_special: bool
    ) -> list[int]:
        """Exactly one of `text` and `chat` is set."""
        if text is not None:
            return self.tokenizer.encode(text, add_special)
        try:
            return self.tokenizer.encode_chat([{"role": m.role, "content": m.content} for m in chat or ()])
        except ChatTemplateError as error:
            raise ProtocolError("chat_template", str(error), field="messages", id=id) from error

    def _prompt_ids(self, op: Generate, capacity: Capacity) -> np.ndarray:
        if op.prompt_ids is not None:
            return op.prompt_ids
        field = "prompt" if op.prompt is not None else "messages"
        self._check_length(op, field, capacity)
        ids = self.encode(op.id, op.prompt, op.messages, op.add_special_tokens)
        if not ids:
            raise ProtocolError("invalid_value", f"{field}: it has no tokens", field=field, value="0 tokens", id=op.id)
        if max(ids) >= capacity.vocab_size:
            raise ProtocolError(
                "invalid_value",
                f"{field}: it contains the token {max(ids)}, for which the model has no embedding",
                field=field,
                value=str(max(ids)),
                allowed=f"token ids below {capacity.vocab_size}",
                id=op.id,
            )
        return np.asarray(ids, dtype="<i4")

    def _check_length(self, op: Generate, field: str, capacity: Capacity) -> None:
        """A text that cannot fit whatever its tokens are is refused before anyone spends a second on tokenising it."""
        texts = [op.prompt] if op.prompt is not None else [message.content for message in op.messages or ()]
        size = sum(len(text) for text in texts)
        if size > capacity.context * self._longest_token:
            raise ProtocolError(
                "context_exceeded",
                f"{field}: {size} characters have more than {capacity.context} tokens, which the context holds",
                field=field,
                value=f"{size} characters",
                allowed=f"at most {capacity.context} tokens with the answer",
                id=op.id,
                details={"limit": capacity.context},
            )

    def _params(self, op: Generate, prompt_tokens: int, capacity: Capacity) -> SamplingParams:
        """Refuses what could not run alone on an empty pool, with the numbers. Without `max_new_tokens` a request may
        go on to the end of what fits."""
        room = min(capacity.context, capacity.tokens + 1) - prompt_tokens
        defaults = self.tokenizer.generation_defaults
        params = to_sampling_params(op, defaults, secrets.randbelow(MAX_INTEGER), max(1, room))
        total = prompt_tokens + params.max_new_tokens
        if total > capacity.context:
            raise _too_long("context_exceeded", op.id, prompt_tokens, params, "context", capacity.context)
        if total - 1 > capacity.tokens:
            raise _too_long("kv_capacity_exceeded", op.id, prompt_tokens, params, "KV pool", capacity.tokens)
        if params.min_new_tokens > params.max_new_tokens:
            raise ProtocolError(
                "conflict",
                f"min_new_tokens: {params.min_new_tokens} is over the {params.max_new_tokens} new tokens that fit",
                field="min_new_tokens",
                id=op.id,
            )
        return params


def _too_long(code: str, id: RequestId, prompt: int, params: SamplingParams, what: str, limit: int) -> ProtocolError:
    total = prompt + params.max_new_tokens
    return ProtocolError(
        code,
        f"prompt of {prompt} tokens + {params.max_new_tokens} new tokens = {total}; the {what} holds {limit} tokens",
        field="max_new_tokens" if prompt < limit else "prompt",
        value=str(total),
        allowed=f"at most {limit} tokens together",
        id=id,
        details={"prompt_tokens": prompt, "max_new_tokens": params.max_new_tokens, "limit": limit},
    )
