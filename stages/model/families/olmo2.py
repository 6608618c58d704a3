"""OLMo 2: norms on what attention and MLP give, none before them, and one norm of all of q and of all of k."""

from __future__ import annotations

from dataclasses import replace

from deepinfer.stages.model.config import POST, ModelConfig
from deepinfer.stages.model.families.family import Family
from deepinfer.stages.model.gguf_keys import GGUFKeys
from deepinfer.stages.model.json_fields import ConfigFields


def _olmo2(config: ModelConfig) -> ModelConfig:
    return replace(config, norms=POST, qk_norm="projection")


def _from_json(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return replace(_olmo2(config), qkv_bias=bias, o_bias=bias)


def _from_gguf(config: ModelConfig, keys: GGUFKeys) -> ModelConfig:
    return _olmo2(config)


OLMO2 = Family(
    name="olmo2",
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
    from_json=_from_json,
    architecture="olmo2",
    from_gguf=_from_gguf,
    gguf_tensors={
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
