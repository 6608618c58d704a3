"""The thread that computes gives each caller what its own call returned or raised, and keeps nothing of it."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from deepinfer.stages.compute import ComputeThread


@pytest.fixture
def compute():
    thread = ComputeThread()
    yield thread
    thread.close()


def test_every_caller_gets_its_own_result_or_error_and_calls_never_overlap(compute):
    inside = 0

    def job(number: int) -> int:
        nonlocal inside
        inside += 1
        assert inside == 1
        time.sleep(0.0005)
        inside -= 1
        if number % 3 == 0:
            raise KeyError(number)
        return number * number

    def ask(number: int) -> int | str:
        try:
            return compute.run(job, number)
        except KeyError as error:
            return f"error {error}"

    with ThreadPoolExecutor(8) as callers:
        answers = list(callers.map(ask, range(200)))
    assert answers == [f"error {n}" if n % 3 == 0 else n * n for n in range(200)]
    assert compute.progress == 200
    assert not compute.working


def test_all_calls_run_in_one_thread_that_says_that_it_works(compute):
    seen = {compute.run(lambda: (threading.get_ident(), compute.working)) for _ in range(5)}
    assert len(seen) == 1
    assert seen.pop()[1]


class Large:
    pass


@pytest.mark.parametrize("fails", [False, True])
def test_a_result_is_not_kept_while_the_next_call_is_waited_for(compute, fails):
    def make() -> Large:
        made = Large()
        watched.append(weakref.ref(made))
        if fails:
            raise ValueError(made)
        return made

    watched: list[weakref.ref[Large]] = []
    with contextlib.suppress(ValueError):
        compute.run(make)
    give_up = time.monotonic() + 20
    while watched[0]() is not None:  # The thread may just be about to let go of it.
        assert time.monotonic() < give_up
        time.sleep(0.001)
