"""One matrix of a quantised folder, unpacked: w = scale * (code - zero), exactly as its format defines it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from deepinfer.kernels.cpu.records import BLOCK
from deepinfer.kernels.cpu.word_rows import COLUMNS
from deepinfer.kernels.stored_words import CodeWords, StoredWords, WordsPart
from deepinfer.stages.model.gguf_codes import GROUP, Int8Groups
from deepinfer.stages.model.int4 import Int4Groups, kernel_group

_ROWS_AT_ONCE = 512


class Int4Matrix(NamedTuple):
    unpack: Callable[[], np.ndarray]
    """Gives the codes, uint8 [rows, columns], 0 to 15; to 255 in a matrix of 8 bits."""
    scales: np.ndarray
    """float32 [rows, groups]."""
    zeros: np.ndarray
    """float32 [rows, groups], whole numbers."""
    group_of: np.ndarray
    """int [columns]: the group of each column. In act-order files any, else column // group."""
    words: CodeWords | None = None
    """The codes as the file has them, if they have 4 bits."""

    def dense(self) -> np.ndarray:
        """float32 [rows, columns], each weight rounded once."""
        codes = self.unpack()
        out = np.empty(codes.shape, np.float32)
        for first in range(0, len(out), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            np.subtract(codes[rows], self.zeros[rows][:, self.group_of], out=out[rows])
            out[rows] *= self.scales[rows][:, self.group_of]
        return out

    def groups(self, size: int) -> Int4Groups:
        """As the kernels take it, in groups of `size` columns, each of which lies within one group of the file. The
        columns of act-order files are sorted by group.

        The minimum is -scale * zero: with 16-bit scales it is exact, and so is scale * code + minimum. With float32
        scales either may be off in the last bit of float32.
        """
        order, codes = column_order(self.group_of), self.unpack()
        if order is not None:
            codes = np.ascontiguousarray(codes[:, order])
        return Int4Groups(codes, *self._factors(size, order), order)

    def stored(self, size: int) -> StoredWords | None:
        """The same without unpacking it, where the kernels take the words as they are."""
        order = column_order(self.group_of)
        if self.words is None or len(self.scales) % BLOCK or (order is not None and self.words.layout != COLUMNS):
            return None
        return StoredWords((WordsPart(self.words, *self._factors(size, order)),), size, order)

    def _factors(self, size: int, order: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Scales and minima."""
        of = (self.group_of if order is None else self.group_of[order])[::size]
        scales, zeros = np.ascontiguousarray(self.scales[:, of]), self.zeros[:, of]
        return scales, np.ascontiguousarray(-scales * zeros)


def int8_groups(matrix: Int4Matrix) -> Int8Groups:
    """A symmetric matrix of 8 bits, whose groups are multiples of the kernels': the same weights, scales repeated."""
    of = matrix.group_of[::GROUP]
    return Int8Groups((matrix.unpack() ^ 128).view(np.int8), np.ascontiguousarray(matrix.scales[:, of]))


def nibbles(words: np.ndarray) -> np.ndarray:
    """int32 [rows, n] to uint8 [rows, 8 n], the lowest four bits of a word first."""
    pairs = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8).astype("<u2")
    pairs |= pairs << 4  # A byte of two codes is now in both bytes, once in the right place for each.
    pairs &= 0x0F0F
    return pairs.view(np.uint8)


def octets(words: np.ndarray) -> np.ndarray:
    """int32 [rows, n] to uint8 [rows, 4 n], the lowest eight bits of a word first."""
    return np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)


def plain_groups(columns: int, group: int) -> np.ndarray:
    """The group of each column when groups are neighbours; the last one may be short."""
    return np.arange(columns) // group


def column_order(group_of: np.ndarray) -> np.ndarray | None:
    """int32 [columns]: the columns sorted by group, each group's in the order that they had. None: they are sorted."""
    if (np.diff(group_of) >= 0).all():
        return None
    return np.argsort(group_of, kind="stable").astype(np.int32)


def usable_group(group: int, group_of: np.ndarray) -> int:
    """The kernels' group for a matrix whose columns are sorted by group, 0 when they have none that fits or when its
    groups are not of `group` columns each."""
    if not np.array_equal(np.sort(group_of), plain_groups(len(group_of), group)):
        return 0
    return kernel_group(group, len(group_of))
