"""What is done to ZeroMQ sockets for every message, by plain integers: pyzmq's flags are members of enums, and to make
one of two takes longer than to send a frame."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
_MORE, _LAST = int(zmq.DONTWAIT | zmq.SNDMORE), int(zmq.DONTWAIT)


def readable(socket: zmq.Socket) -> bool:
    """Whether a message has come. A receive that fails costs several times as much."""
    return bool(int(socket.get(_EVENTS)) & _READABLE)


def send_now(socket: zmq.Socket, frames: Sequence[bytes]) -> None:
    """One message, without waiting. Raises zmq.ZMQError, and then nothing of it was sent."""
    *first, last = frames
    for frame in first:
        socket.send(frame, _MORE)
    socket.send(last, _LAST)
