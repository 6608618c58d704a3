"""Prompts in pools that hold them only because sliding layers let go of what is behind while they are computed."""

from __future__ import annotations

import random

import pytest
from forced_swaps import force_swaps
from test_mixed_windows import BLOCK, FAMILIES, ROWS, WINDOW, answers, assert_all_came_back, poison
from tiny import save_tiny_family

from deepinfer.clients.errors import DeepInferError
from deepinfer.daemon.engine import Engine
from deepinfer.stages.memory.entries import State
from deepinfer.stages.memory.layer_groups import rows_alone

CHUNK = 19
LONG, NEW = 400, 60
STORED = LONG + NEW - 1
SETTINGS = {"block_size": BLOCK, "prefill_chunk_tokens": CHUNK, "batch_invariant": True, "residency_quantum": 1}
SINGLE = {"mistral": (0, 1)}
ALL_ROWS = {**ROWS, **SINGLE}


@pytest.fixture(scope="module", params=[*FAMILIES, *SINGLE])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    fields = {"vocab_size": 257, "sliding_window": WINDOW, **FAMILIES.get(request.param, {})}
    return request.param, save_tiny_family(path, request.param, **fields)


@pytest.fixture(scope="module")
def asked():
    rng = random.Random(7)
    first = [[rng.randrange(1, 257) for _ in range(LONG)] for _ in range(3)]
    return [*first, first[0][:200] + first[1][:150]]


@pytest.fixture(scope="module")
def expected(model, asked):
    """Of a pool in which everyone has room."""
    with Engine(model[1], kv_cache_dtype="int8", num_blocks=200, **SETTINGS) as engine:
        return answers(engine, asked, NEW)[1]


@pytest.fixture(scope="module")
def blocks(model, asked):
    """Of all layers, of the smallest pool in which the longest one runs alone."""
    with Engine(model[1], num_blocks=40, **SETTINGS) as engine:
        kinds = [tables.kind for tables in engine.host.residency.ledger.kinds]
    rows = rows_alone(kinds, WINDOW, STORED, BLOCK, 2 * CHUNK)
    return -(-rows // sum(ALL_ROWS[model[0]]))


def test_a_pool_that_windows_fit_serves_a_prompt_for_which_not_all_layers_have_room(model, asked, expected, blocks):
    """Twice, the second time from the prefix cache, then all together; free rows hold NaN. A block less is too few."""
    assert blocks * BLOCK < 0.75 * STORED
    with Engine(model[1], kv_cache_dtype="int8", num_blocks=blocks, **SETTINGS) as engine:
        poison(engine)
        assert engine.host.max_context > STORED
        for number in (0, 0, 1):
            assert answers(engine, [asked[number]], NEW)[1] == [expected[number]]
        (again,), _ = answers(engine, [[*asked[1], *expected[1]][:-1]], 2)
        assert again.usage["cached_tokens"] >= STORED - BLOCK
        assert answers(engine, asked, NEW)[1] == expected
        assert_all_came_back(engine)
    with (
        Engine(model[1], kv_cache_dtype="int8", num_blocks=blocks - 1, **SETTINGS) as engine,
        pytest.raises(DeepInferError, match=f"= {STORED + 1}; the context holds {engine.host.max_context} tokens"),
    ):
        engine.complete(asked[0], max_new_tokens=NEW)


@pytest.mark.parametrize(
    "settings",
    [{"preemption": "swap"}, {"preemption": "recompute"}, {"offload_unit": "block"}, {"max_parks": 1}],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_answers_are_the_same_where_long_prompts_push_one_another_out(model, asked, expected, blocks, settings):
    """In a pool of half as much again; each has two choices that say the same."""
    small = SETTINGS | {"num_blocks": blocks * 3 // 2, "verify_payloads": True} | settings
    with Engine(model[1], kv_cache_dtype="int8", **small) as engine:
        poison(engine)
        streams = [engine.generate(ids, max_new_tokens=NEW, n=2) for ids in (*asked, *asked)]
        results = [stream.result() for stream in streams]
        said = [[choice.ids for choice in result.choices] for result in results]
        assert said == [[ids, ids] for ids in (*expected, *expected)]
        assert_all_came_back(engine)
        counters = engine.host.decode.counters
        assert counters.requests_swapped_total + counters.requests_recomputed_total >= 1


def test_a_prompt_goes_on_where_it_was_after_a_swap_in_the_middle_of_it(model, asked, expected, blocks):
    small = SETTINGS | {"num_blocks": blocks + 1, "max_parks": 4, "prefix_cache": False}
    with Engine(model[1], kv_cache_dtype="int8", **small) as engine:
        poison(engine)
        at: dict[int, int] = {}

        def is_further(entry):
            """Than when it left the last time: at 100 tokens, 200, 300."""
            further = entry.state is State.PREFILL and entry.cached > at.get(entry.rid, 0) + 100 and entry.parks < 3
            if further:
                at[entry.rid] = entry.cached
            return further

        swapped = force_swaps(engine, is_further)
        assert answers(engine, asked[:2], NEW)[1] == expected[:2]
        assert len(swapped) == 6
        assert engine.host.decode.counters.replayed_tokens_total == 0
        assert_all_came_back(engine)
