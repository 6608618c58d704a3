"""Many streams over few connections, all read by one thread that checks every event of each."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import zmq

from deepinfer.clients import DeepInferError
from deepinfer.clients.streams import StreamState
from deepinfer.clients.wire import pack_request, unpack_event

PING_ID = "last"
POLL_MS = 50
Key = tuple[int, int | str]
"""A connection and a request's id."""


class Crowd:
    """`ends` counts finish reasons and error codes; `wrong` are sentences: a gap in the numbers of a stream, an event
    after its end, silence. `gaps` are seconds between two token events of one stream."""

    def __init__(self, context: zmq.Context, endpoint: str, connections: int) -> None:
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.gaps: list[float] = []
        self.tokens = 0
        self._open: dict[Key, StreamState] = {}
        self._last: dict[Key, float] = {}
        self._sockets = [_dealer(context, endpoint) for _ in range(connections)]
        self._place = {socket: place for place, socket in enumerate(self._sockets)}
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)

    def ask(self, streams: int, fields: dict[str, Any]) -> None:
        """Of every connection in turn."""
        for number in range(streams):
            place = number % len(self._sockets)
            self._open[place, number] = StreamState(True)
            self._sockets[place].send_multipart(pack_request("generate", number, {"prompt": f"{number} is", **fields}))

    def read(self, stall_s: float) -> None:
        """Until every stream has ended, and then whatever comes after that."""
        last_event = time.monotonic()
        while self._open:
            if self._receive():
                last_event = time.monotonic()
            elif time.monotonic() - last_event > stall_s:
                self.wrong.append(f"no event for {stall_s:.0f} s, with {len(self._open)} streams open")
                return
        self._collect_strays(stall_s)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()

    def _receive(self) -> bool:
        ready = self._poller.poll(POLL_MS)
        for socket, _ in ready:
            while socket.poll(0):
                self._take(self._place[socket], unpack_event(socket.recv_multipart()))
        return bool(ready)

    def _take(self, place: int, event: dict[str, Any]) -> None:
        key: Key = (place, event.get("id", ""))
        state = self._open.get(key)
        if state is None:
            self.wrong.append(f"{event['event']} of request {key[1]} after its end")
            return
        try:
            state.feed(event)
        except DeepInferError as error:
            self.wrong.append(f"request {key[1]}: {error}")
            self._end(key, error.code)
            return
        if event["event"] == "token":
            self._note_token(key, event)
        if state.ended:
            self._end(key, state.completion().finish_reason)

    def _note_token(self, key: Key, event: dict[str, Any]) -> None:
        now = time.perf_counter()
        if key in self._last:
            self.gaps.append(now - self._last[key])
        self._last[key] = now
        self.tokens += len(event["ids"])

    def _end(self, key: Key, how: str) -> None:
        self.ends[how] += 1
        del self._open[key]
        self._last.pop(key, None)

    def _collect_strays(self, patience: float) -> None:
        """A ping on every connection: its reply comes after everything that was sent before it."""
        for place, socket in enumerate(self._sockets):
            socket.send_multipart(pack_request("ping", PING_ID, {}))
            while socket.poll(int(patience * 1000)):
                event = unpack_event(socket.recv_multipart())
                if event.get("id") == PING_ID:
                    break
                self._take(place, event)


def _dealer(context: zmq.Context, endpoint: str) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.set_hwm(0)  # All requests are sent before the first event is read.
    socket.heartbeat_ivl = 2000  # These three as docs/protocol.md asks of every client.
    socket.heartbeat_timeout = 6000
    socket.heartbeat_ttl = 6000
    socket.connect(endpoint)
    return socket
