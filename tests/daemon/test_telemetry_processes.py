"""Subscribers, the control socket and Prometheus beside a real daemon."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import msgpack
import pytest
import zmq
from daemon_process import nothing_left, run_cli, running

from deepinfer.clients import Client, Token

EXAMPLE = Path(__file__).parent.parent.parent / "clients" / "examples" / "metrics_subscriber.py"
SECRET = "Sesame, open yourself"
WAIT_MS = 30_000
ANSWER_SECONDS = 1.0
"""Of the control socket while everything is saturated. It takes some milliseconds; a thread that waited for admission
or for the engine would take as long as the load does."""


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("t") / "run"


class Subscriber:
    def __init__(self, endpoint: str, *topics: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(endpoint)
        for topic in topics:
            self._socket.subscribe(topic)

    def take(self, holds=lambda message: True) -> dict:
        while self._socket.poll(WAIT_MS):
            message = msgpack.unpackb(self._socket.recv_multipart()[1])
            if holds(message):
                return message
        raise AssertionError("the message did not come")

    def close(self) -> None:
        self._context.destroy(linger=0)


def test_subscribers_hear_of_a_daemon_from_ready_to_stopped(tiny_path, folder):
    with running(tiny_path, folder, "--num-blocks", "64", "--prometheus-port", "0") as daemon:
        endpoint = daemon.connection["metrics_endpoint"]
        example = subprocess.Popen(
            [sys.executable, EXAMPLE, folder], stdout=subprocess.PIPE, text=True, env={**os.environ}
        )
        printed = []
        while not any(line.startswith("replay/") for line in printed):
            printed.append(example.stdout.readline())
            assert printed[-1], printed
        events, requests = Subscriber(endpoint, "events", "replay/x"), Subscriber(endpoint, "requests", "replay/y")
        snapshots = Subscriber(endpoint, "metrics")
        assert [event["event"] for event in events.take()["events"]] == ["ready"]
        requests.take()
        with Client(folder / "daemon.json") as client:
            answer = client.complete(SECRET, max_new_tokens=7, ignore_eos=True)
            after = snapshots.take(lambda message: message["metrics"].get("deepinfer_generation_tokens_total") == 7)
            assert client.metrics()["deepinfer_generation_tokens_total"] == 7
        record = requests.take()
        assert record["instance"] == daemon.connection["instance"]
        assert (record["prompt_tokens"], record["completion_tokens"]) == (len(SECRET), 7)
        assert record["finish_reason"] == "length"
        assert record["timings"] == answer.timings
        assert 0 < record["ttft_s"] < record["e2e_s"]
        assert SECRET not in str(record)
        assert answer.text not in str(record)
        assert after["metrics"]["deepinfer_request_success_total"] == {"length": 1}
        status = json.loads(daemon.cli("status", "--json").stdout)
        assert status["prometheus"].startswith("http://127.0.0.1:")
        assert status["prometheus"] in daemon.cli("status").stdout
        scraped = urllib.request.urlopen(status["prometheus"], timeout=20).read().decode()
        assert "deepinfer_generation_tokens_total 7.0" in scraped.splitlines()
        assert daemon.cli("stop").returncode == 0
        assert daemon.wait_end() == 0
        nothing_left(folder)
        assert [events.take()["event"] for _ in range(2)] == ["draining", "stopped"]
        for subscriber in (events, requests, snapshots):
            subscriber.close()
        while "stopped" not in (line := example.stdout.readline()):
            assert line, printed
            printed.append(line)
        example.kill()
        example.wait()
        example.stdout.close()
        assert {line.split()[0].partition("/")[0] for line in printed} == {"metrics", "events", "requests", "replay"}
        assert "lost" not in "".join(printed)


@pytest.fixture(scope="module")
def daemon(tiny_path, tmp_path_factory):
    with running(tiny_path, tmp_path_factory.mktemp("t") / "run", "--num-blocks", "512") as daemon:
        yield daemon


def test_the_control_socket_answers_metrics_while_everything_else_is_busy(daemon):
    with Client(daemon.folder / "daemon.json") as client:
        streams = [client.generate(SECRET * 15, max_new_tokens=150, ignore_eos=True) for _ in range(60)]
        next(iter(streams[0]))
        context = zmq.Context()
        control = context.socket(zmq.REQ)
        control.connect(daemon.connection["control_endpoint"])
        seconds, busy = [], 0
        for _ in range(25):
            began = time.monotonic()
            control.send(msgpack.packb({"v": 1, "op": "metrics"}))
            assert control.poll(WAIT_MS)
            answer = msgpack.unpackb(control.recv())
            seconds.append(time.monotonic() - began)
            busy += answer["data"]["deepinfer_live_requests"] > 0
        context.destroy(linger=0)
        assert busy > 0
        assert statistics.median(seconds) < ANSWER_SECONDS


def test_top_once_prints_one_frame_of_what_goes_on(daemon):
    with Client(daemon.folder / "daemon.json") as client:
        streams = [client.generate(SECRET, max_new_tokens=480, ignore_eos=True) for _ in range(4)]
        next(event for event in streams[0] if isinstance(event, Token))
        shown = daemon.cli("top", "--once")
        for stream in streams:
            stream.result()
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("ready")
    assert "of 512 in use" in shown.stdout
    assert "tokens/s" in shown.stdout
    assert "GB/s of weights" in shown.stdout or "no decode step" in shown.stdout
    assert re.search(r"#\d+ ready", shown.stdout)
    assert SECRET not in shown.stdout


def test_top_without_a_daemon_says_so(folder):
    ended = run_cli("top", runtime_dir=folder)
    assert ended.returncode == 3
    assert "no daemon is running" in ended.stdout


def test_the_death_of_an_engine_and_the_next_one_are_events(daemon):
    events = Subscriber(daemon.connection["metrics_endpoint"], "events", "replay/z")
    events.take()
    with Client(daemon.folder / "daemon.json") as client:
        stream = client.generate(SECRET, max_new_tokens=480, ignore_eos=True)
        next(event for event in stream if isinstance(event, Token))
        (engine,) = daemon.children()
        engine.kill()
        assert len(stream.result().ids) == 480
        heard = [events.take()]
        while heard[-1]["event"] != "resumed":
            heard.append(events.take())
        metrics = client.metrics()
    events.close()
    names = [event["event"] for event in heard]
    assert names.index("engine_died") < names.index("restarting") < names.index("ready")
    assert names.index("preempted") < names.index("resumed")
    assert "SIGKILL" in heard[names.index("engine_died")]["error"]
    assert heard[names.index("preempted")]["reason"] == "engine_restart"
    assert [event["seq"] for event in heard] == list(range(heard[0]["seq"], heard[0]["seq"] + len(heard)))
    assert metrics["deepinfer_engine_deaths_total"] == 1
    assert metrics["deepinfer_request_success_total"]["length"] > 0
