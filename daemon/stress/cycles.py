"""`deepinfer-daemon stress cycles`: a daemon is started and hit, again and again, and nothing of it is ever left."""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import psutil

from deepinfer.daemon.stress.checks import Check
from deepinfer.daemon.stress.cycle import Cycle, Seen
from deepinfer.daemon.stress.cycle_plan import Plan, plan
from deepinfer.daemon.stress.cycles_config import TINY, CyclesConfig
from deepinfer.daemon.stress.site import Site
from deepinfer.daemon.stress.tiny_model import save_tiny_llama
from deepinfer.daemon.stress.verdict import conclude, earlier_runs, judged

CHECKS = (
    "every start works",
    "every stream ends",
    "streams end as documented",
    "every daemon ends",
    "exit codes are as documented",
    "no process is left",
    "nobody holds the lock",
    "no file is left",
    "no shared memory is left",
    "no temporary file is left",
    "no descriptor of this process is left open",
)
SETTLED_AFTER = 5
"""Cycles after which everything lazy in this process has happened."""


class CyclesRun:
    """All cycles in one runtime folder, so that each start meets what the one before it left."""

    def __init__(self, config: CyclesConfig, site: Site) -> None:
        self._config, self._site = config, site
        self._kinds = config.kinds()
        self._seen: list[Seen] = []
        self._starts: list[float] = []
        self._failures: dict[str, list[str]] = {name: [] for name in CHECKS}
        self._descriptors: list[int] = []
        self._left: set[str] = set()

    def run(self) -> dict[str, Any]:
        began = time.monotonic()
        self._starts = [self._calm_start("the first start")]
        for number in range(self._config.first, self._config.first + self._config.cycles):
            if self._config.seconds is not None and time.monotonic() > began + self._config.seconds:
                break
            self._cycle(plan(self._config.seed, number, self._kinds))
            if len(self._seen) % 10 == 0:
                failed = sum(map(len, self._failures.values()))
                click.echo(f"{len(self._seen)} cycles, {failed} failures", err=True)
        self._calm_start("the start after the last cycle")
        return {
            **judged([Check(name, failures) for name, failures in self._failures.items()]),
            "seed": self._config.seed,
            "cycles": len(self._seen),
            "kinds": dict(Counter(seen.plan.kind for seen in self._seen)),
            "start_s": self._spread(self._starts),
            "end_s": self._spread([seen.end_seconds for seen in self._seen]),
            "descriptors": self._descriptors[-1:],
            "seconds": time.monotonic() - began,
        }

    def _cycle(self, plan: Plan) -> None:
        seen = Cycle(self._site, self._config, plan, statistics.median(self._starts)).run()
        self._seen.append(seen)
        self._starts += [] if seen.start_seconds is None else [seen.start_seconds]
        for check, how in [*seen.faults, *self._remains()]:
            self._failures[check].append(f"cycle {plan.number} ({plan.kind}): {how}")
            click.echo(f"cycle {plan.number} ({plan.kind}): {check}: {how}", err=True)

    def _remains(self) -> list[tuple[str, str]]:
        """What was not there before this cycle."""
        found = [("no shared memory is left", name) for name in self._site.shared_memory()]
        found += [("no temporary file is left", name) for name in self._site.temporary_files()]
        new = [(check, name) for check, name in found if name not in self._left]
        self._left |= {name for _, name in new}
        self._descriptors.append(psutil.Process().num_fds())
        if len(self._descriptors) > SETTLED_AFTER and self._descriptors[-1] > self._descriptors[SETTLED_AFTER]:
            before, now = self._descriptors[SETTLED_AFTER], self._descriptors[-1]
            new.append(("no descriptor of this process is left open", f"{now}, {before} after {SETTLED_AFTER} cycles"))
        return new

    def _calm_start(self, which: str) -> float:
        """It must start and stop, whatever the last cycle left. Returns its seconds, which are of loading."""
        seen = Cycle(self._site, self._config, Plan(-1, "ready", "front", "term", False, 0.0, 0.0), 0.0).run()
        for check, how in seen.faults:
            self._failures[check].append(f"{which}: {how}")
        return seen.start_seconds or 0.0

    def _spread(self, values: list[float]) -> dict[str, float] | None:
        return {"median": statistics.median(values), "most": max(values)} if values else None


def stress_cycles(config: CyclesConfig) -> dict[str, Any]:
    """A report with `passed` and `checks`. Raises ConfigError."""
    config.check()
    with tempfile.TemporaryDirectory(prefix="tiny-") as folder:
        model = str(save_tiny_llama(Path(folder))) if config.model == TINY else config.model
        with Site(config.options(model)) as site:
            return CyclesRun(config, site).run()


def run_cycles(config: CyclesConfig, output: Path | None, append: bool) -> int:
    """Prints the report; returns the exit code: 1 when a check failed. Raises ConfigError."""
    if append:
        earlier_runs(output)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that the daemon is ended, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)  # In the background it is ignored, by children too.
    click.echo(f"seed {config.seed}; one cycle again: --seed {config.seed} --first NUMBER --cycles 1", err=True)
    return conclude(stress_cycles(config), config, output, append)
