"""What `bench profile` prints: a table for every number of rows, with the rates beside the times."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import click

from deepinfer.daemon.bench.profile.account import Account, mean

PLAIN, SERVED = "as the engine runs it", "through a daemon's sockets"


def entry(plain: Sequence[int], timed: Sequence[Account], served: Sequence[float]) -> dict[str, Any]:
    """Of one number of rows, in milliseconds. The parts of `operators` and `between` sum up to `timed_ms`."""
    account = mean(timed)
    operators = {
        name: {
            "ms": account.operators[name].time / 1e6,
            "share": account.operators[name].time / account.whole,
            "waiting": 1 - operator.busy / operator.time,
            "calls": operator.calls,
            "tasks": operator.tasks,
            "bytes": operator.bytes,
            "flops": operator.flops,
            "gb_per_s": operator.bytes / operator.time,
            "gflop_per_s": operator.flops / operator.time,
        }
        for name, operator in account.operators.items()
    }
    between = {name: {"ms": time / 1e6, "share": time / account.whole} for name, time in account.between.items()}
    quiet = sorted(plain)[: -(-len(plain) // 2)]
    return {
        "timed_ms": account.whole / 1e6,
        "plain_ms": sum(quiet) / len(quiet) / 1e6,
        "served_ms": statistics.median(served) / 1e6 if served else None,
        "operators_share": account.named / account.whole,
        "operators": operators,
        "between": between,
    }


def print_report(report: Mapping[str, Any]) -> None:
    machine, engine = report["machine"], report["engine"]
    click.echo(
        f"{machine['cpu']}, {engine['threads']} threads; {report['model']}; KV {engine['kv_cache_dtype']}; a copy of "
        f"memory reads and writes {report['copy_gb_per_s']:.1f} GB/s"
    )
    for rows, found in report["decode"].items():
        _print_one(f"decode, {rows} rows at {report['context']} tokens ({report['decode_steps']})", found)
    for rows, found in report["prefill"].items():
        _print_one(f"prefill chunk of {rows} rows (call by call)", found)


def _print_one(title: str, found: Mapping[str, Any]) -> None:
    click.echo(f"\n{title}")
    click.echo(f"  {'':28}{'ms':>9}{'%':>7}{'GB/s':>8}{'GFLOP/s':>9}{'MB':>9}{'calls':>7}{'tasks':>7}{'waiting':>9}")
    for name, part in found["operators"].items():
        flops = f"{part['gflop_per_s']:.1f}" if part["flops"] else "-"
        click.echo(
            f"  {name:28}{part['ms']:9.3f}{part['share']:7.1%}{part['gb_per_s']:8.1f}{flops:>9}"
            f"{part['bytes'] / 1e6:9.2f}{part['calls']:7}{part['tasks']:7}{part['waiting']:9.1%}"
        )
    for name, part in found["between"].items():
        click.echo(f"  {name:28}{part['ms']:9.3f}{part['share']:7.1%}")
    click.echo(f"  {'all of it':28}{found['timed_ms']:9.3f}{1:7.1%}")
    click.echo(f"  {PLAIN:28}{found['plain_ms']:9.3f}{found['plain_ms'] / found['timed_ms']:7.1%}")
    if found["served_ms"] is not None:
        over = found["served_ms"] / found["plain_ms"] - 1
        click.echo(f"  {SERVED:28}{found['served_ms']:9.3f}   {over:+.1%} for stages, sockets and scheduling")
