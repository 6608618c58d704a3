"""How long a fuzz test goes on: its share of the suite, or with DEEPINFER_FUZZ_SECONDS=60 so many seconds each."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator

from hypothesis import HealthCheck, settings

SECONDS = float(os.environ.pop("DEEPINFER_FUZZ_SECONDS", "0"))
"""Taken out of the environment: it is no setting of the daemons that tests start."""


def rounds() -> Iterator[int]:
    """0, then 1, 2, ... until the seconds are over: seeds."""
    give_up = time.monotonic() + SECONDS
    yield 0
    for number in itertools.count(1):
        if time.monotonic() >= give_up:
            return
        yield number


def fuzz(examples: int) -> Callable[[Callable], Callable]:
    """Over `given`: rounds of so many examples, which differ every time."""

    def decorate(test: Callable) -> Callable:
        batch = settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])(test)

        @functools.wraps(batch)
        def for_seconds() -> None:
            for _ in rounds():
                batch()

        return for_seconds

    return decorate
