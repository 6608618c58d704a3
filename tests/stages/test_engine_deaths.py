"""Admission through the deaths of many engines, at every moment: no token is lost, none comes twice."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import tempfile
import time
import zlib
from typing import Any

import msgspec
import pytest
import zmq

from deepinfer.clients import DeepInferError
from deepinfer.clients.streams import StreamState
from deepinfer.clients.wire import pack_request, unpack_event
from deepinfer.stages import messages
from deepinfer.stages.admission import AdmissionStage
from deepinfer.stages.blame import Blame
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.engine_port import EngineAddresses
from deepinfer.stages.flight_record import RECORD_BYTES, FlightRecord
from deepinfer.stages.messages import (
    Cancel,
    Drain,
    EngineDied,
    EngineReady,
    EngineStopped,
    Finished,
    Preempted,
    Resumed,
    Submit,
    TokenItem,
    Tokens,
    encode,
)
from deepinfer.stages.model import load_tokenizer
from deepinfer.stages.protocol import Limits
from deepinfer.stages.telemetry import Telemetry

SUMMARY = {"vocab_size": 264, "context": 512, "longest_stored": 1024}
SECONDS = 60.0
_serial = itertools.count()


def token_at(prompt: bytes, index: int) -> int:
    """What the model of this test says, a printable character: a function of the request and the place alone."""
    return 1 + zlib.crc32(prompt + index.to_bytes(4, "little")) % 94


def addresses() -> EngineAddresses:
    number = next(_serial)
    return EngineAddresses(f"inproc://fake-admission-{number}", f"inproc://fake-decode-{number}")


class Died(Exception):
    """`running` is what the engine was computing."""

    def __init__(self, running: list[int]) -> None:
        super().__init__("died")
        self.running = running


class FakeEngine:
    """Runs up to three requests at a time; dies when the dice say so (with `mid`, also while it computes), and when it
    computes a token that kills."""

    def __init__(
        self,
        context: zmq.Context,
        where: EngineAddresses,
        dice: random.Random,
        kills: dict[bytes | int, int],
        mid: bool,
    ) -> None:
        self.inbox = context.socket(zmq.PULL)
        self.inbox.bind(where.decode)
        self.outbox = context.socket(zmq.PUSH)
        self.outbox.connect(where.admission)
        self.outbox.send(encode(EngineReady(summary=SUMMARY)))
        self.dice = dice
        self.kills = kills
        self.mid = mid
        self.requests: dict[int, Submit] = {}
        self.generated: dict[int, list[int]] = {}
        self.parked: set[int] = set()
        self.stopped = False

    def close(self) -> None:
        self.inbox.close(linger=0)
        self.outbox.close(linger=0)

    def send(self, message: Any) -> None:
        self.outbox.send(encode(message))

    def step(self, risk: float) -> None:
        self._read()
        self._die(risk, [])
        batch = self.dice.sample(sorted(self.requests), min(3, len(self.requests)))
        self._wake(batch)
        if any(self._deadly(rid) == len(self.generated[rid]) for rid in batch):
            raise Died(batch)
        self._die(risk if self.mid else 0.0, batch)
        items = []
        for rid in batch:
            index = len(self.generated[rid])
            self.generated[rid].append(token_at(self.requests[rid].prompt, index))
            items.append(TokenItem(rid, self.generated[rid][-1], index))
        if items:
            self.send(Tokens(items=items))
        self._die(risk, [])
        for rid in batch:
            if len(self.generated[rid]) == self.requests[rid].params.max_new_tokens:
                self._finish(rid, "length")
            elif self.dice.random() < 0.1:
                self.parked.add(rid)
                self.send(Preempted(rid=rid))
        self._die(risk, [])

    def _read(self) -> None:
        while self.inbox.poll(1 if not self.requests else 0):
            message = messages.decode(self.inbox.recv())
            if isinstance(message, Submit):
                self._enter(message)
                for fork in message.forks:
                    self._enter(msgspec.structs.replace(message, rid=fork.rid, clock=fork.clock))
            elif isinstance(message, Cancel) and message.rid in self.requests:
                self._finish(message.rid, message.reason)
            elif isinstance(message, Drain):
                self.stopped = True
                self.send(EngineStopped())

    def _deadly(self, rid: int) -> int | None:
        """The place of the token of `rid` that kills."""
        return self.kills.get(rid, self.kills.get(self.requests[rid].prompt))

    def _enter(self, message: Submit) -> None:
        assert message.rid not in self.requests, "submitted twice to one engine"
        ids = memoryview(message.generated).cast("i").tolist()
        assert ids == [token_at(message.prompt, index) for index in range(len(ids))]
        self.requests[message.rid] = message
        self.generated[message.rid] = ids
        if message.clock is not None and message.clock.parked:
            self.parked.add(message.rid)
        if len(ids) == message.params.max_new_tokens:
            self._finish(message.rid, "length")

    def _wake(self, batch: list[int]) -> None:
        for rid in batch:
            if rid in self.parked:
                self.parked.discard(rid)
                self.send(Resumed(rid=rid))

    def _finish(self, rid: int, reason: str) -> None:
        del self.requests[rid]
        self.parked.discard(rid)
        self.send(Finished(rid=rid, reason=reason))

    def _die(self, risk: float, running: list[int]) -> None:
        if self.dice.random() < risk:
            raise Died(running)


class World:
    """Admission, one client connection, the engine of the day, and the supervisor that replaces it."""

    def __init__(self, tokenizer: Any, seed: int, kills: dict[bytes | int, int], mid: bool = False) -> None:
        self.dice = random.Random(seed)
        self.mid = mid
        self.struck: dict[int, int] = {}
        """In how many deaths a request was being computed, by engine's request id."""
        self.kills = kills
        self.context = zmq.Context()
        number = next(_serial)
        clients, front, where = f"inproc://clients-{number}", f"inproc://front-{number}", addresses()
        self.board = StatusBoard({})
        self.admission = AdmissionStage(
            self.context, front, where, clients, tokenizer, "m", Limits(), self.board, Telemetry(), supervised=True
        )
        self.admission.start()
        self.supervisor = self.context.socket(zmq.PUSH)
        self.supervisor.connect(front)
        self.client = self.context.socket(zmq.DEALER)
        self.client.connect(clients)
        self.engine: FakeEngine | None = FakeEngine(self.context, where, self.dice, kills, mid)
        self.next_where = where
        self.deaths = 0
        self.streams: dict[int, StreamState] = {}
        self.events: dict[int, list[str]] = {}
        self.wait(lambda: self.board.phase == "ready")

    def wait(self, condition: Any) -> None:
        give_up = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < give_up
            time.sleep(0.001)

    def ask(self, number: int, prompt: list[int], new: int, n: int = 1) -> None:
        self.streams[number] = StreamState(True)
        self.events[number] = []
        fields = {"max_new_tokens": new, "ignore_eos": True, "n": n}
        self.client.send_multipart(pack_request("generate", number, fields, prompt))

    def cancel(self, number: int) -> None:
        self.client.send_multipart(pack_request("cancel", number, {}))

    def run(self, risk: float) -> None:
        """Until every stream has ended."""
        give_up = time.monotonic() + SECONDS
        while not all(stream.ended for stream in self.streams.values()):
            assert time.monotonic() < give_up, self.events
            self.turn(risk)

    def turn(self, risk: float) -> None:
        if self.engine is None:
            if self.dice.random() < 0.5:
                self.engine = FakeEngine(self.context, self.next_where, self.dice, self.kills, self.mid)
        else:
            try:
                self.engine.step(risk)
            except Died as death:
                self.bury(death.running)
        self.read()

    def bury(self, running: list[int]) -> None:
        self.deaths += 1
        for rid in running:
            self.struck[rid] = self.struck.get(rid, 0) + 1
        self.engine.close()
        self.engine = None
        self.next_where = addresses()
        died = EngineDied(error="killed", **self.next_where._asdict(), running=running)
        self.supervisor.send(encode(died))

    def read(self) -> None:
        while self.client.poll(0):
            event = unpack_event(self.client.recv_multipart())
            if event["event"] == "reply":
                continue
            stream = self.streams[event["id"]]
            assert not stream.ended, "an event after the terminal one"
            self.events[event["id"]].append(event["event"])
            try:
                stream.feed(event)
            except DeepInferError as error:
                self.events[event["id"]][-1] = error.code

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        assert self.admission.stop(10)
        self.supervisor.close(linger=0)
        self.client.close(linger=0)
        self.context.term()


