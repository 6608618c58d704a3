"""Seconds of a call on the device at hand, repeated for long enough; on a GPU as a captured graph between events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import torch

from deepinfer.kernels.cpu.tasks import Recording, recording
from deepinfer.kernels.ops import Ops

SHORTEST = 0.04
"""Seconds that a measurement takes at least."""

Measure = Callable[[], float]
"""Seconds of one call, averaged over a measurement."""


def prepare(ops: Ops, function: Callable[[], None]) -> Measure:
    """Run `function` once, so that everything is compiled, and return what measures it.

    Where there are graphs it is captured, and on the CPU it is recorded, as decode steps are: so kernels are measured,
    not Python.
    """
    function()
    if ops.capture is not None:
        return repeated(ops, ops.capture(function).replay)
    if ops.name != "cpu":
        return repeated(ops, function)
    with recording() as recorder:
        function()
    return repeated(ops, partial(Recording(recorder).run, numba.get_num_threads()))


def repeated(ops: Ops, function: Callable[[], Any]) -> Measure:
    """Measures `function` as it is, as often as it takes for `SHORTEST` seconds."""
    count = 1

    def measure() -> float:
        nonlocal count
        while True:
            seconds = _seconds(ops, function, count)
            if seconds >= SHORTEST:
                return seconds / count
            count = max(count + 1, int(count * min(10.0, 1.2 * SHORTEST / max(seconds, 1e-9))))

    return measure


def _seconds(ops: Ops, function: Callable[[], Any], count: int) -> float:
    ops.synchronize()
    if ops.device == "cpu":
        began = time.perf_counter()
        for _ in range(count):
            function()
        return time.perf_counter() - began
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def copy_measure(ops: Ops, size: int) -> Measure:
    """Seconds of copying `size` bytes within the device's memory, by torch."""
    source = torch.ones(size, dtype=torch.uint8, device=ops.device)
    target = torch.zeros_like(source)
    return repeated(ops, lambda: target.copy_(source))


def in_rounds(arms: dict[str, Measure], rounds: int) -> dict[str, list[float]]:
    """Every arm once in each round: a slow minute of the machine then hits all of them."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, measure in arms.items():
            samples[name].append(measure())
    return samples


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
