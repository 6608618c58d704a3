"""`deepinfer-daemon stress swap`: requests move out and come back by the hundred, and all say what they say alone."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import psutil

from deepinfer.clients import Completion
from deepinfer.daemon.bench.conditions import conditions
from deepinfer.daemon.config import ConfigError
from deepinfer.daemon.engine import Engine, EngineError
from deepinfer.daemon.stress.checks import Check, engine_checks, judge, outcome_checks
from deepinfer.daemon.stress.client import Drive, Outcome
from deepinfer.daemon.stress.copies import PlainCopies, StressCopies
from deepinfer.daemon.stress.jobs import Question, catalogue, jobs
from deepinfer.daemon.stress.report import copy_report, latency_report, print_report
from deepinfer.daemon.stress.swap_config import StressConfig
from deepinfer.stages.memory.sizes import blocks_for
from deepinfer.stages.model import load_tokenizer, resolve_model
from deepinfer.stages.stats import EngineCounters


def run_stress(config: StressConfig, formats: Sequence[str], settings: dict[str, Any], output: Path | None) -> int:
    """`settings` go to the engine. Prints a table for every format; returns the exit code: 1 when a check failed."""
    config.check()
    reports = []
    for kv_format in formats:
        reports.append(stress_format(config, kv_format, settings))
        print_report(reports[-1])
    passed = all(report["passed"] for report in reports)
    if output is not None:
        whole = {**conditions(), "config": vars(config), "settings": settings, "passed": passed, "runs": reports}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(whole, indent=1) + "\n")
        click.echo(f"written to {output}")
    return 0 if passed else 1


def stress_format(config: StressConfig, kv_format: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One engine, one KV format. The report has `passed`, and `checks` with what failed."""
    copies = StressCopies(config)
    fixed: dict[str, Any] = {
        "num_blocks": config.num_blocks,
        "block_size": config.block_size,
        "preemption": config.preemption,
        "offload_unit": config.offload_unit,
        "max_cpu_offload_mb": config.max_cpu_offload_mb,
        "kv_cache_dtype": kv_format,
        "batch_invariant": True,
    }
    twice = sorted(fixed.keys() & settings.keys())
    if twice:
        raise ConfigError(f"set names {', '.join(twice)}; that has an option of its own, or is what the checks rest on")
    engine = Engine(config.model, copy=copies, **fixed, **settings)
    try:
        report = StressRun(config, engine, copies).report()
    finally:
        died = _close(engine)
    report["checks"].append(Check("the engine stops", died))
    report["passed"] = all(check.passed for check in report["checks"])
    report["checks"] = [{**check._asdict(), "passed": check.passed} for check in report["checks"]]
    return report


def _close(engine: Engine) -> list[str]:
    try:
        engine.close()
    except EngineError as error:
        return [str(error)]
    return []


