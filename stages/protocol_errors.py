"""The one table of error codes that a client can be sent, and the exception that carries one."""

from __future__ import annotations

from typing import NamedTuple


class ErrorCode(NamedTuple):
    """`retry` is true when the same request may succeed later without being changed."""

    retry: bool
    meaning: str


ERROR_CODES: dict[str, ErrorCode] = {
    # The message could not be read, or a field of it is wrong.
    "malformed": ErrorCode(False, "the frames are not a msgpack map of this protocol"),
    "too_large": ErrorCode(False, "a frame, map, list or text is over its limit"),
    "too_deep": ErrorCode(False, "the msgpack is nested deeper than any request can be"),
    "unsupported_version": ErrorCode(False, "`v` is not a protocol version that this daemon speaks"),
    "unknown_op": ErrorCode(False, "`op` is not an operation"),
    "unknown_field": ErrorCode(False, "the operation has no field of this name"),
    "missing_field": ErrorCode(False, "a required field is absent"),
    "invalid_type": ErrorCode(False, "a field has the wrong msgpack type"),
    "invalid_value": ErrorCode(False, "a field has the right type but a value that is not allowed"),
    "out_of_range": ErrorCode(False, "a number, a length or a token id is outside its range"),
    "conflict": ErrorCode(False, "two fields, or a field and the socket type, exclude each other"),
    # The request is well formed but cannot be taken.
    "duplicate_id": ErrorCode(False, "this connection already has a live stream with this id"),
    "unknown_model": ErrorCode(False, "`model` is not the model that is served"),
    "chat_template": ErrorCode(False, "the chat template is missing or refused these messages"),
    "context_exceeded": ErrorCode(False, "prompt plus new tokens are more than the context of the model"),
    "kv_capacity_exceeded": ErrorCode(False, "the request could not run even alone on an empty KV pool"),
    "queue_full": ErrorCode(True, "too many requests are waiting"),
    "not_ready": ErrorCode(True, "the engine is still loading"),
    "shutting_down": ErrorCode(True, "the daemon takes no new requests because it is stopping"),
    # A stream that had been accepted ends without its result.
    "deadline_exceeded": ErrorCode(True, "`deadline_ms` passed before the stream was complete"),
    "slow_consumer": ErrorCode(True, "the client did not read its events and the buffer for them is full"),
    "non_finite_logits": ErrorCode(False, "the model computed NaN or infinity for this request"),
    "engine_killer": ErrorCode(False, "the engine died twice while it computed this request"),
    "engine_failed": ErrorCode(True, "the engine died and no other one could take the stream up"),
    "internal": ErrorCode(False, "a fault of the daemon; its log has the details"),
}

RequestId = str | int


class ProtocolError(Exception):
    """A request that is refused. `str()` of it is the sentence for people, `code` is what programs compare.

    `field` is a path such as `messages[3].role`; `value` is a shortened rendering of what was sent; `id` is
    the request id when it could be read.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        field: str | None = None,
        value: str | None = None,
        allowed: str | None = None,
        id: RequestId | None = None,
        details: dict | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.value = value
        self.allowed = allowed
        self.id = id
        self.retry = ERROR_CODES[code].retry
        self.details = details
