"""Models in which some layers slide and others see everything: sliding ones keep only what they can still see."""

from __future__ import annotations

import random

import pytest
from forced_swaps import force_swaps
from reference import greedy_ids, load_reference
from tiny import save_tiny_family

from deepinfer.clients.errors import DeepInferError
from deepinfer.daemon import planner
from deepinfer.daemon.engine import Engine
from deepinfer.stages.memory import book
from deepinfer.stages.memory.kind_tables import Kind
from deepinfer.stages.memory.layer_groups import LayerGroups
from deepinfer.stages.memory.sizes import READ_TOGETHER

WINDOW, BLOCK, NEW = 24, 16, 150
FAMILIES = {
    "gemma2": {"num_hidden_layers": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"num_hidden_layers": 6},
}
ROWS = {"gemma2": (1, 1), "gemma3_text": (1, 5)}
SETTINGS = {"block_size": BLOCK, "prefill_chunk_tokens": 19, "batch_invariant": True, "num_blocks": 60}
ONE_GROUP = LayerGroups((), (Kind(),), 0, 0)


def prompts(count, seed=5):
    rng = random.Random(seed)
    return [[rng.randrange(1, 257) for _ in range(rng.randint(60, 130))] for _ in range(count)]


def answers(engine, asked, new=NEW):
    results = [stream.result() for stream in [engine.generate(ids, max_new_tokens=new) for ids in asked]]
    return results, [result.ids for result in results]


def assert_all_came_back(engine):
    ledger = engine.host.residency.ledger
    ledger.audit()
    assert ledger.available == ledger.num_rows


def poison(engine):
    """From now on rows that are free hold NaN, in every format: as a code and as a scale."""
    pool = engine.host.pool.data
    for tables in engine.host.residency.ledger.kinds:
        give_back = tables._give_back

        def poisoned(part, tables=tables, give_back=give_back):
            pool[tables.rows_of(part)] = 0xFF
            give_back(part)

        tables._give_back = poisoned


def watch(engine):
    """The most rows that were in use after any step, by how many requests held some."""
    residency, most = engine.host.residency, {}
    let_past = residency.let_past

    def watched(rid):
        let_past(rid)
        holders = residency.ledger.holders
        most[holders] = max(most.get(holders, 0), residency.ledger.used)

    residency.let_past = watched
    return most


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    fields = {"vocab_size": 257, "sliding_window": WINDOW, **FAMILIES[request.param]}
    return request.param, save_tiny_family(path, request.param, **fields)


@pytest.fixture
def before(model, monkeypatch):
    """format -> what an engine says that keeps everything of all layers."""

    def said(fmt, asked):
        with monkeypatch.context() as patch:
            patch.setattr(planner, "group_layers", lambda windows: ONE_GROUP)
            with Engine(model[1], kv_cache_dtype=fmt, **SETTINGS) as engine:
                assert engine.host.residency.ledger.rows_per_block == 1
                return answers(engine, asked)[1]

    return said


def test_layers_of_one_kind_lie_in_rows_of_their_own(model):
    family, path = model
    with Engine(path, **SETTINGS) as engine:
        ledger = engine.host.residency.ledger
        assert [(tables.kind.rows, tables.kind.slides) for tables in ledger.kinds] == [
            (ROWS[family][0], False),
            (ROWS[family][1], True),
        ]
        assert ledger.num_rows == 60 * sum(ROWS[family])


def test_long_greedy_answers_are_those_of_transformers(model):
    path = model[1]
    reference, asked = load_reference(path), prompts(3)
    expected = [tuple(greedy_ids(reference, prompt, NEW)) for prompt in asked]
    with Engine(path, kv_cache_dtype="fp32", **SETTINGS | {"batch_invariant": False}) as engine:
        poison(engine)
        assert answers(engine, asked)[1] == expected
        assert_all_came_back(engine)


