"""A straight line through latencies, and from where on one line is below another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Line(NamedTuple):
    """y = intercept + slope * x."""

    intercept: float
    slope: float
    r2: float
    """Part of the variance of y that it explains; 1 where y does not vary."""


class Wins(NamedTuple):
    """Where one line is below another: from `begin` to `end`; None: without end. Both None: nowhere."""

    begin: float | None
    end: float | None


def least_squares(x: Sequence[float], y: Sequence[float]) -> Line:
    at, values = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    centred = at - at.mean()
    slope = float((centred * (values - values.mean())).sum() / (centred**2).sum())
    intercept = float(values.mean() - slope * at.mean())
    left = ((values - intercept - slope * at) ** 2).sum()
    total = ((values - values.mean()) ** 2).sum()
    return Line(intercept, slope, 1 - float(left / total) if total > 0 else 1.0)


def wins(ours: Line, other: Line) -> Wins:
    """Where ours is below, for x >= 0."""
    start, climb = ours.intercept - other.intercept, other.slope - ours.slope
    if climb > 0:
        return Wins(max(0.0, start / climb), None)
    if start >= 0:
        return Wins(None, None)
    return Wins(0.0, start / climb if climb < 0 else None)


def in_words(found: Wins, longest: float) -> str:
    """`longest`: what was measured; beyond it the line is a guess."""
    if found.begin is None:
        return "never faster"
    if found.end is not None:
        return f"faster only below {found.end:,.0f} tokens{_guess(found.end, longest)}"
    if found.begin == 0:
        return "faster from the first token on"
    return f"faster from {found.begin:,.0f} tokens on{_guess(found.begin, longest)}"


def _guess(tokens: float, longest: float) -> str:
    return ", which is longer than what was measured" if tokens > longest else ""
