"""Phi-3 and Phi-4: llama whose files hold q, k and v as one matrix, gate and up as another; perhaps one window for all.
Phi-4-mini rotates three quarters of each head.

Phi's long contexts ("longrope") have other frequencies than those within the original length, for all positions. Which
ones an engine takes follows from its longest context, so keys that are stored stay what they are.
"""

from __future__ import annotations

from dataclasses import replace

from deepinfer.stages.model.config import ModelConfig
from deepinfer.stages.model.families.family import Family
from deepinfer.stages.model.families.windows import one_window
from deepinfer.stages.model.gguf_keys import GGUFKeys
from deepinfer.stages.model.json_fields import ConfigFields


def _from_json(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    return replace(config, fused_projections=True, windows=one_window(fields, config.num_layers))


def _from_gguf(config: ModelConfig, keys: GGUFKeys) -> ModelConfig:
    return replace(config, fused_projections=True)


PHI3 = Family(
    name="phi3",
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 32000},
    from_json=_from_json,
    architecture="phi3",
    from_gguf=_from_gguf,
    partial_rope=True,
    gguf_tensors={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
)
