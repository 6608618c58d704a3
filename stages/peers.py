"""Which clients of a ROUTER have left, known without sending them anything.

A ROUTER itself notices only when it sends, and a request that waits, or does not stream, sends nothing for minutes.
libzmq's monitor tells of a closed connection by its file descriptor alone, and a message says by which descriptor it
came. Descriptors are used again, so the order matters: what the monitor has said is read before a descriptor is
believed to be a new client's.
"""

from __future__ import annotations

import itertools

import zmq
from zmq.utils.monitor import parse_monitor_message

from deepinfer.stages.sockets import readable

_serial = itertools.count()
NEWER = 2**31
"""Identities that a ROUTER gives count up, modulo 2^32."""


class Peers:
    """Owned by the thread of its ROUTER. Clients whose process died, who closed their socket or stopped answering
    heartbeats are known within a turn; those of `inproc://` endpoints are not, they live in this process.

    `events` is a PAIR socket that the owner polls and closes; after `close`, which must come first.
    """

    def __init__(self, router: zmq.Socket, events: zmq.Socket) -> None:
        address = f"inproc://peers-{next(_serial)}"
        self._router = router
        self._events = events
        events.set_hwm(0)  # Else libzmq's I/O thread would wait for us.
        router.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        events.connect(address)
        self._connected: set[int] = set()
        self._identity_of: dict[int, bytes] = {}
        self._descriptor_of: dict[bytes, int] = {}
        self._left: list[bytes] = []

    def close(self) -> None:
        self._router.disable_monitor()

    def note(self, identity: zmq.Frame) -> None:
        """A message has come, and this is its first frame."""
        name = identity.bytes
        if name in self._descriptor_of:
            return
        try:
            descriptor = int(identity.get(zmq.SRCFD))
        except zmq.ZMQError:  # inproc has none.
            return
        self._read_events()
        holder = self._identity_of.get(descriptor)
        if descriptor not in self._connected or (holder is not None and not _is_newer(name, holder)):
            self._left.append(name)
            return
        if holder is not None:
            self._leave(descriptor)
        self._identity_of[descriptor] = name
        self._descriptor_of[name] = descriptor

    def left(self) -> list[bytes]:
        """The identities of clients that have left since the last call."""
        if readable(self._events):
            self._read_events()
        left, self._left = self._left, []
        return left

    def _read_events(self) -> None:
        while True:
            try:
                event = parse_monitor_message(self._events.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._connected.add(descriptor)
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._connected.discard(descriptor)
                self._leave(descriptor)

    def _leave(self, descriptor: int) -> None:
        identity = self._identity_of.pop(descriptor, None)
        if identity is not None:
            del self._descriptor_of[identity]
            self._left.append(identity)


def _is_newer(identity: bytes, other: bytes) -> bool:
    ahead = int.from_bytes(identity[1:], "big") - int.from_bytes(other[1:], "big")
    return 0 < ahead % 2**32 < NEWER
