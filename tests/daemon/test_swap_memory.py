"""A thousand swaps leave the process as large as it was."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch
from forced_swaps import force_swaps

from deepinfer.daemon.engine import Engine

PROMPT = list(range(1, 151))
SWAPS_OF_A_REQUEST = 250
FLAT_BYTES = 4 << 20
"""One block of 4,096 bytes lost in every swap would be as much."""


class KeptCopies:
    """A copy that keeps what it copied out, if it is told to: the leak that the test must see."""

    def __init__(self, leaks: bool) -> None:
        self.leaks = leaks
        self.kept: list[torch.Tensor] = []

    def __call__(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)
        if self.leaks:
            self.kept.append(source.clone())


@pytest.mark.parametrize(("offload_unit", "leaks"), [("request", False), ("block", False), ("block", True)])
def test_the_process_does_not_grow_over_a_thousand_swaps(tiny_path, offload_unit, leaks):
    """Resident memory of this process, in which all stages run, after one request with as many swaps to warm up."""
    settings = {"num_blocks": 64, "block_size": 8, "max_cpu_offload_mb": 8, "offload_unit": offload_unit, "threads": 1}
    with Engine(tiny_path, copy=KeptCopies(leaks), **settings) as engine:
        last: dict[int, int] = {}

        def before_every_token(entry: Any) -> bool:
            due = entry.yielded > 0 and entry.length != last.get(entry.rid)
            last[entry.rid] = entry.length
            return due

        force_swaps(engine, before_every_token, blocks=12)
        resident = []
        for _ in range(5):
            answer = engine.complete(PROMPT, max_new_tokens=SWAPS_OF_A_REQUEST + 1, ignore_eos=True)
            assert answer.preemptions >= SWAPS_OF_A_REQUEST - 1
            resident.append(psutil.Process().memory_info().rss)
        assert engine.host.decode.counters.requests_swapped_total >= 5 * SWAPS_OF_A_REQUEST - 5
        assert (resident[-1] - resident[0] < FLAT_BYTES) == (not leaks), resident
