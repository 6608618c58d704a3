"""Who is named when something stands still, and who is not."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer.daemon.engine import Engine
from deepinfer.daemon.watchdog import Watchdog
from deepinfer.stages.memory.entries import Moves

BOUND = 10.0
STAGES = ("compute", "prefill", "offload", "decode")


class Fake:
    """A front and an engine that are looked at ten times a second."""

    def __init__(self) -> None:
        self.now = 100.0
        self.turns = 0
        self.stamp = 0.0
        self.pulses = dict.fromkeys(STAGES, (False, 0))
        self.dog = Watchdog(BOUND, self.now)

    def run(self, seconds: float, *moving: str, beats: bool = True, turns: bool = True, step: float = 0.1) -> None:
        for _ in range(round(seconds / step)):
            self.now += step
            self.turns += turns
            if beats:
                self.stamp = self.now
                for name in moving:
                    self.pulses = {**self.pulses, name: (self.pulses[name][0], self.pulses[name][1] + 1)}
            self.dog.look(self.now, self.turns, self.stamp, self.pulses)

    def work(self, *names: str) -> None:
        self.pulses = {name: (name in names, self.pulses[name][1]) for name in STAGES}


@pytest.mark.parametrize(
    ("working", "moving", "named"),
    [
        ((), (), ""),
        (("decode",), (), "decode"),
        (("decode",), ("decode",), ""),
        (("offload", "decode"), (), "offload"),
        (("offload", "decode"), ("decode",), "offload"),
        (("prefill", "decode"), (), "prefill"),
        (("compute", "prefill"), (), "compute"),
        (("compute", "decode"), (), "compute"),
        # A long chunk: prefill and decode are in the middle of one message, and layers go by.
        (("compute", "prefill", "decode"), ("compute",), ""),
        # Everyone waits in the pool for a transfer that is under way.
        (("offload", "decode"), ("offload",), ""),
    ],
)
def test_the_stage_that_others_wait_for_is_named_once_it_stands_still_for_the_bound(working, moving, named):
    fake = Fake()
    fake.work(*working)
    fake.run(BOUND - 1, *moving)
    assert fake.dog.stalled() == ""
    assert fake.dog.stalled(0.5) == named
    fake.run(2, *moving)
    assert fake.dog.stalled() == named
    fake.run(0.2, *STAGES)
    assert fake.dog.stalled(0.5) == ""


def test_an_engine_that_says_nothing_is_named_whatever_it_last_said():
    fake = Fake()
    fake.work("decode", "compute")
    fake.run(5, "compute")
    fake.run(BOUND + 0.5, beats=False)
    assert fake.dog.stalled() == "engine process"


def test_while_admission_does_not_turn_it_alone_is_to_blame_and_the_engine_is_judged_afterwards():
    fake = Fake()
    fake.run(1)
    fake.run(BOUND * 3, beats=False, turns=False)
    assert fake.dog.stalled() == "admission"
    fake.run(1)
    assert fake.dog.stalled(0.5) == ""


def test_time_in_which_nobody_looked_does_not_count():
    fake = Fake()
    fake.work("decode")
    fake.run(1)
    fake.run(3600, beats=False, step=3600)
    assert fake.dog.stalled(0.5) == ""


def test_the_report_tells_of_each_stage_how_long_it_has_stood():
    fake = Fake()
    fake.work("offload")
    fake.run(4, "decode")
    report = fake.dog.report()
    assert report["offload"] == {"still_s": pytest.approx(3.9, abs=0.2), "working": True, "progress": 0}
    assert report["decode"]["progress"] == 40
    assert report["admission"] == {"still_s": 0.0}


# --- a real engine, one thread of which is held -------------------------------------------------------------------


def named_within(engine: Engine, seconds: float, bound_s: float) -> str:
    """By a watchdog that is given the pulses of this engine."""
    dog = Watchdog(bound_s, time.monotonic())
    give_up = time.monotonic() + seconds
    turns = 0
    while time.monotonic() < give_up and not dog.stalled():
        time.sleep(0.02)
        turns += 1
        dog.look(time.monotonic(), turns, float(turns), engine.host.pulses())
    return dog.stalled()


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


def hold(gate: threading.Event, function: Any) -> Any:
    def held(*args: Any, **kwargs: Any) -> Any:
        gate.wait()
        return function(*args, **kwargs)

    return held


@pytest.mark.parametrize("stage", ["compute", "prefill", "decode", "offload"])
def test_the_stage_that_hangs_is_the_one_that_is_named(tiny_path, gate, stage):
    copy = hold(gate, lambda destination, source: destination.copy_(source))
    with Engine(tiny_path, num_blocks=8, copy=copy) as engine:
        if stage == "compute":
            engine.host.prefill_executor.forward = hold(gate, engine.host.prefill_executor.forward)
        elif stage == "prefill":
            engine.host.prefill._runner = SimpleNamespace(run=hold(gate, engine.host.prefill._runner.run))
        elif stage == "decode":  # A policy that never lets anyone in.
            moves = engine.host.residency.moves
            engine.host.residency.moves = lambda: moves() if gate.is_set() else Moves([], [], [], [], [])
        streams = [engine.generate("abcdefgh" * 4, max_new_tokens=90, ignore_eos=True) for _ in range(2)]
        assert named_within(engine, 30, bound_s=0.5) == stage
        gate.set()
        assert [stream.result().usage["completion_tokens"] for stream in streams] == [90, 90]
        assert engine.host.pulses().keys() == set(STAGES)


def test_an_idle_engine_and_a_busy_one_are_not_named(tiny_path):
    with Engine(tiny_path, num_blocks=64) as engine:
        assert named_within(engine, 2.5, bound_s=2) == ""
        stream = engine.generate("abc", max_new_tokens=480, ignore_eos=True)
        assert named_within(engine, 2.5, bound_s=2) == ""
        stream.cancel()