@pytest.mark.parametrize("fmt", ["fp16", "int8", "fp8"])
def test_answers_are_the_same_whatever_happens_to_the_blocks(model, before, fmt):
    """Chunked prompts, prefixes found, swaps of whole requests and of blocks: what is free is NaN throughout, and ids
    are those of an engine that keeps everything."""
    asked = prompts(3)
    expected = before(fmt, asked)
    with Engine(model[1], kv_cache_dtype=fmt, **SETTINGS) as engine:
        poison(engine)
        assert answers(engine, asked)[1] == expected
        found, ids = answers(engine, asked)
        assert ids == expected
        assert all(result.usage["cached_tokens"] >= 48 for result in found), "prefixes were found"
        assert_all_came_back(engine)
    for unit, blocks in (("request", None), ("block", 2 * sum(ROWS[model[0]]))):
        with Engine(model[1], kv_cache_dtype=fmt, offload_unit=unit, verify_payloads=True, **SETTINGS) as engine:
            poison(engine)
            swapped = force_swaps(engine, lambda entry: entry.parks < 3 and entry.yielded >= 20, blocks)
            assert answers(engine, asked)[1] == expected
            assert len(swapped) >= 3
            assert_all_came_back(engine)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_answers_are_the_same_where_requests_push_one_another_out(model, before, preemption):
    """Six contexts that grow to eleven blocks each in a pool of twelve."""
    asked = [prompt[:20] for prompt in prompts(6)]
    expected = before("int8", asked)
    small = SETTINGS | {"num_blocks": 12, "preemption": preemption, "residency_quantum": 1}
    with Engine(model[1], kv_cache_dtype="int8", **small) as engine:
        poison(engine)
        results, ids = answers(engine, asked)
        assert ids == expected
        assert sum(result.preemptions for result in results) >= 1
        assert_all_came_back(engine)


def test_a_block_that_is_let_go_of_too_early_shows(model, before, monkeypatch):
    """The control: what lies one piece of a context further than windows allow is poisoned, and seen."""
    asked = prompts(3)
    expected = before("fp16", asked)
    exact = book.first_seen
    monkeypatch.setattr(book, "first_seen", lambda stored, window, size: exact(stored + READ_TOGETHER, window, size))
    with Engine(model[1], kv_cache_dtype="fp16", prefix_cache=False, **SETTINGS) as engine:
        poison(engine)
        streams = [engine.generate(ids, max_new_tokens=NEW) for ids in asked]
        assert all(said(stream) != ids for stream, ids in zip(streams, expected, strict=True))


def said(stream):
    try:
        return stream.result().ids
    except DeepInferError as error:
        return error.code


@pytest.mark.parametrize("sharing", [False, True])
def test_a_long_request_holds_no_more_of_sliding_layers_than_they_see(model, sharing):
    family, path = model
    full, sliding = ROWS[family]
    prompt, new = prompts(1)[0][:40], 400
    with Engine(path, kv_cache_dtype="int8", prefix_cache=sharing, **SETTINGS) as engine:
        most = watch(engine)
        answers(engine, [prompt], new)
        blocks, in_sight = -(-(len(prompt) + new) // BLOCK), (WINDOW + READ_TOGETHER) // BLOCK + 1
        assert full * blocks < most[1] <= full * blocks + sliding * in_sight
        assert_all_came_back(engine)


def test_more_long_requests_decode_at_once_where_sliding_layers_let_go(model):
    """Contexts of 16 blocks each: the pool holds one with all its layers, and several of what they still see."""
    family, path = model
    asked = [prompt[:30] for prompt in prompts(3)]
    pool = SETTINGS | {"num_blocks": {"gemma2": 36, "gemma3_text": 26}[family]}
    with Engine(path, kv_cache_dtype="fp16", preemption="swap-only", max_cpu_offload_mb=0, **pool) as engine:
        streams = [engine.generate(prompt, max_new_tokens=220, ignore_eos=True) for prompt in asked]
        results = [stream.result() for stream in streams]
        assert [result.preemptions for result in results] == [0, 0, 0]
        assert [result.finish_reason for result in results] == ["length"] * 3
        assert_all_came_back(engine)


def test_a_prefix_is_found_only_while_the_window_at_its_end_is_there(model):
    """A conversation goes on: its end is known. What lies before the end of its window was evicted meanwhile, so that a
    shorter part of it is not found."""
    path = model[1]
    first = prompts(1)[0]
    with Engine(path, kv_cache_dtype="fp16", **SETTINGS | {"num_blocks": 30}) as engine:
        poison(engine)
        answer = answers(engine, [first], 100)[1][0]
        whole = [*first, *answer]
        (again,), _ = answers(engine, [whole], 40)
        assert again.usage["cached_tokens"] >= len(whole) - BLOCK - 1
        other = prompts(4, seed=8)
        answers(engine, other, 60)
        with Engine(path, kv_cache_dtype="fp16", **SETTINGS) as fresh:
            for part in (whole, whole[:100], whole[:70]):
                assert answers(engine, [part], 40)[1] == answers(fresh, [part], 40)[1]
        assert_all_came_back(engine)
