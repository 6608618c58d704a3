"""ModelConfig from the config.json and generation_config.json of a Hugging Face folder.

Plain JSON instead of AutoConfig: it reads in a millisecond and says which field is wrong. The defaults of fields that
a file leaves out are those of the transformers configuration classes, which a test compares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer.stages.model.config import FAMILIES, ROPE_TYPES, ModelConfig, RopeConfig
from deepinfer.stages.model.errors import CheckpointError, UnsupportedModelError

_REQUIRED = object()

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}
_LEGACY_EOS = {"llama": 2, "mistral": 2}


class _Fields:
    """Typed access to config.json: family defaults for absent fields, errors that name the file and the field."""

    def __init__(self, raw: Mapping[str, Any], family: str, where: str):
        self.raw, self.where = raw, where
        self._defaults = _DEFAULTS[family]

    def get(self, name: str, default: Any = None) -> Any:
        return self.raw.get(name, self._defaults.get(name, default))

    def integer(self, name: str, default: Any = _REQUIRED, least: int = 1) -> int:
        value = self.get(name, default)
        if value is _REQUIRED:
            raise CheckpointError(f"{self.where}: field {name} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise CheckpointError(
                f"{self.where}: {name} is {value!r}, expected an integer of at least {least}"
            )
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        return positive_number(self.get(name, default), name, self.where)

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {name} is {value!r}, expected true or false")
        return value


def positive_number(value: Any, name: str, where: str) -> float:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise CheckpointError(f"{where}: {name} is {value!r}, expected a positive number")
    return float(value)


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError when the file is absent, is no JSON or holds no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, expected a JSON object")
    return value


def config_from_folder(folder: Path) -> ModelConfig:
    raw = read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    return config_from_json(raw, generation, str(folder / "config.json"))


def config_from_json(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Raises UnsupportedModelError for a family, RoPE type, activation or quantisation that is not supported."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"{where}: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    fields = _Fields(raw, family, where)
    _refuse_unsupported(fields)
    q_heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads") if fields.get("num_key_value_heads") else q_heads
    hidden = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim") if fields.get("head_dim") else hidden // q_heads
    if q_heads % kv_heads:
        raise CheckpointError(
            f"{where}: {q_heads} attention heads are no multiple of {kv_heads} key-value heads"
        )
    num_layers = fields.integer("num_hidden_layers")
    attention_bias = fields.flag("attention_bias") if family in ("llama", "qwen3") else False
    return ModelConfig(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_context=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope_from_json(fields),
        windows=_windows(fields, family, num_layers),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=eos_token_ids(raw, generation, where),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias") if family == "llama" else False,
        qk_norm=family == "qwen3",
    )


def _refuse_unsupported(fields: _Fields) -> None:
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(
            f"{fields.where}: hidden_act {activation!r} is not supported; supported: silu"
        )
    quantisation = fields.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise UnsupportedModelError(
            f"{fields.where}: quantisation {method!r} is not supported in a safetensors folder; supported: "
            "unquantised float32, float16 and bfloat16, or a GGUF file"
        )


def _windows(fields: _Fields, family: str, num_layers: int) -> tuple[int, ...]:
    """llama has none, mistral one for all layers, qwen only those layers that it names."""
    if family == "llama" or fields.get("sliding_window") is None:
        return (0,) * num_layers
    if family == "mistral":
        return (fields.integer("sliding_window"),) * num_layers
    if not fields.flag("use_sliding_window"):
        return (0,) * num_layers
    window = fields.integer("sliding_window")
    first = fields.integer("max_window_layers", 28, least=0)
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    kinds = fields.get("layer_types") or default
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise CheckpointError(f"{fields.where}: layer_types must name {num_layers} layers, got {kinds!r}")
    unknown = sorted({str(kind) for kind in kinds} - {"sliding_attention", "full_attention"})
    if unknown:
        raise UnsupportedModelError(
            f"{fields.where}: layer_types {', '.join(unknown)} are not supported; supported: "
            "full_attention, sliding_attention"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """generation_config's ids first, then those of config.json; either may be one id or a list."""
    found: list[int] = []
    for value in (
        generation.get("eos_token_id"),
        raw.get("eos_token_id", _LEGACY_EOS.get(str(raw.get("model_type")))),
    ):
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise CheckpointError(f"{where}: eos_token_id {token!r} is no token id")
            if token not in found:
                found.append(token)
    return tuple(found)


def rope_from_json(fields: _Fields) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` beside it (before)."""
    scaling = fields.raw.get("rope_scaling") or fields.raw.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise CheckpointError(f"{fields.where}: rope parameters are {scaling!r}, expected an object")
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{fields.where}: rope_type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    partial = scaling.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(
            f"{fields.where}: partial_rotary_factor {partial!r} is not supported, only 1"
        )
    theta = scaling.get("rope_theta", fields.get("rope_theta", 10000.0))
    theta = positive_number(theta, "rope_theta", fields.where)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    factor = scaling.get("factor")
    original = fields.get("original_max_position_embeddings") or scaling.get(
        "original_max_position_embeddings"
    )
    original = int(
        positive_number(original or fields.integer("max_position_embeddings"), "rope", fields.where)
    )
    if factor is None and rope_type == "yarn":
        factor = fields.integer("max_position_embeddings") / original
    factor = positive_number(factor, f"factor of rope_type {rope_type}", fields.where)

    def number(name: str, default: Any = None) -> float:
        return positive_number(scaling.get(name) or default, f"{name} of rope_type {rope_type}", fields.where)

    if rope_type == "linear":
        return RopeConfig("linear", theta, factor)
    if rope_type == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            factor,
            original,
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=_yarn_attention_factor(scaling, factor),
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
    return yarn_mscale(factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN, section 3.4 (arXiv 2309.00071): 0.1 ln(s) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
