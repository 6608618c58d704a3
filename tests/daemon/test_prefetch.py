"""A swapped request comes back while others are computed, and the counters tell when that hid its copy."""

from __future__ import annotations

import threading
from typing import Any

import torch
from forced_swaps import force_swaps

from deepinfer.daemon.engine import Engine
from deepinfer.stages.memory.entries import State

PROMPT = "The quick brown fox jumps"
FIELDS = {"max_new_tokens": 8, "ignore_eos": True}


class HeldReturn:
    """The copy back waits until the engine has been looked at, so that a test need not wait for the clock."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.pool = torch.empty(0)

    def __call__(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        first = self.pool.data_ptr()
        if first <= destination.data_ptr() < first + self.pool.numel():
            self.began.set()
            assert self.go_on.wait(30)
        destination.copy_(source)


def swap_once(engine: Engine, prompt_tokens: int, copy: HeldReturn | None = None) -> None:
    if copy is not None:
        copy.pool = engine.host.pool.data
    done: set[int] = set()
    force_swaps(engine, lambda e: e.length == prompt_tokens + 3 and e.rid not in done and not done.add(e.rid))


def prefetches(engine: Engine) -> tuple[int, int, int]:
    counters = engine.host.decode.counters
    return counters.prefetch_hits_total, counters.prefetch_misses_total, counters.prefetch_cancelled_total


def test_a_return_beside_a_decoding_request_is_a_hit_and_does_not_stop_it(tiny_path):
    copy = HeldReturn()
    with Engine(tiny_path, batch_invariant=True, num_blocks=64, copy=copy) as engine:
        swap_once(engine, len(PROMPT), copy)
        other = engine.generate("xy", max_new_tokens=400, ignore_eos=True)
        seen = iter(other)
        next(event for event in seen if event.text or getattr(event, "ids", ()))
        stream = engine.generate(PROMPT, **FIELDS)
        assert copy.began.wait(30)
        steps = engine.host.decode.counters.decode_steps_total
        next(event for event in seen if engine.host.decode.counters.decode_steps_total > steps + 3)
        copy.go_on.set()
        assert len(stream.result().ids) == 8
        assert prefetches(engine) == (1, 0, 0)
        other.cancel()
        other.result()


def test_a_return_to_an_idle_engine_is_a_miss(tiny_path):
    copy = HeldReturn()
    copy.go_on.set()
    with Engine(tiny_path, num_blocks=64, copy=copy) as engine:
        swap_once(engine, len(PROMPT), copy)
        engine.complete(PROMPT, **FIELDS)
        assert prefetches(engine) == (0, 1, 0)


def test_a_request_that_is_cancelled_on_its_way_back_counts_as_cancelled(tiny_path):
    copy = HeldReturn()
    with Engine(tiny_path, num_blocks=64, copy=copy) as engine:
        swap_once(engine, len(PROMPT), copy)
        stream = engine.generate(PROMPT, **FIELDS)
        assert copy.began.wait(30)
        assert [entry.state for entry in engine.host.residency.entries.values()] == [State.SWAPPING_IN]
        stream.cancel()
        assert stream.result().finish_reason == "cancelled"
        copy.go_on.set()
        engine.complete("xy", max_new_tokens=2, ignore_eos=True)
        assert prefetches(engine) == (0, 0, 1)


def test_metrics_tell_how_often_requests_were_parked_and_the_most_host_memory_in_use(tiny_path):
    with Engine(tiny_path, num_blocks=64, block_size=8) as engine:
        engine.complete(PROMPT, **FIELDS)
        swap_once(engine, len(PROMPT))
        engine.complete(PROMPT, **FIELDS)
        used = -(-(len(PROMPT) + 2) // 8) * engine.host.plan.block_bytes
        metrics: dict[str, Any] = {}
        while (metrics.get("deepinfer_max_cpu_offload_bytes"), metrics.get("cpu_offload_bytes")) != (used, 0):
            metrics = engine.client.metrics()
        parks = metrics["deepinfer_request_parks"]
        assert (parks["count"], parks["sum"]) == (2, 1)
        assert parks["buckets"][:2] == [[0.0, 1], [1.0, 2]]
        offload = engine.status()["cpu_offload"]
        assert offload["max_payload_bytes"] == used
        assert offload["payload_bytes"] == 0
