"""The end of a stress run: what was seen is printed, written as JSON, and becomes an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from deepinfer.daemon.bench.conditions import conditions
from deepinfer.daemon.bench.results import write_json
from deepinfer.daemon.stress.checks import Check

SHOWN_FAILURES = 10


def judged(checks: Sequence[Check]) -> dict[str, Any]:
    """The first entries of a report."""
    return {
        "passed": all(check.passed for check in checks),
        "checks": [{**check._asdict(), "passed": check.passed} for check in checks],
    }


def conclude(report: dict[str, Any], config: Any, output: Path | None) -> int:
    """Returns the exit code: 1 when a check failed."""
    for name, value in report.items():
        if name not in ("passed", "checks"):
            click.echo(f"{name}: {value}")
    for check in report["checks"]:
        click.echo(f"{'ok' if check['passed'] else 'FAILED'}: {check['name']}")
        for line in check["failures"][:SHOWN_FAILURES]:
            click.echo(f"    {line}")
    write_json({**conditions(), "config": vars(config), **report}, output)
    return 0 if report["passed"] else 1
