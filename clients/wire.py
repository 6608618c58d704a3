"""Requests to frames and frames to events, with msgpack."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from deepinfer.clients.errors import InvalidRequestError, ProtocolViolationError

PROTOCOL_VERSION = 1


def pack_request(
    op: str,
    id: int | str,
    fields: Mapping[str, Any],
    ids: Sequence[int] | None = None,
    max_frame_bytes: int = 8 * 1024 * 1024,
) -> list[bytes]:
    """The frames of a request. Fields that are None are left out; `ids` become the second frame (int32).

    Raises InvalidRequestError, also for a frame over the daemon's limit: libzmq would drop the connection.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        frames = [msgpack.packb({"v": PROTOCOL_VERSION, "op": op, "id": id, **given})]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError("invalid_value", f"{op} cannot be encoded as msgpack: {error}") from error
    if ids is not None:
        frames.append(_pack_ids(ids))
    for frame in frames:
        if len(frame) > max_frame_bytes:
            raise InvalidRequestError(
                "too_large",
                f"a frame of this request has {len(frame)} bytes, the daemon takes {max_frame_bytes}",
            )
    return frames


def _pack_ids(ids: Sequence[int]) -> bytes:
    try:
        packed = array("i", ids)
    except (TypeError, OverflowError) as error:
        raise InvalidRequestError("invalid_type", f"token ids are 32-bit integers: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_event(frames: Sequence[bytes]) -> dict[str, Any]:
    """Raises ProtocolViolationError on anything that is not an event of this version."""
    if len(frames) != 1:
        raise ProtocolViolationError(f"an event is one frame, got {len(frames)}")
    try:
        event = msgpack.unpackb(frames[0])
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolViolationError(f"an event is not msgpack: {error}") from error
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ProtocolViolationError("an event is a map with a string in `event`")
    if event.get("v") != PROTOCOL_VERSION:
        raise ProtocolViolationError(f"protocol version {event.get('v')!r}, this client speaks {PROTOCOL_VERSION}")
    if not isinstance(event.get("id"), str | int | None):
        raise ProtocolViolationError(f"an id is a string or an integer, got {type(event['id']).__name__}")
    return event
