"""Whatever ends a request, wherever it is: one terminal event, everything given back, and the next one is served."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from leftovers import forgotten, settled
from moments import LAST_STEP, PLACES, Moment

from deepinfer.clients import DeepInferError
from deepinfer.clients.wire import pack_request, unpack_event
from deepinfer.daemon import engine as engine_module
from deepinfer.daemon.engine import Engine
from deepinfer.daemon.topology import one_process
from deepinfer.stages import admission, client_streams, live_table
from deepinfer.stages.messages import Drain, encode

PROMPTS = (f"{number} quick brown foxes jump over the dog" for number in itertools.count(100))
"""No two begin with the same block: what is known already would not be computed."""
NEW = 12
HOUR_MS = 3_600_000
PATIENCE_MS = 30_000


class Clock:
    """Admission's clock: a test lets hours pass."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead

    def pass_hours(self, hours: int) -> None:
        self._ahead += 3600 * hours


@contextmanager
def held_engine(model: Path, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Moment, Clock]]:
    """Over ipc, where a client can be gone."""
    moment, clock = Moment(), Clock()
    patch.setattr(engine_module, "one_process", lambda: dataclasses.replace(one_process(), clients=f"ipc://{folder}/s"))
    for module in (admission, client_streams, live_table):
        patch.setattr(module, "monotonic", clock)
    settings = {"num_blocks": 16, "block_size": 8, "prefill_chunk_tokens": 4, "threads": 1}
    with Engine(model, copy=moment.copy, **settings) as engine:
        moment.attach(engine)
        yield engine, moment, clock
        moment.let_go()


@pytest.fixture(scope="module")
def shared(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Moment, Clock]]:
    with pytest.MonkeyPatch.context() as patch, held_engine(tiny_path, tmp_path_factory.mktemp("s"), patch) as held:
        yield held


class RawClient:
    """A DEALER that shows every event, those that a client library would swallow too."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)

    def send(self, op: str, **fields: Any) -> None:
        self.socket.send_multipart(pack_request(op, "r", fields))

    def events_until_terminal(self) -> list[dict[str, Any]]:
        """Of the stream; then a ping shows that nothing follows."""
        events: list[dict[str, Any]] = []
        while not events or events[-1]["event"] not in ("done", "error"):
            event = self._next()
            if event["event"] != "reply":
                events.append(event)
        self.socket.send_multipart(pack_request("ping", "p", {}))
        while (event := self._next()).get("id") != "p":
            assert event["event"] == "reply", f"{event} after the end"
        return events

    def _next(self) -> dict[str, Any]:
        assert self.socket.poll(PATIENCE_MS), "the stream has no end"
        return unpack_event(self.socket.recv_multipart())

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def client_of(engine: Engine) -> Iterator[RawClient]:
    client = RawClient(engine.topology.clients)
    yield client
    client.close()


def check_end(events: list[dict[str, Any]], place: str, ending: str) -> None:
    """`ending`: a finish reason or an error code; a request in its last step is done before it hears of anything."""
    last = events[-1]
    assert last.get("finish_reason", last.get("code")) == ("length" if place == LAST_STEP else ending)
    assert [event["seq"] for event in events] == list(range(len(events)))
    if last["event"] == "done" and len(events) > 1:
        ids = [token for event in events for token in event.get("ids", ())]
        assert len(ids) == last["usage"]["completion_tokens"]
        assert len(ids) == NEW or place != LAST_STEP


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", ["cancel", "deadline_exceeded", "client gone"])
def test_a_request_ends_once_and_leaves_nothing_whatever_ends_it_and_wherever_it_is(shared, what, place, stream):
    engine, moment, clock = shared
    with client_of(engine) as client:
        moment.aim(place)
        fields = {"deadline_ms": HOUR_MS} if what == "deadline_exceeded" else {}
        client.send("generate", prompt=next(PROMPTS), max_new_tokens=NEW, ignore_eos=True, stream=stream, **fields)
        moment.wait_reached()
        if what == "client gone":
            client.close()
        elif what == "cancel":
            client.send("cancel")
        else:
            clock.pass_hours(2)
        if what != "client gone":
            check_end(client.events_until_terminal(), place, "cancelled" if what == "cancel" else what)
    settled(engine)
    assert moment.hit == place
    forgotten(engine)
    moment.let_go()
    assert len(engine.complete("who is next", max_new_tokens=3, ignore_eos=True).ids) == 3


@pytest.mark.parametrize("place", PLACES)
def test_an_engine_that_stops_ends_a_request_once_wherever_it_is(tiny_path, tmp_path_factory, monkeypatch, place):
    with held_engine(tiny_path, tmp_path_factory.mktemp("s"), monkeypatch) as (engine, moment, _):
        with client_of(engine) as client:
            moment.aim(place)
            client.send("generate", prompt=next(PROMPTS), max_new_tokens=NEW, ignore_eos=True)
            moment.wait_reached()
            engine._outbox.send(encode(Drain(now=True)))
            check_end(client.events_until_terminal(), place, "shutting_down")
        assert engine.host.wait(20)
        settled(engine)
        assert moment.hit == place
        with pytest.raises(DeepInferError) as refused:
            engine.complete("who is next", max_new_tokens=3)
        assert refused.value.code == "shutting_down"
