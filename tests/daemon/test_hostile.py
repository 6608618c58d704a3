"""What may come in on the client socket of a real daemon, while somebody else's stream goes on."""

from __future__ import annotations

import pickle
import random
import socket
import threading
import time
from urllib.parse import urlparse

import msgpack
import psutil
import pytest
import zmq
from daemon_process import running
from fuzzing import rounds

from deepinfer.clients import Client

GENERATE = {"v": 1, "op": "generate", "id": "x", "prompt": "hello", "max_new_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def daemon(tiny_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("d", numbered=True) / "run"
    with running(tiny_path, folder, "--num-blocks", "256", "--endpoint", "tcp://127.0.0.1:*") as daemon:
        yield daemon


@pytest.fixture
def dealer(daemon):
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(daemon.connection["endpoint"])
    yield socket
    socket.close()
    context.term()


@pytest.fixture
def bystander(daemon):
    """A stream that runs during the test and must not notice anything; then the daemon is asked again."""
    with Client(daemon.folder / "daemon.json") as client:
        stream = client.generate("bystander", max_new_tokens=400, ignore_eos=True)
        next(iter(stream))
        yield
        assert stream.result().usage["completion_tokens"] == 400
        assert client.complete("after", max_new_tokens=3, ignore_eos=True).usage["completion_tokens"] == 3
        assert client.status()["phase"] == "ready"


def answer(dealer: zmq.Socket, seconds: float = 5.0) -> dict:
    assert dealer.poll(int(seconds * 1000)), "no answer"
    return msgpack.unpackb(dealer.recv_multipart()[-1])


HOSTILE_FRAMES = {
    "nothing": [b""],
    "garbage": [b"\xff\xfe\xfd"],
    "pickle": [pickle.dumps({"op": "generate"})],
    "a truncated map": [msgpack.packb(GENERATE)[:-3]],
    "a list": [msgpack.packb([1, 2, 3])],
    "deep nesting": [b"\x91" * 100_000 + b"\x01"],
    "a map nested in a field": [b"\x83\xa1v\x01\xa2op\xa8generate\xa6prompt" + b"\x91" * 50_000 + b"\x01"],
    "a million empty maps": [b"\xdd\x00\x0f\x42\x40" + b"\x80" * 1_000_000],
    "an announced giant": [b"\xdf\xff\xff\xff\xff"],
    "seven frames": [b"1", b"2", b"3", b"4", b"5", b"6", b"7"],
    "ten thousand frames": [b"x"] * 10_000,
    "another version": [msgpack.packb({**GENERATE, "v": 2})],
    "an unknown op": [msgpack.packb({"v": 1, "op": "shutdown"})],
    "a nan": [msgpack.packb({**GENERATE, "temperature": float("nan")})],
    "a huge integer": [msgpack.packb({**GENERATE, "max_new_tokens": 2**63})],
    "half an int32": [msgpack.packb({"v": 1, "op": "generate", "id": 1}), b"\x01\x00\x00"],
    "ids outside the vocabulary": [msgpack.packb({"v": 1, "op": "generate", "id": 1, "prompt_ids": [10**6]})],
    "a prompt over the context": [msgpack.packb({**GENERATE, "prompt": "x" * 600_000})],
}


@pytest.mark.parametrize("name", HOSTILE_FRAMES)
def test_hostile_frames_get_a_typed_error_and_the_connection_still_works(dealer, bystander, name):
    dealer.send_multipart(HOSTILE_FRAMES[name])
    error = answer(dealer)
    assert error["event"] == "error"
    assert error["code"] not in ("internal", "engine_failed")
    assert error["message"]
    dealer.send(msgpack.packb({"v": 1, "op": "ping"}))
    assert answer(dealer)["event"] == "reply"


def test_an_oversized_frame_only_costs_its_sender_the_connection(daemon, dealer, bystander):
    dealer.send(b"x" * (9 << 20))
    assert not dealer.poll(500)


@pytest.mark.parametrize(
    "raw",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 64, b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f", b""],
    ids=["http", "zeros", "zmtp 1", "silence"],
)
def test_bytes_that_are_not_zmtp_are_dropped(daemon, bystander, raw):
    place = urlparse(daemon.connection["endpoint"])
    with socket.create_connection((place.hostname, place.port)) as connection:
        connection.sendall(raw)
        time.sleep(0.2)


MANY = 1_000_000


@pytest.mark.slow
def test_a_message_of_a_million_frames_is_refused_and_its_memory_goes_back_to_the_system(daemon, dealer, bystander):
    """In pieces of a hundred bytes, which the C library would keep even after the client has gone."""
    front = psutil.Process(daemon.process.pid)
    before = front.memory_info().rss
    dealer.set_hwm(0)
    dealer.send_multipart([b"x" * 100] * MANY)
    peak = before
    give_up = time.monotonic() + 60
    while not dealer.poll(20):
        peak = max(peak, front.memory_info().rss)
        assert time.monotonic() < give_up, "no answer"
    assert answer(dealer)["code"] == "malformed"
    assert peak - before > 100 << 20
    while front.memory_info().rss - before > 16 << 20:
        assert time.monotonic() < give_up, f"{front.memory_info().rss - before} bytes are kept"
        time.sleep(0.1)


MUTATED = [
    {**GENERATE, "stop": ["a", "b"], "logit_bias": {5: 1.5}, "temperature": 0.5},
    {"v": 1, "op": "generate", "id": 1, "messages": [{"role": "user", "content": "x"}], "n": 2, "deadline_ms": 9},
    {"v": 1, "op": "generate", "id": 2, "prompt_ids": [1, 2], "stream": False, "logprobs": 3, "max_new_tokens": 3},
    {"v": 1, "op": "cancel", "id": "x"},
    {"v": 1, "op": "tokenize", "text": "hello"},
    {"v": 1, "op": "detokenize", "ids": [1, 2]},
    {"v": 1, "op": "status"},
    {"v": 1, "op": "models"},
    {"v": 1, "op": "metrics"},
]


def mutated(rng: random.Random) -> bytes:
    raw = bytearray(msgpack.packb(rng.choice(MUTATED)))
    for _ in range(rng.randint(1, 4)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw)


def test_random_mutations_of_requests_never_stop_the_loop_and_leave_no_memory_behind(daemon, dealer):
    front = psutil.Process(daemon.process.pid)
    before = front.memory_info().rss
    with Client(daemon.folder / "daemon.json") as client:
        for seed in rounds():
            rng = random.Random(seed)
            bystander = client.generate("bystander", max_new_tokens=60, ignore_eos=True)
            for number in range(300):
                dealer.send(mutated(rng))
                dealer.send(msgpack.packb({"v": 1, "op": "ping", "id": number}))
            answered = 0
            while answered < 300:
                event = answer(dealer, 20)
                answered += event["event"] == "reply" and event["op"] == "ping"
                assert event.get("code") not in ("internal", "engine_failed"), event
            assert bystander.result().usage["completion_tokens"] == 60
    assert front.memory_info().rss - before < 30 << 20


def test_a_client_that_never_reads_does_not_stall_others_and_loses_its_streams(daemon):
    """Its events pile up in a bounded buffer, joined; everyone else is served."""
    context = zmq.Context()
    deaf = context.socket(zmq.DEALER)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.setsockopt(zmq.RCVBUF, 4096)
    deaf.setsockopt(zmq.LINGER, 0)
    deaf.connect(daemon.connection["endpoint"])
    front = psutil.Process(daemon.process.pid)
    before = front.memory_info().rss
    try:
        for number in range(60):
            deaf.send(msgpack.packb({**GENERATE, "id": number, "max_new_tokens": 400, "logprobs": 20}))
        blocked = 0
        with Client(daemon.folder / "daemon.json") as client:
            served: list[int] = []

            def be_served() -> None:
                for _ in range(5):
                    done = client.complete("hello", max_new_tokens=20, ignore_eos=True)
                    served.append(done.usage["completion_tokens"])

            other = threading.Thread(target=be_served, daemon=True)
            other.start()
            beside = False
            give_up = time.monotonic() + 60
            while (status := client.status())["blocks"]["free"] != 256 or not blocked:
                blocked = max(blocked, status["requests"]["blocked"])
                beside |= len(served) == 5 and status["blocks"]["free"] != 256
                assert time.monotonic() < give_up
                deaf.send(msgpack.packb({"v": 1, "op": "ping"}))  # Else it would soon count as gone.
                time.sleep(0.1)
            other.join(60)
            assert served == [20] * 5
            assert beside
        assert front.memory_info().rss - before < 16 << 20
        endings = []
        while len(endings) < 60 and deaf.poll(3000):
            event = msgpack.unpackb(deaf.recv())
            if event["event"] in ("done", "error"):
                endings.append(event.get("code", "done"))
        assert "slow_consumer" in endings
        assert set(endings) <= {"slow_consumer", "done"}
    finally:
        deaf.close()
        context.term()


def test_an_identity_chosen_by_the_client_is_refused(daemon):
    """Whoever took the same one after it would get its answers."""
    context = zmq.Context()
    alice = context.socket(zmq.DEALER)
    alice.setsockopt(zmq.LINGER, 0)
    alice.setsockopt(zmq.ROUTING_ID, b"alice")
    alice.connect(daemon.connection["endpoint"])
    try:
        alice.send(msgpack.packb(GENERATE))
        refused = answer(alice)
        assert refused["code"] == "malformed"
        assert "identity" in refused["message"]
    finally:
        alice.close()
        context.term()


def test_req_sockets_get_one_answer(daemon):
    context = zmq.Context()
    req = context.socket(zmq.REQ)
    req.setsockopt(zmq.LINGER, 0)
    req.connect(daemon.connection["endpoint"])
    try:
        req.send(msgpack.packb({**GENERATE, "stream": False}))
        assert req.poll(20_000)
        done = msgpack.unpackb(req.recv())
        assert done["event"] == "done"
        assert len(done["ids"]) == 4
        req.send(msgpack.packb(GENERATE))
        refused = msgpack.unpackb(req.recv())
        assert refused["code"] == "conflict"
        assert refused["field"] == "stream"
        req.send(msgpack.packb({"v": 1, "op": "status"}))
        assert msgpack.unpackb(req.recv())["data"]["phase"] == "ready"
    finally:
        req.close()
        context.term()


def test_a_thousand_streams_over_one_connection(daemon):
    with Client(daemon.folder / "daemon.json") as client:
        streams = [client.generate(f"stream {n}", max_new_tokens=8, ignore_eos=True) for n in range(1000)]
        results = [stream.result() for stream in streams]
        assert all(len(result.ids) == 8 for result in results)
        time.sleep(0.4)
        assert client.status()["blocks"]["free"] == 256
