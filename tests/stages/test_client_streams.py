"""What waits for clients that do not read: it is joined, bounded, and asks for little of the turn of everyone else."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import msgpack
import pytest

from deepinfer.stages import client_streams
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.client_port import Delivery
from deepinfer.stages.client_streams import MAX_PENDING_SIZE, RETRY_SECONDS, ClientStreams
from deepinfer.stages.intake import Capacity, Intake
from deepinfer.stages.live import LiveRequest, Route
from deepinfer.stages.live_table import LiveTable
from deepinfer.stages.messages import Finished, TokenItem, Tokens
from deepinfer.stages.model import load_tokenizer
from deepinfer.stages.protocol_requests import Generate
from deepinfer.stages.telemetry import Telemetry

CAPACITY = Capacity(context=512, tokens=65536, vocab_size=264)
TOP = tuple((number, -1.0) for number in range(20))


class FakeEngine:
    """Takes everything and says nothing."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    def submit(self, live: LiveRequest) -> None:
        for choice in live.choices:
            choice.submitted = True

    def moved(self, rid: int) -> None: ...

    def cancel(self, choices: Any, reason: str) -> list[Any]:
        self.cancelled += [choice.rid for choice in choices]
        return []


class Post:
    """Clients by name; those in `full` do not read."""

    def __init__(self, intake: Intake) -> None:
        self.full: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.order: list[str] = []
        """Of what a message says: `take`, as its tokens become text, and `send`."""
        self.tries: Counter[bytes] = Counter()
        self.read: dict[bytes, list[dict[str, Any]]] = {}
        self.table, self.engine = LiveTable(), FakeEngine()
        self.streams = ClientStreams(self.table, self.engine, StatusBoard({}), Telemetry(), self._send)  # type: ignore[arg-type]
        self._intake = intake
        self.now = 0.0
        self.try_seconds = 0.0
        """What it takes to try a client that does not read."""

    def _send(self, frames: list[bytes]) -> Delivery:
        client, payload = frames
        self.tries[client] += 1
        self.order.append("send")
        if client in self.gone:
            return Delivery.GONE
        if client in self.full:
            self.now += self.try_seconds
            return Delivery.FULL
        self.read.setdefault(client, []).append(msgpack.unpackb(payload))
        return Delivery.SENT

    def ask(self, client: bytes, rid: int) -> None:
        op = Generate(id=rid, prompt="x", max_new_tokens=500, ignore_eos=True)
        self.streams.open(self._intake.live_request(rid, Route(client, False), op, CAPACITY), None)

    def tokens(self, rids: Any, index: int, top: Any = ()) -> None:
        logprob = -1.0 if top else None
        self.streams.on_tokens(Tokens(items=[TokenItem(rid, 5, index, logprob, top) for rid in rids]))

    def turn(self) -> None:
        self.now += RETRY_SECONDS
        self.streams.retry(self.now)

    def of(self, client: bytes, rid: int) -> list[dict[str, Any]]:
        return [event for event in self.read.get(client, []) if event["id"] == rid]


@pytest.fixture(scope="module")
def intake(tiny_path):
    return Intake(load_tokenizer(tiny_path), "m")


@pytest.fixture
def post(intake, monkeypatch):
    post = Post(intake)
    monkeypatch.setattr(client_streams, "monotonic", lambda: post.now)
    return post


def test_what_waits_is_joined_and_comes_in_order_when_the_client_reads_again(post):
    post.ask(b"slow", 1)
    post.full.add(b"slow")
    for index in range(50):
        post.tokens([1], index)
        post.turn()
    post.full.clear()
    post.streams.on_finished(Finished(rid=1, reason="length"))
    post.turn()
    events = post.of(b"slow", 1)
    assert [event["seq"] for event in events] == list(range(len(events)))
    assert len(events) <= 4
    assert [id for event in events for id in event.get("ids", ())] == [5] * 50
    assert events[-1]["event"] == "done"
    assert len(post.table) == post.streams.blocked == 0


def test_a_client_that_reads_nothing_costs_one_try_a_turn_however_many_streams_it_has(post):
    post.full.add(b"deaf")
    for rid in range(1, 1001):
        post.ask(b"deaf", rid)
    post.ask(b"other", 2000)
    post.turn()
    post.tries.clear()
    for index in range(4):
        post.tokens(range(1, 1001), index)
        post.tokens([2000], index)
        post.turn()
    assert post.tries[b"deaf"] == 4
    assert len(post.of(b"other", 2000)) == 5
    assert post.streams.blocked == 1000


