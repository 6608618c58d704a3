"""`deepinfer-daemon bench jitter`: how evenly tokens come when requests must swap, and when they need not.

One daemon whose pool holds half of the requests, say. The same requests are sent twice in each round: as many at a time
as fit, and all at once. The work is the same, and so are pool, kernels and about the number of rows in a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from deepinfer.clients import Client
from deepinfer.daemon.bench.conditions import conditions, engine_facts, served_sha256
from deepinfer.daemon.bench.drive import drive
from deepinfer.daemon.bench.jitter_config import JitterBench
from deepinfer.daemon.bench.load import Seen, settled_counters, started_daemon
from deepinfer.daemon.bench.results import check_plot, save_figure, write_json
from deepinfer.daemon.bench.rounds import Spread, noise, print_noise, ratio_line, ratio_of
from deepinfer.daemon.bench.served import Pass, latencies
from deepinfer.daemon.bench.workload import random_jobs

CALM, PRESSED = "as many as fit", "all at once"
DEFINITIONS = {
    CALM: "no request has to leave: the next one is sent when one has ended",
    PRESSED: "all requests are sent together, and those that do not fit push others out, which come back",
    "tpot_ms": "of each request: the time after its first token, by token",
    "itl_ms": "every pause between two events with tokens of a request; longest: the longest of all requests",
    "moved": "of the requests that were preempted while all were sent at once; stayed: of the others",
}


def run_jitter_bench(bench: JitterBench, output: Path | None, plot: Path | None) -> None:
    """Prints a table. Raises ConfigError."""
    bench.check()
    check_plot(plot)
    with started_daemon(*bench.options(bench.formats[0])) as client:
        status = client.status()
        sha256 = served_sha256(client, status)
        passes, swaps = _measure(bench, client, int(status["limits"]["vocab_size"]))
    report = build_report(bench, status, passes, swaps) | {"model_sha256": sha256}
    _print(report)
    write_json(report, output)
    if plot is not None:
        _draw(report, passes, plot)


def _measure(bench: JitterBench, client: Client, vocab_size: int) -> tuple[dict[str, list[Pass]], dict[str, int]]:
    """The passes of each arm, and how many swaps there were in them."""
    jobs = random_jobs([bench.input_len] * bench.requests, bench.max_new_tokens, vocab_size, 0)
    arms = {CALM: bench.fitting, PRESSED: bench.requests}
    passes: dict[str, list[Pass]] = {name: [] for name in arms}
    swaps = dict.fromkeys(arms, 0)
    for number in range(bench.rounds):
        click.echo(f"round {number + 1} of {bench.rounds}", err=True)
        for name, at_a_time in arms.items():
            before = settled_counters(client)["requests_swapped_total"]
            passes[name].append(drive(client, jobs, [0.0] * len(jobs), at_a_time))
            swaps[name] += int(settled_counters(client)["requests_swapped_total"] - before)
    return passes, swaps


def build_report(
    bench: JitterBench, status: Mapping[str, Any], passes: Mapping[str, Sequence[Pass]], swaps: Mapping[str, int]
) -> dict[str, Any]:
    failed = [seen.error for runs in passes.values() for run in runs for seen in run.seen if seen.error]
    if failed:
        raise click.ClickException(f"{len(failed)} requests failed: {failed[0]}")
    pressed = [seen for run in passes[PRESSED] for seen in run.seen]
    groups = {
        CALM: [seen for run in passes[CALM] for seen in run.seen],
        PRESSED: pressed,
        "moved": [seen for seen in pressed if seen.moves],
        "stayed": [seen for seen in pressed if not seen.moves],
    }
    ratios = _ratios(passes)
    return {
        **conditions(),
        "model": bench.model,
        "settings": asdict(bench),
        "definitions": DEFINITIONS,
        "engine": engine_facts(dict(status)),
        "swaps": dict(swaps),
        "groups": {name: jitter_of(seen) for name, seen in groups.items()},
        "tokens_per_s": {name: statistics.median(_rates(runs)) for name, runs in passes.items()},
        "ratios": {name: ratio._asdict() for name, ratio in ratios.items()},
        "too_noisy": noise(ratios, bench.rounds),
    }


def jitter_of(seen: Sequence[Seen]) -> dict[str, Any]:
    """Milliseconds; None where there is nothing to measure."""
    found = latencies(seen)
    return {"requests": len(seen), **{f"{name}_ms": _figures(found[name]) for name in ("tpot", "itl")}}


def _figures(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    values = 1000 * np.array(seconds)
    p50, p95, p99 = (float(np.percentile(values, percent)) for percent in (50, 95, 99))
    return {"mean": float(values.mean()), "p50": p50, "p95": p95, "p99": p99, "longest": float(values.max())}


def _rates(runs: Sequence[Pass]) -> list[float]:
    return [sum(len(seen.tokens) for seen in run.seen) / run.seconds for run in runs]


def _ratios(passes: Mapping[str, Sequence[Pass]]) -> dict[str, Spread]:
    """All at once to as many as fit, round by round. Of the longest pause there is no ratio: it is one event."""

    def of_rounds(name: str, percent: int) -> dict[str, list[float]]:
        return {
            arm: [float(np.percentile(latencies(run.seen)[name], percent)) for run in runs]
            for arm, runs in passes.items()
        }  # fmt: skip

    return {
        "tokens/s": ratio_of({name: _rates(runs) for name, runs in passes.items()}, PRESSED, CALM),
        "TPOT, p50": ratio_of(of_rounds("tpot", 50), PRESSED, CALM),
        "ITL, p50": ratio_of(of_rounds("itl", 50), PRESSED, CALM),
        "ITL, p99": ratio_of(of_rounds("itl", 99), PRESSED, CALM),
    }


def _print(report: Mapping[str, Any]) -> None:
    engine, settings = report["engine"], report["settings"]
    click.echo(
        f"{report['machine']['cpu']}, {engine['threads']} threads; {report['model']}; KV {engine['kv_cache_dtype']}; "
        f"{settings['requests']} requests over a pool for {settings['fitting']}; {settings['rounds']} rounds"
    )
    row = "{:22} {:>9} {:>10} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8} {:>8} {:>8} {:>9}"
    keys = ("mean", "p50", "p95", "p99", "longest")
    click.echo(row.format("", "requests", *(f"TPOT {keys[0]}", *keys[1:]), *(f"ITL {keys[0]}", *keys[1:])))
    for name, group in report["groups"].items():
        figures = [group[key] and group[key][figure] for key in ("tpot_ms", "itl_ms") for figure in keys]
        label = name if name in (CALM, PRESSED) else f"  {name}"
        click.echo(row.format(label, group["requests"], *("-" if f is None else f"{f:.1f}" for f in figures)))
    for name, rate in report["tokens_per_s"].items():
        click.echo(f"{name:22} {rate:9.1f} tokens/s, {report['swaps'][name]} swaps")
    for name, ratio in report["ratios"].items():
        click.echo(ratio_line(f"{name}, {PRESSED} to {CALM}", Spread(**ratio)))
    if not report["swaps"][PRESSED]:
        click.secho("nothing was swapped: use longer prompts or more --max-new-tokens", fg="yellow")
    print_noise(report)


def _draw(report: Mapping[str, Any], passes: Mapping[str, Sequence[Pass]], plot: Path) -> None:
    """Which part of the pauses is longer than so many milliseconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, runs in passes.items():
        pauses = np.sort([1000 * pause for run in runs for pause in latencies(run.seen)["itl"]])
        axes.step(pauses, 1 - np.arange(len(pauses)) / len(pauses), where="pre", label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("pause between tokens, ms")
    axes.set_ylabel("part of the pauses that are at least as long")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    axes.set_title(f"{report['model']}, {report['settings']['requests']} requests over a pool for "
                   f"{report['settings']['fitting']}")  # fmt: skip
    save_figure(figure, plot)
