"""What a bench was to reach, and whether it did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import click


class Goal(NamedTuple):
    name: str
    value: float | None
    """None: it could not be measured."""
    limit: float
    sense: str = "at most"
    """Or `at least`."""

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.limit if self.sense == "at most" else self.value >= self.limit

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "met": self.met}


def print_goals(goals: Iterable[Mapping[str, Any]]) -> None:
    """As `Goal.as_json` gives them."""
    click.echo("goals")
    for goal in goals:
        value = "-" if goal["value"] is None else f"{goal['value']:.2f}"
        verdict = {True: "met", False: "MISSED", None: "not measured"}[goal["met"]]
        click.echo(f"  {goal['name']:52} {value:>6}, {goal['sense']} {goal['limit']:.2f}: {verdict}")
