"""The end of a stress run: what was seen is printed, written as JSON, and becomes an exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from deepinfer.daemon.bench.conditions import conditions
from deepinfer.daemon.bench.results import write_json
from deepinfer.daemon.setting import ConfigError
from deepinfer.daemon.stress.checks import Check

SHOWN_FAILURES = 10


def judged(checks: Sequence[Check]) -> dict[str, Any]:
    """The first entries of a report."""
    return {
        "passed": all(check.passed for check in checks),
        "checks": [{**check._asdict(), "passed": check.passed} for check in checks],
    }


def conclude(report: dict[str, Any], config: Any, output: Path | None, append: bool = False) -> int:
    """Returns the exit code: 1 when a check failed. `append`: the file has `runs`, and this one is added to them."""
    for name, value in report.items():
        if name not in ("passed", "checks"):
            click.echo(f"{name}: {value}")
    for check in report["checks"]:
        click.echo(f"{'ok' if check['passed'] else 'FAILED'}: {check['name']}")
        for line in check["failures"][:SHOWN_FAILURES]:
            click.echo(f"    {line}")
    written = {**conditions(), "config": vars(config), **report}
    write_json({"runs": [*earlier_runs(output), written]} if append else written, output)
    return 0 if report["passed"] else 1


def earlier_runs(output: Path | None) -> list[Any]:
    """Those that the file holds already. Raises ConfigError for one that is not of runs."""
    if output is None or not output.exists():
        return []
    try:
        runs = json.loads(output.read_text())["runs"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"output is {output}; with --append it must be a file that --append has written") from None
    return list(runs)