@pytest.fixture(scope="module")
def tokenizer(tiny_path):
    return load_tokenizer(tiny_path)


def pauses_alternate(events: list[str]) -> bool:
    pauses = [event for event in events if event in ("preempted", "resumed")]
    return pauses == [("preempted", "resumed")[place % 2] for place in range(len(pauses))]


@pytest.mark.parametrize("seed", range(40))
def test_streams_say_the_same_whatever_engines_die_of_and_only_killers_are_ended(tokenizer, seed):
    dice = random.Random(seed)
    prompts = [[1 + number, *(dice.randrange(1, 257) for _ in range(5))] for number in range(14)]
    lengths = [dice.randrange(1, 25) for _ in prompts]
    killers = dice.sample(range(14), seed % 4)
    raw = [b"".join(token.to_bytes(4, "little") for token in prompt) for prompt in prompts]
    kills = {raw[number]: dice.randrange(lengths[number]) for number in killers}
    cancelled = dice.sample([number for number in range(14) if number not in killers], 2)
    risk = 0.05 if seed % 2 else 0.0
    world = World(tokenizer, seed, kills, mid=seed % 4 == 3)
    try:
        for number, (prompt, new) in enumerate(zip(prompts, lengths, strict=True)):
            world.ask(number, prompt, new)
            for _ in range(dice.randrange(3)):
                world.turn(risk)
        for number in cancelled:
            world.cancel(number)
        world.run(risk)
        for number, stream in world.streams.items():
            due = [token_at(raw[number], index) for index in range(lengths[number])]
            assert pauses_alternate(world.events[number])
            if number in killers:
                assert world.events[number][-1] == "engine_killer"
                assert world.struck[number + 1] >= 2
                text = tokenizer.decode(due[: kills[raw[number]]], True)
                assert text.startswith(stream.text) if world.mid else text == stream.text
                continue
            if world.mid and world.struck.get(number + 1, 0) >= 2 and world.events[number][-1] == "engine_killer":
                continue  # It was unlucky twice, which nobody can tell from guilt.
            answer = stream.completion()
            assert answer.text == tokenizer.decode(due[: len(answer.ids)], True)
            if answer.finish_reason == "cancelled":
                assert number in cancelled
                assert list(answer.ids) == due[: len(answer.ids)]
            else:
                assert list(answer.ids) == due
        world.client.send_multipart(pack_request("ping", "last", {}))
        world.wait(lambda: world.board.front["live"] == 0)
        world.read()
    finally:
        world.close()
    if risk:
        assert world.deaths > 0
    else:
        assert world.deaths <= 4 * len(killers)


