"""What subscribers get, and what those who do not read cannot do. The publisher runs here without an engine."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import psutil
import pytest
import zmq

from deepinfer.daemon.metrics import Metrics
from deepinfer.daemon.publisher import HIGH_WATER_MARK, RING, PublisherStage
from deepinfer.daemon.telemetry import Outgoing, PublishedTelemetry
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.telemetry import RequestRecord

WAIT_MS = 20_000
HOUR = 3600.0
MIB = 1 << 20


class Publisher:
    """A running PublisherStage on an ipc address, and subscribers in the same process."""

    def __init__(self, address: str, interval_s: float, high_water_mark: int) -> None:
        self.address = address
        self.context = zmq.Context()
        self.board = StatusBoard({"instance": "one"})
        self.metrics = Metrics(self.board)
        self.telemetry = PublishedTelemetry(self.metrics)
        self.stage = PublisherStage(
            self.context, "inproc://publisher", address, self.board, self.telemetry, interval_s, high_water_mark
        )
        self.stage.start()

    def subscribe(self, *topics: str, queue: int = 100_000) -> zmq.Socket:
        socket = self.context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(queue)
        socket.connect(self.address)
        for topic in topics:
            socket.subscribe(topic)
        return socket

    def listener(self, *topics: str) -> zmq.Socket:
        """A subscriber that gets all that is sent from now on: subscriptions are seen in the order they are made."""
        socket = self.subscribe(*topics, "replay/listener")
        take(socket, "replay/listener")
        return socket

    def finish(self, count: int) -> None:
        for number in range(count):
            self.telemetry.finished(record(number))

    def published(self, topic: str) -> int:
        return self.telemetry.metrics().get("deepinfer_telemetry_published_total", {}).get(topic, 0)

    def wait_published(self, topic: str, count: int) -> None:
        give_up = time.monotonic() + WAIT_MS / 1000
        while self.published(topic) < count:
            assert time.monotonic() < give_up
            time.sleep(0.01)


@contextmanager
def publisher(folder: Any, interval_s: float = HOUR, high_water_mark: int = HIGH_WATER_MARK) -> Iterator[Publisher]:
    running = Publisher(f"ipc://{folder}/m.sock", interval_s, high_water_mark)
    try:
        yield running
    finally:
        assert running.stage.stop(20)
        running.context.destroy(linger=0)


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("p")


def record(number: int) -> RequestRecord:
    return RequestRecord(
        request=number,
        id="x" * 128,
        finish_reason="length",
        code=None,
        prompt_tokens=3,
        cached_tokens=0,
        completion_tokens=2,
        ttft_s=0.5,
        tpot_s=0.5,
        e2e_s=1.0,
        timings=None,
    )


def take(socket: zmq.Socket, topic: str) -> dict[str, Any]:
    """The next message of that topic."""
    while socket.poll(WAIT_MS):
        got, payload = socket.recv_multipart()
        if got.decode() == topic:
            return msgpack.unpackb(payload)
    raise AssertionError(f"nothing came on {topic}")


def take_events(socket: zmq.Socket, count: int) -> list[dict[str, Any]]:
    return [take(socket, "events") for _ in range(count)]


def test_every_new_subscriber_gets_a_snapshot_at_once_however_long_the_interval(folder):
    with publisher(folder) as running:
        for number in range(3):
            message = take(running.subscribe("metrics"), "metrics")
            assert message["instance"] == "one"
            assert message["phase"] == "loading"
            assert message["metrics"]["deepinfer_engine_up"] == 0
            assert message["seq"] == number
        assert take(running.subscribe(""), "metrics")["seq"] == 3


def test_snapshots_come_again_after_the_interval_with_numbers_in_order(folder):
    with publisher(folder, interval_s=0.05) as running:
        subscriber = running.subscribe("metrics")
        assert [take(subscriber, "metrics")["seq"] for _ in range(5)] == list(range(5))


def test_events_and_requests_are_numbered_each_topic_by_itself(folder):
    with publisher(folder) as running:
        subscriber = running.listener("events", "requests")
        for number in range(50):
            running.telemetry.event("preempted", request=number, id="a")
            running.telemetry.finished(record(number))
        events = take_events(subscriber, 50)
        assert [event["seq"] for event in events] == list(range(50))
        assert [event["request"] for event in events] == list(range(50))
        assert {event["event"] for event in events} == {"preempted"}
        second = running.listener("requests")
        running.telemetry.finished(record(50))
        assert take(second, "requests")["seq"] == 50


def test_a_replay_reaches_only_who_asked_for_it_with_the_numbers_of_old(folder):
    with publisher(folder) as running:
        early = running.listener("events")
        for number in range(RING + 10):
            running.telemetry.event("resumed", request=number)
        assert len(take_events(early, RING + 10)) == RING + 10
        late = running.subscribe("events", "replay/late")
        replay = take(late, "replay/late")
        assert [event["seq"] for event in replay["events"]] == list(range(10, RING + 10))
        assert replay["events"][0]["request"] == 10
        assert replay["instance"] == "one"
        running.telemetry.event("ready")
        assert take(late, "events")["seq"] == RING + 10
        assert early.recv_multipart()[0] == b"events"
        assert not early.poll(300)


def test_a_replay_has_the_death_of_an_engine_however_often_requests_were_swapped_since(folder):
    with publisher(folder) as running:
        running.telemetry.event("engine_died", deaths=1)
        for number in range(RING + 10):
            running.telemetry.event("preempted", request=number)
        running.telemetry.event("ready")
        late = running.subscribe("replay/late")
        kept = take(late, "replay/late")["events"]
        assert [event["event"] for event in kept] == ["engine_died", *["preempted"] * RING, "ready"]
        assert [event["seq"] for event in kept] == [0, *range(11, RING + 12)]


def test_swaps_and_hangs_that_show_on_the_board_become_events(folder):
    with publisher(folder) as running:
        listener = running.listener("events")
        running.board.stats = {
            "requests_swapped_total": 2,
            "kv_cpu_offload_bytes_total": 4096,
            "cpu_offload_seconds": 0.5,
        }
        event = take(listener, "events")
        assert event["event"] == "swap"
        assert (event["requests_out"], event["bytes_out"], event["seconds_out"]) == (2, 4096, 0.5)
        assert event["requests_in"] == 0
        running.board.hung = "decode"
        assert take(listener, "events")["stage"] == "decode"
        running.board.hung = ""
        assert take(listener, "events")["stage"] is None
        assert not listener.poll(200)


def test_a_full_queue_gives_up_the_oldest_counts_it_and_the_numbers_show_it():
    metrics = Metrics(StatusBoard({}))
    queue = Outgoing(metrics.dropped.labels("events"), size=3)
    for number in range(5):
        queue.put({"event": str(number)})
    assert [(message.seq, message.fields["event"]) for message in queue.take()] == [(2, "2"), (3, "3"), (4, "4")]
    assert metrics.as_map()["deepinfer_telemetry_dropped_total"] == {"events": 2}
    queue.put({"event": "5"})
    assert [message.seq for message in queue.take()] == [5]


def test_a_subscriber_that_does_not_read_loses_messages_visibly_and_costs_others_none(folder):
    with publisher(folder) as running:
        stuck = running.subscribe("requests", "replay/stuck", queue=10)
        take(stuck, "replay/stuck")
        reader = running.listener("requests")
        total, seen = 10_000, []
        while len(seen) < total:
            running.finish(400)
            seen.extend(take(reader, "requests")["seq"] for _ in range(400))
        assert seen == list(range(total))
        stuck_saw = []
        while stuck.poll(500):
            stuck_saw.append(msgpack.unpackb(stuck.recv_multipart()[1])["seq"])
        assert stuck_saw[0] == 0
        assert len(stuck_saw) < total
        assert stuck_saw == sorted(stuck_saw)
        running.finish(1)
        assert take(stuck, "requests")["seq"] == total > stuck_saw[-1] + 1


def growth_with_a_stuck_subscriber(folder, high_water_mark: int) -> int:
    with publisher(folder, high_water_mark=high_water_mark) as running:
        stuck = running.subscribe("", "replay/stuck", queue=10)
        take(stuck, "replay/stuck")
        gc.collect()
        before = psutil.Process().memory_info().rss
        for round in range(1, 21):
            running.finish(2000)
            running.wait_published("requests", 2000 * round)
        gc.collect()
        return psutil.Process().memory_info().rss - before


def test_memory_does_not_grow_by_a_subscriber_that_never_reads(folder, tmp_path_factory):
    """Each in a process of its own: in this one other tests have left memory that growth would fill unseen."""
    arms = (folder, HIGH_WATER_MARK), (tmp_path_factory.mktemp("p"), 0)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        bounded, unbounded = pool.starmap(growth_with_a_stuck_subscriber, arms, chunksize=1)
    assert bounded < 10 * MIB
    assert unbounded > 10 * MIB


def test_memory_does_not_grow_by_subscribers_that_come_and_go(folder):
    with publisher(folder) as running:
        for _ in range(50):
            take(running.subscribe("metrics"), "metrics")
        before = psutil.Process().memory_info().rss
        context = zmq.Context()
        for number in range(600):
            socket = context.socket(zmq.SUB)
            socket.connect(running.address)
            socket.subscribe("".join(chr(97 + (number * 7 + i) % 26) for i in range(200)))
            socket.subscribe(f"replay/{number}")
            assert socket.poll(WAIT_MS)
            socket.close(linger=0)
        context.term()
        assert psutil.Process().memory_info().rss - before < 10 * MIB
        assert len(running.stage._wanted) <= 1


def test_a_publisher_that_dies_shows_in_status(folder):
    with publisher(folder) as running:
        listener = running.listener("events")
        running.telemetry.events.put({"event": object()})
        give_up = time.monotonic() + 20
        while "publisher_error" not in running.board.status():
            assert time.monotonic() < give_up
            time.sleep(0.02)
        assert "TypeError" in running.board.status()["publisher_error"]
        assert not listener.poll(0)
