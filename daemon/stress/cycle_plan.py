"""What is done to a daemon in one cycle, and what may then become of it. Nothing here starts or asks anything."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MOMENTS = ("loading", "ready", "load", "swap", "stopping")
ENGINE_BLOWS = ("kill", "term", "int", "twice", "stop")
FRONT_BLOWS = (*ENGINE_BLOWS, "freeze")
"""twice: SIGTERM, and again after a while. stop: SIGSTOP, and SIGKILL after a while. freeze: SIGSTOP of the engine, and
SIGKILL of the front after a while."""
AIMS = (*(("front", blow) for blow in FRONT_BLOWS), *(("engine", blow) for blow in ENGINE_BLOWS))
VICTIMS = ("front", "engine")
STARTS = ("foreground", "detached")
Kind = tuple[str, tuple[str, str], bool]
"""A moment, an aim, and whether the start is detached."""
KINDS: tuple[Kind, ...] = tuple(itertools.product(MOMENTS, AIMS, (False, True)))
INTERRUPTED = (1, 130, -signal.SIGINT)
"""Exit codes of a Python program that is interrupted before it has its own handler."""


class Plan(NamedTuple):
    """Of `delay` and `pause` the plan knows a share from 0 to 1; how long that is depends on the moment."""

    number: int
    moment: str
    victim: str
    blow: str
    detach: bool
    delay: float
    """Until the blow, since its moment has come."""
    pause: float
    """Between the two signals of a blow that has two."""

    @property
    def kind(self) -> str:
        return f"{self.blow} of the {self.victim}, {self.moment}, {'detached' if self.detach else 'in the foreground'}"

    @property
    def crash(self) -> bool:
        """The front is killed, so nobody clears up."""
        return self.victim == "front" and self.blow in ("kill", "stop", "freeze")

    @property
    def survives(self) -> bool:
        """The daemon must be ready again afterwards, and end only when it is told to."""
        return self.victim == "engine" and self.moment not in ("loading", "stopping")

    def exit_codes(self) -> tuple[int, ...]:
        """Of `start` in the foreground."""
        if self.crash:
            return (-signal.SIGKILL,)
        if self.victim == "engine":
            return (0,) if self.survives else (0, 1)
        if self.moment != "loading":
            return (0,)
        return (0, *INTERRUPTED) if self.blow == "int" else (0, -signal.SIGTERM)

    def stream_ends(self, seconds: float, drain_s: float) -> set[str]:
        """Finish reasons and error codes that a stream may end with. `seconds`: how long the end took."""
        if self.crash:
            return {"length", "connection_lost"}
        if self.survives:
            return {"length"}
        cut = self.blow == "twice" or self.moment == "stopping" or seconds >= drain_s
        return {"length", "shutting_down"} if cut else {"length"}


def plan(seed: int, number: int, kinds: Sequence[Kind] = KINDS) -> Plan:
    """The same for the same numbers and kinds. Every kind comes once before any comes again."""
    turn, place = divmod(number, len(kinds))
    kind = kinds[np.random.default_rng([seed, 0, turn]).permutation(len(kinds))[place]]
    moment, (victim, blow), detach = kind
    delay, pause = np.random.default_rng([seed, 1, number]).random(2)
    return Plan(number, moment, victim, blow, detach, float(delay), float(pause))
