"""What `kv-quality` makes of its figures: a table, the gate, a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from deepinfer.daemon.setting import ConfigError

_HEAD = ("KV format", "bytes/token", "KLD mean", "p99", "max", "top-1 %", "dPPL", "parts at", "same", "passkey")
_ROW = "{:20} {:>11} {:>9} {:>9} {:>9} {:>8} {:>8} {:>9} {:>6} {:>8}"


def gate_failures(report: Mapping[str, Any]) -> list[str]:
    """One sentence for each limit that a format is over. A figure that is not a number is over every limit."""
    max_kld, min_top1 = report["gate"]["max_kld"], report["gate"]["min_top1"]
    failures = []
    for name, row in report["formats"].items():
        kld, top1 = row["kld"]["mean"], row["top1_percent"]
        if max_kld is not None and not kld <= max_kld:
            failures.append(f"{name}: mean KLD is {kld:.3g}, the limit is {max_kld:g}")
        if min_top1 is not None and not top1 >= min_top1:
            failures.append(f"{name}: top-1 agreement is {top1:.2f} %, the limit is {min_top1:g} %")
    return failures


def print_report(report: Mapping[str, Any]) -> None:
    base, engine = report["baseline"], report["engine"]
    click.echo(
        f"{report['model']} on {engine['device']}, compute {engine['compute_dtype']}{_changes(report)}; "
        f"{base['positions']} positions; "
        f"against KV {base['format']}: perplexity {base['perplexity']:.2f}, passkeys {_hits(base['passkeys'])}"
    )
    click.echo(_ROW.format(*_HEAD))
    for name, row in report["formats"].items():
        kld, parts = row["kld"], row["median_first_divergence"]
        click.echo(
            _ROW.format(
                name,
                f"{row['bytes_per_token']:.0f}",
                *(f"{kld[key]:.1e}" for key in ("mean", "p99", "max")),
                f"{row['top1_percent']:.2f}",
                f"{row['perplexity_change']:+.3f}",
                "-" if parts is None else f"{parts:.0f}",
                f"{row['same_texts']}/{len(row['first_divergence'])}",
                _hits(row["passkeys"]),
            )
        )
    for failure in report["gate"]["failed"]:
        click.secho(f"FAILED {failure}", fg="red")


def _changes(report: Mapping[str, Any]) -> str:
    """Of the model, for what is measured."""
    settings = report["settings"]
    rounded, offset = settings["w4_activations"], settings["key_offset"]
    parts = [
        "" if rounded == "auto" else f", 4-bit weights meet {rounded} activations",
        f", {offset:g} added to key channels (kv_key_bias {settings['kv_key_bias']})" if offset else "",
    ]
    return "".join(parts)


def _hits(passkeys: list[bool]) -> str:
    return f"{sum(passkeys)}/{len(passkeys)}"


def check_plot() -> None:
    """Raises ConfigError where a picture cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plot needs matplotlib, which is not installed: pip install 'deepinfer-daemon[plot]'", "plot")


def write_plot(report: Mapping[str, Any], path: Path) -> None:
    """Mean KL divergence against bytes per token, one mark for each format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, row in report["formats"].items():
        at = row["bytes_per_token"], row["kld"]["mean"]
        axes.plot(*at, "o", color="tab:blue")
        axes.annotate(name, at, xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.set_yscale("log")
    axes.set_xlabel("bytes per token")
    axes.set_ylabel(f"mean KL divergence from KV {report['baseline']['format']}, nats")
    axes.set_title(f"{report['model']}, {report['baseline']['positions']} positions")
    axes.grid(True, which="both", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
