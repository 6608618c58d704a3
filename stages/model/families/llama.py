"""Llama 1 to 3 and what has its shape. Mistral's GGUF files come under this name too."""

from __future__ import annotations

from dataclasses import replace

from deepinfer.stages.model.config import ModelConfig
from deepinfer.stages.model.families.family import Family
from deepinfer.stages.model.json_fields import ConfigFields


def _from_json(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return replace(config, qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias"))


LLAMA = Family(
    name="llama",
    defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
    from_json=_from_json,
    architecture="llama",
    interleaved_gguf=True,
)
