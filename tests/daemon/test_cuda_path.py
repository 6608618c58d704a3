"""The CUDA path from end to end, its kernels executed on the CPU: the same stages, wrappers, pointers and grids."""

from __future__ import annotations

import pytest
import torch
from tiny import save_tiny_family, save_tiny_llama

from deepinfer.daemon.config import ConfigError, EngineConfig
from deepinfer.daemon.engine import Engine, no_progress
from deepinfer.daemon.engine_host import EngineHost

PROMPTS = ["The quick brown fox", "jumps over", "the lazy dog and then it runs away"]
FIELDS = {"max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def wide_path(tmp_path_factory):
    """head_dim 64, which the CUDA kernels are made for."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-wide"), head_dim=64)


def answers(path, device, **settings):
    with Engine(path, device=device, num_blocks=24, prefill_chunk_tokens=7, **settings) as engine:
        streams = [engine.generate(prompt, **FIELDS) for prompt in PROMPTS]
        return [stream.result().ids for stream in streams], engine.status()["engine"]


@pytest.mark.parametrize("kv_format", ["bf16", "fp16", "int8", "fp8", "e5m2", "int8/e5m2"])
def test_prefill_and_decode_on_the_cuda_path_are_token_for_token_those_of_the_cpu_path(wide_path, kv_format):
    expected, _ = answers(wide_path, "cpu", kv_cache_dtype=kv_format)
    got, engine = answers(wide_path, "host-emulation", kv_cache_dtype=kv_format)
    assert got == expected
    assert engine["device"] == "host-emulation"
    assert "host-emulation" in engine["attention"]


@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
def test_prompts_attended_in_tiles_of_rows_say_what_the_cpu_path_says(wide_path, kv_format):
    prompts = ["The quick brown fox jumps over the lazy dog and then it runs away, far away", "jumps"]
    said = []
    for device in ("cpu", "host-emulation"):
        with Engine(wide_path, device=device, kv_cache_dtype=kv_format, num_blocks=24) as engine:
            streams = [engine.generate(prompt, **FIELDS) for prompt in prompts]
            said.append([stream.result().ids for stream in streams])
            attention = engine.status()["engine"]["attention"]
    assert said[0] == said[1]
    assert f"prompts dp_paged_gqa_prefill_{kv_format} " in attention


def test_a_batch_invariant_engine_attends_the_rows_of_prompts_one_by_one_and_says_so(wide_path):
    settings = {"device": "host-emulation", "kv_cache_dtype": "int8", "dtype": "bf16", "batch_invariant": True}
    with Engine(wide_path, num_blocks=24, **settings) as engine:
        assert "prompts row by row" in engine.status()["engine"]["attention"]


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma2", {"sliding_window": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
        ("olmo2", {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 128}),
        ("smollm3", {"no_rope_layers": [1, 0]}),
        ("phi3", {"partial_rotary_factor": 0.75, "pad_token_id": None}),
    ],
)
def test_what_a_family_has_beside_llama_is_the_same_on_the_cuda_path(tmp_path, family, fields):
    path = save_tiny_family(tmp_path, family, **{"head_dim": 64, **fields})
    expected, _ = answers(path, "cpu", kv_cache_dtype="fp16")
    got, engine = answers(path, "host-emulation", kv_cache_dtype="fp16")
    assert got == expected
    assert len({token for ids in got for token in ids}) > 6
    assert (engine["family"], engine["cuda_graphs"]) == (family, True)


def test_decode_steps_are_replayed_from_graphs_and_say_the_same_without_them(wide_path):
    plain, off = answers(wide_path, "host-emulation", kv_cache_dtype="int8", cuda_graphs=False)
    with Engine(wide_path, device="host-emulation", kv_cache_dtype="int8", num_blocks=24) as engine:
        results = [stream.result() for stream in [engine.generate(prompt, **FIELDS) for prompt in PROMPTS]]
        status = engine.status()
    assert [result.ids for result in results] == plain
    assert (status["engine"]["cuda_graphs"], off["cuda_graphs"]) == (True, False)
    stats = engine.host.decode.stats()
    assert stats["cuda_graph_replays_total"] > 0
    assert stats["cuda_graphs_captured_total"] > 0


def test_the_warm_up_captures_a_step_of_every_number_of_rows(wide_path):
    settings = {"device": "host-emulation", "kv_cache_dtype": "int8", "num_blocks": 8}
    host = EngineHost(
        EngineConfig(model=str(wide_path), max_running=5, prefill_chunk_tokens=20, **settings), no_progress
    )
    try:
        host.warm_up()
        assert host.executor.graphs.captured == [(rows, host.max_context) for rows in (1, 2, 4, 5)]
        assert not host.pool.data.any()
    finally:
        host.close()


def test_the_cpu_has_no_graphs_and_says_so(tiny_path):
    with Engine(tiny_path, num_blocks=24, device="cpu") as engine:
        assert engine.status()["engine"]["cuda_graphs"] is False


def test_a_swap_on_the_cuda_path_changes_nothing(wide_path):
    expected, _ = answers(wide_path, "host-emulation", kv_cache_dtype="int8")
    with Engine(wide_path, device="host-emulation", kv_cache_dtype="int8", num_blocks=4, residency_quantum=1) as engine:
        streams = [engine.generate(prompt, **FIELDS) for prompt in PROMPTS]
        results = [stream.result() for stream in streams]
        assert [result.ids for result in results] == expected
        assert sum(result.preemptions for result in results) >= 1


def test_without_a_gpu_device_cuda_says_so_in_one_line(wide_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match=r"^device is cuda, but") as refused:
        Engine(wide_path, device="cuda")
    assert "\n" not in str(refused.value)


def test_an_attention_path_of_the_cpu_is_refused_on_another_device(wide_path):
    with pytest.raises(ConfigError, match="runs on the CPU only"):
        Engine(wide_path, device="host-emulation", attention="numba", num_blocks=8)


def test_choices_on_the_cuda_path_are_those_of_the_cpu_path(wide_path):
    """The last block of the prompt is copied by the device, between the steps of its stream."""
    fields = {**FIELDS, "n": 3, "temperature": 1.2, "seed": 40}
    said = []
    for device in ("cpu", "host-emulation"):
        with Engine(wide_path, device=device, kv_cache_dtype="int8", num_blocks=24) as engine:
            others = [engine.generate(prompt, **FIELDS) for prompt in PROMPTS[1:]]
            choices = engine.complete(PROMPTS[0], **fields).choices
            said.append([choice.ids for choice in choices] + [other.result().ids for other in others])
            assert engine.host.decode.counters.kv_copied_blocks_total == 2
    assert said[0] == said[1]
    assert len(set(said[0][:3])) == 3
