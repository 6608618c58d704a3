"""ModelConfig from GGUF metadata and the tensor table (biases, head and q/k norms show by their tensors)."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from deepinfer.stages.model.config import ModelConfig, RopeConfig, check_rotated, check_sizes, context_length
from deepinfer.stages.model.errors import CheckpointError, UnsupportedModelError
from deepinfer.stages.model.families import ARCHITECTURES
from deepinfer.stages.model.gguf_keys import ROPE_FREQUENCIES, ROPE_LONG, ROPE_SHORT, GGUFKeys
from deepinfer.stages.model.rope_json import longrope_attention_factor, yarn_mscale

_GGUF_ROPE_TYPES = ("none", "linear", "yarn")


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    divisors: Mapping[str, tuple[float, ...]],
    where: str,
) -> ModelConfig:
    """`divisors` are the values of the tensors of `ROPE_DIVISORS` that there are, by their names.

    Raises UnsupportedModelError for another architecture, RoPE type, partial rotation or experts.
    """
    architecture = metadata.get("general.architecture")
    family = ARCHITECTURES.get(str(architecture))
    if family is None:
        raise UnsupportedModelError(
            f"{where}: GGUF architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    keys = GGUFKeys(metadata, family.architecture, where, tensor_names)
    if keys.get("expert_count"):
        raise UnsupportedModelError(f"{where}: a mixture of {keys.get('expert_count')} experts is not supported")
    hidden, q_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    kv_heads = keys.integer("attention.head_count_kv", q_heads)
    head_dim = keys.integer("attention.key_length", hidden // q_heads)
    num_layers = keys.integer("block_count")
    check_sizes(num_layers, q_heads, kv_heads, head_dim, where)
    rotated = keys.integer("rope.dimension_count", head_dim)
    same = ("attention.value_length",) if family.partial_rope else ("attention.value_length", "rope.dimension_count")
    for name in same:
        if keys.integer(name, head_dim) != head_dim:
            raise UnsupportedModelError(f"{where}: {name} {keys.get(name)} differs from the head size {head_dim}")
    check_rotated(rotated, head_dim, f"{where}: rope.dimension_count")
    for name, values in divisors.items():
        if len(values) != rotated // 2:
            raise CheckpointError(f"{where}: tensor {name} has {len(values)} values, expected {rotated // 2}")
    rope = replace(_rope(keys, divisors), rotated=0 if rotated == head_dim else rotated)
    window = keys.integer("attention.sliding_window", 0, least=0)
    common = ModelConfig(
        family=family.name,
        num_layers=num_layers,
        hidden_size=hidden,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.integer("feed_forward_length"),
        vocab_size=_vocab_size(keys),
        max_context=context_length(rope, keys.integer("context_length"), where),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        windows=(window,) * num_layers,
        tie_word_embeddings="output.weight" not in tensor_names,
        eos_token_ids=eos_token_ids(metadata),
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        o_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_down.bias" in tensor_names,
        qk_norm="head" if "blk.0.attn_q_norm.weight" in tensor_names else "",
    )
    return family.from_gguf(common, keys)


def _vocab_size(keys: GGUFKeys) -> int:
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list | array) else tokens
    return keys.integer("vocab_size", count)


def _rope(keys: GGUFKeys, divisors: Mapping[str, tuple[float, ...]]) -> RopeConfig:
    theta = keys.number("rope.freq_base", 10000.0)
    rope_type = keys.get("rope.scaling.type", "linear" if keys.get("rope.scale_linear") else "none")
    if ROPE_SHORT in divisors or ROPE_LONG in divisors:
        return _longrope(keys, divisors, theta)
    if rope_type not in _GGUF_ROPE_TYPES:
        raise UnsupportedModelError(
            f"{keys.where}: rope.scaling.type {rope_type!r} is not supported; supported: {', '.join(_GGUF_ROPE_TYPES)}"
        )
    if ROPE_FREQUENCIES in divisors:
        if rope_type == "yarn":
            raise UnsupportedModelError(f"{keys.where}: {ROPE_FREQUENCIES} together with yarn is not supported")
        return RopeConfig("llama3", theta, frequency_divisors=divisors[ROPE_FREQUENCIES])
    if rope_type == "none":
        return RopeConfig(theta=theta)
    factor = keys.number("rope.scaling.factor", keys.get("rope.scale_linear"))
    if rope_type == "linear":
        return RopeConfig("linear", theta, factor)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        keys.integer("rope.scaling.original_context_length", keys.integer("context_length")),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=keys.number("rope.scaling.attn_factor", 1.0) * yarn_mscale(factor),
    )


def _longrope(keys: GGUFKeys, divisors: Mapping[str, tuple[float, ...]], theta: float) -> RopeConfig:
    for name in (ROPE_SHORT, ROPE_LONG):
        if name not in divisors:
            raise CheckpointError(f"{keys.where}: tensor {name} is missing, which longrope needs beside the other one")
    context = keys.integer("context_length")
    original = keys.integer("rope.scaling.original_context_length", context)
    factor = context / original
    return RopeConfig(
        "longrope",
        theta,
        factor,
        original,
        attention_factor=keys.number("rope.scaling.attn_factor", longrope_attention_factor(factor, original)),
        frequency_divisors=divisors[ROPE_SHORT],
        long_divisors=divisors[ROPE_LONG],
    )


def eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [metadata.get(f"tokenizer.ggml.{name}") for name in names]
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int)))