def test_an_engine_that_is_faster_than_the_retries_does_not_pass_the_bound(post):
    post.full.add(b"deaf")
    for rid in range(1, 65):
        post.ask(b"deaf", rid)
    for index in range(200):
        post.tokens(range(1, 65), index, TOP)
        assert sum(live.pending_size for live in post.table.of(b"deaf")) <= 1.2 * MAX_PENDING_SIZE
    assert len(post.engine.cancelled) > 0


def test_what_will_never_be_read_is_freed_at_once(post):
    """Not only when garbage is collected."""
    gc.disable()
    try:
        post.full.add(b"deaf")
        for rid in (1, 2):
            post.ask(b"deaf", rid)
            post.tokens([rid], 0, TOP)
        lives = post.table.of(b"deaf")
        waiting = [weakref.ref(live.choices[0].waiting) for live in lives]
        lives[0].drop_pending_tokens()
        assert waiting[0]() is None
        post.streams.client_gone(b"deaf")
        assert waiting[1]() is None
    finally:
        gc.enable()


def test_clients_that_do_not_read_take_a_tenth_of_the_time_at_most(post):
    post.full.add(b"deaf")
    post.ask(b"deaf", 1)
    post.turn()
    post.try_seconds = 0.05
    tries = post.tries[b"deaf"]
    began = post.now
    for _ in range(1000):
        post.turn()
    tried = post.tries[b"deaf"] - tries
    assert tried > 1
    assert tried * post.try_seconds <= 0.11 * (post.now - began)


@pytest.mark.parametrize("top", [(), TOP], ids=["plain", "with 20 likely ones"])
def test_past_the_bound_streams_end_those_with_most_first_and_others_do_not(post, top):
    post.ask(b"deaf", 1)
    post.ask(b"deaf", 2)
    post.ask(b"other", 3)
    post.full.add(b"deaf")
    bound = MAX_PENDING_SIZE // (4 + len(top))
    post.tokens([2, 3], 0, top)
    for index in range(bound - 1):
        post.tokens([1, 3] if index else [1], index, top)
    post.turn()
    assert post.engine.cancelled == []
    for index in range(bound - 1, bound + 2):
        post.tokens([1], index, top)
    post.turn()
    assert post.engine.cancelled == [1]
    post.full.clear()
    post.turn()
    assert post.of(b"deaf", 1)[-1]["code"] == "slow_consumer"
    assert post.of(b"deaf", 2)[-1]["event"] == "token"
    assert post.of(b"other", 3)[-1]["event"] == "token"


def test_what_finished_streams_left_unread_counts_against_the_bound(post):
    post.full.add(b"deaf")
    each = MAX_PENDING_SIZE // 4 // 8
    for rid in range(1, 9):
        post.ask(b"deaf", rid)
        for index in range(each):
            post.tokens([rid], index)
        post.streams.on_finished(Finished(rid=rid, reason="length"))
        post.turn()
    post.ask(b"deaf", 9)
    post.turn()
    assert post.engine.cancelled == []
    post.tokens([9], 0)
    post.turn()
    post.tokens([9], 1)
    post.turn()
    assert post.engine.cancelled == [9]


def test_the_tokens_of_a_step_are_sent_together_after_all_of_them_were_taken(post, monkeypatch):
    for rid in range(1, 5):
        post.ask(b"client", rid)
    post.order.clear()
    take = post.streams._take_token
    monkeypatch.setattr(post.streams, "_take_token", lambda *args: (post.order.append("take"), take(*args)))
    post.tokens(range(1, 5), 0)
    assert post.order == ["take"] * 4 + ["send"] * 4
    assert all(post.of(b"client", rid)[-1]["ids"] == [5] for rid in range(1, 5))


def test_a_client_found_gone_among_the_tokens_of_a_step_is_tried_once_and_others_get_theirs(post):
    for rid in range(1, 4):
        post.ask(b"gone", rid)
    post.ask(b"other", 10)
    post.tries.clear()
    post.gone.add(b"gone")
    post.tokens([1, 2, 10, 3], 0)
    assert post.tries == {b"gone": 1, b"other": 1}
    assert post.of(b"other", 10)[-1]["ids"] == [5]
    assert sorted(post.engine.cancelled) == [1, 2, 3]
    assert len(post.table) == 1
