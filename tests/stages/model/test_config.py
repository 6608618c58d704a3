"""Configurations read as transformers reads them, RoPE frequencies included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from deepinfer.stages.model.config import ModelConfig
from deepinfer.stages.model.config_hf import config_from_folder, config_from_json
from deepinfer.stages.model.errors import CheckpointError, UnsupportedModelError
from deepinfer.stages.model.precision import choose_dtype
from deepinfer.stages.model.rope import inverse_frequencies, rope_tables
from deepinfer.stages.model.source import TensorHeader

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SIZES = {"hidden_size": 256, "num_attention_heads": 32, "num_hidden_layers": 4, "vocab_size": 100}


def _read(**raw: Any) -> ModelConfig:
    generation = raw.pop("generation", {})
    return config_from_json({"intermediate_size": 64, **SIZES, **raw}, generation, "config.json")


@pytest.mark.parametrize("family", ["olmo2", "smollm3", "phi3", "gemma2", "gemma3_text"])
def test_fields_of_further_families_that_are_left_out_have_the_defaults_of_transformers(family: str) -> None:
    ours, theirs = _read(model_type=family), AutoConfig.for_model(family, **SIZES)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.max_context == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    window = getattr(theirs, "sliding_window", None) or 0
    kinds = getattr(theirs, "layer_types", ["sliding_attention"] * 4)
    assert ours.windows == tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    parameters = theirs.rope_parameters
    thetas = [parameters[kind if kind in parameters else "rope_theta"] for kind in kinds]
    rotates = getattr(theirs, "no_rope_layers", [1] * 4)
    for layer, theta in enumerate(thetas):
        expected = theta["rope_theta"] if isinstance(theta, dict) else theta
        rope = ours.rope_of(layer)
        assert (0 if rope is None else rope.theta) == expected * rotates[layer]
    caps = [getattr(theirs, f"{kind}_logit_softcapping", None) or 0.0 for kind in ("attn", "final")]
    assert [ours.attention_soft_cap, ours.logit_soft_cap] == caps


def test_what_a_family_does_not_have_is_refused_by_name() -> None:
    for raw, message in (
        ({"model_type": "phi3", "rope_scaling": {"type": "dynamic"}}, "'dynamic' is not supported"),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma3"}, "model_type 'gemma3' is not supported; supported: .*gemma3_text"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            _read(**raw)
    with pytest.raises(CheckpointError, match=r"no_rope_layers is \[1, 2, 0, 1\], expected a 0 or a 1 for each of 4"):
        _read(model_type="smollm3", no_rope_layers=[1, 2, 0, 1])


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_are_left_out_have_the_defaults_of_transformers(family: str) -> None:
    ours, theirs = _read(model_type=family), AutoConfig.for_model(family, **SIZES)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.max_context == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    window = getattr(theirs, "sliding_window", None) or 0
    assert ours.windows == (window,) * 4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("style", ["rope_scaling", "rope_scaling with type", "rope_parameters"])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        {"rope_type": "yarn", "factor": 8.0},
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
)
def test_frequencies_are_those_of_transformers_in_old_and_new_spelling(
    family: str, style: str, scaling: dict[str, Any]
) -> None:
    theta, context = 500000.0, 32768
    if style == "rope_parameters":
        raw: dict[str, Any] = {"rope_parameters": {**scaling, "rope_theta": theta}}
    else:
        renamed = {("type" if k == "rope_type" and "type" in style.split() else k): v for k, v in scaling.items()}
        raw = {"rope_scaling": renamed, "rope_theta": theta}
    ours = _read(model_type=family, head_dim=128, max_position_embeddings=context, **raw)
    parameters = {**scaling, "rope_theta": theta}
    theirs = AutoConfig.for_model(
        family, **SIZES, head_dim=128, max_position_embeddings=context, rope_parameters=parameters
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    assert torch.equal(inverse_frequencies(ours.rope, 128), frequencies)
    assert ours.rope.attention_factor == pytest.approx(factor, abs=1e-9)
    cos, sin = rope_tables(ours.rope, 128, 300)
    angles = 299 * frequencies
    assert torch.allclose(cos[299], angles.cos() * factor, atol=1e-6)
    assert torch.allclose(sin[299], angles.sin() * factor, atol=1e-6)


@pytest.mark.parametrize("spelling", [{"rope_type": "longrope"}, {"type": "su"}, {"type": "yarn"}])
def test_longrope_has_the_frequencies_of_transformers_by_the_longest_context(spelling: dict[str, str]) -> None:
    sets = {"short_factor": [1 + i / 48 for i in range(48)], "long_factor": [1 + i for i in range(48)]}
    sizes = {**SIZES, "hidden_size": 384, "num_attention_heads": 4, "max_position_embeddings": 131072}
    sizes["original_max_position_embeddings"] = 4096
    ours = _read(model_type="phi3", rope_scaling={**spelling, **sets}, **sizes)
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096, **sets}
    theirs = AutoConfig.for_model("phi3", **sizes, pad_token_id=None, rope_parameters=parameters)
    for context in (4096, 4097):
        wanted, factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, torch.device("cpu"), seq_len=context)
        assert torch.equal(inverse_frequencies(ours.rope, 96, context), wanted)
        assert ours.rope.attention_factor == pytest.approx(factor, abs=1e-9)
    assert ours.rope.named(4096) == "longrope, short factors"
    assert ours.rope.named(4097) == "longrope, long factors"


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ({"short_factor": [1.0] * 48}, "long_factor of rope_type longrope is None, expected a list"),
        ({"short_factor": [1.0] * 48, "long_factor": [1.0] * 47}, "RoPE has 47 factors, expected 48"),
        (
            {"short_factor": [0] * 48, "long_factor": [1.0] * 48},
            "short_factor of rope_type longrope is 0, expected a posi",
        ),
    ],
)
def test_longrope_factors_that_cannot_be_are_named(sets: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        _read(model_type="phi3", head_dim=96, rope_scaling={"type": "longrope", **sets})


def test_yarn_reaches_beyond_the_stated_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    for stated in (32768, 131072):
        config = _read(model_type="qwen2", max_position_embeddings=stated, rope_scaling=scaling)
        assert config.max_context == 131072


def test_end_tokens_come_from_both_files_as_one_id_or_a_list() -> None:
    assert _read(model_type="qwen2", eos_token_id=5).eos_token_ids == (5,)
    assert _read(model_type="llama", generation={"eos_token_id": [7, 9]}).eos_token_ids == (7, 9, 2)
    both = _read(model_type="llama", eos_token_id=[9, 3], generation={"eos_token_id": 9})
    assert both.eos_token_ids == (9, 3)
    assert _read(model_type="llama", eos_token_id=None).eos_token_ids == ()


def test_a_configuration_saved_by_transformers_is_read_from_its_folder(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen3", **SIZES, intermediate_size=64, eos_token_id=4).save_pretrained(str(tmp_path))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 6]}))
    config = config_from_folder(tmp_path)
    assert (config.family, config.qk_norm, config.head_dim, config.eos_token_ids) == (
        "qwen3",
        "head",
        128,
        (4, 6),
    )


def _headers(*dtypes: str) -> dict[str, TensorHeader]:
    return {str(i): TensorHeader((8, 8), dtype, 0) for i, dtype in enumerate(dtypes)}


def test_the_compute_dtype_follows_the_weights() -> None:
    assert choose_dtype("auto", _headers("F32", "F32")) == "fp32"
    assert choose_dtype("auto", _headers("Q4_1", "Q8_0")) == "bf16"
    assert choose_dtype("auto", _headers("BF16", "F16")) == "bf16"
    assert choose_dtype("fp32", _headers("Q4_1")) == "fp32"
    with pytest.raises(ValueError, match="dtype 'fp16' is unknown; known: auto, fp32, bf16"):
        choose_dtype("fp16", {})


@pytest.mark.parametrize("factor", [0, -0.5, 1.5, 0.1, "half"])
def test_parts_of_a_head_that_cannot_be_rotated_are_refused_by_name(factor: object) -> None:
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        _read(model_type="phi3", head_dim=96, partial_rotary_factor=factor)


def test_phi_4_mini_rotates_three_quarters_of_each_head_by_longrope() -> None:
    sets = {"short_factor": [1.0] * 48, "long_factor": [1 + i / 8 for i in range(48)]}
    sizes = {**SIZES, "hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 131072}
    sizes |= {"original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75}
    ours = _read(model_type="phi3", rope_scaling={"type": "longrope", **sets}, **sizes)
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096, **sets}
    theirs = AutoConfig.for_model("phi3", **sizes, pad_token_id=None, rope_parameters=parameters)
    wanted, factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, torch.device("cpu"), seq_len=131072)
    assert torch.equal(inverse_frequencies(ours.rope, 128, 131072), wanted)
    cos, sin = rope_tables(ours.rope, 128, 131072)
    assert torch.equal(cos[:, 48:], torch.ones(131072, 16))
    assert not sin[:, 48:].any()
    assert float(cos[0, 0]) == pytest.approx(factor)
    assert ours.rope.named(131072) == "longrope, long factors, 96 elements of each head"
