"""ModelConfig from the config.json and generation_config.json of a Hugging Face folder.

Plain JSON instead of AutoConfig: it reads in a millisecond and says which field is wrong. The defaults of
fields that a file leaves out are those of the transformers configuration classes, which a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer.stages.model.config import GELU_TANH, SILU, ModelConfig, check_divisors, check_sizes, context_length
from deepinfer.stages.model.errors import CheckpointError, UnsupportedModelError
from deepinfer.stages.model.families import FAMILIES
from deepinfer.stages.model.folder_names import CONFIG
from deepinfer.stages.model.json_fields import ConfigFields, read_json
from deepinfer.stages.model.rope_json import rope_from_json

_ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH}


def config_from_folder(folder: Path) -> ModelConfig:
    raw = read_json(folder / CONFIG)
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    return config_from_json(raw, generation, str(folder / CONFIG))


def config_from_json(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Raises UnsupportedModelError for an unknown family, RoPE type or activation."""
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        raise UnsupportedModelError(
            f"{where}: model_type {raw.get('model_type')!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    fields = ConfigFields(raw, family.defaults, where)
    q_heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads") if fields.get("num_key_value_heads") else q_heads
    hidden = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim") if fields.get("head_dim") else hidden // q_heads
    num_layers = fields.integer("num_hidden_layers")
    check_sizes(num_layers, q_heads, kv_heads, head_dim, where)
    rope = rope_from_json(fields, partial_of=head_dim if family.partial_rope else 0)
    check_divisors(rope, head_dim, where)
    common = ModelConfig(
        family=family.name,
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
        windows=(0,) * num_layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=eos_token_ids(raw, generation, where),
        activation=_activation(fields, family.activation_field),
    )
    return family.from_json(common, fields)


def _activation(fields: ConfigFields, name: str) -> str:
    activation = fields.get(name, "silu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{fields.where}: {name} {activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[activation]


def eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """generation_config's ids first, then those of config.json; either may be one id or a list."""
    found: list[int] = []
    for value in (
        generation.get("eos_token_id"),
        raw.get("eos_token_id", _default_eos(raw)),
    ):
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise CheckpointError(f"{where}: eos_token_id {token!r} is no token id")
            if token not in found:
                found.append(token)
    return tuple(found)


def _default_eos(raw: Mapping[str, Any]) -> Any:
    family = FAMILIES.get(str(raw.get("model_type")))
    return None if family is None else family.defaults.get("eos_token_id")
