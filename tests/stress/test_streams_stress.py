"""Many streams at once, by the stress command; and what that command notices."""

from __future__ import annotations

import itertools
import os
from typing import Any

import msgpack
import pytest
import zmq
from click.testing import CliRunner

from deepinfer.daemon.cli import main
from deepinfer.daemon.stress.crowd import Crowd
from deepinfer.daemon.stress.daemon import RealDaemon
from deepinfer.daemon.stress.fairness import ARMS, BASELINE, READING, Fairness
from deepinfer.daemon.stress.streams import stress_streams
from deepinfer.daemon.stress.streams_config import StreamsConfig

ACCEPTED = {"event": "accepted", "prompt_tokens": 1, "model": "m", "seed": 0, "max_new_tokens": 1}
DONE = {"event": "done", "finish_reason": "length", "usage": {}, "timings": {}}
_serial = itertools.count()


@pytest.mark.slow
def test_a_hundred_streams_leave_nothing_and_the_control_socket_answers(tiny_path):
    config = StreamsConfig(
        model=str(tiny_path), streams=100, connections=10, queued=50, new_tokens=8, rounds=0, control_ms=5000.0
    )
    report = stress_streams(config)
    assert {check["name"]: check["failures"] for check in report["checks"] if not check["passed"]} == {}
    assert report["streams"]["status_answers"] > 0
    assert report["queued"]["connections"] == 1


def test_the_daemon_of_a_run_shares_its_session_but_not_its_process_group():
    with RealDaemon(["--model", "nothing-of-this-name"]) as daemon:
        pid = daemon.process.pid
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) == pid


class FakeDaemon:
    """Says what it is told to; answers pings."""

    def __init__(self, context: zmq.Context) -> None:
        self.address = f"inproc://crowd-{next(_serial)}"
        self._socket = context.socket(zmq.ROUTER)
        self._socket.bind(self.address)

    def say(self, events: list[dict[str, Any]]) -> None:
        identity, raw = self._socket.recv_multipart()
        request = msgpack.unpackb(raw)
        for number, event in enumerate(events):
            whole = {"v": 1, "id": request["id"], "seq": number, "events": number + 1, **event}
            self._socket.send_multipart([identity, msgpack.packb(whole)])
        pong = {"v": 1, "event": "reply", "op": "ping", "id": "last", "data": {}}
        self._socket.send_multipart([identity, msgpack.packb(pong)])

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.mark.parametrize(
    ("events", "words", "ends"),
    [
        ([ACCEPTED, DONE], None, {"length": 1}),
        ([ACCEPTED, {**DONE, "seq": 5, "events": 6}], "came where 1 was due", {"protocol_violation": 1}),
        ([ACCEPTED, DONE, DONE], "done of request 0 after its end", {"length": 1}),
        ([ACCEPTED, {"event": "error", "code": "internal", "message": "x"}], "internal", {"internal": 1}),
        ([ACCEPTED], "no event for 0 s, with 1 streams open", {}),
    ],
    ids=["fine", "a gap", "two ends", "an error", "silence"],
)
def test_a_crowd_notices_what_is_wrong_with_a_stream(events, words, ends):
    context = zmq.Context()
    daemon, crowd = FakeDaemon(context), None
    try:
        crowd = Crowd(context, daemon.address, 1)
        crowd.ask(1, {})
        daemon.say(events)
        crowd.read(stall_s=0.3)
        strays = [wrong for wrong in crowd.wrong if "reply" not in wrong]
        assert bool(strays) == (words is not None)
        assert words is None or words in strays[0]
        assert crowd.ends == ends
    finally:
        if crowd is not None:
            crowd.close()
        daemon.close()
        context.term()


def test_pauses_and_memory_are_judged_beside_the_round_of_the_client_that_reads(monkeypatch):
    seen = {
        BASELINE: ([1.0] * 100, 100 << 20),
        "a client that never reads": ([1.0] * 98 + [1.5] * 2, 111 << 20),
        READING: ([1.2] * 100, 100 << 20),
        "a subscriber that never reads": ([1.4] * 100, 109 << 20),
    }
    monkeypatch.setattr(Fairness, "_round", lambda self, arm: seen[arm])
    floods = {"reads": 103 << 20, "never-reads": 108 << 20}
    monkeypatch.setattr(Fairness, "_flood", lambda self, role: floods[role])
    monkeypatch.setattr("deepinfer.daemon.stress.fairness.psutil.Process", lambda pid: None)

    class Daemon:
        class process:
            pid = 1

    report, checks = Fairness(StreamsConfig(rounds=3), {}, Daemon, list, lambda: None).run()  # type: ignore[arg-type]
    failed = {check.name for check in checks if not check.passed}
    assert failed == {
        "a client that never reads: the pauses of others are at most 1.2 times as long",
        "a client that never reads: the front grows by at most 10 MiB",
    }
    assert report["a subscriber that never reads"]["growth_mb"] == 9
    assert report["a flood that nobody reads"]["growth_mb"] == 5
    assert set(report) >= set(ARMS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--connections", "5", "--streams", "4"], "at most streams"),
        (["--streams", "99999"], "2048"),
        (["--round-tokens", "1"], "round_tokens"),
    ],
)
def test_wrong_options_are_named_before_a_daemon_is_started(options, words):
    ended = CliRunner().invoke(main, ["stress", "streams", *options])
    assert ended.exit_code == 78
    assert words in ended.output
