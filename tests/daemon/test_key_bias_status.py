"""Key biases and encoder counts as an operator sees them: option, status, summary, counters."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tiny import save_tiny_qwen2

from deepinfer.daemon.config import ConfigError, EngineConfig
from deepinfer.daemon.display import summary_rows
from deepinfer.daemon.engine import Engine

PROMPT = "The quick brown fox jumps"


@pytest.fixture(scope="module")
def biased_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 whose first layer has key biases beyond what E4M3 holds."""
    return save_tiny_qwen2(tmp_path_factory.mktemp("tiny-qwen2"), {7: 600.0, 15: -900.0, 22: 700.0})


def status_after_an_answer(folder, **settings):
    with Engine(folder, num_blocks=32, **settings) as engine:
        assert len(engine.complete(PROMPT, max_new_tokens=8, ignore_eos=True).ids) == 8
        give_up = time.monotonic() + 10
        while engine.status()["counters"].get("generation_tokens_total") != 8 and time.monotonic() < give_up:
            time.sleep(0.02)
        return engine.status()


def test_a_split_layer_is_named_in_status_and_nothing_saturates(biased_path):
    status = status_after_an_answer(biased_path, kv_cache_dtype="fp8")
    choice = status["engine"]["kv_key_bias"]
    assert (choice["mode"], choice["split_layers"]) == ("auto", [0])
    assert choice["layers"][0]["norm"] > 1200
    assert status["counters"]["kv_saturated_total"] == status["counters"]["kv_nonfinite_total"] == 0
    assert status["kv_encoder_layers"] == []
    shown = dict(summary_rows({**status, "endpoint": "ipc://somewhere"}))
    assert shown["key bias"].startswith("auto: 1 of 2 layers split; ")


def test_an_inline_bias_beyond_the_format_is_counted_in_its_layer(biased_path):
    status = status_after_an_answer(biased_path, kv_cache_dtype="fp8", kv_key_bias="inline")
    assert status["engine"]["kv_key_bias"]["split_layers"] == []
    saturated = status["counters"]["kv_saturated_total"]
    assert saturated > 2 * len(PROMPT)
    assert status["kv_encoder_layers"] == [{"layer": 0, "saturated": saturated, "nonfinite": 0}]


def test_both_attention_paths_answer_alike_with_split_biases(biased_path):
    answers = []
    for attention in ("numba", "reference"):
        with Engine(biased_path, attention=attention, kv_key_bias="split", num_blocks=32) as engine:
            assert engine.status()["engine"]["kv_key_bias"]["split_layers"] == [0]
            answers.append(engine.complete(PROMPT, max_new_tokens=24, ignore_eos=True).ids)
    assert answers[0] == answers[1]


def test_an_unknown_choice_is_refused():
    with pytest.raises(ConfigError, match="kv_key_bias is 'both'; it must be one of: auto, inline, split"):
        EngineConfig(kv_key_bias="both").check()