class StressRun:
    """What happens to one engine: every question alone, then the load, then perhaps the load in fitting waves."""

    def __init__(self, config: StressConfig, engine: Engine, copies: StressCopies) -> None:
        self.config = config
        self.engine = engine
        self.copies = copies
        host = engine.host
        known = load_tokenizer(resolve_model(config.model)).vocab_size
        vocab_size = min(host.model.config.vocab_size, known)
        self.questions = catalogue(config, vocab_size, host.max_context)
        self.alone: list[Completion] = []
        self.reserved = self._reserve_host_rows()
        self.plain = PlainCopies(host.pool.data, blocks_for(self._median_stored(), config.block_size))

    def _reserve_host_rows(self) -> list[int]:
        """Taken before anything runs, by this thread: the offload thread owns the arena from the first swap on."""
        arena = self.engine.host.arena
        if self.config.host_blocks is None:
            return []
        return arena.take(max(0, arena.num_rows - self.config.host_blocks)) or []

    def _median_stored(self) -> int:
        return int(statistics.median(question.stored for question in self.questions))

    def report(self) -> dict[str, Any]:
        self.alone = [self._alone(number, question) for number, question in enumerate(self.questions)]
        before = self.engine.host.decode.counters.as_dict()
        self.copies.watch(self.engine.host.pool.data)
        rss = _rss()
        drive, seconds = self._drive(self.config.clients)
        growth = _rss() - rss
        asked = len(self.questions) + len(drive.outcomes)
        checks = [
            Check("the run does not hang", [drive.hung] if drive.hung else []),
            Check("exactly one terminal event", drive.strays),
            *self._outcome_checks(drive),
            *engine_checks(self.engine, self.copies, len(self.reserved), asked),
            self._rss_check(growth),
            *self._smoke_checks(before, len(drive.outcomes)),
        ]
        counters = _difference(self.engine.host.decode.counters, before)
        report: dict[str, Any] = {
            "kv_cache_dtype": self.engine.host.kv_format.name,
            "block_bytes": self.engine.host.plan.block_bytes,
            "checks": checks,
            "requests": _ends(drive.outcomes),
            "seconds": seconds,
            "tokens_per_s": _tokens(drive.outcomes) / seconds,
            "rss_growth_bytes": growth,
            "faults": vars(self.copies.faults),
            "counters": counters,
            "preemption": self.engine.host.decode.preemption.as_dict(),
            "copies": copy_report(counters, self.copies, self.plain),
            "latency": latency_report(drive.outcomes),
        }
        if self.config.fitting and not drive.hung:
            report["fitting"] = self._fitting(report["tokens_per_s"])
            checks += report["fitting"].pop("checks")
        return report

    def _alone(self, number: int, question: Question) -> Completion:
        """With a salt of its own: nothing of the answer comes out of the prefix cache."""
        return self.engine.complete(question.prompt, cache_salt=f"alone {number}", **question.options)

    def _drive(self, clients: int) -> tuple[Drive, float]:
        drive = Drive(
            self.engine.context,
            self.engine.topology.clients,
            self.questions,
            clients,
            self._judge,
            lambda: self.engine.host.failure() is None and self.engine.admission.failure is None,
        )
        began = time.monotonic()
        until = began + (self.config.duration if self.config.duration is not None else float("inf"))
        try:
            drive.run(jobs(self.config), until, self.config.stall_s)
        finally:
            drive.close()
        return drive, time.monotonic() - began

    def _judge(self, outcome: Outcome) -> str:
        self.plain.measure()
        return judge(outcome, self.alone[outcome.job.question])

    def _outcome_checks(self, drive: Drive) -> list[Check]:
        return outcome_checks(drive.outcomes, self.engine.host.config.max_parks, self.config.allow_exhausted)

    def _fitting(self, oversubscribed: float) -> dict[str, Any]:
        """The same requests, only as many at a time as the pool holds: what there is to lose by swapping."""
        largest = max(blocks_for(question.stored, self.config.block_size) for question in self.questions)
        clients = max(1, min(self.config.clients, self.config.num_blocks // largest))
        before = self.engine.host.decode.counters.as_dict()
        drive, seconds = self._drive(clients)
        swaps = _difference(self.engine.host.decode.counters, before)["requests_swapped_total"]
        wrong = self._outcome_checks(drive)
        rate = _tokens(drive.outcomes) / seconds
        return {
            "clients": clients,
            "swaps": swaps,
            "tokens_per_s": rate,
            "oversubscribed_to_fitting": oversubscribed / rate,
            "checks": [Check(f"fitting: {check.name}", check.failures) for check in wrong],
        }

    def _rss_check(self, growth: int) -> Check:
        """Less the host rows that were written for the first time: they are in the budget."""
        growth -= len(self.copies.host_rows) * self.engine.host.arena.row_bytes
        limit = self.config.rss_limit_mb << 20
        return Check("the process does not grow", [] if growth <= limit else [f"it grew by {growth} bytes"])

    def _smoke_checks(self, before: dict[str, Any], finished: int) -> list[Check]:
        if self.config.scenario != "smoke":
            return []
        counters = _difference(self.engine.host.decode.counters, before)
        rounds = finished // 2
        names = ("requests_swapped_total", "requests_resumed_total")
        wrong = [f"{name} is {counters[name]} in {rounds} rounds" for name in names if counters[name] != rounds]
        return [Check("one swap and one resume a round", wrong)]


def _rss() -> int:
    return psutil.Process().memory_info().rss


def _difference(counters: EngineCounters, before: dict[str, Any]) -> dict[str, Any]:
    after = counters.as_dict()
    return {name: after[name] - before[name] for name in after}


def _ends(outcomes: Sequence[Outcome]) -> dict[str, int]:
    reasons = sorted(outcome.reason for outcome in outcomes)
    return {reason: len(list(group)) for reason, group in itertools.groupby(reasons)}


def _tokens(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.tokens for outcome in outcomes)
