"""`deepinfer-daemon stress kill`: the engine dies under load, at every moment, and nobody's answer changes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
import zmq

from deepinfer.clients import Client, Completion
from deepinfer.daemon.stress.checks import Check, judge, outcome_checks
from deepinfer.daemon.stress.client import Drive, Outcome
from deepinfer.daemon.stress.cycles_config import TINY
from deepinfer.daemon.stress.daemon import RealDaemon
from deepinfer.daemon.stress.jobs import Job, catalogue, jobs
from deepinfer.daemon.stress.kill_config import SIGNALS, KillConfig
from deepinfer.daemon.stress.swap_config import StressConfig
from deepinfer.daemon.stress.tiny_model import save_tiny_llama
from deepinfer.daemon.stress.verdict import conclude, earlier_runs, judged

MOMENTS = ("accepted", "token", "preempted", "idle")
MAX_PARKS = 8
SETTLE_SECONDS = 60.0
LOAD_SECONDS = 4.0
"""Within which a second death comes, most often while the next engine still loads."""


class Killer:
    """Kills the engine when the streams of a round have come to a moment, and perhaps the one after it."""

    def __init__(self, daemon: RealDaemon, config: KillConfig, random: np.random.Generator) -> None:
        self._daemon = daemon
        self.moment = MOMENTS[int(random.integers(len(MOMENTS)))]
        most = {"accepted": config.streams, "token": 30 * config.streams, "preempted": 3, "idle": 1}[self.moment]
        self._left = int(random.integers(1, most, endpoint=True))
        self.how = str(random.choice(config.signals.split(",")))
        self._second_after = float(random.uniform(0, LOAD_SECONDS)) if random.random() < config.twice else None
        self.first: psutil.Process | None = None
        self._killed_at = 0.0
        self.struck: set[int] = set()
        """Process ids. One that is stopped may be struck again, in the next round, before the daemon replaces it."""

    def see(self, event: dict[str, Any]) -> None:
        """Every event of every stream."""
        self._left -= event["event"] == self.moment
        if self._left <= 0 and self.first is None:
            self.kill()
        self.second()

    def alive(self) -> bool:
        """Whether the daemon is; called when nothing happens."""
        self.second()
        return self._daemon.alive()

    def kill(self) -> None:
        self.first = self._daemon.engine()
        self._killed_at = time.monotonic()
        if self.first is not None:
            self.first.send_signal(SIGNALS[self.how])
            self.struck.add(self.first.pid)

    def second(self) -> None:
        if self.first is None or self._second_after is None or time.monotonic() < self._killed_at + self._second_after:
            return
        engine = self._daemon.engine()
        if engine is not None and engine.pid != self.first.pid:
            self._second_after = None
            engine.kill()
            self.struck.add(engine.pid)


class KillRun:
    """What happens to one daemon: every question alone, then the rounds."""

    def __init__(self, config: KillConfig, daemon: RealDaemon) -> None:
        self.config = config
        self.daemon = daemon
        self.context = zmq.Context()
        self.client = Client(daemon.folder / "daemon.json", context=self.context)
        status = self.client.status()
        load = config.load()
        vocabulary = json.loads((daemon.folder / "daemon.json").read_text())["limits"]["vocab_size"]
        self.questions = catalogue(load, vocabulary, status["engine"]["context"])
        self.load = load
        self.rounds = 0
        self.alone: list[Completion] = []
        self.outcomes: list[Outcome] = []
        self.strays: list[str] = []
        self.hung: list[str] = []
        self.struck: set[int] = set()
        self.moments: Counter[str] = Counter()
        self.resources: list[tuple[int, int]] = []

    def run(self) -> list[Check]:
        for number, question in enumerate(self.questions):
            self.alone.append(
                self.client.complete(list(question.prompt), cache_salt=f"alone {number}", **question.options)
            )
        rounds = np.random.default_rng([self.config.seed, 3])
        stream = jobs(StressConfig(**{**vars(self.load), "requests": self.config.rounds * self.config.streams}))
        began = time.monotonic()
        for number in range(self.config.rounds):
            late = self.config.seconds is not None and time.monotonic() > began + self.config.seconds
            last = late or number == self.config.rounds - 1
            load = itertools.islice(stream, self.config.streams)
            self._round(Killer(self.daemon, self.config, rounds), load, last)
            self.rounds += 1
            if self.hung or last:
                break
            if number % 10 == 9:
                click.echo(f"{number + 1} rounds, {len(self.struck)} deaths", err=True)
        return self._checks()

    def _round(self, killer: Killer, load: Iterator[Job], last: bool) -> None:
        drive = Drive(
            self.context,
            json.loads((self.daemon.folder / "daemon.json").read_text())["endpoint"],
            self.questions,
            self.config.streams,
            lambda outcome: judge(outcome, self.alone[outcome.job.question]),
            killer.alive,
            killer.see,
        )
        try:
            drive.run(load, float("inf"), self.config.stall_s)
        finally:
            drive.close()
        if killer.first is None and not drive.hung:
            killer.moment = "idle"
            killer.kill()
        self.outcomes += drive.outcomes
        self.strays += drive.strays
        self.hung += [f"{drive.hung}; {self._situation()}"] if drive.hung else []
        self.moments[f"{killer.how} at {killer.moment}"] += 1
        if killer.moment != "idle" or last:
            self._settle(killer)
        self.struck |= killer.struck  # Some only now: the second death may come after the last stream.

    def _situation(self) -> str:
        """For whoever must find out why it hangs."""
        status = self.client.status()
        return f"phase {status['phase']}, requests {status['requests']}; the log ends: {self.daemon.last_words()}"

    def _settle(self, killer: Killer) -> None:
        """Until an engine is ready and holds nothing; after a death without load the next round does not wait."""
        give_up = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < give_up:
            killer.second()
            status = self.client.status()
            quiet = status["requests"].get("live") == 0 and status["blocks"]["free"] == self.config.num_blocks
            if status["phase"] == "ready" and quiet:
                self.resources.append((self.daemon.descriptors(), self.daemon.files()))
                return
            time.sleep(0.05)
        self.hung.append(f"the daemon did not become quiet; {self._situation()}")

    def _checks(self) -> list[Check]:
        status = self.client.status()
        ended, asked = len(self.outcomes), self.rounds * self.config.streams
        died = status["engine_deaths"]
        return [
            Check("the run does not hang", self.hung),
            Check("every request ended", [] if ended == asked else [f"{ended} of {asked} ended"]),
            Check("exactly one terminal event", self.strays),
            *outcome_checks(self.outcomes, MAX_PARKS + 2, False),
            Check(
                "every death was noticed",
                []
                if died == len(self.struck)
                else [f"{died} noticed, {len(self.struck)} caused", *self.daemon.log_lines("a new one is started")],
            ),
            Check("no descriptor and no file is left over", self._growth()),
        ]

    def _growth(self) -> list[str]:
        """From the second quiet moment to the last one: by then everything lazy has happened once."""
        if len(self.resources) < 3:
            return []
        early, late = self.resources[1], self.resources[-1]
        return [] if late == early else [f"{early} descriptors and files after two rounds, {late} at the end"]


def stress_kill(config: KillConfig) -> dict[str, Any]:
    """A report with `passed` and `checks`. Raises ConfigError; DaemonFailed when the daemon does not start or end."""
    config.load()
    with tempfile.TemporaryDirectory(prefix="tiny-") as folder:
        model = str(save_tiny_llama(Path(folder))) if config.model == TINY else config.model
        return _kill_engines_of(dataclasses.replace(config, model=model))


def _kill_engines_of(config: KillConfig) -> dict[str, Any]:
    began = time.monotonic()
    with RealDaemon(config.options()) as daemon:
        daemon.wait_ready()
        run = KillRun(config, daemon)
        try:
            checks = run.run()
        finally:
            run.client.close()
            run.context.term()
        daemon.process.terminate()
        code, left = daemon.wait_end()
        checks.append(Check("the daemon stops", [] if code == 0 else [f"exit code {code}: {daemon.last_words()}"]))
        checks.append(Check("nothing is left over", left))
    gaps = sorted(outcome.longest_gap for outcome in run.outcomes if outcome.preempted)
    return {
        **judged(checks),
        "rounds": run.rounds,
        "deaths": len(run.struck),
        "moments": dict(run.moments),
        "requests": len(run.outcomes),
        "tokens": sum(outcome.tokens for outcome in run.outcomes),
        "longest_gap_s": {"median": gaps[len(gaps) // 2], "most": gaps[-1]} if gaps else None,
        "seconds": time.monotonic() - began,
    }


def run_kill(config: KillConfig, output: Path | None, append: bool) -> int:
    """Prints the report; returns the exit code: 1 when a check failed. Raises ConfigError."""
    if append:
        earlier_runs(output)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that the daemon is ended, too.
    return conclude(stress_kill(config), config, output, append)
