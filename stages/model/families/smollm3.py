"""SmolLM3: llama without RoPE in some layers, every fourth one if the file does not say which."""

from __future__ import annotations

from dataclasses import replace

from deepinfer.stages.model.config import FULL, SLIDING, ModelConfig
from deepinfer.stages.model.errors import CheckpointError
from deepinfer.stages.model.families.family import Family
from deepinfer.stages.model.families.windows import layer_kinds, windows_of
from deepinfer.stages.model.gguf_keys import GGUFKeys
from deepinfer.stages.model.json_fields import ConfigFields

_INTERVAL = 4


def _rotates(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Of each layer: `no_rope_layers`, which has a 1 where there is RoPE, or else by `no_rope_layer_interval`."""
    given = fields.get("no_rope_layers")
    if given is None:
        interval = fields.integer("no_rope_layer_interval", _INTERVAL)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) < num_layers or any(flag not in (0, 1) for flag in given):
        raise CheckpointError(
            f"{fields.where}: no_rope_layers is {given!r}, expected a 0 or a 1 for each of {num_layers} layers"
        )
    return [bool(flag) for flag in given[:num_layers]]


def _from_json(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    bias, rotates = fields.flag("attention_bias"), _rotates(fields, config.num_layers)
    sliding = fields.flag("use_sliding_window")
    kinds = layer_kinds(fields, config.num_layers, [FULL if turns or not sliding else SLIDING for turns in rotates])
    return replace(
        _without_rope(config, rotates),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        windows=windows_of(fields, kinds),
    )


def _from_gguf(config: ModelConfig, keys: GGUFKeys) -> ModelConfig:
    """GGUF files do not say which layers rotate: those of the published models."""
    return _without_rope(config, [(layer + 1) % _INTERVAL != 0 for layer in range(config.num_layers)])


def _without_rope(config: ModelConfig, rotates: list[bool]) -> ModelConfig:
    return replace(config, layer_ropes=tuple(config.rope if turns else None for turns in rotates))


SMOLLM3 = Family(
    name="smollm3",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 128001,
    },
    from_json=_from_json,
    architecture="smollm3",
    from_gguf=_from_gguf,
    interleaved_gguf=True,
)
