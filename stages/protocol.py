"""The client protocol, server side: frames of a ROUTER socket to typed requests.

`docs/protocol.md` is the contract. Everything a client can get wrong ends in one `ProtocolError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from deepinfer.stages import protocol_fields as fields
from deepinfer.stages.protocol_errors import ERROR_CODES, ErrorCode, ProtocolError, RequestId
from deepinfer.stages.protocol_fields import Parser, Refused
from deepinfer.stages.protocol_limits import MAX_INTEGER, Limits
from deepinfer.stages.protocol_ops import BULK_FIELDS, OPS, Op
from deepinfer.stages.protocol_requests import (
    Cancel,
    ChatMessage,
    Detokenize,
    Generate,
    Metrics,
    Models,
    Ping,
    Request,
    Status,
    Tokenize,
    to_sampling_params,
)

__all__ = [
    "ERROR_CODES",
    "MAX_INTEGER",
    "PROTOCOL_VERSION",
    "Cancel",
    "ChatMessage",
    "Detokenize",
    "ErrorCode",
    "Generate",
    "Limits",
    "Metrics",
    "Models",
    "Ping",
    "ProtocolError",
    "Request",
    "RequestId",
    "Status",
    "Tokenize",
    "decode_request",
    "is_req",
    "to_sampling_params",
]

PROTOCOL_VERSION = 1

_envelope = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_NIL = b"\xc0"


def is_req(frames: Sequence[bytes]) -> bool:
    """True when the frames (without identity) are those of a REQ socket: answers begin with an empty one."""
    return len(frames) > 1 and len(frames[0]) == 0


def decode_request(frames: Sequence[bytes], limits: Limits, ops: Mapping[str, Op] = OPS) -> Any:
    """A `Request`, or what `ops` builds. `frames` without the identity: `[payload]`, `[payload, ids]`, or either after
    one empty frame (REQ).

    Raises ProtocolError, and nothing else, on whatever a client may send.
    """
    req = is_req(frames)
    payload, ids_frame = _split(frames[1:] if req else frames, limits)
    given = _decode_envelope(payload, limits)
    request_id = _read(None, "id", fields.request_id, given.pop("id", None), limits)
    _check_version(request_id, given.pop("v", None), limits)
    op_name, op = _read_op(request_id, given.pop("op", None), limits, ops)
    _refuse_unknown_fields(request_id, op_name, op, given)
    if op.needs_id and request_id is None:
        raise _missing(None, "id", f"{op_name} needs an id")
    values = {name: _read(request_id, name, op.parsers[name], raw, limits) for name, raw in given.items()}
    if ids_frame is not None:
        _add_ids_frame(request_id, op_name, op, values, ids_frame, limits)
    _require_one_of(request_id, op, values)
    request = op.build(id=request_id, **values)
    if isinstance(request, Generate):
        _check_generate(request, values, req)
    elif isinstance(request, Tokenize):
        _check_special_tokens(request_id, "text", values)
    return request


def _split(frames: Sequence[bytes], limits: Limits) -> tuple[bytes, bytes | None]:
    if len(frames) not in (1, 2):
        raise ProtocolError(
            "malformed",
            f"a request has 1 or 2 frames (a msgpack map, then optionally raw token ids), got {len(frames)}",
            value=f"{len(frames)} frames",
            allowed="1 or 2 frames",
        )
    for frame in frames:
        if len(frame) > limits.max_frame_bytes:
            raise ProtocolError(
                "too_large",
                f"a frame of {len(frame)} bytes is over the limit of {limits.max_frame_bytes}",
                value=f"frame of {len(frame)} bytes",
                allowed=f"at most {limits.max_frame_bytes} bytes",
            )
    return frames[0], frames[1] if len(frames) == 2 else None


def _decode_envelope(payload: bytes, limits: Limits) -> dict[str, msgspec.Raw]:
    """The top level only: values stay undecoded, nil ones are dropped, and their sizes are checked here."""
    count = fields.header_count(payload, "map")
    if count is None:
        raise ProtocolError("malformed", "a request is one msgpack map", allowed="a msgpack map")
    if count > limits.max_fields:
        raise _too_large(f"map of {count} fields", f"at most {limits.max_fields} fields")
    try:
        given = _envelope.decode(payload)
    except msgspec.DecodeError as error:
        raise ProtocolError("malformed", f"a request is one msgpack map with string keys: {error}") from None
    except RecursionError:
        raise ProtocolError("too_deep", "the request is nested deeper than any request can be") from None
    if len(given) != count:
        raise ProtocolError("malformed", "a field is given twice", allowed="each field once")
    small = sum(len(name) + len(memoryview(raw)) for name, raw in given.items() if name not in BULK_FIELDS)
    if small > limits.max_map_bytes:
        allowed = f"at most {limits.max_map_bytes} bytes without {', '.join(sorted(BULK_FIELDS))}"
        raise _too_large(f"map of {small} bytes", allowed)
    return {name: raw for name, raw in given.items() if memoryview(raw) != _NIL}


def _too_large(value: str, allowed: str) -> ProtocolError:
    return ProtocolError("too_large", f"the request is a {value}; allowed: {allowed}", value=value, allowed=allowed)


def _read(id: RequestId | None, name: str, parser: Parser, raw: msgspec.Raw | None, limits: Limits) -> Any:
    """The value of one field, None when it is absent; `Refused` becomes the error that the client sees."""
    if raw is None:
        return None
    try:
        return parser(raw, limits)
    except Refused as refused:
        raise _field_error(id, name, refused, fields.render(raw)) from None


def _field_error(id: RequestId | None, name: str, refused: Refused, value: str) -> ProtocolError:
    field = name + refused.path
    value = value if refused.value is None else refused.value
    message = f"{field} = {value}: {refused.code.replace('_', ' ')}; allowed: {refused.allowed}"
    return ProtocolError(refused.code, message, field=field, value=value, allowed=refused.allowed, id=id)


def _missing(id: RequestId | None, name: str, message: str) -> ProtocolError:
    return ProtocolError("missing_field", message, field=name, id=id)


def _check_version(id: RequestId | None, raw: msgspec.Raw | None, limits: Limits) -> None:
    if raw is None:
        raise _missing(id, "v", f"v is missing: the protocol version, {PROTOCOL_VERSION}")
    version = _read(id, "v", fields.integer(0), raw, limits)
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            "unsupported_version",
            f"v: protocol version {version} is not spoken here; allowed: {PROTOCOL_VERSION}",
            field="v",
            value=str(version),
            allowed=str(PROTOCOL_VERSION),
            id=id,
        )


def _read_op(id: RequestId | None, raw: msgspec.Raw | None, limits: Limits, ops: Mapping[str, Op]) -> tuple[str, Op]:
    allowed = ", ".join(ops)
    if raw is None:
        raise _missing(id, "op", f"op is missing; allowed: {allowed}")
    name = _read(id, "op", fields.text(0, 64), raw, limits)
    if name not in ops:
        message = f"op: {name!r} is not an operation{_did_you_mean(name, ops)}; allowed: {allowed}"
        raise ProtocolError("unknown_op", message, field="op", value=repr(name), allowed=allowed, id=id)
    return name, ops[name]


def _refuse_unknown_fields(id: RequestId | None, op_name: str, op: Op, given: Mapping[str, msgspec.Raw]) -> None:
    for name, raw in given.items():
        if name not in op.parsers:
            allowed = ", ".join(["v", "op", "id", *op.parsers])
            shown = fields.shorten(name)
            message = f"{op_name} has no field {shown!r}{_did_you_mean(shown, op.parsers)}; allowed: {allowed}"
            raise ProtocolError("unknown_field", message, field=shown, value=fields.render(raw), allowed=allowed, id=id)


def _did_you_mean(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _add_ids_frame(
    id: RequestId | None, op_name: str, op: Op, values: dict[str, Any], frame: bytes, limits: Limits
) -> None:
    if op.ids is None:
        raise ProtocolError("malformed", f"{op_name} takes no second frame", allowed="1 frame", id=id)
    if op.ids in values:
        raise _conflict(id, op.ids, f"{op.ids} is given both in the map and as the second frame")
    try:
        values[op.ids] = fields.raw_token_ids(frame, op.min_ids, limits)
    except Refused as refused:
        raise _field_error(id, op.ids, refused, f"frame of {len(frame)} bytes") from None


def _require_one_of(id: RequestId | None, op: Op, values: Mapping[str, Any]) -> None:
    present = [name for name in op.one_of if name in values]
    choices = " or ".join(op.one_of)
    if len(present) > 1:
        raise _conflict(id, present[1], f"{' and '.join(present)} exclude each other; give one of {choices}")
    if op.one_of and not present:
        raise _missing(id, op.one_of[0], f"{choices} is missing")


def _conflict(
    id: RequestId | None, field: str, message: str, value: str | None = None, allowed: str | None = None
) -> ProtocolError:
    return ProtocolError("conflict", message, field=field, value=value, allowed=allowed, id=id)


def _check_generate(request: Generate, values: Mapping[str, Any], req: bool) -> None:
    if req and request.stream:
        message = "stream = True: a REQ socket gets exactly one answer; allowed: false, or a DEALER socket"
        raise _conflict(request.id, "stream", message, "True", "false")
    low, high = request.min_new_tokens, request.max_new_tokens
    if high is not None and low > high:
        message = f"min_new_tokens = {low}: more than max_new_tokens; allowed: at most {high}"
        raise _conflict(request.id, "min_new_tokens", message, str(low), f"at most {high}")
    _check_special_tokens(request.id, "prompt", values)


def _check_special_tokens(id: RequestId | None, needed: str, values: Mapping[str, Any]) -> None:
    if "add_special_tokens" in values and needed not in values:
        message = f"add_special_tokens only goes with {needed}: ids and rendered messages are taken as they are"
        raise _conflict(id, "add_special_tokens", message)
