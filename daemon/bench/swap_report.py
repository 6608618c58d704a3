"""What `bench swap` prints: a table of each experiment, and its goals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from deepinfer.daemon.bench.goals import print_goals


def print_report(report: Mapping[str, Any]) -> None:
    machine, engine = report["machine"], report["engine"]
    click.echo(
        f"{machine['cpu']}, {engine['threads']} threads; {report['model']}; KV {engine['kv_cache_dtype']}; "
        f"unit {report['offload_unit']}; {report['rounds']} rounds"
    )
    for name, text in _lines(report):
        click.echo(f"  {name:52} {text}")
    print_goals(report["goals"])


def _lines(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    forced, beside, over = report["forced"], report["beside"], report["oversubscribed"]
    plain = forced["plain_copy"]
    step, tpot, rates = beside["step_ms"], beside["tpot_ms"], over["tokens_per_s"]
    return [
        *((f"forced swap, {way}", _copy(forced[way], plain[way])) for way in ("out", "in")),
        (f"forced: {forced['moved']['requests']} that were moved", _pauses(forced["moved"])),
        (f"forced: {forced['stayed']['requests']} that were not", _pauses(forced["stayed"])),
        ("step of those that stay, alone", _ms(step["alone"])),
        (f"the same during a copy, {beside['moves']} moves", _ms(step["during a copy"])),
        ("TPOT of those that stay, others in turns", _ms(tpot["in turns"])),
        ("the same, others swapping", _ms(tpot["swapping"])),
        (f"8 requests over a pool for 2, {over['swaps']} swaps", f"{rates['all at once']:.1f} tokens/s"),
        ("the same two at a time", f"{rates['fitting waves']:.1f} tokens/s"),
        (f"oversubscribed: {over['moved']['requests']} that were moved", _pauses(over["moved"])),
    ]


def _copy(way: Mapping[str, float], plain: float) -> str:
    return (
        f"{way['bytes_per_swap'] / 1e6:.2f} MB in {way['ms_per_swap']:.2f} ms, {way['copies_per_swap']:.1f} copies, "
        f"{way['bytes_per_s'] / 1e9:.2f} GB/s; plain copy {plain / 1e9:.2f} GB/s"
    )


def _pauses(seen: Mapping[str, Any]) -> str:
    return f"TPOT {_ms(seen['tpot_ms'])}, longest gap {_ms(seen['longest_gap_ms'])}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"
