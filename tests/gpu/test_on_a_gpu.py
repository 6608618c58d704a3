"""The same checks as everywhere, on a GPU. Skipped, with the reason, where there is none."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch
from greedy_bound import answer, follow
from tiny import save_tiny_llama

from deepinfer.daemon import validate_kernels
from deepinfer.daemon.bench.attention import Heads
from deepinfer.daemon.bench.kernels import Plan, run_bench_kernels
from deepinfer.daemon.bench.matmul import Shape
from deepinfer.daemon.engine import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

FORMATS = ["fp16", "int8", "fp8", "e5m2"]


def test_every_kernel_is_within_its_limits_on_the_card():
    assert validate_kernels.run_validation("cuda", None, None) == 0


def test_the_bench_of_the_kernels_runs_and_names_the_card(tmp_path):
    shape = Shape("tiny", 2, 512, 4, 2, 128, 1024, 1024)
    plan = Plan((Heads("tiny", 8, 2, 128),), (1024,), (1, 4), 1 << 24, (shape,), shape, 512)
    report = run_bench_kernels("cuda", 1, 1, tmp_path / "bench.json", plan)
    assert report["backend"] == f"cuda: {torch.cuda.get_device_name(0)}"
    assert report["step"]["replayed"]["milliseconds"]["median"] > 0


LOGIT_BOUND = {"fp32": 0.05, "bf16": 0.5}
"""In nats: a code of the KV cache may fall the other way where the last bit before it differs; bf16 rounds besides."""


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_200_greedy_tokens_are_those_of_the_cpu_path_within_the_logit_bound(tmp_path, smollm2_path, model, kv_format):
    path = save_tiny_llama(tmp_path / "tiny", head_dim=64) if model == "tiny" else smollm2_path
    settings = {"num_blocks": 64, "kv_cache_dtype": kv_format}
    with Engine(path, device="cpu", **settings) as engine:
        prompt = engine.client.tokenize("The quick brown fox")
        wanted, dtype = answer(engine, prompt, 200), engine.status()["engine"]["compute_dtype"]
    with Engine(path, device="cuda", **settings) as engine:
        assert engine.status()["engine"]["compute_dtype"] == dtype
        follow(engine, prompt, wanted, LOGIT_BOUND[dtype])


@pytest.mark.parametrize("kv_format", FORMATS)
def test_graphs_on_equals_graphs_off(smollm2_path, kv_format):
    prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]

    def answers(cuda_graphs: bool) -> list[tuple[int, ...]]:
        settings = {"num_blocks": 128, "kv_cache_dtype": kv_format, "batch_invariant": True, "dtype": "bf16"}
        with Engine(smollm2_path, device="cuda", cuda_graphs=cuda_graphs, **settings) as engine:
            streams = [engine.generate(prompt, max_new_tokens=100, ignore_eos=True) for prompt in prompts]
            answer = [stream.result().ids for stream in streams]
        assert (engine.host.decode.stats()["cuda_graph_replays_total"] > 0) == cuda_graphs
        return answer

    assert answers(True) == answers(False)


def test_graphs_on_equals_graphs_off_where_contexts_cross_their_buckets(smollm2_path):
    settings = {"num_blocks": 256, "kv_cache_dtype": "int8", "batch_invariant": True, "dtype": "bf16"}
    prompts = ["a " * 500, "b " * 20]

    def answers(cuda_graphs: bool) -> list[tuple[int, ...]]:
        with Engine(smollm2_path, device="cuda", cuda_graphs=cuda_graphs, **settings) as engine:
            streams = [engine.generate(prompt, max_new_tokens=300, ignore_eos=True) for prompt in prompts]
            answer = [stream.result().ids for stream in streams]
            graphs = engine.host.executor.graphs
        assert graphs is None or len({context for _, context in graphs.captured}) >= 2
        return answer

    assert answers(True) == answers(False)


def test_prompts_computed_beside_decoding_change_nothing(smollm2_path):
    """Long prompts come in while others decode, in a pool so small that blocks change hands and requests move out."""
    prompts = [f"{number} " + "word " * 150 for number in range(8)]
    settings = {"device": "cuda", "kv_cache_dtype": "int8", "batch_invariant": True, "dtype": "bf16"}
    fields = {"max_new_tokens": 60, "ignore_eos": True}
    with Engine(smollm2_path, num_blocks=256, prefix_cache=False, **settings) as engine:
        alone = [engine.complete(prompt, **fields).ids for prompt in prompts]
    with Engine(smollm2_path, num_blocks=40, residency_quantum=1, prefill_chunk_tokens=64, **settings) as engine:
        assert engine.status()["engine"]["prefill_beside_decode"] is True
        assert engine.status()["engine"]["arena_pinned"] is True
        streams = [engine.generate(prompt, **fields) for prompt in prompts]
        results = [stream.result() for stream in streams]
    assert [result.ids for result in results] == alone
    assert sum(result.preemptions for result in results) >= 1


@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_the_sanitizer_finds_nothing_in_any_kernel(tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    command = [sys.executable, "-m", "deepinfer.daemon.cli", "validate-kernels", "--device", "cuda"]
    result = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", *command], capture_output=True, text=True, timeout=1800
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


def test_the_real_model_answers_on_the_card(smollm2_path):
    with Engine(smollm2_path, device="cuda", num_blocks=64, kv_cache_dtype="fp8") as engine:
        answer = engine.client.chat([{"role": "user", "content": "What is the capital of France?"}], max_new_tokens=20)
        assert "Paris" in answer.text
