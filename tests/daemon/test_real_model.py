"""SmolLM2-135M through the whole daemon: the same ids as transformers, and the same ids in any company."""

from __future__ import annotations

import time
from typing import Any

import pytest
from forced_swaps import force_swaps
from reference import greedy_ids

from deepinfer.daemon.engine import Engine
from deepinfer.kernels.packed_linear import COPY_ROWS, ROUND_ROWS

NEW_TOKENS = 64
CHATS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List three uses of copper.",
    "用中文介绍一下北京。",
    "Translate 'good morning' into Spanish, German and Italian.",
    "What does this emoji mean: 👩‍👩‍👧‍👦? And this one: 🏳️‍🌈?",
    "How many legs do two spiders and three dogs have together?",
    "Write a Python function that reverses a list.",
    "Why do cats purr?",
]
TEXTS = [
    "Once upon a time, in a village at the foot of a mountain,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, Neil Armstrong",
    "人工智能的发展",
    "🙂🙃😉 The best emoji is",
    "<table>\n  <tr>\n    <td>",
]
LONG_TEXT = "The river rises in the hills, and where it bends the old mill stands. " * 110


def prompts(engine: Engine) -> list[list[int]]:
    client = engine.client
    chats = [client.tokenize(messages=[{"role": "user", "content": chat}]) for chat in CHATS]
    return chats + [client.tokenize(text) for text in [*TEXTS, LONG_TEXT]]


@pytest.mark.timeout(1200)  # transformers' generate takes 90 s of it on two quiet cores
def test_greedy_ids_equal_those_of_transformers_for_twenty_prompts(smollm2_path, reference):
    with Engine(smollm2_path, dtype="fp32", num_blocks=1024) as engine:
        all_prompts = prompts(engine)
        assert len(all_prompts) == 20
        assert max(map(len, all_prompts)) > 1500
        streams = [engine.generate(ids, max_new_tokens=NEW_TOKENS) for ids in all_prompts]
        ours = [list(stream.result().ids) for stream in streams]
    for ids, got in zip(all_prompts, ours, strict=True):
        assert got == greedy_ids(reference, ids, NEW_TOKENS)


@pytest.mark.parametrize("kv_format", ["auto", "int8"])
def test_packed_weights_say_the_same_alone_in_company_chunked_and_swapped(smollm2_path, kv_format):
    """Batch-invariant mode with W4A16 weights: a pool that holds three of nine, small chunks, swaps."""
    settings = {"batch_invariant": True, "kv_cache_dtype": kv_format}
    texts = [*TEXTS[:7], LONG_TEXT[:700], LONG_TEXT[300:800]]
    fields = {"max_new_tokens": 24, "ignore_eos": True}
    with Engine(smollm2_path, num_blocks=64, **settings) as engine:
        alone = [engine.complete(text, **fields).ids for text in texts]
    with Engine(smollm2_path, num_blocks=14, prefill_chunk_tokens=23, residency_quantum=1, **settings) as engine:
        streams = [engine.generate(text, **fields) for text in texts]
        assert [stream.result().ids for stream in streams] == alone
        time.sleep(0.3)
        counters = engine.status()["counters"]
        assert counters["requests_swapped_total"] >= 1
        assert engine.status()["blocks"]["free"] == 14


def test_packed_weights_say_the_same_when_swapped_before_every_single_token(smollm2_path):
    fields = {"max_new_tokens": 24, "ignore_eos": True}
    with Engine(smollm2_path, batch_invariant=True, kv_cache_dtype="fp8", num_blocks=64) as engine:
        alone = engine.complete(TEXTS[0], **fields).ids
        seen: set[int] = set()
        swapped = force_swaps(engine, lambda entry: entry.length not in seen and not seen.add(entry.length))
        assert engine.complete(TEXTS[0], **fields).ids == alone
        assert len(swapped) >= 24


def test_the_default_mode_stays_within_its_stated_logit_bound(smollm2_path):
    """Another kernel for other row counts may change logits in the default mode; docs/numerics.md says how much."""
    fields = {"max_new_tokens": 1, "logprobs": 20}
    bound = 0.25

    def first_logprobs(**settings: Any) -> list[Any]:
        with Engine(smollm2_path, num_blocks=256, w4_prefill="bf16", **settings) as engine:
            texts = [*prompts(engine)[:10], *(engine.client.tokenize(LONG_TEXT[:size]) for size in (300, 1200, 2400))]
            assert min(map(len, texts)) > COPY_ROWS, "shorter ones meet the same kernel either way"
            assert len([ids for ids in texts if len(ids) > ROUND_ROWS]) >= 3
            return [engine.complete(ids, **fields).logprobs[0] for ids in texts]

    differences = []
    for few, many in zip(first_logprobs(prefill_chunk_tokens=4), first_logprobs(), strict=True):
        other = dict(many.top)
        differences += [abs(value - other[token]) for token, value in few.top if token in other]
    assert len(differences) >= 13 * 10
    assert 0 < max(differences) < bound


def test_the_deltas_of_a_chinese_answer_are_its_full_decode(smollm2_path):
    with Engine(smollm2_path, num_blocks=64) as engine:
        stream = engine.generate(
            messages=[{"role": "user", "content": CHATS[4]}], max_new_tokens=60, temperature=1.0, seed=3
        )
        events = list(stream)
        ids = [token for event in events for token in getattr(event, "ids", ())]
        assert "".join(event.text for event in events) == engine.client.detokenize(ids)
