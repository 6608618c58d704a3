"""The ROUTER socket that clients talk to: bounded reads, sends that never block and never lose silently."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import zmq

from deepinfer.stages.peers import Peers
from deepinfer.stages.sockets import send_now

MAX_FRAMES = 4
"""Identity, the empty frame of a REQ, a map and raw ids."""
FRAMES_SKIPPED = 2000
"""In one turn, of a message that has more than any request: some milliseconds."""
HIGH_WATER_MARK = 1000
"""Events that libzmq queues for one client before a send says FULL."""


class Delivery(Enum):
    SENT = "sent"
    FULL = "full"
    """The client does not read: keep the event and try again."""
    GONE = "gone"
    """The client is not there any more."""


def configure(socket: zmq.Socket, max_frame_bytes: int) -> None:
    """The options of a client-facing ROUTER, each for the reason given in docs/protocol.md. Before bind."""
    socket.set_hwm(HIGH_WATER_MARK)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
    socket.setsockopt(zmq.HEARTBEAT_TTL, 6000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 2000)
    socket.setsockopt(zmq.LINGER, 2000)


def receive(socket: zmq.Socket, limit: int, peers: Peers | None = None) -> Iterator[list[bytes]]:
    """Up to `limit` waiting messages, each cut to MAX_FRAMES + 1 frames however many were sent. `peers` is told of
    their senders. A message of a million frames is skipped over many calls, so that no other work waits for its end."""
    for _ in range(limit):
        if not _skip_rest(socket):
            return
        try:
            identity = socket.recv(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return
        if peers is not None:
            peers.note(identity)
        frames = [identity.bytes]
        while len(frames) <= MAX_FRAMES and socket.getsockopt(zmq.RCVMORE):
            frames.append(socket.recv())
        yield frames


def _skip_rest(socket: zmq.Socket) -> bool:
    """Drop what is left of the message that was read last. False when there is still more of it."""
    if not socket.getsockopt(zmq.RCVMORE):
        return True
    return any(not socket.recv(copy=False).more for _ in range(FRAMES_SKIPPED))


def send(socket: zmq.Socket, frames: list[bytes]) -> Delivery:
    try:
        send_now(socket, frames)
    except zmq.Again:
        return Delivery.FULL
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return Delivery.GONE
        raise
    return Delivery.SENT
