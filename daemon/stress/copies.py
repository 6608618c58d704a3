"""What stands in the place of the offload stage's copy: it injects faults, and it sees every byte that moves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from deepinfer.daemon.stress.swap_config import StressConfig
from deepinfer.stages.offload import copy_rows

MAX_SAMPLES = 1000
MIN_PLAIN_BYTES = 64 << 20


class InjectedFault(RuntimeError):
    """A copy that failed because the stress run wanted it to."""


@dataclass
class Direction:
    """What went one way. `seconds` are those of the copies alone, without injected delays."""

    copies: int = 0
    bytes: int = 0
    seconds: float = 0.0
    continued: int = 0
    """Copies whose rows continue those of the copy before on both sides: it could have been one copy."""
    last_end: tuple[int, int] = (0, 0)
    """Addresses after the last copy's destination and source."""


@dataclass
class Faults:
    slow: int = 0
    failed: int = 0
    corrupted: int = 0


@dataclass
class StressCopies:
    """Called by the offload thread alone. `watch` before the load starts; until then nothing is injected or counted."""

    config: StressConfig
    faults: Faults = field(default_factory=Faults)
    out: Direction = field(default_factory=Direction)
    back: Direction = field(default_factory=Direction)
    host_rows: set[int] = field(default_factory=set)
    """Addresses of the host rows that were ever written: what of the host memory is really in use."""

    def __post_init__(self) -> None:
        self._random = np.random.default_rng([self.config.seed, 3])
        self._pool: tuple[int, int] | None = None

    def watch(self, pool: torch.Tensor) -> None:
        self._pool = (pool.data_ptr(), pool.data_ptr() + pool.numel())

    def __call__(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Raises InjectedFault, at the configured rate."""
        if self._pool is None:
            copy_rows(destination, source)
            return
        self._delay_or_fail()
        began = time.perf_counter()
        copy_rows(destination, source)
        self._note(destination, source, time.perf_counter() - began)
        if self._random.random() < self.config.corrupt_copies:
            self.faults.corrupted += 1
            row, column = (int(self._random.integers(size)) for size in destination.shape)
            destination[row, column] ^= 0xFF

    def _delay_or_fail(self) -> None:
        rate, seconds = self.config.slow
        if self._random.random() < rate:
            self.faults.slow += 1
            time.sleep(seconds)
        if self._random.random() < self.config.failed_copies:
            self.faults.failed += 1
            raise InjectedFault("injected by the stress run")

    def _note(self, destination: torch.Tensor, source: torch.Tensor, seconds: float) -> None:
        begins = (destination.data_ptr(), source.data_ptr())
        first, last = self._pool or (0, 0)
        way = self.back if first <= begins[0] < last else self.out
        if way is self.out:
            self.host_rows.update(range(begins[0], begins[0] + destination.numel(), destination.shape[-1]))
        way.copies += 1
        way.bytes += source.numel()
        way.seconds += seconds
        way.continued += begins == way.last_end
        way.last_end = (begins[0] + destination.numel(), begins[1] + source.numel())


class PlainCopies:
    """The peer of a swap: one torch copy of `rows` rows, timed at the ends of the requests of the same run.

    It goes from and to changing places of large buffers, as a swap finds its bytes: what a cache has would flatter it.
    """

    def __init__(self, pool: torch.Tensor, rows: int) -> None:
        shape = (max(len(pool), -(-MIN_PLAIN_BYTES // pool.shape[1])), pool.shape[1])
        self._device = torch.ones(shape, dtype=torch.uint8, device=pool.device)
        self._host = torch.ones(shape, dtype=torch.uint8, pin_memory=pool.is_cuda)
        self._rows = rows
        self._first = 0
        self._out: list[float] = []
        self._back: list[float] = []

    def measure(self) -> None:
        if len(self._out) < MAX_SAMPLES:
            self._out.append(self._seconds(self._host, self._device))
            self._back.append(self._seconds(self._device, self._host))

    def _seconds(self, destination: torch.Tensor, source: torch.Tensor) -> float:
        self._first = (self._first + self._rows) % (len(source) - self._rows + 1)
        place = slice(self._first, self._first + self._rows)
        began = time.perf_counter()
        copy_rows(destination[place], source[place])
        return time.perf_counter() - began

    def rates(self, average: Callable[[Sequence[float]], float] = statistics.mean) -> dict[str, Any]:
        """Bytes per second, from the average time of all samples. A mean where the other side of a comparison is one:
        both have the waits of a busy machine in them."""
        size = self._rows * self._host.shape[1]
        return {
            "bytes": size,
            "samples": len(self._out),
            "out": size / average(self._out) if self._out else None,
            "in": size / average(self._back) if self._back else None,
        }
