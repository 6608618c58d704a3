"""The connection of one client: a DEALER socket, what waits to be sent, and who waits for which id."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from deepinfer.clients.discovery import Connection
from deepinfer.clients.errors import (
    ClientClosedError,
    ConnectionLostError,
    DeepInferError,
    NoDaemonError,
    ProtocolViolationError,
)
from deepinfer.clients.keys import denied, use_keys
from deepinfer.clients.wire import pack_request, unpack_event

logger = logging.getLogger(__name__)

HEARTBEAT_MS = 2000
HEARTBEAT_TIMEOUT_MS = 6000
REFUSALS = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
"""libzmq does not try again after these."""
HANDSHAKES = 3
"""So many that end without a word, one after the other, are a refusal too: a daemon that dies breaks only one."""
WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED | sum(REFUSALS)
TERMINAL_EVENTS = frozenset({"done", "error", "reply"})

Item = Mapping[str, Any] | DeepInferError


class Mailbox(Protocol):
    """queue.SimpleQueue and asyncio.Queue both are one."""

    def put_nowait(self, item: Item) -> None: ...


class Waiter(NamedTuple):
    mailbox: Mailbox
    is_stream: bool


class Link:
    """`request`, `cancel` and `abandon` may be called from any thread; all else only by the one that pumps.

    `wake` is called after something was put into the outbox, so that the pumping side looks at it.
    """

    def __init__(self, context: zmq.Context, connection: Connection, wake: Callable[[], None]) -> None:
        self.connection = connection
        self.socket = _dealer(context)
        if connection.curve is not None:
            use_keys(self.socket, connection.curve)
        self.monitor = self.socket.get_monitor_socket(WATCHED)
        self._connect(connection.endpoint)
        self.up = connection.endpoint.startswith("inproc://")
        """Whether a daemon is connected; inproc has no handshake that could be seen."""
        self._failed_handshakes = 0
        self._wake = wake
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._waiters: dict[int | str, Waiter] = {}
        self._outbox: deque[tuple[int | str, list[bytes]]] = deque()
        self._closed: DeepInferError | None = None

    def _connect(self, endpoint: str) -> None:
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._close_sockets(linger=0)
            raise NoDaemonError(f"cannot connect to {endpoint}: {error}") from error

    @property
    def open_streams(self) -> list[int | str]:
        with self._lock:
            return [id for id, waiter in self._waiters.items() if waiter.is_stream]

    def request(self, op: str, fields: Mapping[str, Any], mailbox: Mailbox, ids: Sequence[int] | None = None) -> int:
        """Queues a request whose events go to `mailbox`; the last one is terminal or a DeepInferError."""
        id = next(self._ids)
        frames = pack_request(op, id, fields, ids, self.connection.max_frame_bytes)
        with self._lock:
            if self._closed is not None:
                raise self._closed
            self._waiters[id] = Waiter(mailbox, op == "generate")
            self._outbox.append((id, frames))
        self._wake()
        return id

    def cancel(self, id: int | str) -> None:
        """Nothing happens when the stream has ended already."""
        with self._lock:
            if id not in self._waiters:
                return
            self._outbox.append((id, pack_request("cancel", id, {})))
        self._wake()

    def abandon(self, id: int | str) -> None:
        """Nobody waits for this id any more: a request that has not left is dropped, a stream cancelled."""
        with self._lock:
            waiter = self._waiters.pop(id, None)
            if waiter is None:
                return
            self._outbox = deque(entry for entry in self._outbox if entry[0] != id)
            if waiter.is_stream and self.up:
                self._outbox.append((id, pack_request("cancel", id, {})))
        self._wake()

    def pump(self) -> None:
        """Receive and send all that can be without waiting."""
        while True:
            self._receive()
            self._watch()
            self._send()
            wanted = zmq.POLLIN | (zmq.POLLOUT if self._outbox else 0)
            if not self.socket.poll(0, wanted):
                return

    @property
    def wants_to_send(self) -> bool:
        return bool(self._outbox)

    def close(self) -> None:
        """What was sent but has not left is given a moment only while streams are open, for their cancels."""
        linger = 200 if self.open_streams else 0
        self._fail_all(ClientClosedError(), closed=True)
        self._close_sockets(linger)

    def _close_sockets(self, linger: int) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger)

    def _receive(self) -> None:
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                self._deliver(unpack_event(frames))
            except ProtocolViolationError as error:
                self._fail_all(error)

    def _deliver(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "reply" and event.get("op") == "cancel":
            return
        id = event.get("id")
        with self._lock:
            terminal = event["event"] in TERMINAL_EVENTS
            waiter = self._take(id, terminal) if id is not None else None
        if waiter is not None:
            waiter.mailbox.put_nowait(event)
        elif id is None:
            logger.warning("the daemon sent an event for no request: %r", event)

    def _take(self, id: int | str, terminal: bool) -> Waiter | None:
        return self._waiters.pop(id, None) if terminal else self._waiters.get(id)

    def _watch(self) -> None:
        """What came before a break is delivered before the break, so a stream that had ended is whole."""
        while True:
            try:
                message = self.monitor.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            event = parse_monitor_message(message)["event"]
            was_up, self.up = self.up, event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._failed_handshakes += event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            if event in REFUSALS or self._failed_handshakes == HANDSHAKES:
                self._fail_all(denied(self.connection), closed=True)
            elif self.up:
                self._failed_handshakes = 0
            elif was_up:
                self._receive()
                self._fail_all(ConnectionLostError(f"the connection to {self.connection.endpoint} broke"))

    def _send(self) -> None:
        while True:
            with self._lock:
                if not self._outbox:
                    return
                try:
                    self.socket.send_multipart(self._outbox[0][1], zmq.DONTWAIT)
                except zmq.Again:
                    return
                self._outbox.popleft()

    def _fail_all(self, error: DeepInferError, closed: bool = False) -> None:
        with self._lock:
            if closed:
                self._closed = error
            waiters = list(self._waiters.values())
            self._waiters.clear()
            self._outbox.clear()
        for waiter in waiters:
            waiter.mailbox.put_nowait(error)


def _dealer(context: zmq.Context) -> zmq.Socket:
    """IMMEDIATE: a request is not kept for a later daemon. Heartbeats find a peer that was stopped."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    return socket
