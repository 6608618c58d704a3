"""`deepinfer-daemon bench overhead`: what front, sockets and scheduling take of a decode step.

In every round a real daemon decodes over its socket, and an engine of the same settings in this process computes the
very same steps with neither stages nor sockets: same model, prompts, rows and contexts, the same runner.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import psutil

from deepinfer.clients import Client
from deepinfer.daemon.bench.conditions import conditions, engine_facts, served_sha256
from deepinfer.daemon.bench.goals import Goal
from deepinfer.daemon.bench.in_process import InProcess
from deepinfer.daemon.bench.load import (
    Streams,
    random_prompt,
    settled_counters,
    started_daemon,
    step_together,
    until_together,
)
from deepinfer.daemon.bench.overhead_config import OverheadBench
from deepinfer.daemon.bench.results import write_json
from deepinfer.daemon.bench.rounds import Spread, noise, print_noise, ratio_line, ratio_of, spread_of
from deepinfer.daemon.engine import no_progress
from deepinfer.daemon.engine_host import EngineHost

LIMIT = 0.05
DEFINITIONS = {
    "client": "a step by the times at which tokens arrive at the client's socket while all streams decode",
    "ms_per_step": "means over the steps of a round; median, least and greatest of the rounds",
    "stage": "a decode step as the decode stage counts it: from looking up the rows to the tokens, between two pauses "
    "of its thread",
    "run": "the same step in this process, by the same runner: rows to a batch, forward pass, sampling",
    "forward": "the forward pass of it alone",
    "share": "1 - run / client: what front, sockets, scheduling and their use of the same cores take",
    "cpu_ms_per_step": "processor time of each process while it decoded, by step; beyond cores times client they take "
    "turns",
}


class _Sockets(NamedTuple):
    client: float
    stage: float
    cpu: dict[str, float]
    """Processor seconds by step, of each process."""


def run_overhead_bench(bench: OverheadBench, output: Path | None) -> None:
    """Prints a table. Raises ConfigError."""
    bench.check()
    with ExitStack() as stack:
        client = stack.enter_context(started_daemon(*bench.options(bench.formats[0])))
        host = EngineHost(bench.engine, no_progress)
        stack.callback(host.close)
        host.warm_up()
        report = _measure(bench, client, host)
    _print(report)
    write_json(report, output)


def _measure(bench: OverheadBench, client: Client, host: EngineHost) -> dict[str, Any]:
    status = client.status()
    vocab_size = int(status["limits"]["vocab_size"])
    prompts = [random_prompt(bench.input_len, number, vocab_size) for number in range(bench.concurrency)]
    alone = InProcess(host)
    samples: dict[str, list[float]] = {name: [] for name in ("client", "stage", "run", "forward")}
    cpu: list[dict[str, float]] = []
    for number in range(bench.rounds + 1):
        click.echo(f"round {number} of {bench.rounds}" if number else "first steps", err=True)
        sockets = until_together(partial(_over_sockets, bench, client, status, prompts))
        steps = alone.decode(prompts, bench.new_tokens, bench.concurrency)
        if number:
            cpu.append(sockets.cpu)
            values = {"client": sockets.client, "stage": sockets.stage, **steps._asdict()}
            for name, value in values.items():
                samples[name].append(value)
    ratios = {
        "run to client": ratio_of(samples, "run", "client"),
        "stage to client": ratio_of(samples, "stage", "client"),
        "run to stage": ratio_of(samples, "run", "stage"),
        "forward to run": ratio_of(samples, "forward", "run"),
    }
    goal = Goal("share of front, sockets and scheduling", 1 - ratios["run to client"].median, LIMIT)
    return {
        **conditions(),
        "model": status["model"],
        "model_sha256": served_sha256(client, status),
        "settings": asdict(bench),
        "definitions": DEFINITIONS,
        "engine": engine_facts(dict(status)),
        "ms_per_step": {
            name: spread_of([1e3 * value for value in values])._asdict() for name, values in samples.items()
        },
        "cpu_ms_per_step": {name: 1e3 * statistics.median(one[name] for one in cpu) for name in cpu[0]},
        "ratios": {name: ratio._asdict() for name, ratio in ratios.items()},
        "goal": goal.as_json(),
        "too_noisy": noise(ratios, bench.rounds),
    }


def _over_sockets(
    bench: OverheadBench, client: Client, status: Mapping[str, Any], prompts: list[list[int]]
) -> _Sockets:  # fmt: skip
    processes = {
        "front": psutil.Process(status["pid"]),
        "engine": psutil.Process(status["engine_pid"]),
        "this client": psutil.Process(os.getpid()),
    }
    before = settled_counters(client)
    spent = {name: -_cpu_seconds(process) for name, process in processes.items()}
    with Streams(client) as streams:
        for prompt in prompts:
            streams.send(prompt, bench.new_tokens)
        streams.until_all_done()
    for name, process in processes.items():
        spent[name] += _cpu_seconds(process)
    after = settled_counters(client)
    steps = after["decode_steps_total"] - before["decode_steps_total"]
    stage = (after["decode_seconds"] - before["decode_seconds"]) / steps
    return _Sockets(step_together(streams.seen), stage, {name: value / steps for name, value in spent.items()})


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _print(report: Mapping[str, Any]) -> None:
    engine, settings = report["engine"], report["settings"]
    click.echo(
        f"{report['machine']['cpu']}, {engine['threads']} threads; {report['model']}; KV {engine['kv_cache_dtype']}; "
        f"{settings['concurrency']} rows; {settings['rounds']} rounds"
    )
    names = {
        "client": "step, as the client sees it",
        "stage": "step, as the decode stage counts it",
        "run": "the same step in one process, no sockets",
        "forward": "its forward pass",
    }
    for name, step in report["ms_per_step"].items():
        click.echo(f"  {names[name]:44} {step['median']:8.3f} ms   ({step['min']:.3f} to {step['max']:.3f})")
    medians = {name: step["median"] for name, step in report["ms_per_step"].items()}
    click.echo("where the rest goes, differences of these medians:")
    for text, more, less in (
        ("between steps: messages, policy, sockets", "client", "stage"),
        ("in a step: tables, and cores that others use", "stage", "run"),
        ("rows to a batch, sampling", "run", "forward"),
    ):
        difference = medians[more] - medians[less]
        click.echo(f"  {text:44} {difference:8.3f} ms   {difference / medians['client']:.1%} of the client's step")
    for name, cost in report["cpu_ms_per_step"].items():
        click.echo(f"  {'processor time, ' + name:44} {cost:8.3f} ms")
    for name, ratio in report["ratios"].items():
        click.echo(ratio_line(name, Spread(**ratio)))
    goal = report["goal"]
    verdict = "met" if goal["met"] else "MISSED"
    if report["too_noisy"] is not None:
        verdict += ", as far as so noisy a run can tell"
    click.echo(f"{goal['name']}: {goal['value']:.1%}, {goal['sense']} {goal['limit']:.0%}: {verdict}")
    print_noise(report)
