"""ModelConfig from the config.json and generation_config.json of a Hugging Face folder.

Plain JSON instead of AutoConfig: it reads in a millisecond and says which field is wrong. The defaults of
fields that a file leaves out are those of the transformers configuration classes, which a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer.stages.model.config import FAMILIES, ModelConfig, check_sizes, context_length
from deepinfer.stages.model.errors import CheckpointError, UnsupportedModelError
from deepinfer.stages.model.json_fields import ConfigFields, read_json
from deepinfer.stages.model.rope_json import rope_from_json

_LEGACY_EOS = {"llama": 2, "mistral": 2}


def config_from_folder(folder: Path) -> ModelConfig:
    raw = read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    return config_from_json(raw, generation, str(folder / "config.json"))


def config_from_json(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Raises UnsupportedModelError for an unknown family, RoPE type or activation."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"{where}: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    fields = ConfigFields(raw, family, where)
    _refuse_unsupported(fields)
    q_heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads") if fields.get("num_key_value_heads") else q_heads
    hidden = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim") if fields.get("head_dim") else hidden // q_heads
    num_layers = fields.integer("num_hidden_layers")
    check_sizes(num_layers, q_heads, kv_heads, head_dim, where)
    rope = rope_from_json(fields)
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
        max_context=context_length(rope, fields.integer("max_position_embeddings"), fields.where),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        windows=_windows(fields, family, num_layers),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=eos_token_ids(raw, generation, where),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias") if family == "llama" else False,
        qk_norm=family == "qwen3",
    )


def _refuse_unsupported(fields: ConfigFields) -> None:
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"{fields.where}: hidden_act {activation!r} is not supported; supported: silu")


def _windows(fields: ConfigFields, family: str, num_layers: int) -> tuple[int, ...]:
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
