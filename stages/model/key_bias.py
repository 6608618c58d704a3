"""Key biases (Qwen2): whether a layer stores its keys with the bias, or without it and adds it when they are read.

A large constant in every key makes the format round off what differs between keys. RoPE(Wx + b) = RoPE(Wx) + RoPE(b),
so a layer may store RoPE(Wx) alone ("split"); `AttentionSpec.key_bias` then has b. That costs no memory and some
attention time, so "auto" splits a layer where it pays: 64 keys of the size that the layer's weights make of normalised
random inputs are rotated and put through the format with the bias and without it. The layer is split if, in some head,
the bias makes the rounding error `WORTHWHILE` times larger and larger than `TOLERATED` of the bias-free key.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from deepinfer.kernels.codecs import FP32, Codec
from deepinfer.kernels.reference_attention import rotate
from deepinfer.stages.model.config import ModelConfig

KEY_BIAS_MODES = ("auto", "inline", "split")
WORTHWHILE = 1.25
TOLERATED = 0.005
"""Relative RMS error of a key. A little less than int8 costs a key without a bias (0.7 %)."""
_KEYS = 64

logger = logging.getLogger(__name__)


class KeyBias(NamedTuple):
    """One layer's bias and what was decided of it."""

    values: torch.Tensor
    """float32 [kv_size]."""
    norm: float
    inline_error: float
    """Relative RMS rounding error of stored keys in the worst head, with the bias in them."""
    split_error: float
    """The same without it."""
    split: bool


@dataclass(frozen=True)
class KeyBiasRule:
    """`mode` is one of `KEY_BIAS_MODES`, `codec` that of the pool's keys. Raises ValueError for another mode."""

    mode: str
    codec: Codec

    def __post_init__(self) -> None:
        if self.mode not in KEY_BIAS_MODES:
            raise ValueError(f"kv_key_bias {self.mode!r} is unknown; known: {', '.join(KEY_BIAS_MODES)}")

    def choose(self, values: torch.Tensor, keys: torch.Tensor, head_dim: int, compute_dtype: torch.dtype) -> KeyBias:
        """`values`: float32 [kv_size]; `keys`: float32 [samples, kv_size] of bias-free keys, before RoPE."""
        inline = self._error(keys, values, head_dim, compute_dtype)
        split = self._error(keys, torch.zeros_like(values), head_dim, compute_dtype)
        norm = float(values.norm())
        wanted = norm > 0 and self.mode == "split"
        if self.mode == "auto":
            wanted = bool(((inline > TOLERATED) & (inline > WORTHWHILE * split)).any())
        return KeyBias(values, norm, float(inline.max()), float(split.max()), wanted)

    def _error(self, keys: torch.Tensor, bias: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Per head, the RMS error of keys that are stored with `bias` in them, over the RMS of `keys`."""
        heads = (keys + bias).unflatten(1, (-1, head_dim))
        generator = torch.Generator().manual_seed(0)
        angles = 2 * math.pi * torch.rand(len(keys), 1, head_dim // 2, generator=generator)
        rounded = rotate(heads.to(dtype).float(), angles.cos(), angles.sin())
        stored = self.codec.decode(*self.codec.encode(rounded))
        exact = rotate(heads.double(), angles.cos().double(), angles.sin().double())
        size = keys.unflatten(1, (-1, head_dim)).double().square().mean(dim=(0, 2)).sqrt()
        error = (stored - exact).square().mean(dim=(0, 2)).sqrt()
        return torch.where(size > 0, error / size, 0.0)


INLINE = KeyBiasRule("inline", FP32)


def sample_keys(weight: torch.Tensor, input_norm: torch.Tensor) -> torch.Tensor:
    """float32 [64, kv_size]: what `weight` (float32 [kv_size, hidden]) makes of random inputs that were normalised by
    an RMS norm with the weights `input_norm` (float32 [hidden])."""
    inputs = torch.randn(_KEYS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    return (inputs * input_norm) @ weight.T


def describe(mode: str, config: ModelConfig, biases: Sequence[KeyBias | None]) -> dict[str, object]:
    """Plain values for `status`: the mode, why it did what it did, and per biased layer the norm and the choice."""
    return {
        "mode": mode,
        "reason": _reason(mode, config),
        "split_layers": [layer for layer, bias in enumerate(biases) if bias is not None and bias.split],
        "layers": [
            {
                "layer": layer,
                "norm": round(bias.norm, 2),
                "inline_error": round(bias.inline_error, 5),
                "split_error": round(bias.split_error, 5),
                "choice": "split" if bias.split else "inline",
            }
            for layer, bias in enumerate(biases)
            if bias is not None
        ],
    }


def log_choices(mode: str, config: ModelConfig, biases: Sequence[KeyBias | None]) -> None:
    logger.info("kv_key_bias %s: %s", mode, _reason(mode, config))
    for layer, bias in enumerate(biases):
        if bias is not None:
            logger.info(
                "layer %d: key bias of norm %.2f, key error %.3g inline, %.3g split: %s",
                layer, bias.norm, bias.inline_error, bias.split_error, "split" if bias.split else "inline",
            )  # fmt: skip


def _reason(mode: str, config: ModelConfig) -> str:
    if not config.qkv_bias:
        return "the model has no key biases"
    if config.qk_norm:
        return "keys are normalised after the bias was added, which is not linear: it stays inline"
    if None in config.layer_ropes:
        return "layers without RoPE keep it inline"
    if mode == "auto":
        return (
            f"split where the bias makes the rounding error of keys more than {WORTHWHILE} times larger "
            f"and larger than {TOLERATED:.1%}"
        )
    return "as asked for"
