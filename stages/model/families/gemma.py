"""Gemma 2 and the text models of Gemma 3: norms on both sides, gelu, scaled embeddings, windows, soft caps.

Safetensors hold w where the norms multiply with 1 + w; GGUF files hold 1 + w.
"""

from __future__ import annotations

from dataclasses import replace

from deepinfer.stages.model.config import BOTH, FULL, GELU_TANH, SLIDING, ModelConfig, RopeConfig
from deepinfer.stages.model.errors import UnsupportedModelError
from deepinfer.stages.model.families.family import Family
from deepinfer.stages.model.families.windows import layer_kinds, windows_of
from deepinfer.stages.model.gguf_keys import GGUFKeys
from deepinfer.stages.model.json_fields import ConfigFields
from deepinfer.stages.model.rope_json import rope_from_json

_GEMMA2_PERIOD, _GEMMA3_PERIOD = 2, 6
"""Every second, or sixth, layer attends to everything; the others have a window."""
_LOCAL_THETA = 10000.0
_HIDDEN_BY_HEADS = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the 27B models, whose scores are scaled by hidden_size / heads, not by head_dim. GGUF does not say so."""


def _gemma(config: ModelConfig) -> ModelConfig:
    return replace(config, norms=BOTH, activation=GELU_TANH, embedding_scale=config.hidden_size**0.5)


def _kinds(num_layers: int, period: int) -> list[str]:
    return [SLIDING if (layer + 1) % period else FULL for layer in range(num_layers)]


def _from_json(config: ModelConfig, fields: ConfigFields, kinds: list[str]) -> ModelConfig:
    if fields.flag("use_bidirectional_attention"):
        raise UnsupportedModelError(f"{fields.where}: use_bidirectional_attention is not supported, only false")
    bias = fields.flag("attention_bias")
    return replace(
        _gemma(config),
        norm_offset=1.0,
        qkv_bias=bias,
        o_bias=bias,
        windows=windows_of(fields, kinds),
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        attention_soft_cap=fields.optional_number("attn_logit_softcapping"),
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
    )


def _gemma2_from_json(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    return _from_json(config, fields, layer_kinds(fields, config.num_layers, _kinds(config.num_layers, _GEMMA2_PERIOD)))


def _gemma3_from_json(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    period = fields.integer("sliding_window_pattern", _GEMMA3_PERIOD)
    kinds = layer_kinds(fields, config.num_layers, _kinds(config.num_layers, period))
    gemma = replace(_from_json(config, fields, kinds), qk_norm="head")
    return _with_local_rope(gemma, kinds, _local_rope(fields))


def _local_rope(fields: ConfigFields) -> RopeConfig:
    """`rope_parameters.sliding_attention` (transformers 5), or `rope_local_base_freq` (before). Never stretched."""
    parameters = fields.get("rope_parameters")
    if isinstance(parameters, dict) and SLIDING in parameters:
        return rope_from_json(fields, SLIDING, _LOCAL_THETA)
    return RopeConfig(theta=fields.number("rope_local_base_freq", _LOCAL_THETA))


def _with_local_rope(config: ModelConfig, kinds: list[str], local: RopeConfig) -> ModelConfig:
    return replace(config, layer_ropes=tuple(local if kind == SLIDING else config.rope for kind in kinds))


def _from_gguf(config: ModelConfig, keys: GGUFKeys, period: int) -> ModelConfig:
    kinds = _kinds(config.num_layers, period)
    window = keys.integer("attention.sliding_window")
    size = config.head_dim
    if config.num_layers == _HIDDEN_BY_HEADS[config.family]:
        size = config.hidden_size // config.num_q_heads
    return replace(
        _gemma(config), attention_scale=size**-0.5, windows=tuple(window if kind == SLIDING else 0 for kind in kinds)
    )


def _gemma2_from_gguf(config: ModelConfig, keys: GGUFKeys) -> ModelConfig:
    return replace(
        _from_gguf(config, keys, _GEMMA2_PERIOD),
        attention_soft_cap=keys.number("attn_logit_softcapping", 50.0),
        logit_soft_cap=keys.number("final_logit_softcapping", 30.0),
    )


def _gemma3_from_gguf(config: ModelConfig, keys: GGUFKeys) -> ModelConfig:
    local = RopeConfig(theta=keys.number("rope.freq_base_swa", _LOCAL_THETA))
    return _with_local_rope(_from_gguf(config, keys, _GEMMA3_PERIOD), _kinds(config.num_layers, _GEMMA3_PERIOD), local)


_COMMON = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
}
_GGUF_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

GEMMA2 = Family(
    name="gemma2",
    defaults={
        **_COMMON,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    from_json=_gemma2_from_json,
    activation_field="hidden_activation",
    architecture="gemma2",
    from_gguf=_gemma2_from_gguf,
    gguf_tensors=_GGUF_NORMS,
)
GEMMA3 = Family(
    name="gemma3_text",
    defaults={**_COMMON, "max_position_embeddings": 131072, "rope_theta": 1000000.0},
    from_json=_gemma3_from_json,
    activation_field="hidden_activation",
    architecture="gemma3",
    from_gguf=_gemma3_from_gguf,
    gguf_tensors=_GGUF_NORMS,
)
