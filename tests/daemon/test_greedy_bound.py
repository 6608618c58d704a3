"""The comparison that tests on a GPU make, between engines of the CPU and the host shim."""

import pytest
from greedy_bound import answer, follow
from tiny import save_tiny_llama

from deepinfer.daemon.engine import Engine

SETTINGS = {"num_blocks": 32}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", head_dim=64)


@pytest.fixture(scope="module")
def wanted(path):
    with Engine(path, kv_cache_dtype="fp16", **SETTINGS) as engine:
        prompt = engine.client.tokenize("The quick brown fox")
        return prompt, answer(engine, prompt, 40)


def test_an_engine_follows_itself_without_being_given_a_token(path, wanted):
    with Engine(path, kv_cache_dtype="fp16", **SETTINGS) as engine:
        assert follow(engine, *wanted, 1e-6) == 0


def test_the_cuda_path_follows_the_cpu_path_within_the_bound_of_the_card(path, wanted):
    with Engine(path, device="host-emulation", kv_cache_dtype="fp16", **SETTINGS) as engine:
        follow(engine, *wanted, 0.05)


def test_a_coarser_cache_is_found_out(path, wanted):
    with (
        Engine(path, kv_cache_dtype="e5m2", **SETTINGS) as engine,
        pytest.raises(AssertionError, match=r"apart|differ"),
    ):
        follow(engine, *wanted, 1e-6)


def test_a_token_that_was_not_likely_is_found_out(path, wanted):
    prompt, entries = wanted
    other = entries[10].top[-1][0]
    wrong = [*entries[:10], type(entries[10])(other, entries[10].top[-1][1], entries[10].top), *entries[11:]]
    assert other != entries[10].id
    with Engine(path, kv_cache_dtype="fp16", **SETTINGS) as engine, pytest.raises(AssertionError, match="token 10"):
        follow(engine, prompt, wrong, 1e-6)


def test_of_two_tokens_that_are_close_either_may_be_chosen(path, wanted):
    prompt, entries = wanted
    second, logprob = entries[10].top[1]
    swapped = [*entries[:10], type(entries[10])(second, logprob, entries[10].top)]
    with Engine(path, kv_cache_dtype="fp16", **SETTINGS) as engine:
        assert follow(engine, prompt, swapped, entries[10].logprob - logprob) == 1
