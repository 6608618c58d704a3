"""Engines that die under load, by the stress command; and what that command does by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from deepinfer.daemon.cli import main
from deepinfer.daemon.stress.kill import MOMENTS, Killer, stress_kill
from deepinfer.daemon.stress.kill_config import KillConfig


@pytest.mark.slow
def test_engines_that_die_under_sixteen_streams_change_no_answer_and_leave_nothing(tiny_path):
    report = stress_kill(KillConfig(model=str(tiny_path), rounds=3, seed=1, twice=0.0, new_tokens="20:60", threads=1))
    assert {check["name"]: check["failures"] for check in report["checks"] if not check["passed"]} == {}
    assert report["deaths"] == 3
    assert report["requests"] == 48


class FakeDaemon:
    """A new engine is there as soon as the last one was killed."""

    def __init__(self) -> None:
        self.killed: list[int] = []

    def engine(self) -> Any:
        number = len(self.killed)
        return SimpleNamespace(
            pid=number, send_signal=lambda _: self.killed.append(number), kill=lambda: self.killed.append(number)
        )

    def alive(self) -> bool:
        return True


def test_a_killer_strikes_once_at_its_moment_and_perhaps_a_second_engine_later(monkeypatch):
    now = 0.0
    monkeypatch.setattr("deepinfer.daemon.stress.kill.time.monotonic", lambda: now)
    moments, seconds = set(), 0
    for seed in range(200):
        now = 0.0
        daemon, config = FakeDaemon(), KillConfig(streams=2, twice=0.5)
        killer = Killer(daemon, config, np.random.default_rng(seed))
        moments.add(killer.moment)
        for event in ["accepted", "token", "preempted", "resumed"] * 70:
            killer.see({"event": event})
        assert len(daemon.killed) == (killer.moment != "idle")
        now = 10.0
        assert killer.alive()
        assert killer.alive()
        assert len(daemon.killed) == len(killer.struck) <= 2
        seconds += len(daemon.killed) == 2
    assert moments == set(MOMENTS)
    assert 40 < seconds < 120


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--signals", "kill,hup"], "kill, segv, stop"),
        (["--rounds", "0"], "rounds"),
        (["--twice", "2"], "twice"),
        (["--new-tokens", "9:1"], "new_tokens"),
    ],
)
def test_wrong_options_are_named_before_a_daemon_is_started(options, words):
    ended = CliRunner().invoke(main, ["stress", "kill", *options])
    assert ended.exit_code == 78
    assert words in ended.output
