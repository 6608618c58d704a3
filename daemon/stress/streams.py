"""`deepinfer-daemon stress streams`: a thousand streams at once, and some beside one that never reads."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import zmq

from deepinfer.clients import Client
from deepinfer.daemon.stress.bystander import Bystander
from deepinfer.daemon.stress.checks import Check
from deepinfer.daemon.stress.crowd import Crowd
from deepinfer.daemon.stress.cycles_config import TINY
from deepinfer.daemon.stress.daemon import RealDaemon
from deepinfer.daemon.stress.fairness import Fairness
from deepinfer.daemon.stress.streams_config import StreamsConfig
from deepinfer.daemon.stress.tiny_model import save_tiny_llama
from deepinfer.daemon.stress.verdict import conclude, judged

SETTLE_SECONDS = 30.0
PERCENTILES = {"p50": 50, "p99": 99, "max": 100}


class Resources(NamedTuple):
    """What a daemon holds when it has nothing to do. Descriptors as (front, engine)."""

    processes: int
    descriptors: tuple[int, int]
    files: int
    free_blocks: int
    live: int


class StreamsRun:
    """Everything with one daemon, so that what one part leaves is seen in the next."""

    def __init__(self, config: StreamsConfig, daemon: RealDaemon, context: zmq.Context) -> None:
        self._config, self._daemon, self._context = config, daemon, context
        self._connection = json.loads((daemon.folder / "daemon.json").read_text())
        self._client = Client(daemon.folder / "daemon.json", context=context)
        self._checks: list[Check] = []
        self._report: dict[str, Any] = {}
        self._wrong_others: list[str] = []

    def run(self) -> dict[str, Any]:
        """A report without verdict, and the checks of it."""
        config = self._config
        self._crowd(config.connections, config.connections)  # Everything lazy happens once.
        quiet = self._settle()
        self._part("streams", config.streams, config.connections)
        self._unchanged("the streams", quiet)
        if config.queued:
            self._part("queued", config.queued, 1)
            self._unchanged("the queued ones", quiet)
        if config.rounds:
            fairness = Fairness(config, self._connection, self._daemon, self._round_of_others, self._settle)
            self._report["fairness"], checks = fairness.run()
            self._checks += [Check("others: contiguous numbers and one end each", self._wrong_others), *checks]
            self._unchanged("those beside one that never reads", quiet)
        self._client.close()
        return {**judged(self._checks), **self._report}

    def _part(self, name: str, streams: int, connections: int) -> None:
        began = time.monotonic()
        with Bystander("control", self._connection["control_endpoint"]) as control:
            crowd = self._crowd(streams, connections)
        answers = np.asarray(control.seen) * 1000
        self._report[name] = {
            "streams": streams,
            "connections": connections,
            "seconds": time.monotonic() - began,
            "tokens_per_s": crowd.tokens / (time.monotonic() - began),
            "status_answers": len(answers),
            "status_ms": {name: _percentile(answers, percent) for name, percent in PERCENTILES.items()},
        }
        ends = {} if crowd.ends == {"length": streams} else crowd.ends
        self._checks += [
            Check(f"{name}: contiguous numbers and one end each", crowd.wrong),
            Check(f"{name}: every one finishes", [f"{how}: {count}" for how, count in ends.items()]),
            Check(
                f"{name}: the control socket answers within {self._config.control_ms:.0f} ms",
                [f"{value:.0f} ms" for value in answers if value > self._config.control_ms],
            ),
        ]

    def _crowd(self, streams: int, connections: int) -> Crowd:
        crowd = Crowd(self._context, self._connection["endpoint"], connections)
        try:
            crowd.ask(streams, {"max_new_tokens": self._config.new_tokens, "ignore_eos": True})
            crowd.read(self._config.stall_s)
        finally:
            crowd.close()
        return crowd

    def _round_of_others(self) -> list[float]:
        """Their pauses between tokens, in seconds."""
        crowd = Crowd(self._context, self._connection["endpoint"], self._config.others)
        try:
            crowd.ask(self._config.others, {"max_new_tokens": self._config.round_tokens, "ignore_eos": True})
            crowd.read(self._config.stall_s)
        finally:
            crowd.close()
        self._wrong_others += crowd.wrong
        return crowd.gaps

    # --- what is held -----------------------------------------------------------------------------------------

    def _settle(self) -> Resources:
        """What it holds when it is quiet, or after a while."""
        give_up = time.monotonic() + SETTLE_SECONDS
        last = None
        while True:
            now = self._resources()
            if (now.live == 0 and now.free_blocks == self._config.num_blocks and now == last) or (
                time.monotonic() > give_up
            ):
                return now
            last = now
            time.sleep(0.3)

    def _resources(self) -> Resources:
        status, engine = self._client.status(), self._daemon.engine()
        return Resources(
            len(psutil.Process(self._daemon.process.pid).children(recursive=True)),
            (self._daemon.descriptors(), engine.num_fds() if engine is not None else 0),
            self._daemon.files(),
            status["blocks"]["free"],
            status["requests"].get("live", 0),
        )

    def _unchanged(self, what: str, before: Resources) -> None:
        after = self._settle()
        self._checks.append(
            Check(
                f"nothing is left of {what}",
                [
                    f"{name}: {then} before, {now} after"
                    for name, then, now in zip(Resources._fields, before, after, strict=True)
                    if then != now
                ],
            )
        )


def _percentile(values: np.ndarray, percent: int) -> float:
    return float(np.percentile(values, percent))


def stress_streams(config: StreamsConfig) -> dict[str, Any]:
    """A report with `passed` and `checks`. Raises ConfigError; DaemonFailed when the daemon does not start or end."""
    config.check()
    with tempfile.TemporaryDirectory(prefix="tiny-") as folder:
        model = str(save_tiny_llama(Path(folder))) if config.model == TINY else config.model
        with RealDaemon(config.options(model)) as daemon:
            daemon.wait_ready()
            context = zmq.Context()
            try:
                report = StreamsRun(config, daemon, context).run()
            finally:
                context.destroy(linger=0)
            daemon.process.terminate()
            code, left = daemon.wait_end()
    ended = Check("the daemon stops, and leaves nothing", left + ([] if code == 0 else [f"exit code {code}"]))
    return {**report, **judged([*(Check(c["name"], c["failures"]) for c in report["checks"]), ended])}


def run_streams(config: StreamsConfig, output: Path | None) -> int:
    """Prints the report; returns the exit code: 1 when a check failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that the daemon is ended, too.
    return conclude(stress_streams(config), config, output)
