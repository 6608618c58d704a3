"""Every (K format, V format, device, head_dim, block size) runs natively or is refused before weights are read."""

from __future__ import annotations

import re

import pytest
from tiny import save_tiny_llama

from deepinfer.daemon import engine_host
from deepinfer.daemon.config import BLOCK_SIZES, ConfigError, EngineConfig
from deepinfer.kernels.codecs import Codec
from deepinfer.kernels.kv_formats import resolve_kv_format

CODECS = ("fp32", "bf16", "fp16", "int8", "fp8_e4m3", "fp8_e5m2")
CUDA_CODECS, CUDA_HEAD_DIMS, CUDA_BLOCK_SIZES = CODECS[1:], (64, 80, 96, 128, 256), (8, 16, 32, 64)


class WeightsAreRead(Exception):
    """The engine got as far as reading weights."""


@pytest.fixture(autouse=True)
def weights_are_watched(monkeypatch):
    def load_model(*args, **kwargs):
        raise WeightsAreRead

    monkeypatch.setattr(engine_host, "load_model", load_model)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Tiny models by head_dim."""
    dims = (12, 16, 64, 80)
    return {dim: save_tiny_llama(tmp_path_factory.mktemp(f"tiny-{dim}"), head_dim=dim) for dim in dims}


def verdict(path, **settings):
    """The refusal, or "" when weights would be read next."""
    config = EngineConfig(model=str(path), num_blocks=4, max_context=32, max_cpu_offload_mb=0, **settings)
    with pytest.raises((WeightsAreRead, ConfigError)) as outcome:
        engine_host.EngineHost(config, lambda *_: None)
    return "" if outcome.type is WeightsAreRead else str(outcome.value)


@pytest.mark.parametrize("head_dim", [12, 16, 64, 80])
def test_every_pair_of_formats_runs_or_is_refused_with_what_works(paths, head_dim):
    for k in CODECS:
        for v in CODECS:
            pair = f"{k}/{v}"
            on_cpu = verdict(paths[head_dim], device="cpu", kv_cache_dtype=pair)
            assert (on_cpu == "") == (head_dim % 16 == 0), on_cpu
            on_cuda = verdict(paths[head_dim], device="host-emulation", kv_cache_dtype=pair)
            assert (on_cuda == "") == (head_dim in CUDA_HEAD_DIMS and "fp32" not in (k, v)), on_cuda
            if "fp32" in (k, v) and on_cuda:
                assert re.search(r"stores [KV] as fp32: use one of bf16, fp16, int8, fp8_e4m3, fp8_e5m2", on_cuda)
            elif on_cuda:
                assert "there are (64, 80, 96, 128, 256)" in on_cuda
            assert all("\n" not in said for said in (on_cpu, on_cuda))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_block_size_runs_or_is_refused_with_those_that_do(paths, block_size):
    settings = {"block_size": block_size, "kv_cache_dtype": "int8"}
    assert verdict(paths[64], device="cpu", **settings) == ""
    said = verdict(paths[64], device="host-emulation", **settings)
    assert (said == "") == (block_size in CUDA_BLOCK_SIZES)
    assert said == "" or "there are (8, 16, 32, 64)" in said


def test_the_default_format_of_an_fp32_model_is_named_when_it_is_refused(paths):
    said = verdict(paths[64], device="host-emulation")
    assert "kv_cache_dtype auto (fp32)" in said
    assert "host-emulation" in said
    assert verdict(paths[64], device="host-emulation", dtype="bf16") == ""


def test_batch_invariance_that_the_device_does_not_have_is_refused(paths):
    settings = {"device": "host-emulation", "kv_cache_dtype": "fp16", "batch_invariant": True}
    assert "use bf16" in verdict(paths[64], **settings)
    assert verdict(paths[64], dtype="bf16", **settings) == ""


def test_16_bit_models_are_computed_in_bf16(monkeypatch, tmp_path):
    from transformers import AutoModelForCausalLM

    path = save_tiny_llama(tmp_path / "half", head_dim=64)
    AutoModelForCausalLM.from_pretrained(path).bfloat16().save_pretrained(path)
    seen: list[Codec] = []
    layout = engine_host.EngineHost._refuse_what_cannot_run

    def watched(self, model, dtype, pool_layout):
        seen.append(pool_layout.k)
        layout(self, model, dtype, pool_layout)

    monkeypatch.setattr(engine_host.EngineHost, "_refuse_what_cannot_run", watched)
    assert verdict(path, device="host-emulation") == ""
    assert verdict(path, device="cpu") == ""
    assert seen == [resolve_kv_format("bf16").k] * 2
