"""What a stress run measured: copies beside a plain copy of as many bytes, and the pauses that requests saw."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import click

from deepinfer.daemon.stress.client import Outcome
from deepinfer.daemon.stress.copies import Direction, PlainCopies, StressCopies
from deepinfer.stages.preemption import describe_choice

SHOWN_FAILURES = 5


def copy_report(counters: dict[str, Any], copies: StressCopies, plain: PlainCopies) -> dict[str, Any]:
    """By direction. The engine's own counters cover a whole swap: also injected delays, and what the offload stage does
    around its copies. `copy_seconds` are the copies alone."""
    rates = plain.rates()
    return {
        "plain_copy": {"bytes": rates["bytes"], "samples": rates["samples"]},
        "out": _direction(
            counters["requests_swapped_total"],
            counters["kv_cpu_offload_blocks_total"],
            counters["kv_cpu_offload_bytes_total"],
            counters["kv_cpu_offload_copies_total"],
            counters["cpu_offload_seconds"],
            copies.out,
            rates["out"],
        ),
        "in": _direction(
            counters["requests_resumed_total"],
            counters["kv_cpu_reload_blocks_total"],
            counters["kv_cpu_reload_bytes_total"],
            counters["kv_cpu_reload_copies_total"],
            counters["cpu_reload_seconds"],
            copies.back,
            rates["in"],
        ),
    }


def _direction(
    swaps: int, blocks: int, size: int, copies: int, seconds: float, seen: Direction, plain: float | None
) -> dict[str, Any]:
    rate = size / seconds if seconds else None
    copy_rate = seen.bytes / seen.seconds if seen.seconds else None
    return {
        "swaps": swaps,
        "blocks": blocks,
        "bytes": size,
        "copies": copies,
        "runs_of_rows": seen.copies - seen.continued,
        "copies_per_swap": copies / swaps if swaps else None,
        "seconds": seconds,
        "bytes_per_s": rate,
        "copy_seconds": seen.seconds,
        "copy_bytes_per_s": copy_rate,
        "plain_bytes_per_s": plain,
        "times_a_plain_copy": plain / rate if plain and rate else None,
        "copies_times_a_plain_copy": plain / copy_rate if plain and copy_rate else None,
    }


def latency_report(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Seconds, medians: the longest pause between two tokens of requests that were moved out, and of the others."""
    moved = [outcome for outcome in outcomes if outcome.parks]
    stayed = [outcome for outcome in outcomes if not outcome.parks]
    return {
        "requests_moved": len(moved),
        "requests_that_stayed": len(stayed),
        "most_parks": max((outcome.parks for outcome in outcomes), default=0),
        "longest_gap_moved_s": _median(outcome.longest_gap for outcome in moved),
        "longest_gap_stayed_s": _median(outcome.longest_gap for outcome in stayed),
        "swapped_s": _median(outcome.swapped_seconds for outcome in moved),
    }


def _median(values: Any) -> float | None:
    values = list(values)
    return statistics.median(values) if values else None


def print_report(report: dict[str, Any]) -> None:
    """For people; everything is in the JSON."""
    click.echo(f"KV {report['kv_cache_dtype']}, blocks of {report['block_bytes']} bytes")
    for name, text in _lines(report):
        click.echo(f"  {name:40} {text}")
    for check in report["checks"]:
        click.echo(f"  {check['name']:40} {'ok' if check['passed'] else 'FAILED'}")
        for failure in check["failures"][:SHOWN_FAILURES]:
            click.echo(f"    {failure}")
        more = len(check["failures"]) - SHOWN_FAILURES
        if more > 0:
            click.echo(f"    and {more} more")
    click.echo("passed" if report["passed"] else "FAILED")


def _lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    counters, latency = report["counters"], report["latency"]
    ends = ", ".join(f"{count} {reason}" for reason, count in report["requests"].items())
    lines = [
        ("requests", f"{ends}; {report['seconds']:.1f} s, {report['tokens_per_s']:.1f} tokens/s"),
        (
            "moves",
            f"{counters['requests_swapped_total']} out, {counters['requests_resumed_total']} back, "
            f"{counters['requests_recomputed_total']} computed again, "
            f"{counters['kv_cpu_offload_failed_total']} failed, {counters['kv_cpu_offload_rejected_total']} rejected; "
            f"at most {latency['most_parks']} parks of a request",
        ),
        ("preemption", describe_choice(report["preemption"])),
        ("injected", ", ".join(f"{count} {name}" for name, count in report["faults"].items())),
        ("copies out", _copies(report["copies"]["out"])),
        ("copies in", _copies(report["copies"]["in"])),
        (
            "longest pause",
            f"{_milliseconds(latency['longest_gap_moved_s'])} of {latency['requests_moved']} that were moved, "
            f"{_milliseconds(latency['longest_gap_stayed_s'])} of {latency['requests_that_stayed']} that were not",
        ),
        ("process", f"grew by {report['rss_growth_bytes'] / 2**20:.1f} MiB"),
    ]
    if "fitting" in report:
        fitting = report["fitting"]
        lines.append(
            (
                f"{fitting['clients']} at a time",
                f"{fitting['tokens_per_s']:.1f} tokens/s, {fitting['swaps']} swaps; "
                f"the run above reached {fitting['oversubscribed_to_fitting']:.0%} of it",
            )
        )
    return lines


def _copies(way: dict[str, Any]) -> str:
    if not way["swaps"]:
        return "none"
    return (
        f"{way['copies']} for {way['runs_of_rows']} runs of rows, {way['copies_per_swap']:.1f} a swap; "
        f"{way['bytes'] / 1e6:.2f} MB in {1000 * way['seconds']:.2f} ms, {_rate(way['bytes_per_s'])}; "
        f"copies alone {_rate(way['copy_bytes_per_s'])}; plain copy {_rate(way['plain_bytes_per_s'])}, "
        f"{_times(way['times_a_plain_copy'])} the swaps' rate, {_times(way['copies_times_a_plain_copy'])} the copies'"
    )


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f} times"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e9:.2f} GB/s"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"
