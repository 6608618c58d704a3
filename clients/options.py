"""What both clients share: how a call's arguments become fields, and how long to wait for what."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.clients.errors import (
    DeepInferError,
    IdleTimeoutError,
    InvalidRequestError,
    NoDaemonError,
    ProtocolViolationError,
)
from deepinfer.clients.link import Item, Link
from deepinfer.clients.streams import StreamState

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Timeouts:
    """Seconds. `idle` runs between the events of a stream, but not while it is queued or preempted."""

    connect: float = 5.0
    call: float = 30.0
    idle: float = 120.0
    close: float = 2.0

    def with_idle(self, seconds: float) -> Timeouts:
        return dataclasses.replace(self, idle=seconds)


def generate_fields(
    prompt: str | Sequence[int] | None, messages: Messages | None, options: Mapping[str, Any]
) -> tuple[dict[str, Any], Sequence[int] | None]:
    """The map of a `generate` request and, for a prompt of token ids, what goes into its second frame."""
    if (prompt is None) == (messages is None):
        raise InvalidRequestError("conflict", "give either a prompt or messages", field="prompt")
    fields: dict[str, Any] = dict(options)
    if messages is not None:
        return {"messages": [dict(message) for message in messages], **fields}, None
    if isinstance(prompt, str):
        return {"prompt": prompt, **fields}, None
    return fields, prompt


def reply_data(item: Item) -> dict[str, Any]:
    """What a one-answer call returns. Raises the error that came instead."""
    if isinstance(item, DeepInferError):
        raise item
    if item["event"] == "error":
        raise DeepInferError.from_event(item)
    if not isinstance(item.get("data"), dict):
        raise ProtocolViolationError(f"a {item['event']} event came where a reply was due")
    return item["data"]


def stream_patience(state: StreamState, link: Link, timeouts: Timeouts) -> float | None:
    """How long to wait for the next event; None is for ever."""
    if not link.up:
        return timeouts.connect
    return None if state.may_be_quiet else timeouts.idle


def gave_up(link: Link, waited: float) -> DeepInferError:
    """The error for having waited in vain."""
    if not link.up:
        return nobody_answers(link, waited)
    return IdleTimeoutError(f"no event for {waited:g} s from {link.connection.endpoint}")


def nobody_answers(link: Link, waited: float) -> NoDaemonError:
    connection, hint = link.connection, ""
    if connection.pid is not None and not _process_exists(connection.pid):
        hint = f"; its connection file was left by process {connection.pid}, which does not run any more"
    return NoDaemonError(f"no daemon answers at {connection.endpoint} within {waited:g} s{hint}")


def _process_exists(pid: int) -> bool:
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