@pytest.mark.parametrize("seed", range(12))
def test_several_choices_go_on_after_every_death_and_one_that_kills_ends_its_whole_request(tokenizer, seed):
    dice = random.Random(seed)
    prompts = [[1 + number, dice.randrange(1, 257)] for number in range(6)]
    raw = [b"".join(token.to_bytes(4, "little") for token in prompt) for prompt in prompts]
    killers = [2] if seed % 2 else []
    world = World(tokenizer, seed, {6: 3} if killers else {})  # Its last choice: the engine's requests are 4, 5 and 6.
    try:
        for number, prompt in enumerate(prompts):
            world.ask(number, prompt, 12, n=1 + number % 3)
            world.turn(0.05)
        world.run(0.0 if killers else 0.05)
        for number, stream in world.streams.items():
            if number in killers:
                assert world.events[number][-1] == "engine_killer"
                continue
            answers = stream.completion().choices
            assert [list(answer.ids) for answer in answers] == [
                [token_at(raw[number], index) for index in range(12)] for _ in range(1 + number % 3)
            ]
        world.wait(lambda: world.board.front["live"] == 0)
        assert world.admission.table.by_choice == {}
    finally:
        world.close()
    assert world.deaths > 0 or not killers


def test_a_request_whose_end_was_lost_with_the_engine_ends_without_another_token(tokenizer):
    world = World(tokenizer, 1, {})
    try:
        world.ask(0, [5], 3)
        while world.events[0].count("token") == 0 or len(world.streams[0].text) < 3:
            world.engine._read()
            for rid, submit in world.engine.requests.items():
                items = [TokenItem(rid, token_at(submit.prompt, index), index) for index in range(3)]
                world.engine.send(Tokens(items=items))
                world.engine.requests = {}
                break
            world.read()
        world.bury([])
        world.run(0.0)
        assert list(world.streams[0].completion().ids) == [token_at(b"\5\0\0\0", index) for index in range(3)]
    finally:
        world.close()


