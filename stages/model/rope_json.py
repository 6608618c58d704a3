"""RopeConfig from config.json, in the spelling of transformers 5 and in the one before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deepinfer.stages.model.config import FULL, ROPE_TYPES, SLIDING, RopeConfig, check_rotated
from deepinfer.stages.model.errors import CheckpointError, UnsupportedModelError
from deepinfer.stages.model.json_fields import ConfigFields, positive_number

_LONGROPE = "short_factor", "long_factor"


def rope_from_json(
    fields: ConfigFields, kind: str = FULL, theta: float | None = None, partial_of: int = 0
) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` beside it (before). Where parameters are
    given by kind of layer, those of `kind`. `theta`: where none is given, if not the family's. `partial_of`: head_dim
    in a family that may rotate a part of it only."""
    scaling = _scaling(fields, kind)
    rotated = _rotated(scaling, fields, partial_of)
    return replace(_whole_rope(scaling, fields, theta), rotated=rotated)


def _scaling(fields: ConfigFields, kind: str) -> Mapping[str, Any]:
    scaling = fields.raw.get("rope_scaling") or fields.raw.get("rope_parameters") or {}
    if isinstance(scaling, dict) and (FULL in scaling or SLIDING in scaling):
        scaling = scaling.get(kind) or {}
    if not isinstance(scaling, dict):
        raise CheckpointError(f"{fields.where}: rope parameters are {scaling!r}, expected an object")
    return scaling


def _rotated(scaling: Mapping[str, Any], fields: ConfigFields, head_dim: int) -> int:
    """As `RopeConfig` has it."""
    name = "partial_rotary_factor"
    partial = scaling.get(name, fields.get(name, 1.0))
    if partial in (None, 1, 1.0):
        return 0
    if not head_dim:
        raise UnsupportedModelError(f"{fields.where}: {name} {partial!r} is not supported for this family, only 1")
    rotated = int(head_dim * positive_number(partial, name, fields.where))
    check_rotated(rotated, head_dim, f"{fields.where}: {name} {partial!r}")
    return rotated


def _whole_rope(scaling: Mapping[str, Any], fields: ConfigFields, theta: float | None) -> RopeConfig:
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type == "su" or "short_factor" in scaling:  # As early files of Phi-3 call it.
        rope_type = "longrope"
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{fields.where}: rope_type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    default = fields.get("rope_theta", 10000.0) if theta is None else theta
    theta = positive_number(scaling.get("rope_theta", default), "rope_theta", fields.where)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    factor = scaling.get("factor")
    original = fields.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    original = int(positive_number(original or fields.integer("max_position_embeddings"), "rope", fields.where))
    if factor is None and rope_type in ("yarn", "longrope"):
        factor = fields.integer("max_position_embeddings") / original
    factor = positive_number(factor, f"factor of rope_type {rope_type}", fields.where)

    def number(name: str, default: Any = None) -> float:
        return positive_number(scaling.get(name) or default, f"{name} of rope_type {rope_type}", fields.where)

    if rope_type == "linear":
        return RopeConfig("linear", theta, factor)
    if rope_type == "longrope":
        return _longrope(scaling, theta, factor, original, fields.where)
    if rope_type == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            factor,
            original,
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=_yarn_attention_factor(scaling, factor, fields.where),
    )


def _longrope(scaling: Mapping[str, Any], theta: float, factor: float, original: int, where: str) -> RopeConfig:
    """LongRoPE (arXiv 2402.13753): divisors of the frequencies, a set for the original context and one beyond it."""
    short, long = (_factors(scaling.get(name), f"{name} of rope_type longrope", where) for name in _LONGROPE)
    given = scaling.get("attention_factor")
    attention = longrope_attention_factor(factor, original)
    if given is not None:
        attention = positive_number(given, "attention_factor of rope_type longrope", where)
    return RopeConfig(
        "longrope",
        theta,
        factor,
        original,
        attention_factor=attention,
        frequency_divisors=short,
        long_divisors=long,
    )


def _factors(value: Any, name: str, where: str) -> tuple[float, ...]:
    if not isinstance(value, list) or not value:
        raise CheckpointError(f"{where}: {name} is {value!r}, expected a list of numbers")
    return tuple(positive_number(each, name, where) for each in value)


def longrope_attention_factor(factor: float, original: int) -> float:
    """LongRoPE as Phi-3 has it: sqrt(1 + ln(s) / ln(original context))."""
    return 1.0 if factor <= 1 or original < 2 else math.sqrt(1 + math.log(factor) / math.log(original))


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float, where: str) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return positive_number(given, "attention_factor of rope_type yarn", where)
    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        own = yarn_mscale(factor, positive_number(mscale, "mscale of rope_type yarn", where))
        return own / yarn_mscale(factor, positive_number(mscale_all, "mscale_all_dim of rope_type yarn", where))
    return yarn_mscale(factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN, section 3.4 (arXiv 2309.00071): 0.1 ln(s) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
