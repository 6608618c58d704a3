"""`deepinfer-daemon bench swap`: what it costs to move requests to the host and back, on this machine, in one run.

A real daemon is driven over its socket by three experiments, in turns, round after round:

forced          two requests that each need the whole pool; the second pushes the first out, which comes back after it
beside          two requests that stay while others swap beside them; the same while the others come in turns; and alone
oversubscribed  eight requests over a pool for two, all at once; and the same eight two at a time
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from deepinfer.clients import Client
from deepinfer.daemon.bench.conditions import conditions, engine_facts
from deepinfer.daemon.bench.load import started_daemon
from deepinfer.daemon.bench.results import write_json
from deepinfer.daemon.bench.swap_config import SwapBench
from deepinfer.daemon.bench.swap_experiments import Beside, Forced, Oversubscribed
from deepinfer.daemon.bench.swap_report import print_report


def run_swap_bench(bench: SwapBench, output: Path | None) -> None:
    with started_daemon(*bench.options()) as client:
        report = _measure(bench, client)
    print_report(report)
    write_json(report, output)


def _measure(bench: SwapBench, client: Client) -> dict[str, Any]:
    experiments = (Forced(bench, client), Beside(bench, client), Oversubscribed(bench, client))
    for number in range(bench.rounds):
        click.echo(f"round {number + 1} of {bench.rounds}", err=True)
        for experiment in experiments:
            experiment.round()
    return {
        **conditions(),
        **asdict(bench),
        "engine": engine_facts(client.status()),
        **{type(experiment).__name__.lower(): experiment.report() for experiment in experiments},
        "goals": [goal.as_json() for experiment in experiments for goal in experiment.goals()],
    }