# --- who is to blame ----------------------------------------------------------------------------------------------


def test_a_request_that_was_alone_in_two_deaths_at_the_same_token_is_guilty():
    blame = Blame()
    assert blame.died({1: 5, 2: 7}) is None
    assert not blame.holds(3)
    blame.clear(1)
    assert blame.died({2: 7}) == 2
    assert not blame.holds(3)


def test_one_that_was_twice_in_bad_company_is_tried_before_it_is_called_guilty():
    blame = Blame()
    blame.died({1: 0, 2: 0})
    assert blame.died({1: 0, 3: 0}) is None
    assert [blame.holds(rid) for rid in (1, 2, 3)] == [False, True, True]
    assert blame.clear(1)
    assert not any(blame.holds(rid) for rid in (1, 2, 3))


def test_a_request_that_went_on_in_between_is_not():
    blame = Blame()
    for tokens in range(20):
        assert blame.died({1: tokens}) is None
        blame.clear(1)


def test_several_suspects_are_tried_one_by_one_while_the_others_wait():
    blame = Blame()
    blame.died({1: 0, 2: 0, 3: 0})
    assert blame.died({1: 0, 2: 0, 3: 0, 4: 0}) is None
    assert [blame.holds(rid) for rid in (1, 2, 3, 4, 5)] == [False, True, True, True, True]
    assert blame.clear(1)
    assert [blame.holds(rid) for rid in (1, 2, 3, 4, 5)] == [False, False, True, True, True]
    assert blame.died({1: 1}) is None
    assert blame.died({1: 1, 2: 0}) == 2
    assert blame.clear(3)
    assert not any(blame.holds(rid) for rid in (1, 3, 4, 5))


def test_suspects_that_end_of_themselves_hold_nobody_up():
    blame = Blame()
    blame.died({1: 0, 2: 0})
    blame.died({1: 0, 2: 0})
    assert not blame.clear(2)
    assert blame.holds(9)
    assert blame.clear(1)
    assert not blame.holds(9)


def test_the_flight_record_outlives_the_process_that_wrote_it():
    with tempfile.TemporaryFile() as file:
        file.truncate(RECORD_BYTES)
        record = FlightRecord(file.fileno())
        words = f"""
import os, signal
from deepinfer.stages.flight_record import FlightRecord
record = FlightRecord({file.fileno()})
record.decode.begin(range(7))
record.decode.end()
record.prefill.begin([5])
record.decode.begin([3, 2**40])
os.kill(os.getpid(), signal.SIGKILL)
"""
        assert record.running() == []
        subprocess.run([sys.executable, "-c", words], pass_fds=(file.fileno(),), timeout=60, check=False)
        assert record.running() == [3, 2**40, 5]
        record.close()
    own = FlightRecord()
    own.prefill.begin(range(5000))
    assert own.running() == list(range(4096))


def test_choices_that_wait_for_a_trial_end_with_their_client_and_no_engine_gets_them(tokenizer):
    """The first choice is on trial, the other two wait for it. When their client leaves, no trial is left to wait for,
    and no client to compute for."""
    world = World(tokenizer, 0, {})
    try:
        world.ask(0, [1], 8, n=3)  # For the engine 1, 2 and 3.
        world.ask(1, [2], 8)
        world.ask(2, [3], 8)
        world.wait(lambda: world.board.front["live"] == 3)
        for running in ([1, 4], [1, 5]):
            world.bury(running)
            world.wait(lambda: world.board.engine_deaths == world.deaths)
            world.engine = FakeEngine(world.context, world.next_where, world.dice, {}, False)
            world.wait(lambda: world.board.phase == "ready")
        engine = world.engine

        def given(rids: set[int]) -> bool:
            engine._read()
            return set(engine.requests) == rids

        world.wait(lambda: given({1}))
        world.client.close(linger=0)

        def left() -> bool:
            """An event that it does not take tells that it is gone."""
            engine.send(Resumed(rid=1))
            engine.send(Preempted(rid=1))
            return world.board.front["live"] == 0

        world.wait(left)
        assert given(set())
    finally:
        world.close()
