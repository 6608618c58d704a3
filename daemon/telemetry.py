"""What the front tells of itself: counted in the registry at once, and queued for the publisher."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, NamedTuple

import msgspec
from prometheus_client import Counter

from deepinfer.daemon.metrics import Metrics
from deepinfer.stages.telemetry import RequestRecord, Telemetry

MAX_QUEUED = 4096
"""Messages of one topic that wait for the publisher, which looks several times a second."""


class Numbered(NamedTuple):
    seq: int
    time: float
    """Seconds since 1970."""
    fields: dict[str, Any]

    @classmethod
    def now(cls, seq: int, fields: dict[str, Any]) -> Numbered:
        return cls(seq, time.time(), fields)


class Outgoing:
    """A bounded queue that never blocks: when it is full the oldest message goes, and its number is missing."""

    def __init__(self, dropped: Counter, size: int = MAX_QUEUED) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Numbered] = deque(maxlen=size)
        self._next = 0
        self._dropped = dropped

    def put(self, fields: dict[str, Any]) -> None:
        with self._lock:
            if len(self._waiting) == self._waiting.maxlen:
                self._dropped.inc()
            self._waiting.append(Numbered.now(self._next, fields))
            self._next += 1

    def take(self) -> list[Numbered]:
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
        return waiting


class CountingTelemetry(Telemetry):
    """For a daemon that publishes nothing: the in-process engine."""

    def __init__(self, metrics: Metrics) -> None:
        self.counts = metrics

    def refused(self, code: str) -> None:
        self.counts.refused.labels(code).inc()

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        self.counts.ttft.observe(seconds)
        self.counts.prompt_tokens.inc(prompt_tokens)

    def next_token(self, seconds: float) -> None:
        self.counts.itl.observe(seconds)

    def finished(self, record: RequestRecord) -> None:
        self.counts.finished(record)

    def event(self, name: str, **fields: Any) -> None:
        self.counts.events.labels(name).inc()
        if name == "preempted":
            self.counts.preemptions.inc()

    def metrics(self) -> dict[str, Any]:
        return self.counts.as_map()


class PublishedTelemetry(CountingTelemetry):
    """The publisher takes from the two queues."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        self.events = Outgoing(metrics.dropped.labels("events"))
        self.requests = Outgoing(metrics.dropped.labels("requests"))

    def finished(self, record: RequestRecord) -> None:
        super().finished(record)
        self.requests.put(msgspec.structs.asdict(record))

    def event(self, name: str, **fields: Any) -> None:
        super().event(name, **fields)
        self.events.put({"event": name, **fields})
