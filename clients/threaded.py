"""The thread that owns a synchronous client's socket. Callers reach it by the link's outbox and a wake-up."""

from __future__ import annotations

import contextlib
import threading
import uuid

import zmq

from deepinfer.clients.discovery import Connection
from deepinfer.clients.link import Link


class LinkThread:
    """Runs `link.pump` whenever there is something to do, until `close`. A given context stays open."""

    def __init__(self, connection: Connection, context: zmq.Context | None) -> None:
        self._own_context = context is None
        self._context = zmq.Context() if context is None else context
        address = f"inproc://deepinfer-wake-{uuid.uuid4().hex}"
        self._wake_in = _quick_socket(self._context, zmq.PULL)
        self._wake_in.bind(address)
        self._wake_out = _quick_socket(self._context, zmq.PUSH)
        self._wake_out.connect(address)
        self._wake_lock = threading.Lock()
        self._closing = False
        self._closed = False
        try:
            self.link = Link(self._context, connection, self._wake)
        except BaseException:
            self._wake_in.close()
            self._release()
            raise
        self._thread = threading.Thread(target=self._run, name="deepinfer-client", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; whoever still waits gets ClientClosedError. Idempotent."""
        self._closing = True
        self._wake()
        self._thread.join()
        self._release()

    def _wake(self) -> None:
        """A full wake-up queue is a wake-up already."""
        with self._wake_lock, contextlib.suppress(zmq.Again):
            if not self._closed:
                self._wake_out.send(b"", zmq.DONTWAIT)

    def _release(self) -> None:
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
            self._wake_out.close()
        if self._own_context:
            self._context.term()

    def _run(self) -> None:
        link = self.link
        poller = zmq.Poller()
        poller.register(self._wake_in, zmq.POLLIN)
        poller.register(link.monitor, zmq.POLLIN)
        try:
            while not self._closing:
                poller.register(link.socket, zmq.POLLIN | (zmq.POLLOUT if link.wants_to_send else 0))
                poller.poll()
                self._drain_wakes()
                link.pump()
        finally:
            link.close()
            self._wake_in.close()

    def _drain_wakes(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._wake_in.recv(zmq.DONTWAIT)


def _quick_socket(context: zmq.Context, kind: int) -> zmq.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    return socket
