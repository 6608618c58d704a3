"""What can go wrong for a client. Programs compare `code`; docs/protocol.md lists what the daemon sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class DeepInferError(Exception):
    """An error the daemon sent, or one of the subclasses below that the client found itself.

    `retry`: the same request may succeed later. `field`, `value`, `allowed`: which part of the request was
    refused, what it was, and what would be right; None when the error is not about a field.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        field: str | None = None,
        value: str | None = None,
        allowed: str | None = None,
        retry: bool = False,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.field = field
        self.value = value
        self.allowed = allowed
        self.retry = retry
        self.details = details

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> DeepInferError:
        return cls(
            str(event.get("code")),
            str(event.get("message")),
            field=event.get("field"),
            value=event.get("value"),
            allowed=event.get("allowed"),
            retry=bool(event.get("retry")),
            details=event.get("details"),
        )


class InvalidRequestError(DeepInferError):
    """The request cannot be put on the wire, so it was not sent."""


class NoDaemonError(DeepInferError):
    """Nobody answers at the endpoint, or there is no connection file."""

    def __init__(self, message: str) -> None:
        super().__init__("no_daemon", message, retry=True)


class AccessDeniedError(DeepInferError):
    """The daemon is there and does not let this client in: it wants CURVE keys, or knows others."""

    def __init__(self, message: str) -> None:
        super().__init__("access_denied", message)


class ConnectionLostError(DeepInferError):
    """The connection broke while a request was open. The daemon ends the streams of a lost connection."""

    def __init__(self, message: str) -> None:
        super().__init__("connection_lost", message, retry=True)


class IdleTimeoutError(DeepInferError):
    """The daemon is connected but nothing came for this request in time."""

    def __init__(self, message: str) -> None:
        super().__init__("idle_timeout", message, retry=True)


class ProtocolViolationError(DeepInferError):
    """The daemon sent something that the protocol does not allow, such as a gap in a stream's numbers."""

    def __init__(self, message: str) -> None:
        super().__init__("protocol_violation", message)


class ClientClosedError(DeepInferError):
    """The client was closed, or its receiving thread ended."""

    def __init__(self, message: str = "this client is closed") -> None:
        super().__init__("client_closed", message)
