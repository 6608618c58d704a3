"""The control socket: what it refuses, and that whatever goes wrong in it, it answers the next call."""

from __future__ import annotations

import msgpack
import pytest
import zmq

from deepinfer.daemon.control import FIELDS, ControlStage
from deepinfer.daemon.setting import ConfigError
from deepinfer.stages.board import StatusBoard


def broken(_):
    raise OSError(5, "Input/output error", "/keys/\udcff")


def misconfigured(_):
    raise ConfigError("no such file: /etc/\udcff")


@pytest.fixture
def ask():
    """One request to a control stage of its own."""
    context = zmq.Context()
    told = []
    actions = {
        "stop": lambda request: told.append(request) or {},
        "drain": lambda request: told.append(request) or {},
        "dump": broken,
        "reload": misconfigured,
        "metrics": lambda _: {"x": 2**70},
    }
    stage = ControlStage(context, "inproc://inbox", "inproc://control", StatusBoard({}), actions)
    stage.start()
    socket = context.socket(zmq.DEALER)
    socket.connect("inproc://control")

    def call(*frames):
        socket.send_multipart([frame if isinstance(frame, bytes) else msgpack.packb(frame) for frame in frames])
        assert socket.poll(20_000), "no answer"
        return msgpack.unpackb(socket.recv())

    call.told = told
    yield call
    stage.stop()
    socket.close(linger=0)
    context.term()
    assert stage.failure is None


def request(op="status", **given):
    return {"v": 1, "op": op, "id": "a", **given}


@pytest.mark.parametrize(
    ("given", "code", "field"),
    [
        (request(v=2), "unsupported_version", "v"),
        (request(v=True), "invalid_type", "v"),
        (request("halt"), "unknown_op", "op"),
        (request(op=5), "invalid_type", "op"),
        (request(now=True), "unknown_field", "now"),
        (request("stop", seconds=5), "unknown_field", "seconds"),
        (request("drain", now=True), "unknown_field", "now"),
        (request("stop", now=1), "invalid_type", "now"),
        (request("drain", seconds=-1), "out_of_range", "seconds"),
        (request("drain", seconds=2**63), "out_of_range", "seconds"),
        (request("drain", seconds=1.5), "invalid_type", "seconds"),
        (request("drain", seconds=float("nan")), "invalid_type", "seconds"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_what_is_allowed(ask, given, code, field):
    error = ask(given)
    assert (error["event"], error["id"], error["code"], error["field"]) == ("error", "a", code, field)
    assert error["value"]
    assert error["allowed"]
    assert ask.told == []


@pytest.mark.parametrize("id", [-1, 2**63, "", "x" * 129, 1.5])
def test_an_id_that_no_client_should_choose_is_refused(ask, id):
    assert ask(request(id=id))["field"] == "id"


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xff"],
        [b"\x91" * 3000],
        [b"\x81\xa1v" + b"\x91" * 3000 + b"\x01"],
        [b"\x83\xa1v\x01\xa1v\x01\xa2op\xa4ping"],
        [request(), b"1234"],
        [b"x"] * 9,
    ],
    ids=["nothing", "garbage", "nested lists", "a deep field", "a field twice", "a second frame", "nine frames"],
)
def test_what_is_no_control_request_is_refused(ask, frames):
    assert ask(*frames)["event"] == "error"
    assert ask(request("ping"))["event"] == "reply"


@pytest.mark.parametrize(("op", "code"), [("dump", "internal"), ("metrics", "internal"), ("reload", "invalid_value")])
def test_an_operation_that_fails_is_an_error_and_the_next_call_is_answered(ask, op, code):
    error = ask(request(op))
    assert (error["code"], error["id"]) == (code, "a")
    assert ask(request("ping"))["event"] == "reply"


def test_every_operation_takes_what_it_should(ask):
    assert ask(request("stop", now=True))["event"] == "reply"
    assert ask(request("drain", seconds=604800))["event"] == "reply"
    assert ask(request("drain", seconds=None))["event"] == "reply"
    assert [(told.op, told.now, told.seconds) for told in ask.told] == [
        ("stop", True, None),
        ("drain", False, 604800),
        ("drain", False, None),
    ]
    assert set(FIELDS) == {"status", "ping", "metrics", "stop", "drain", "reload", "dump"}
