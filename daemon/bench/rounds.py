"""Samples of rounds in which everything took turns: their median and spread, ratios, and when they are too noisy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click

NOISY = 0.05
"""Of the median: two runs whose ratios are surer than that agree to within it."""
RISK = 0.05
"""That the true median lies outside `low` to `high`."""

Samples = Mapping[str, Sequence[float]]
"""By what was measured: one value for each round, in the order of the rounds."""


class Spread(NamedTuple):
    """Over the rounds. `low` to `high` holds the true median but for `RISK`, whatever the distribution: these are the
    order statistics of the sign test, so they are the least and the greatest while rounds are few."""

    median: float
    min: float
    max: float
    low: float
    high: float

    @property
    def doubt(self) -> float:
        """How far apart the medians of two such runs may be, of the median."""
        return (self.high - self.low) / abs(self.median) if self.median else math.inf


def spread_of(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    cut = _outermost(len(ordered))
    return Spread(statistics.median(ordered), ordered[0], ordered[-1], ordered[cut], ordered[-1 - cut])


def _outermost(count: int) -> int:
    """How many values may be left out at each end: the chance that fewer than so many, or exactly so many, of `count`
    fair coins fall one way, for either way, is at most RISK."""
    cut, chance = 0, 0.0
    while 2 * cut < count:
        chance += 2 * math.comb(count, cut) / 2**count
        if chance > RISK:
            break
        cut += 1
    return max(0, cut - 1)


def ratio_of(samples: Samples, ours: str, other: str) -> Spread:
    """Of the ratios of the rounds, so that a slow minute of the machine hits both sides."""
    return spread_of([a / b for a, b in zip(samples[ours], samples[other], strict=True)])


def noise(ratios: Mapping[str, Spread], rounds: int) -> str | None:
    """One sentence where another run may say something else, or None."""
    if not ratios:
        return None
    if rounds < 2:
        return "one round does not tell how noisy this machine is: use more --rounds"
    name, worst = max(ratios.items(), key=lambda entry: entry[1].doubt)
    if worst.doubt <= NOISY:
        return None
    return (
        f"too noisy: {name} lies between {worst.low:.3g} and {worst.high:.3g} over {rounds} rounds, {worst.doubt:.0%} "
        f"apart; another run may differ by more than {NOISY:.0%}. Use more --rounds or a quieter machine"
    )


def ratio_line(name: str, ratio: Spread) -> str:
    return f"{name:42} {ratio.median:10.2f} x   ({ratio.min:.2f} to {ratio.max:.2f})"


def print_noise(report: Mapping[str, Any]) -> None:
    """The one line that says whether another run would say the same: `too_noisy` of a report is what `noise` found."""
    if report["too_noisy"] is not None:
        click.secho(report["too_noisy"], fg="yellow")
    elif report["ratios"]:
        click.echo(f"another run should give the same ratios to within {NOISY:.0%}")
