"""Mistral: llama with one window for all layers, where config.json does not set it to null."""

from __future__ import annotations

from dataclasses import replace

from deepinfer.stages.model.config import ModelConfig
from deepinfer.stages.model.families.family import Family
from deepinfer.stages.model.families.windows import one_window
from deepinfer.stages.model.json_fields import ConfigFields


def _from_json(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    return replace(config, windows=one_window(fields, config.num_layers))


MISTRAL = Family(
    name="mistral",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
    from_json=_from_json,
)
