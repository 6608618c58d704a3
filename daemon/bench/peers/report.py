"""What `bench peers` prints: everybody's tokens/s, our ratio to each peer, and why others were not measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from deepinfer.daemon.bench.goals import Goal, print_goals
from deepinfer.daemon.bench.peers.config import Arm
from deepinfer.daemon.bench.peers.measure import OURS
from deepinfer.daemon.bench.rounds import Samples, Spread, print_noise, spread_of

AT_LEAST = 1.0
AT_LEAST_SMALL = 1.2
SMALL = (1, 4)

Rates = Mapping[str, Samples]
"""By arm, then by member."""


def medians(rates: Rates) -> dict[str, dict[str, Spread]]:
    """Of tokens/s, by arm and member."""
    return {arm: {name: spread_of(values) for name, values in of.items() if values} for arm, of in rates.items()}


def ratios(rates: Rates) -> dict[str, dict[str, Spread]]:
    """Ours to each peer's, by arm: of the rounds in which both were measured."""
    found: dict[str, dict[str, Spread]] = {}
    for arm, of in rates.items():
        ours = of[OURS]
        each = {name: [a / b for a, b in zip(ours, values, strict=False)] for name, values in of.items()}
        found[arm] = {name: spread_of(values) for name, values in each.items() if values and name != OURS}
    return found


def best(ratio: Mapping[str, Mapping[str, Spread]]) -> dict[str, dict[str, Any]]:
    """By arm, the peer that is the fastest beside us."""
    found = {}
    for arm, of in ratio.items():
        if of:
            name = min(of, key=lambda peer: of[peer].median)
            found[arm] = {"peer": name, "ours_to_it": of[name].median}
    return found


def goals(arms: Sequence[Arm], of_best: Mapping[str, Mapping[str, Any]]) -> list[Goal]:
    """1.2 times the best peer for one and four streams, as fast as it for the others and in prefill."""
    found = []
    for arm in arms:
        limit = AT_LEAST_SMALL if arm.kind == "decode" and arm.streams in SMALL else AT_LEAST
        value = of_best[arm.name]["ours_to_it"] if arm.name in of_best else None
        found.append(Goal(f"{arm.name}, of the best peer", value, limit, "at least"))
    return found


def as_json(values: Mapping[str, Mapping[str, Spread]], digits: int) -> dict[str, dict[str, dict[str, float]]]:
    return {
        arm: {name: {key: round(part, digits) for key, part in each._asdict().items()} for name, each in of.items()}
        for arm, of in values.items()
    }


def flat(ratio: Mapping[str, Mapping[str, Spread]]) -> dict[str, Spread]:
    return {f"{arm}, ours to {name}": each for arm, of in ratio.items() for name, each in of.items()}


def print_report(report: Mapping[str, Any]) -> None:
    machine = report["machine"]
    sizes = f"{report['threads']} threads; {report['model']}; our KV {report['engine']['kv_cache_dtype']}"
    click.echo(f"{machine['cpu']}, {sizes}; {report['rounds']} rounds, medians")
    names = list(report["fairness"])
    _table("tokens/s", names, report["tokens_per_s"], "median", "9.1f", report["weights_gb_per_s"])
    peers = [name for name in names if name != OURS]
    if peers:
        _table("ours / peer", peers, report["ratios"], "median", "8.2f", None)
        _table("  least", peers, report["ratios"], "min", "8.2f", None)
        _table("  greatest", peers, report["ratios"], "max", "8.2f", None)
    for name, reason in report["not_measured"].items():
        click.echo(f"not measured: {name}: {reason}")
    for name, agreed in report["first_tokens_as_ours"].items():
        click.echo(f"first tokens as ours: {name}: {agreed['same']} of {agreed['prompts']}")
    click.echo("fairness")
    for name, facts in report["fairness"].items():
        parts = (f"{key} {facts[key]}" for key in ("weights", "activations", "kv_cache", "threads"))
        click.echo(f"  {name:18} {'; '.join(parts)}")
    print_goals(report["goals"])
    print_noise(report)


def _table(
    title: str,
    names: Sequence[str],
    values: Mapping[str, Mapping[str, Mapping[str, float]]],
    key: str,
    number: str,
    weights_gb_per_s: Mapping[str, float] | None,
) -> None:
    widths = {name: max(len(name), 9) + 2 for name in names}
    last = "" if weights_gb_per_s is None else "   our GB/s of weights"
    click.echo(f"\n{title:30}" + "".join(f"{name:>{widths[name]}}" for name in names) + last)
    for arm, of in values.items():
        cells = (format(of[name][key], number).strip() if name in of else "-" for name in names)
        line = f"{arm:30}" + "".join(f"{cell:>{widths[name]}}" for cell, name in zip(cells, names, strict=True))
        if weights_gb_per_s is not None and arm in weights_gb_per_s:
            line += f"{weights_gb_per_s[arm]:12.1f}"
        click.echo(line)
