"""The files beside the weights: config.json with what was quantised, and tokenizer files, copied or made of a GGUF."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from deepinfer.daemon.quantize.plan import Plan
from deepinfer.stages.model.checkpoint import Checkpoint
from deepinfer.stages.model.config import ModelConfig, RopeConfig
from deepinfer.stages.model.errors import UnsupportedModelError
from deepinfer.stages.model.folder_names import AWQ_CONFIG, CONFIG, GPTQ_CONFIG, INDEX
from deepinfer.stages.model.json_fields import read_json
from deepinfer.stages.model.rope import inverse_frequencies
from deepinfer.stages.model.rope_json import yarn_mscale
from deepinfer.stages.model.tokenizer import load_tokenizer

_COPIED = ("*.json", "*.txt", "*.jinja", "*.model", "LICENSE*", "NOTICE*")
_WRITTEN = (CONFIG, INDEX, GPTQ_CONFIG, AWQ_CONFIG)
_DTYPES = {"F16": "float16", "BF16": "bfloat16"}
_ARCHITECTURES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_LLAMA3_FACTORS = (8.0, 32.0)
"""Llama 3.1 and 3.2; the other numbers are the same in both."""


def write_files(folder: Path, checkpoint: Checkpoint, plan: Plan) -> None:
    if checkpoint.format == "gguf":
        raw = config_of(checkpoint.config, str(checkpoint.path))
        load_tokenizer(checkpoint.path).save(folder)
        generation = {"eos_token_id": list(checkpoint.config.eos_token_ids)}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    else:
        raw = read_json(checkpoint.path / CONFIG)
        for file in _companions(checkpoint.path):
            shutil.copyfile(file, folder / file.name)
    raw.pop("torch_dtype", None)
    raw["dtype"] = _DTYPES[plan.dtype]
    raw["quantization_config"] = plan.quantization_config()
    if plan.unties_head:
        raw["tie_word_embeddings"] = False
    (folder / CONFIG).write_text(json.dumps(raw, indent=1, ensure_ascii=False) + "\n")


def _companions(folder: Path) -> list[Path]:
    """Never code: a model folder may bring some, and nobody here runs it."""
    found = {path for pattern in _COPIED for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in found if path.name not in _WRITTEN)


def config_of(config: ModelConfig, where: str) -> dict[str, Any]:
    """What config.json says of a model that came without one. Raises UnsupportedModelError, with the file `where`, for
    what such a file cannot say."""
    family = "mistral" if config.family == "llama" and any(config.windows) else config.family
    if family not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{where}: config.json cannot be made of a {family} file; it can of {', '.join(_ARCHITECTURES)}. Give the "
            "model's Hugging Face folder"
        )
    raw: dict[str, Any] = {
        "architectures": [f"{_ARCHITECTURES[family]}ForCausalLM"],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": None,
        "eos_token_id": list(config.eos_token_ids),
        **_rope(config, where),
    }
    if config.qkv_bias != (config.o_bias or family == "qwen2"):
        raise UnsupportedModelError(f"{where}: config.json of a {family} cannot say which of its matrices have biases")
    if any(config.windows):
        raw |= {"sliding_window": max(config.windows), "use_sliding_window": True, "max_window_layers": 0}
    return raw


def _rope(config: ModelConfig, where: str) -> dict[str, Any]:
    """In the spelling of transformers 5 and, for older readers, the one before."""
    rope = config.rope
    parameters: dict[str, Any] = {"rope_type": rope.rope_type, "rope_theta": rope.theta}
    if rope.rope_type == "linear":
        parameters |= {"factor": rope.factor}
    elif rope.rope_type == "llama3":
        parameters |= _llama3(config, where)
    elif rope.rope_type == "yarn":
        attention = rope.attention_factor
        parameters |= {
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_positions,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            **({} if attention == yarn_mscale(rope.factor) else {"attention_factor": attention}),
        }
    elif rope.rope_type == "longrope":
        parameters |= {
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_positions,
            "attention_factor": rope.attention_factor,
            "short_factor": list(rope.frequency_divisors),
            "long_factor": list(rope.long_divisors),
        }
    scaling = None if rope.rope_type == "default" else {k: v for k, v in parameters.items() if k != "rope_theta"}
    return {"rope_theta": rope.theta, "rope_parameters": parameters, "rope_scaling": scaling}


def _llama3(config: ModelConfig, where: str) -> dict[str, Any]:
    """A GGUF file has the divisors that come of these numbers, not the numbers."""
    wanted = inverse_frequencies(config.rope, config.head_dim)
    for factor in _LLAMA3_FACTORS:
        rope = RopeConfig("llama3", config.rope.theta, factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
        if torch.allclose(inverse_frequencies(rope, config.head_dim), wanted, rtol=1e-4, atol=0):
            return {
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
    raise UnsupportedModelError(
        f"{where}: the frequencies of rope_freqs.weight are not those of Llama 3.1 or 3.2; config.json cannot say them"
    )
