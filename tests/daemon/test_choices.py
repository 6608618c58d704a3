"""Several answers to one prompt: what each says, what they share, and that they end as one request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from forced_swaps import force_swaps
from leftovers import forgotten, settled

from deepinfer.clients import AsyncClient, Done, Preempted, Resumed, Token
from deepinfer.daemon.engine import Engine
from deepinfer.stages.memory.ledger import BlockLedger

PROMPT = "The quick brown fox jumps"
"""25 tokens: the last block of 8 is partly filled."""
SAMPLED = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 1.2, "seed": 40, "logprobs": 2}


def alone(engine: Engine, prompt: Any, count: int, **fields: Any) -> list[Any]:
    return [engine.complete(prompt, **{**fields, "seed": fields["seed"] + index}) for index in range(count)]


def assert_same(choices: Any, expected: list[Any]) -> None:
    assert [c.ids for c in choices] == [e.ids for e in expected]
    assert [c.logprobs for c in choices] == [e.logprobs for e in expected]
    assert [c.text for c in choices] == [e.text for e in expected]


@pytest.mark.parametrize("kv_format", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:24], "a"], ids=["partly filled", "full blocks", "one token"])
def test_choice_i_says_what_a_request_with_the_seed_plus_i_says(tiny_path, kv_format, prefix_cache, prompt):
    settings = {"kv_cache_dtype": kv_format, "prefix_cache": prefix_cache, "batch_invariant": True, "block_size": 8}
    with Engine(tiny_path, threads=1, num_blocks=64, **settings) as engine:
        together = engine.complete(prompt, n=4, **SAMPLED)
        assert len({choice.ids for choice in together.choices}) > 1
        assert_same(together.choices, alone(engine, prompt, 4, **SAMPLED))
        assert [choice.seed for choice in together.choices] == [40, 41, 42, 43]
        settled(engine)


def test_greedy_choices_all_say_the_same_and_the_prompt_is_computed_and_counted_once(tiny_path):
    with Engine(tiny_path, threads=1, batch_invariant=True, block_size=8, num_blocks=64, prefix_cache=False) as engine:
        expected = engine.complete(PROMPT, max_new_tokens=20, ignore_eos=True)
        before = engine.host.decode.counters.as_dict()
        together = engine.complete(PROMPT, n=3, max_new_tokens=20, ignore_eos=True)
        assert [choice.ids for choice in together.choices] == [expected.ids] * 3
        assert together.usage == {
            "prompt_tokens": 25,
            "cached_tokens": 0,
            "completion_tokens": 60,
            "total_tokens": 85,
        }
        after = engine.host.decode.counters.as_dict()
        counted = {name: after[name] - before[name] for name in after}
        assert counted["prompt_tokens_total"] == 25
        assert counted["replayed_tokens_total"] == 0
        assert counted["requests_forked_total"] == 2
        assert counted["kv_copied_blocks_total"] == 2
        assert counted["generation_tokens_total"] == 60
        settled(engine)


def test_a_block_that_is_not_copied_is_overwritten_by_the_others(tiny_path, monkeypatch):
    """The control arm of the tests above."""
    with Engine(tiny_path, threads=1, batch_invariant=True, block_size=8, num_blocks=64, prefix_cache=False) as engine:
        expected = alone(engine, PROMPT, 4, **SAMPLED)
        monkeypatch.setattr(BlockLedger, "shared_rows", lambda self, rid, place: 0)
        together = engine.complete(PROMPT, n=4, **SAMPLED)
        assert [choice.ids for choice in together.choices] != [e.ids for e in expected]


@pytest.mark.parametrize(
    "settings",
    [{}, {"prefix_cache": False}, {"offload_unit": "block"}, {"cpu_offload": False}, {"max_running": 2}],
    ids=str,
)
def test_choices_that_do_not_fit_together_say_what_they_say_alone(tiny_path, settings):
    options = {"batch_invariant": True, "block_size": 8, "residency_quantum": 1, **settings}
    with Engine(tiny_path, threads=1, num_blocks=9, **options) as engine:
        expected = alone(engine, PROMPT, 4, **SAMPLED)
        others = alone(engine, "x" * 30, 2, **SAMPLED)
        for _ in range(3):
            stream = engine.generate(PROMPT, n=4, **SAMPLED)
            other = engine.generate("x" * 30, n=2, **SAMPLED)
            assert_same(stream.result().choices, expected)
            assert_same(other.result().choices, others)
        settled(engine)
        counters = engine.host.decode.counters
        moved = counters.requests_swapped_total + counters.requests_recomputed_total
        assert moved > 0 or "max_running" in settings


def test_a_fork_that_is_swapped_out_leaves_the_shared_blocks_to_the_others(tiny_path):
    with Engine(tiny_path, threads=1, batch_invariant=True, block_size=8, num_blocks=64) as engine:
        expected = alone(engine, PROMPT, 3, **SAMPLED)
        swapped: set[int] = set()
        force_swaps(
            engine, lambda e: e.yielded == 1 and e.parks == 0 and e.rid not in swapped and not swapped.add(e.rid)
        )
        events = list(engine.generate(PROMPT, n=3, **SAMPLED))
        assert_same(events[-1].choices, expected)
        for index in range(3):
            pauses = [type(e) for e in events if isinstance(e, Preempted | Resumed) and e.choice == index]
            assert pauses == [Preempted, Resumed]
            assert events[-1].choices[index].timings["parks"] == 1
        settled(engine)


def test_events_say_their_choice_and_there_is_one_last_event(tiny_path):
    with Engine(tiny_path, threads=1, batch_invariant=True, num_blocks=64) as engine:
        events = list(engine.generate(PROMPT, n=3, **SAMPLED))
        assert events[0].n == 3
        done = events[-1]
        assert [type(event) for event in events].count(Done) == 1
        for index, choice in enumerate(done.choices):
            tokens = [event for event in events if isinstance(event, Token) and event.choice == index]
            assert sum((event.ids for event in tokens), ()) == choice.ids
            assert "".join(event.text for event in tokens) == choice.text == engine.client.detokenize(choice.ids)
        whole = engine.complete(PROMPT, n=3, stream=False, **SAMPLED)
        assert_same(whole.choices, list(done.choices))


def test_a_stop_string_ends_its_own_choice_only(tiny_path):
    with Engine(tiny_path, threads=1, batch_invariant=True, num_blocks=64) as engine:
        free = engine.complete(PROMPT, n=3, **SAMPLED)
        stop = free.choices[1].text[4:7]
        expected = [
            engine.complete(PROMPT, **{**SAMPLED, "seed": 40 + index, "stop": [stop], "logprobs": None})
            for index in range(3)
        ]
        result = engine.complete(PROMPT, n=3, **{**SAMPLED, "stop": [stop], "logprobs": None})
        assert [c.text for c in result.choices] == [e.text for e in expected]
        assert [c.finish_reason for c in result.choices] == [e.finish_reason for e in expected]
        assert result.choices[1].finish_reason == "stop"
        assert "length" in {c.finish_reason for c in result.choices}
        settled(engine)


def test_cancel_ends_all_choices(tiny_path):
    with Engine(tiny_path, threads=1, num_blocks=64) as engine:
        stream = engine.generate(PROMPT, n=4, max_new_tokens=400, ignore_eos=True)
        for event in stream:
            if isinstance(event, Token):
                stream.cancel()
        assert {choice.finish_reason for choice in stream.result().choices} == {"cancelled"}
        settled(engine)
        forgotten(engine)


def test_an_asynchronous_client_gets_several_choices_too(tiny_path):
    async def ask(engine: Engine) -> Any:
        async with AsyncClient(engine.topology.clients, context=engine.context) as client:
            return await client.complete(PROMPT, n=2, **SAMPLED)

    with Engine(tiny_path, threads=1, batch_invariant=True, num_blocks=64) as engine:
        assert_same(asyncio.run(ask(engine)).choices, alone(engine, PROMPT, 2, **SAMPLED))
