"""Weights to 4-bit or 8-bit codes: w = scale * (code - zero), group by group.

The range of a group is from its least to its greatest weight and 0, or the part of it that errs least: the weights
beyond are cut to its ends, and the steps between get smaller. Scales are rounded to the 16 bits that the file has
before the codes are chosen, so that nothing is rounded afterwards.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

WHOLE = (1.0,)
SHRINKS = tuple(1 - 0.03 * step for step in range(14))
"""Parts of a group's range that are tried."""


class Codes(NamedTuple):
    codes: Tensor
    """uint8 [rows, columns], below 2 ** bits."""
    scales: Tensor
    """[rows, groups], bf16 or fp16."""
    zeros: Tensor
    """uint8 [rows, groups]; half of 2 ** bits throughout when symmetric."""

    def dense(self) -> Tensor:
        """float32 [rows, columns]."""
        grouped = self.codes.unflatten(1, (self.scales.shape[1], -1)).float() - self.zeros.unsqueeze(-1)
        return (grouped * self.scales.float().unsqueeze(-1)).flatten(1)


def to_codes(
    weight: Tensor,
    group: int,
    bits: int,
    symmetric: bool,
    dtype: torch.dtype,
    shrinks: tuple[float, ...] = WHOLE,
    importance: Tensor | None = None,
) -> Codes:
    """Args:
    weight: float32 [rows, columns], finite; `group` divides the columns.
    dtype: of the scales. importance: float32 [columns], what a squared error in each column counts; 1 by default.
    """
    grouped = weight.unflatten(1, (-1, group))
    counts = None if importance is None else importance.view(-1, group)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    trials = (_try(grouped, low * part, high * part, bits, symmetric, dtype, counts) for part in shrinks)
    best = reduce(_Trial.better_of, trials)
    codes = _codes(grouped, best.scales, best.zeros, bits)
    return Codes(codes.to(torch.uint8).flatten(1), best.scales, best.zeros.to(torch.uint8))


class _Trial(NamedTuple):
    scales: Tensor
    zeros: Tensor
    errors: Tensor
    """[rows, groups]."""

    def better_of(self, other: _Trial) -> _Trial:
        """Group by group; the wider range where it makes no difference."""
        wins = other.errors < self.errors
        return _Trial(*(torch.where(wins, theirs, ours) for ours, theirs in zip(self, other, strict=True)))


def _try(
    grouped: Tensor, low: Tensor, high: Tensor, bits: int, symmetric: bool, dtype: torch.dtype, counts: Tensor | None
) -> _Trial:
    top = 2**bits - 1
    if symmetric:
        half = 2 ** (bits - 1)
        scales = _stored(torch.maximum(-low / half, high / (half - 1)), dtype)
        zeros = torch.full_like(low, half)
    else:
        scales = _stored((high - low) / top, dtype)
        zeros = (-low / scales.float()).round().clamp(0, top)
    wide, zero = scales.float().unsqueeze(-1), zeros.unsqueeze(-1)
    wrong = _codes(grouped, scales, zeros, bits).sub_(zero).mul_(wide).sub_(grouped).square_()
    return _Trial(scales, zeros, (wrong if counts is None else wrong.mul_(counts)).sum(-1))


def _codes(grouped: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """float32 [rows, groups, group], whole numbers."""
    codes = (grouped / scales.float().unsqueeze(-1)).round_().add_(zeros.unsqueeze(-1))
    return codes.clamp_(0, 2**bits - 1)


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """In 16 bits and never 0: a group of zeros has codes that are its zero point."""
    least = torch.finfo(dtype).smallest_normal if dtype == torch.bfloat16 else 2.0**-24
    return scales.clamp(min=least).to(dtype)
