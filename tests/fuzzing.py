"""How long a fuzz test goes on: its share of the suite, or with DEEPINFER_FUZZ_SECONDS=60 so many seconds each."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

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


def fuzz(examples: int, repeatable: bool = False) -> Callable[[Callable], Callable]:
    """Over `given`: rounds of so many examples, which differ every time. `repeatable`: as a share of the suite they are
    always the same."""

    def decorate(test: Callable) -> Callable:
        same = {"derandomize": True, "database": None} if repeatable and not SECONDS else {}
        slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
        batch = settings(max_examples=examples, deadline=None, suppress_health_check=slow, **same)(test)

        @functools.wraps(batch)
        def for_seconds(*fixtures: Any, **named: Any) -> None:
            for _ in rounds():
                batch(*fixtures, **named)

        return for_seconds

    return decorate
