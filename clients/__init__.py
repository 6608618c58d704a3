"""Python clients of the daemon. They need pyzmq and msgpack only."""

from deepinfer.clients.aio import AsyncClient, AsyncStream
from deepinfer.clients.client import Client, Stream
from deepinfer.clients.errors import (
    AccessDeniedError,
    ClientClosedError,
    ConnectionLostError,
    DeepInferError,
    IdleTimeoutError,
    InvalidRequestError,
    NoDaemonError,
    ProtocolViolationError,
)
from deepinfer.clients.events import Accepted, Choice, Completion, Done, Event, Logprob, Preempted, Resumed, Token
from deepinfer.clients.options import Timeouts

__all__ = [
    "Accepted",
    "AccessDeniedError",
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Client",
    "ClientClosedError",
    "Completion",
    "ConnectionLostError",
    "DeepInferError",
    "Done",
    "Event",
    "IdleTimeoutError",
    "InvalidRequestError",
    "Logprob",
    "NoDaemonError",
    "Preempted",
    "ProtocolViolationError",
    "Resumed",
    "Stream",
    "Timeouts",
    "Token",
]
