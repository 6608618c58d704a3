"""Requests of which only a part is swapped: what they say, what is copied, and what is left, on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from forced_swaps import force_swaps
from leftovers import settled

from deepinfer.daemon.engine import Engine
from deepinfer.stages.memory.entries import State
from deepinfer.stages.memory.sizes import blocks_for

FORMATS = ["auto", "fp16", "int8", "fp8", "e5m2"]
PROMPT = "The quick brown fox jumps"
FIELDS = {"max_new_tokens": 24, "ignore_eos": True, "logprobs": 1}
BY_BLOCK = {"offload_unit": "block", "batch_invariant": True, "block_size": 8, "threads": 1}


def once_before_each_token(at: dict[str, int]) -> Callable[[Any], bool]:
    done: set[int] = set()
    return lambda e: e.length == at["length"] and e.rid not in done and not done.add(e.rid)


@pytest.mark.parametrize(("kv_format", "prefix_cache"), [("auto", False), *((name, True) for name in FORMATS)])
def test_two_blocks_that_go_and_come_back_before_any_token_change_nothing(tiny_path, kv_format, prefix_cache):
    with Engine(tiny_path, kv_cache_dtype=kv_format, prefix_cache=prefix_cache, num_blocks=32, **BY_BLOCK) as engine:
        alone = engine.complete(PROMPT, **FIELDS)
        at = {"length": -1}
        swapped = force_swaps(engine, once_before_each_token(at), blocks=2)
        for token in range(1, 24):
            at["length"] = len(PROMPT) + token
            answer = engine.complete(PROMPT, **FIELDS)
            assert (answer.ids, answer.logprobs) == (alone.ids, alone.logprobs), f"swapped before token {token}"
            engine.host.residency.ledger.audit()
        counters = engine.host.decode.counters
        assert len(swapped) == counters.requests_swapped_total == counters.requests_resumed_total == 23
        assert counters.kv_cpu_offload_blocks_total == counters.kv_cpu_reload_blocks_total == 2 * 23
        block_bytes = engine.host.plan.block_bytes
        assert counters.kv_cpu_offload_bytes_total == counters.kv_cpu_reload_bytes_total == 2 * 23 * block_bytes
        settled(engine)


def test_blocks_that_lose_their_bytes_on_the_way_are_seen(tiny_path):
    """The control arm of the test above."""

    def no_copy(destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.zero_()

    with Engine(tiny_path, num_blocks=32, copy=no_copy, **BY_BLOCK) as engine:
        alone = engine.complete(PROMPT, **FIELDS)
        force_swaps(engine, once_before_each_token({"length": len(PROMPT) + 3}), blocks=2)
        assert engine.complete(PROMPT, **FIELDS).ids != alone.ids


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_pool_that_is_too_small_sends_less_to_the_host_than_whole_requests_and_nothing_changes(
    tiny_path, prefix_cache
):
    prompts = [f"{PROMPT} {number}" for number in range(4)]
    fields = {"max_new_tokens": 60, "ignore_eos": True}
    settings = {**BY_BLOCK, "num_blocks": 14, "residency_quantum": 1, "prefix_cache": prefix_cache}
    with Engine(tiny_path, verify_payloads=True, **settings) as engine:
        in_part = note_parts(engine)
        alone = [engine.complete(prompt, **fields).ids for prompt in prompts]
        together = [stream.result() for stream in [engine.generate(prompt, **fields) for prompt in prompts]]
        assert [answer.ids for answer in together] == alone
        assert in_part
        assert all(0 < gone < stored for gone, stored in in_part)
        counters = engine.host.decode.counters
        assert counters.requests_recomputed_total == 0
        assert counters.requests_resumed_total == counters.requests_swapped_total
        assert sum(answer.preemptions for answer in together) == counters.requests_swapped_total
        assert counters.kv_cpu_reload_bytes_total == counters.kv_cpu_offload_bytes_total > 0
        settled(engine)


def note_parts(engine: Engine) -> list[tuple[int, int]]:
    """For every swap of a part: how many blocks go, of how many."""
    departures, block_size, seen = engine.host.residency.departures, engine.host.config.block_size, []
    choose = departures.choose_leaving

    def choosing(victim: Any, short: int | None) -> int:
        freed = choose(victim, short)
        stored = blocks_for(victim.cached, block_size)
        if len(victim.leaving) + len(victim.away) < stored:
            seen.append((len(victim.leaving), stored))
        return freed

    departures.choose_leaving = choosing
    return seen


@pytest.mark.parametrize("state", [State.SWAPPING_OUT, State.SWAPPED, State.SWAPPING_IN])
def test_a_request_that_is_cancelled_while_a_part_of_it_is_out_gives_both_parts_back(tiny_path, state):
    with Engine(tiny_path, num_blocks=16, **BY_BLOCK) as engine:
        residency, decode = engine.host.residency, engine.host.decode
        force_swaps(engine, once_before_each_token({"length": len(PROMPT) + 3}), blocks=2)
        held: list[tuple[int, int]] = []
        work = decode.work

        def cancel_there() -> None:
            for entry in list(residency.entries.values()):
                if entry.state is state and not entry.ended:
                    held.append((residency.ledger.held(entry.rid), len(entry.away)))
                    decode._finish(entry.rid, "cancelled")

        def working() -> bool:
            cancel_there()
            more = work()
            cancel_there()
            return more

        decode.work = working
        assert engine.complete(PROMPT, **FIELDS).finish_reason == "cancelled"
        stored = blocks_for(len(PROMPT) + 2, 8)
        assert held == [
            {State.SWAPPING_OUT: (stored, 0), State.SWAPPED: (stored - 2, 2), State.SWAPPING_IN: (stored, 2)}[state]
        ]
        settled(engine)
        decode.work = work
        assert len(engine.complete(PROMPT, **FIELDS).ids) == 24
        settled(engine)
