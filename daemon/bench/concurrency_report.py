"""What `bench concurrency` prints and draws."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from deepinfer.daemon.bench.results import save_figure
from deepinfer.daemon.bench.rounds import Spread, print_noise, ratio_line

_HEAD = ("KV format", "c", "tokens/s", "GB/s", "TTFT ms", "p99", "TPOT ms", "p99", "ITL ms", "p99", "E2EL ms", "failed")
_ROW = "{:18} {:>4} {:>9} {:>7} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>9} {:>7}"
LATENCIES = ("ttft", "tpot", "itl")


def print_report(report: Mapping[str, Any]) -> None:
    machine, engine = report["machine"], next(iter(report["engines"].values()))
    click.echo(
        f"{machine['cpu']}, {engine['device']}, {engine['threads']} threads; {report['model']}; "
        f"{report['settings']['rounds']} rounds, medians over their requests"
    )
    click.echo(_ROW.format(*_HEAD))
    for point in report["points"]:
        click.echo(_ROW.format(*_cells(point)))
    click.echo("GB/s: weights, keys and values that decode steps read, over the time of decode steps alone")
    for name, ratio in report["ratios"].items():
        click.echo(ratio_line(name, Spread(**ratio)))
    for error in report["errors"]:
        click.secho(f"failed: {error}", fg="red")
    if report["model_sha256"] is None:
        click.echo("the weights are not on this machine, so the result does not name their hash")
    print_noise(report)


def _cells(point: Mapping[str, Any]) -> list[str]:
    own = point["deepinfer"]
    gb_per_s = "-" if own["gb_per_s"] is None else f"{own['gb_per_s']:.1f}"
    return [
        own["kv_cache_dtype"],
        str(point["max_concurrency"]),
        f"{point['output_throughput']:.1f}",
        gb_per_s,
        *(f"{point[f'{kind}_{name}_ms']:.1f}" for name in LATENCIES for kind in ("median", "p99")),
        f"{point['median_e2el_ms']:.1f}",
        str(point["failed"]),
    ]


def write_plot(report: Mapping[str, Any], plot: Path | None) -> None:
    """Tokens per second, and the times to the first and to each further token, against the concurrency."""
    if plot is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    panels = (
        ("output_throughput", "tokens/s"),
        ("median_ttft_ms", "time to first token, ms"),
        ("median_tpot_ms", "time per token, ms"),
    )
    for axes, (key, label) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for name in dict.fromkeys(point["deepinfer"]["kv_cache_dtype"] for point in report["points"]):
            of_format = [point for point in report["points"] if point["deepinfer"]["kv_cache_dtype"] == name]
            of_format.sort(key=lambda point: point["max_concurrency"])
            axes.plot([p["max_concurrency"] for p in of_format], [p[key] for p in of_format], "o-", label=name)
        axes.set_xlabel("requests at the same time")
        axes.set_xticks(sorted({point["max_concurrency"] for point in report["points"]}))
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(True, alpha=0.3)
    axes.legend(title="KV format")
    figure.suptitle(f"{report['model']}, {report['machine']['cpu']}")
    save_figure(figure, plot)
