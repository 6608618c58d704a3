"""`deepinfer-daemon bench slope`: what a decode step costs more for every token of context, for each KV format.

A daemon for each format; in every round each of them decodes at every context length. Prompts are computed in a first
pass and then found in the prefix cache, so that a round is short.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from deepinfer.clients import Client
from deepinfer.daemon.bench.conditions import conditions, engine_facts, served_sha256
from deepinfer.daemon.bench.lines import Line, in_words, least_squares, wins
from deepinfer.daemon.bench.load import Streams, random_prompt, started_daemon, step_together, until_together
from deepinfer.daemon.bench.results import check_plot, save_figure, write_json
from deepinfer.daemon.bench.rounds import Spread, noise, print_noise, ratio_line, ratio_of, spread_of
from deepinfer.daemon.bench.slope_config import SlopeBench
from deepinfer.daemon.setting import ConfigError

DEFINITIONS = {
    "step_ms": "mean step by the times at which tokens arrive while all streams of that length decode, by round",
    "context": "prompt tokens and half of the new ones: the mean of what the steps read",
    "slope_us_per_1k_tokens": "least squares over the medians of the rounds, for all streams of a step together",
    "kv_gb_per_s": "bytes of keys, values and scales of a token, times the streams, over the slope: how fast more "
    "context is read",
    "wins": "context from which on (begin), or up to which (end), the line lies below that of the first format",
}

Steps = dict[str, dict[int, list[float]]]
"""KV format and prompt length to seconds of a step, one for each round."""


def run_slope_bench(bench: SlopeBench, output: Path | None, plot: Path | None) -> None:
    """Prints a table. Raises ConfigError."""
    bench.check()
    check_plot(plot)
    report = _measure(bench)
    _print(report)
    write_json(report, output)
    if plot is not None:
        _draw(report, plot)


def _measure(bench: SlopeBench) -> dict[str, Any]:
    steps: Steps = {name: {length: [] for length in bench.lengths} for name in bench.formats}
    with ExitStack() as stack:
        clients = {name: stack.enter_context(started_daemon(*bench.options(name))) for name in bench.formats}
        statuses = {name: client.status() for name, client in clients.items()}
        _check_lengths(bench, statuses)
        for number in range(bench.rounds + 1):
            click.echo(f"round {number} of {bench.rounds}" if number else "prompts", err=True)
            for length in bench.lengths:
                for name, client in clients.items():
                    seconds = _step_seconds(client, bench, length, int(statuses[name]["limits"]["vocab_size"]))
                    if number:
                        steps[name][length].append(seconds)
        first = bench.formats[0]
        sha256 = served_sha256(clients[first], statuses[first])
    at = [length + bench.new_tokens / 2 for length in bench.lengths]
    lines = {name: least_squares(at, [statistics.median(steps[name][n]) for n in bench.lengths]) for name in steps}
    ratios = _ratios(bench, steps, at)
    return {
        **conditions(),
        "model": statuses[first]["model"],
        "model_sha256": sha256,
        "settings": asdict(bench),
        "definitions": DEFINITIONS,
        "contexts": at,
        "formats": {
            name: _format(line, lines[first], statuses[name], steps[name], bench.concurrency)
            for name, line in lines.items()
        },
        "ratios": {name: ratio._asdict() for name, ratio in ratios.items()},
        "too_noisy": noise(ratios, bench.rounds),
    }


def _check_lengths(bench: SlopeBench, statuses: Mapping[str, Mapping[str, Any]]) -> None:
    longest = min(status["engine"]["max_context"] for status in statuses.values()) - bench.new_tokens
    if max(bench.lengths) > longest:
        raise ConfigError(
            f"contexts is {bench.contexts!r}; with {bench.new_tokens} new tokens this model takes at most {longest}",
            "contexts",
        )


def _step_seconds(client: Client, bench: SlopeBench, length: int, vocab_size: int) -> float:
    def measured() -> float:
        with Streams(client) as streams:
            for number in range(bench.concurrency):
                streams.send(random_prompt(length, length * 97 + number, vocab_size), bench.new_tokens)
            streams.until_all_done()
        return step_together(streams.seen)

    return until_together(measured)


def _ratios(bench: SlopeBench, steps: Steps, at: list[float]) -> dict[str, Spread]:
    """To the first format: the slopes of each round, and the step at the longest context."""
    slopes = {
        name: [
            least_squares(at, [of_length[length][number] for length in bench.lengths]).slope
            for number in range(bench.rounds)
        ]
        for name, of_length in steps.items()
    }
    longest = max(bench.lengths)
    at_longest = {name: of_length[longest] for name, of_length in steps.items()}
    first, *others = bench.formats
    return {
        **{f"slope, {name} to {first}": ratio_of(slopes, name, first) for name in others if all(slopes[first])},
        **{f"step at {longest}, {name} to {first}": ratio_of(at_longest, name, first) for name in others},
    }


def _format(
    line: Line, first: Line, status: Mapping[str, Any], steps: Mapping[int, list[float]], streams: int
) -> dict[str, Any]:
    engine = status["engine"]
    bytes_per_token = streams * engine["block_bytes"] / engine["block_size"]
    longest = max(steps)
    found = wins(line, first)
    return {
        "engine": engine_facts(dict(status)),
        "step_ms": {
            str(length): spread_of([1e3 * seconds for seconds in values])._asdict() for length, values in steps.items()
        },
        "tokens_per_s": {str(length): streams / statistics.median(values) for length, values in steps.items()},
        "intercept_ms": 1e3 * line.intercept,
        "slope_us_per_1k_tokens": 1e9 * line.slope,
        "r2": line.r2,
        "kv_gb_per_s": bytes_per_token / line.slope / 1e9 if line.slope > 0 else None,
        "wins": found._asdict() if line is not first else None,
        "in_words": in_words(found, longest) if line is not first else "",
    }


def _print(report: Mapping[str, Any]) -> None:
    lengths = list(next(iter(report["formats"].values()))["step_ms"])
    row = "{:18}" + " {:>9}" * len(lengths) + " {:>10} {:>12} {:>6} {:>8}  {}"
    click.echo(
        f"{report['machine']['cpu']}; {report['model']}; {report['settings']['concurrency']} at a time; step, ms"
    )
    click.echo(row.format("KV format", *lengths, "intercept", "us/1k tokens", "r2", "KV GB/s", ""))
    for name, found in report["formats"].items():
        click.echo(
            row.format(
                name,
                *(f"{step['median']:.2f}" for step in found["step_ms"].values()),
                f"{found['intercept_ms']:.2f}",
                f"{found['slope_us_per_1k_tokens']:.0f}",
                f"{found['r2']:.3f}",
                "-" if found["kv_gb_per_s"] is None else f"{found['kv_gb_per_s']:.1f}",
                found["in_words"],
            )
        )
    for name, ratio in report["ratios"].items():
        click.echo(ratio_line(name, Spread(**ratio)))
    print_noise(report)


def _draw(report: Mapping[str, Any], plot: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    at = report["contexts"]
    for name, found in report["formats"].items():
        points = axes.plot(at, [step["median"] for step in found["step_ms"].values()], "o", label=name)
        ends = [0, max(at)]
        line = [found["intercept_ms"] + found["slope_us_per_1k_tokens"] * x / 1e6 for x in ends]
        axes.plot(ends, line, color=points[0].get_color())
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("decode step, ms")
    axes.set_ylim(bottom=0)
    axes.grid(True, alpha=0.3)
    axes.legend(title="KV format")
    axes.set_title(f"{report['model']}, {report['machine']['cpu']}")
    save_figure(figure, plot)
