"""Swapped or computed again, by choice: nothing a client or a statistic sees may differ but the time."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from deepinfer.clients import Completion
from deepinfer.daemon.engine import Engine

PROMPTS = [f"The quick brown fox jumps {number}" for number in range(4)]
FIELDS = {"max_new_tokens": 60, "ignore_eos": True}
SHORT_OF_BLOCKS = {"batch_invariant": True, "block_size": 8, "num_blocks": 14, "residency_quantum": 1, "threads": 1}


def slow_copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Out and in, five milliseconds for each of the pool's 112 tokens: no machine computes the tiny model as slowly."""
    time.sleep(0.3)
    destination.copy_(source)


def failing_copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    raise RuntimeError("injected")


def alone_and_together(engine: Engine) -> tuple[list[Completion], list[Completion], dict[str, Any]]:
    """Everyone alone, then all at once in too small a pool; and the engine's status after that."""
    alone = [engine.complete(prompt, **FIELDS) for prompt in PROMPTS]
    together = [stream.result() for stream in [engine.generate(prompt, **FIELDS) for prompt in PROMPTS]]
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]
    return alone, together, engine.status()


def final_counters(engine: Engine) -> dict[str, Any]:
    return engine.host.decode.counters.as_dict()


@pytest.mark.parametrize(
    ("copy", "chosen", "figure"),
    [(None, "swap", "tokens/s of prefill"), (slow_copy, "recompute", "GB/s"), (failing_copy, "recompute", "injected")],
)
def test_auto_measures_this_engine_and_tells_what_it_chose(tiny_path, copy, chosen, figure):
    with Engine(tiny_path, preemption="auto", **({"copy": copy} if copy else {}), **SHORT_OF_BLOCKS) as engine:
        _, together, status = alone_and_together(engine)
        counters = final_counters(engine)
        choice = engine.host.decode.stats()["preemption"]
        assert choice["mode"] == status["preemption"]["mode"] == "auto"
        assert choice["chosen"] == chosen
        assert figure in choice["reason"]
        assert sum(answer.preemptions for answer in together) >= 1
        assert (counters["requests_recomputed_total"] > 0) == (chosen == "recompute")
        if chosen == "swap":
            assert counters["requests_swapped_total"] >= 1
        else:
            assert counters["requests_swapped_total"] <= 2, "only the first ones, before it was decided"


def test_recompute_by_choice_takes_no_host_memory_and_never_copies(tiny_path):
    with Engine(tiny_path, preemption="recompute", copy=failing_copy, **SHORT_OF_BLOCKS) as engine:
        assert engine.host.arena.num_rows == 0
        _, _, status = alone_and_together(engine)
        assert final_counters(engine)["requests_recomputed_total"] >= 1
        assert final_counters(engine)["requests_swapped_total"] == 0
        assert status["cpu_offload"]["enabled"] is False


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_what_is_computed_again_is_in_no_statistic_of_tokens(tiny_path, monkeypatch, preemption, prefix_cache):
    """Every prompt is asked twice, so everything is counted twice, however often it was computed."""
    with Engine(tiny_path, preemption=preemption, prefix_cache=prefix_cache, **SHORT_OF_BLOCKS) as engine:
        chunk = engine.host.residency.chunk
        chunked = {"rows": 0}

        def counted_chunk() -> Any:
            chunks = chunk()
            chunked["rows"] += sum(item.count for item in chunks)
            return chunks

        monkeypatch.setattr(engine.host.residency, "chunk", counted_chunk)
        alone, together, _ = alone_and_together(engine)
        counters = final_counters(engine)
        prompt_tokens = sum(len(prompt) for prompt in PROMPTS)
        found = sum(answer.usage["cached_tokens"] for answer in [*alone, *together])
        assert counters["prompt_tokens_total"] + found == 2 * prompt_tokens
        assert counters["generation_tokens_total"] == 2 * 60 * len(PROMPTS)
        assert counters["prefix_cache_queries_total"] == 2 * prompt_tokens
        assert counters["prefix_cache_hits_total"] == found
        assert counters["prompt_tokens_total"] + counters["replayed_tokens_total"] == chunked["rows"]
        assert (counters["replayed_tokens_total"] > 0) == (preemption == "recompute")
