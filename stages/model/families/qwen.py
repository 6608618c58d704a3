"""Qwen 2 (biases on q, k and v) and Qwen 3 (norms of every query and key head); windows on layers that they name."""

from __future__ import annotations

from dataclasses import replace

from deepinfer.stages.model.config import FULL, SLIDING, ModelConfig
from deepinfer.stages.model.families.family import Family
from deepinfer.stages.model.families.windows import layer_kinds, windows_of
from deepinfer.stages.model.json_fields import ConfigFields


def _qwen2(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    return replace(config, qkv_bias=True, windows=_windows(fields, config.num_layers))


def _qwen3(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    windows = _windows(fields, config.num_layers)
    return replace(config, qkv_bias=bias, o_bias=bias, qk_norm="head", windows=windows)


def _windows(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    if not fields.flag("use_sliding_window"):
        return (0,) * num_layers
    first = fields.integer("max_window_layers", 28, least=0)
    return windows_of(
        fields, layer_kinds(fields, num_layers, [SLIDING if i >= first else FULL for i in range(num_layers)])
    )


_COMMON = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096}

QWEN2 = Family(name="qwen2", defaults=_COMMON, from_json=_qwen2, architecture="qwen2")
QWEN3 = Family(name="qwen3", defaults={**_COMMON, "head_dim": 128}, from_json=_qwen3, architecture="qwen3")
