"""RoPE frequencies and the tables that attention reads: float32, operation by operation as transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from deepinfer.stages.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, context: int = 0) -> torch.Tensor:
    """float32 [head_dim / 2], radians per position, of contexts of at most `context` tokens."""
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
    """cos and sin, float32 [max_positions, head_dim / 2], with the attention factor multiplied in."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim, max_positions))
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
