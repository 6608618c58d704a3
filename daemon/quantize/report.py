"""What `quantize` shows: a bar on a terminal, and at the end the matrices that lost most and what that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from deepinfer.daemon.display import mib

_SHOWN = 10
_BAR_WIDTH = 20
_ROW = "{:48} {:>4} {:>6} {:>12}"


@contextmanager
def bar(what: str, total: int, of_bytes: bool = False) -> Iterator[Callable[[str, int], None]]:
    """Gives `advance(name, how much)`. Elsewhere than on a terminal nothing is shown. The name comes last, so that the
    bar stays in its place, and is what a narrow terminal cuts."""
    console = Console(stderr=True)
    whole = Column(no_wrap=True)
    done = DownloadColumn(binary_units=True, table_column=whole) if of_bytes else MofNCompleteColumn(table_column=whole)
    columns = (
        TextColumn("{task.description}", table_column=whole),
        BarColumn(_BAR_WIDTH),
        done,
        TimeRemainingColumn(table_column=whole),
        TextColumn("{task.fields[name]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
    )
    with Progress(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total, name="")

        def advance(name: str, count: int) -> None:
            progress.update(task, advance=count, name=name)

        yield advance


def print_report(report: Mapping[str, Any], target: Path) -> None:
    matrices = report["matrices"]
    click.echo(
        f"{report['model']} to {target}: {mib(report['source_bytes'])} to {mib(report['bytes'])}, "
        f"{len(matrices)} matrices at {report['bits_per_coded_weight']:.2f} bits a weight, {report['seconds']} s"
    )
    for sentence in _remarks(report):
        click.echo(sentence)
    click.echo(_ROW.format("worst matrices", "bits", "group", "relative L2"))
    for row in matrices[:_SHOWN]:
        click.echo(_ROW.format(row["name"], row["bits"], row["group"], f"{row['relative_l2']:.4f}"))
    click.echo(_ROW.format(f"mean of {len(matrices)}", "", "", f"{mean(row['relative_l2'] for row in matrices):.4f}"))
    click.echo(_said(report["divergence"]))


def _remarks(report: Mapping[str, Any]) -> Iterator[str]:
    if report["requantised"]:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in report["requantised"].items())
        yield f"the source is quantised itself ({kinds}): its weights are rounded a second time"
    if report["left_in_16_bits"]:
        names = report["left_in_16_bits"]
        yield f"left in 16 bits, because no group divides their columns: {', '.join(names[:4])}" + (
            f" and {len(names) - 4} more" if len(names) > 4 else ""
        )
    if report["unties_head"]:
        yield "the head was tied to the embedding; now it is stored beside it, and tie_word_embeddings is false"


def _said(divergence: Mapping[str, Any]) -> str:
    if "skipped" in divergence:
        return f"not compared with the source: {divergence['skipped']}"
    kld = divergence["kld"]
    return (
        f"against the source over {divergence['positions']} positions: KLD mean {kld['mean']:.3g}, p99 "
        f"{kld['p99']:.3g}, max {kld['max']:.3g}; top-1 {divergence['top1_percent']:.2f} %; perplexity "
        f"{divergence['source_perplexity']:.2f} to {divergence['perplexity']:.2f}"
    )
