"""Logits of every family and RoPE type against transformers, in prefill, in chunks and over decode steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from executor_runner import Runner
from reference import load_reference, teacher_forced_logits
from tiny_checkpoints import random_ids, save, tiny_model

from deepinfer.stages.model import load_model, open_checkpoint

PROMPT, STEPS = 45, 64
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
NO_IDS = {"pad_token_id": None, "bos_token_id": None}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
"""Low enough to bite: random logits and scores exceed them."""


def longrope(original: int, frequencies: int = 8) -> dict[str, Any]:
    """`Runner` has tables for contexts of 256 tokens."""
    short, long = ([1 + step * i / 8 for i in range(frequencies)] for step in (0.5, 7))
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short, "long_factor": long}
    return {
        "head_dim": 16,
        "original_max_position_embeddings": original,
        "rope_parameters": {**parameters, "original_max_position_embeddings": original},
    }


def partial(factor: float, parameters: dict[str, Any]) -> dict[str, Any]:
    """Of heads of 16."""
    rope = {"rope_theta": 10000.0, **parameters, "partial_rotary_factor": factor}
    return {"head_dim": 16, "partial_rotary_factor": factor, "rope_parameters": rope}


def partial_longrope(original: int) -> dict[str, Any]:
    """As Phi-4-mini has it."""
    fields = longrope(original, 6)
    return {**fields, **partial(0.75, fields["rope_parameters"])}


CASES = {
    "llama": ("llama", {}),
    "llama, one key-value head per head": ("llama", {"num_key_value_heads": 4}),
    "llama with biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with a tied head": ("llama", {"tie_word_embeddings": True}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN}),
    "qwen2, yarn rope with its own factor": (
        "qwen2",
        {
            "rope_parameters": {
                **YARN,
                "attention_factor": 1.3,
                "beta_fast": 16,
                "beta_slow": 2,
                "truncate": False,
            }
        },
    ),
    "qwen3, yarn rope with mscale": (
        "qwen3",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5}},
    ),
    "mistral with a window": ("mistral", {"sliding_window": 20}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 with a tied head": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows on upper layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1},
    ),
    "qwen2 with named layer types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 with biases and a tied head": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
    "olmo2 with biases": ("olmo2", {"attention_bias": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, **NO_IDS}),
    "smollm3 with windows on the layers that it names": (
        "smollm3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 17, **NO_IDS},
    ),
    "phi3 with a window": ("phi3", {"sliding_window": 20, **NO_IDS}),
    "phi3 without a window": ("phi3", NO_IDS),
    "phi3, longrope within the original length": ("phi3", {**NO_IDS, **longrope(256)}),
    "phi3, longrope beyond it": ("phi3", {**NO_IDS, **longrope(64)}),
    "phi3, three quarters of each head rotated": ("phi3", {**NO_IDS, **partial(0.75, {"rope_type": "default"})}),
    "phi3, a quarter of each head rotated": ("phi3", {**NO_IDS, **partial(0.25, {"rope_type": "default"})}),
    "phi3, longrope of a part of each head, beyond its length": ("phi3", {**NO_IDS, **partial_longrope(64)}),
    "phi3, longrope of a part of each head, within its length": ("phi3", {**NO_IDS, **partial_longrope(256)}),
    "gemma2": ("gemma2", {"sliding_window": 20, "query_pre_attn_scalar": 48, **CAPS}),
    "gemma2 without soft caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma3": ("gemma3_text", {"sliding_window": 20, "num_hidden_layers": 7, "query_pre_attn_scalar": 48}),
    "gemma3 with a stretched global rope": (
        "gemma3_text",
        {
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
}


def _decode_logits(runner: Runner, ids: list[int], chunk: int) -> torch.Tensor:
    rows = [runner.feed({0: ids[at : min(at + chunk, PROMPT)]}, all_rows=True) for at in range(0, PROMPT, chunk)]
    rows += [runner.feed({0: [token]}) for token in ids[PROMPT:]]
    return torch.cat(rows)


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("case", CASES)
def test_a_family_agrees_with_transformers_in_prefill_and_over_64_decode_steps(
    case: str, backend: str, tmp_path: Path
) -> None:
    family, overrides = CASES[case]
    folder = save(tiny_model(family, **overrides), tmp_path)
    ids = random_ids(PROMPT + STEPS)
    expected = teacher_forced_logits(load_reference(folder), ids)
    model = load_model(open_checkpoint(folder))
    assert model.compute_dtype == "fp32"
    got = _decode_logits(Runner(model, backend), ids, chunk=19)
    assert expected.abs().max() > 0.5
    assert (got - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("case", ["mistral with a window", "llama, llama3 rope", "qwen3", "qwen2"])
def test_a_sharded_checkpoint_gives_the_logits_of_a_single_file(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    model = tiny_model(family, **overrides)
    whole = save(model, tmp_path / "whole")
    sharded = save(model, tmp_path / "sharded", shard="60KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    ids = random_ids(30)
    first, second = (Runner(load_model(open_checkpoint(folder))).feed({0: ids}) for folder in (whole, sharded))
    assert torch.equal(first, second)


def test_sequences_of_one_batch_do_not_see_one_another(tmp_path: Path) -> None:
    model = load_model(open_checkpoint(save(tiny_model("qwen3"), tmp_path)))
    prompts = [random_ids(n, seed=n) for n in (3, 16, 33)]
    together = Runner(model, sequences=3)
    logits = [together.feed(dict(enumerate(prompts)))]
    logits.append(together.feed({i: prompt[:1] for i, prompt in enumerate(prompts)}))
    for i, prompt in enumerate(prompts):
        alone = Runner(model)
        for step, tokens in enumerate((prompt, prompt[:1])):
            assert (alone.feed({0: tokens})[0] - logits[step][i]).abs().max() < 1e-5


def test_a_bf16_checkpoint_in_bf16_stays_near_its_fp32_logits(tmp_path: Path) -> None:
    folder = save(tiny_model("llama"), tmp_path, torch.bfloat16)
    ids = random_ids(60)
    exact = Runner(load_model(open_checkpoint(folder), dtype="fp32")).feed({0: ids}, all_rows=True)
    model = load_model(open_checkpoint(folder), dtype="bf16")
    assert model.compute_dtype == "bf16"
    rounded = Runner(model).feed({0: ids}, all_rows=True)
    assert 0 < (rounded - exact).abs().max() < 0.02 * exact.abs().max()


def test_logits_come_in_the_order_that_was_asked_for(tmp_path: Path) -> None:
    from deepinfer.kernels.attention import AttentionBatch
    from deepinfer.stages.model import ForwardBatch

    runner = Runner(load_model(open_checkpoint(save(tiny_model("llama"), tmp_path))))
    batch = AttentionBatch([0, 1, 2], [0, 0, 0], runner.tables[:1], [0, 3])
    ids = torch.tensor([3, 4, 5], dtype=torch.int32)
    natural, asked = (
        runner.executor.forward(ForwardBatch(ids, batch, torch.tensor(rows))) for rows in ([0, 1, 2], [2, 0, 1])
    )
    assert torch.equal(asked, natural[[2, 0, 1]])
    assert not torch.equal(asked, natural)


def test_logits_of_no_rows_are_an_empty_table(tmp_path: Path) -> None:
    runner = Runner(load_model(open_checkpoint(save(tiny_model("llama"), tmp_path))))
    from deepinfer.kernels.attention import AttentionBatch
    from deepinfer.stages.model import ForwardBatch

    batch = AttentionBatch([0, 1], [0, 0], runner.tables[:1], [0, 2])
    none = torch.empty(0, dtype=torch.int64)
    assert runner.executor.forward(ForwardBatch(torch.tensor([3, 4], dtype=torch.int32), batch, none)).shape == (0, 160)
