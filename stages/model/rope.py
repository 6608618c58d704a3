"""RoPE frequencies and the tables that attention reads: float32, operation by operation as transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from deepinfer.stages.model.config import ModelConfig, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, context: int = 0) -> torch.Tensor:
    """float32 [rotated elements / 2], radians per position, of contexts of at most `context` tokens."""
    head_dim = rope.size(head_dim)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    base = rope.theta**exponents
    divisors = rope.long_divisors if rope.is_long(context) else rope.frequency_divisors
    if divisors:
        return 1.0 / (base * torch.tensor(divisors, dtype=torch.float32))
    if rope.rope_type == "yarn":
        return _yarn(rope, head_dim, base)
    plain = 1.0 / base
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, plain)
    return plain


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a smooth ramp between them."""
    wavelength = 2 * math.pi / plain
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    ramp = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = torch.where(wavelength > longest, plain / rope.factor, plain)
    return torch.where((wavelength >= shortest) & (wavelength <= longest), ramp, scaled)


def _yarn(rope: RopeConfig, head_dim: int, base: torch.Tensor) -> torch.Tensor:
    """YaRN, section 3.2 (arXiv 2309.00071): "NTK by parts" between dimensions `low` and `high`."""

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = 1 - ramp
    return (1.0 / (rope.factor * base)) * (1 - kept) + (1.0 / base) * kept


def stacked_tables(ropes: Sequence[RopeConfig], head_dim: int, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin as `rope_tables` has them, or float32 [ropes, max_positions, head_dim / 2] if there are several."""
    tables = [rope_tables(rope, head_dim, max_positions) for rope in ropes]
    if len(tables) == 1:
        return tables[0]
    cos, sin = zip(*tables, strict=True)
    return torch.stack(cos), torch.stack(sin)


def rope_tables(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [max_positions, head_dim / 2], with the attention factor multiplied in. Pairs that are not
    rotated come last and have 1 and 0; see `row_order`."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim, max_positions))
    still = (0, head_dim // 2 - angles.shape[1])
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return F.pad(cos, still, value=1.0), F.pad(sin, still)


def row_order(config: ModelConfig) -> np.ndarray | None:
    """Where a part of each head is rotated: the rows of fused q, k and v such that every kernel, which pairs element i
    of a head with i + head_dim / 2, pairs those that rotate together (i and i + rotated / 2). Scores are sums over
    elements, so they are the same in any order that queries and keys share. None: rows stay where they are.
    """
    head_dim, rotated = config.head_dim, config.rope.size(config.head_dim)
    if rotated == head_dim:
        return None
    half, still = rotated // 2, np.arange(rotated, head_dim)
    first, second = np.split(still, 2)
    head = np.concatenate([np.arange(half), first, np.arange(half, rotated), second])
    heads = np.arange(config.num_q_heads + config.num_kv_heads)
    rotating = (heads[:, None] * head_dim + head).reshape(-1)
    return np.concatenate([rotating, np.arange(len(rotating), len(rotating) + config.kv_size)])
