"""4-bit matrices as Hugging Face folders have them: codes in words that lie in files, scales and minima in memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deepinfer.kernels.cpu.records import BLOCK, record_bytes
from deepinfer.kernels.cpu.repack import fit_half
from deepinfer.kernels.cpu.tasks import Task
from deepinfer.kernels.cpu.word_rows import BLOCKS_OF_UNIT, pack_words_unit


class CodeWords(NamedTuple):
    words: np.ndarray
    """int32, contiguous, of one of the layouts of `word_rows`."""
    layout: int


class WordsPart(NamedTuple):
    """Rows of a matrix: w = scale * code + minimum. Their number is a multiple of 16."""

    codes: CodeWords
    scales: np.ndarray
    """float32 [rows, groups], contiguous."""
    minima: np.ndarray
    """float32 [rows, groups], contiguous."""


class StoredWords(NamedTuple):
    """The rows of `parts` below one another."""

    parts: tuple[WordsPart, ...]
    group: int
    """Columns that share a scale: 32, 64 or 128."""
    order: np.ndarray | None = None
    """int32 [columns]: column k is column order[k] of the file's words. Of the layout COLUMNS only."""

    @property
    def bits(self) -> int:
        return 4

    @property
    def shape(self) -> tuple[int, int]:
        groups = self.parts[0].scales.shape[1]
        return sum(len(part.scales) for part in self.parts), groups * self.group

    def fit_half(self) -> bool:
        """Whether fp16 holds all scales and minima."""
        factors = [factor for part in self.parts for factor in (part.scales, part.minima)]
        return all(fit_half(factor.ctypes.data, factor.size) for factor in factors)

    def tasks(self, kind: int, wide: bool, records: int) -> list[Task]:
        """Packs all of it into `records`. Whoever runs them keeps this."""
        columns, unit, tasks = self.shape[1], pack_words_unit(), []
        order = 0 if self.order is None else self.order.ctypes.data
        for codes, scales, minima in self.parts:
            blocks = len(scales) // BLOCK
            addresses = (codes.words.ctypes.data, codes.layout, order, scales.ctypes.data, minima.ctypes.data)
            arguments = (*addresses, len(scales), columns, self.group, records, int(wide))
            tasks.append(Task(unit, -(-blocks // BLOCKS_OF_UNIT), arguments))
            records += blocks * (columns // self.group) * record_bytes(kind, self.group, wide)
        return tasks
