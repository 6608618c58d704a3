"""Weights in 4-bit groups, whatever file they came from: w = scale * code + minimum, and how groups are made equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

KERNEL_GROUPS = (128, 64, 32)
"""Columns that share a scale, in every kernel of every device."""


class Int4Groups(NamedTuple):
    codes: np.ndarray
    """uint8 [rows, columns], 0 to 15."""
    scales: np.ndarray
    """float32 [rows, columns / group]."""
    minima: np.ndarray
    """float32 [rows, columns / group]."""
    order: np.ndarray | None = None
    """int32 [columns]: codes[:, k] are those of the model's column order[k]. None: both are the same."""

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def permuted(self, rows: np.ndarray) -> Int4Groups:
        return Int4Groups(self.codes[rows], self.scales[rows], self.minima[rows], self.order)

    def dense(self) -> np.ndarray:
        """float32 [rows, columns], as the model has them."""
        grouped = self.codes.reshape(*self.scales.shape, self.group) * self.scales[..., None] + self.minima[..., None]
        stored = grouped.reshape(self.codes.shape)
        if self.order is None:
            return stored
        out = np.empty_like(stored)
        out[:, self.order] = stored
        return out

    def split(self, group: int) -> Int4Groups:
        """The same weights in groups of `group`, which divides the group they have: scales and minima repeated."""
        times = self.group // group
        if times == 1:
            return self
        scales, minima = self.scales.repeat(times, axis=1), self.minima.repeat(times, axis=1)
        return Int4Groups(self.codes, scales, minima, self.order)


def joined(parts: Sequence[Int4Groups]) -> Int4Groups:
    """The rows of `parts`, whose columns are in one order, below one another, in the smallest of their groups."""
    if len(parts) == 1:
        return parts[0]
    group = min(part.group for part in parts)
    split = [part.split(group) for part in parts]
    codes, scales, minima = (np.concatenate([part[field] for part in split]) for field in range(3))
    return Int4Groups(codes, scales, minima, parts[0].order)


def kernel_group(group: int, columns: int) -> int:
    """The largest group of the kernels that divides groups of `group` in rows of `columns`, 0 when none does."""
    return next((size for size in KERNEL_GROUPS if group % size == 0 and columns % size == 0), 0)
