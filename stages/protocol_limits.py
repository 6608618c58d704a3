"""What a request may measure: one frozen object, published in the connection file and by `status`."""

from __future__ import annotations

import msgspec

MAX_INTEGER = 2**53 - 1
"""The largest integer that every client language holds exactly (a double has 53 bits)."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes are bytes on the wire; characters are Unicode code points."""

    max_frame_bytes: int = 8 * 1024 * 1024
    max_map_bytes: int = 64 * 1024
    """The request map without its bulk fields (`prompt`, `prompt_ids`, `messages`, `text`, `ids`)."""
    max_fields: int = 64
    max_id_chars: int = 128
    max_prompt_chars: int = 2 * 1024 * 1024
    """Of `prompt`, of `text`, and of all messages together."""
    max_prompt_ids: int = 256 * 1024
    max_messages: int = 1024
    max_new_tokens: int = 128 * 1024
    max_choices: int = 16
    max_stops: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 64
    max_logit_bias: int = 1024
    max_logprobs: int = 20
    max_deadline_ms: int = 7 * 24 * 3600 * 1000
    max_streams: int = 2048
    """Live streams of one connection."""
    max_queue: int = 2048
    """Live streams of all connections together."""
    vocab_size: int = 2**31 - 1
    """Token ids are 0 to this minus one. The default stands until the model is known."""

    def to_dict(self) -> dict[str, int]:
        return msgspec.structs.asdict(self)
