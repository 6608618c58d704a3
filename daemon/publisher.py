"""The publisher: an XPUB socket that tells of metrics, events and finished requests, in a thread of its own.

It looks at its queues a few times a second, so that the interpreter's lock is taken in a few short turns whatever the
load. A subscriber that does not read loses messages, which the numbers show, and holds up nobody.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import zmq

from deepinfer.daemon.second_address import bind_both
from deepinfer.daemon.swap_events import ROUTINE, SwapWatch
from deepinfer.daemon.telemetry import Numbered, Outgoing, PublishedTelemetry
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.curve import Curve
from deepinfer.stages.stage import Stage, monotonic

METRICS, EVENTS, REQUESTS, REPLAY = b"metrics", b"events", b"requests", b"replay/"
TOPICS = (METRICS, EVENTS, REQUESTS)
SHOWN = ("model", "device", "kv_cache_dtype")
"""What a snapshot says of the engine."""
RING = 256
"""Events that are kept for a replay: so many of those that are routine, and so many others."""
HIGH_WATER_MARK = 2000
"""Messages that libzmq keeps for one subscriber that does not read; further ones are not sent to it. It hears only now
and then how many were read, so one that does read is sure of half as many in one turn."""
MAX_SUBSCRIPTION_BYTES = 2048
"""Handshakes with CURVE keys are held to it too, and need some 300."""
SUBSCRIPTIONS_PER_TURN = 256
BUSY_MS, IDLE_MS = 50, 200
SNAPSHOT_PAUSE_S = 0.05
"""Between two snapshots, however many subscribers come."""
LINGER_MS = 200

_encoder = msgspec.msgpack.Encoder()


class PublisherStage(Stage):
    """Owns the XPUB socket. Messages are two frames: the topic, and a msgpack map; docs/metrics.md has the fields.

    A subscription that covers `metrics` is answered with a snapshot at once, and then every `interval_s` seconds. One
    to `replay/ANYTHING` is answered, on that topic and so to that subscriber alone, with the last events.
    """

    name = "publisher"

    def __init__(
        self,
        context: zmq.Context,
        inbox: str,
        address: str,
        board: StatusBoard,
        telemetry: PublishedTelemetry,
        interval_s: float,
        high_water_mark: int = HIGH_WATER_MARK,
        second_address: str | None = None,
        curve: Curve | None = None,
    ) -> None:
        super().__init__(context, inbox, {})
        self._address, self._second_address, self._curve = address, second_address, curve
        self._board = board
        self._telemetry = telemetry
        self._interval = interval_s
        self._high_water_mark = high_water_mark
        self._routine: deque[dict[str, Any]] = deque(maxlen=RING)
        self._others: deque[dict[str, Any]] = deque(maxlen=RING)
        self._wanted: set[bytes] = set()
        """The subscribed prefixes of our topics; few, whatever subscribers say."""
        self._replays: set[bytes] = set()
        self._swaps = SwapWatch()
        self._hung = ""
        self._snapshots = 0
        self._last_snapshot = self._next_snapshot = 0.0

    def opened(self) -> None:
        self._socket = self.new_socket(zmq.XPUB, poll=True)
        self._socket.set_hwm(self._high_water_mark)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # Every new subscriber shows, not only the first to a topic.
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 2000)
        # No heartbeats: libzmq answers none for a peer whose queue is full, so a slow reader would be cut off.
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        bind_both(self._socket, self._address, "metrics_endpoint", self._second_address, self._curve, self._board)

    def failed(self, error: BaseException) -> None:
        super().failed(error)
        self._board.info["publisher_error"] = repr(error)

    def closing(self) -> None:
        if self.failure is None:
            self._publish_queues()

    def on_socket(self, socket: zmq.Socket) -> None:
        """Subscriptions. They must be read even if nobody cares: an XPUB keeps them for ever otherwise."""
        for _ in range(SUBSCRIPTIONS_PER_TURN):
            try:
                frame = socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            self.progress += 1
            if frame[:1] == b"\1":
                self._subscribed(frame[1:])
            elif frame[:1] == b"\0":
                self._wanted.discard(frame[1:])

    def _subscribed(self, prefix: bytes) -> None:
        if prefix.startswith(REPLAY):
            self._replays.add(prefix)
        if any(topic.startswith(prefix) for topic in TOPICS):
            self._wanted.add(prefix)
        if METRICS.startswith(prefix):
            self._next_snapshot = self._last_snapshot + SNAPSHOT_PAUSE_S

    def work(self) -> bool:
        self._publish_queues()
        for topic in self._replays:
            kept = sorted([*self._routine, *self._others], key=lambda event: event["seq"])
            self._send(topic, _encoder.encode({"v": 1, "instance": self._instance, "events": kept}))
        self._replays.clear()
        now = monotonic()
        if now >= self._next_snapshot and self._is_wanted(METRICS):
            self._last_snapshot, self._next_snapshot = now, now + self._interval
            self._publish_snapshot()
        return False

    def poll_timeout_ms(self) -> int:
        return BUSY_MS if self._wanted else IDLE_MS

    def _publish_queues(self) -> None:
        self._look_at_board()
        for message in self._drained(EVENTS, self._telemetry.events):
            (self._routine if message["event"] in ROUTINE else self._others).append(message)
        self._drained(REQUESTS, self._telemetry.requests)

    def _look_at_board(self) -> None:
        """What nobody reports, because it shows only in what others wrote there."""
        moved = self._swaps.moved(self._board.stats)
        if moved is not None:
            self._telemetry.event("swap", **moved)
        hung = self._board.hung
        if hung != self._hung:
            self._hung = hung
            self._telemetry.event("hung", stage=hung or None)

    def _drained(self, topic: bytes, queue: Outgoing) -> list[dict[str, Any]]:
        messages = [self._message(numbered) for numbered in queue.take()]
        if self._is_wanted(topic):
            for message in messages:
                self._send(topic, _encoder.encode(message))
        return messages

    def _publish_snapshot(self) -> None:
        board = self._board
        fields = {
            "phase": board.phase,
            "engine": {name: board.summary[name] for name in SHOWN if name in board.summary},
            "interval_s": self._interval,
            "metrics": self._telemetry.metrics(),
        }
        self._send(METRICS, _encoder.encode(self._message(Numbered.now(self._snapshots, fields))))
        self._snapshots += 1

    def _message(self, numbered: Numbered) -> dict[str, Any]:
        seq, time, fields = numbered
        return {"v": 1, "seq": seq, "time": time, "instance": self._instance, **fields}

    @property
    def _instance(self) -> str:
        return self._board.info["instance"]

    def _is_wanted(self, topic: bytes) -> bool:
        return any(topic.startswith(prefix) for prefix in self._wanted)

    def _send(self, topic: bytes, payload: bytes) -> None:
        """An XPUB never blocks: it skips a subscriber whose queue is full."""
        self._socket.send_multipart([topic, payload], zmq.DONTWAIT)
        self.progress += 1
        self._telemetry.counts.published.labels(topic.partition(b"/")[0].decode()).inc()
