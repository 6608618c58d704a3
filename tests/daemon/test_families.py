"""Every family through the engine: greedy answers are those of transformers, past the windows too."""

from __future__ import annotations

import random

import pytest
from reference import greedy_ids, load_reference
from tiny import save_tiny_family

from deepinfer.daemon.engine import Engine

WINDOW = 24
FAMILIES = {
    "mistral": {"sliding_window": WINDOW},
    "olmo2": {},
    "smollm3": {"num_hidden_layers": 4},
    "phi3": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": WINDOW, "num_hidden_layers": 6},
}
NEW, LONG = 30, 120
VOCAB = 257
"""All that the tokenizer has: transformers would choose padding rows too."""


def prompts(count):
    rng = random.Random(5)
    return [[rng.randrange(1, 257) for _ in range(rng.randint(3, 70))] for _ in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_of_a_family_are_those_of_transformers(tmp_path, family):
    path = save_tiny_family(tmp_path, family, vocab_size=VOCAB, **FAMILIES[family])
    reference, asked = load_reference(path), prompts(3)
    expected = [tuple(greedy_ids(reference, prompt, NEW)) for prompt in asked]
    with Engine(path, num_blocks=40, kv_cache_dtype="fp32", prefill_chunk_tokens=19) as engine:
        streams = [engine.generate(prompt, max_new_tokens=NEW) for prompt in asked]
        assert [stream.result().ids for stream in streams] == expected


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    path = save_tiny_family(tmp_path_factory.mktemp("windowed"), "mistral", vocab_size=VOCAB, sliding_window=WINDOW)
    reference, asked = load_reference(path), [prompt[:20] for prompt in prompts(3)]
    return path, asked, [tuple(greedy_ids(reference, prompt, LONG)) for prompt in asked]


def test_where_every_layer_has_a_window_blocks_that_are_past_serve_others(windowed):
    """Three contexts of nine blocks in a pool of twelve: each needs no more than four at a time."""
    path, asked, expected = windowed
    with Engine(path, num_blocks=12, kv_cache_dtype="fp32", max_cpu_offload_mb=0, preemption="swap-only") as engine:
        results = [s.result() for s in [engine.generate(p, max_new_tokens=LONG) for p in asked]]
        assert [result.ids for result in results] == expected
        assert [result.preemptions for result in results] == [0, 0, 0]
        engine.host.residency.ledger.audit()
        assert engine.host.residency.ledger.available == 12


@pytest.mark.parametrize("unit", ["request", "block"])
def test_a_windowed_request_that_was_swapped_out_says_the_same(windowed, unit):
    path, asked, expected = windowed
    settings = {"num_blocks": 9, "residency_quantum": 1, "offload_unit": unit, "block_size": 16}
    with Engine(path, kv_cache_dtype="fp32", **settings) as engine:
        streams = [engine.generate(prompt, max_new_tokens=LONG) for prompt in asked * 2]
        results = [stream.result() for stream in streams]
        assert [result.ids for result in results] == expected * 2
        assert sum(result.preemptions for result in results) >= 1
        engine.host.residency.ledger.audit()
        assert engine.host.residency.ledger.available == 9
