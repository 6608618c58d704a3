"""Whether one that never reads costs the others anything: their pauses, and the memory of the front process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import click
import numpy as np
import psutil

from deepinfer.daemon.stress.bystander import Bystander
from deepinfer.daemon.stress.checks import Check
from deepinfer.daemon.stress.daemon import RealDaemon
from deepinfer.daemon.stress.streams_config import LIMITS, StreamsConfig

BASELINE = "a client that reads"
READING = "a subscriber that reads"
ARMS = {
    BASELINE: ("reads", "endpoint", None),
    "a client that never reads": ("never-reads", "endpoint", BASELINE),
    READING: ("reads-metrics", "metrics_endpoint", None),
    "a subscriber that never reads": ("never-reads-metrics", "metrics_endpoint", READING),
}
"""Who is there beside the others, where it connects to, and with whom it is compared: with one that reads the same, so
that what differs is the reading. Subscribers have no streams, so beside them there is also the client that reads."""
SAMPLE_SECONDS = 0.02
FLOOD_SECONDS = 12.0
ARRIVAL_SECONDS = 0.5
"""Which the streams of the other client get to be accepted."""


class Fairness:
    """The arms follow one another in every round, so what else the machine does meets all of them."""

    def __init__(
        self,
        config: StreamsConfig,
        connection: dict[str, Any],
        daemon: RealDaemon,
        others: Callable[[], list[float]],
        settle: Callable[[], Any],
    ) -> None:
        """`others` runs the streams that are measured and returns their pauses."""
        self._config, self._connection, self._others, self._settle = config, connection, others, settle
        self._front = psutil.Process(daemon.process.pid)
        self._p99: dict[str, list[float]] = {arm: [] for arm in ARMS}
        self._peaks: dict[str, list[int]] = {arm: [] for arm in ARMS}

    def run(self) -> tuple[dict[str, Any], list[Check]]:
        warm = [self._round(BASELINE)[1] for _ in range(2)]
        for number in range(self._config.rounds):
            for arm in ARMS:
                gaps, peak = self._round(arm)
                self._p99[arm].append(float(np.percentile(gaps, 99)) * 1000)
                self._peaks[arm].append(peak)
            click.echo(f"{number + 1} rounds beside one that never reads", err=True)
        before = max(*warm, self._peaks[BASELINE][0])
        arms = {arm: self._arm(arm, before) for arm in ARMS}
        read = self._flood("reads")
        flood = (self._flood("never-reads") - max(before, read)) / 2**20
        checks = [check for arm in arms for check in self._judge(arm, arms[arm])]
        checks.append(self._small("a flood that nobody reads", flood))
        return {"front_rss_mb": before / 2**20, **arms, "a flood that nobody reads": {"growth_mb": flood}}, checks

    def _flood(self, role: str) -> int:
        """The most memory of the front while a client asks for as much as it may. One that reads nothing of it has its
        streams cut, and is found gone. What so many streams take by themselves is known from the one that reads."""
        numbers = (LIMITS.max_streams, self._config.round_tokens, LIMITS.max_logprobs)
        with Peak(self._front) as peak:
            with Bystander(role, self._connection["endpoint"], *numbers):
                time.sleep(FLOOD_SECONDS)
            self._settle()
        return peak.bytes

    def _arm(self, arm: str, before: int) -> dict[str, Any]:
        baseline = ARMS[arm][2] or arm
        return {
            "p99_gap_ms": self._p99[arm],
            "ratio": float(np.median(self._p99[arm]) / np.median(self._p99[baseline])),
            "growth_mb": (max(self._peaks[arm]) - before) / 2**20,
        }

    def _judge(self, arm: str, seen: dict[str, Any]) -> list[Check]:
        if ARMS[arm][2] is None:
            return []
        ratio = seen["ratio"]
        wide = [] if ratio <= self._config.gap_ratio else [f"{ratio:.2f} times"]
        return [
            Check(f"{arm}: the pauses of others are at most {self._config.gap_ratio} times as long", wide),
            self._small(arm, seen["growth_mb"]),
        ]

    def _small(self, who: str, growth: float) -> Check:
        big = [] if growth <= self._config.growth_mb else [f"{growth:.1f} MiB"]
        return Check(f"{who}: the front grows by at most {self._config.growth_mb:.0f} MiB", big)

    def _round(self, arm: str) -> tuple[list[float], int]:
        """The pauses of the others, and the most memory that the front had."""
        role, endpoint, _ = ARMS[arm]
        size = (self._config.burden, self._config.round_tokens, 0)
        alone = endpoint == "endpoint"
        with Peak(self._front) as peak:
            with Bystander(role, self._connection[endpoint], *(size if alone else ())):
                reader = nullcontext() if alone else Bystander("reads", self._connection["endpoint"], *size)
                with reader:
                    time.sleep(ARRIVAL_SECONDS)
                    gaps = self._others()
            self._settle()
        return gaps, peak.bytes


class Peak(threading.Thread):
    """The most memory of a process, by samples. `with` begins and ends it."""

    def __init__(self, process: psutil.Process) -> None:
        super().__init__(daemon=True)
        self._process, self._over = process, threading.Event()
        self.bytes = 0

    def run(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self.bytes = max(self.bytes, self._process.memory_info().rss)

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()
