"""AWQ, the gemm layout: `qweight` int32 [columns, rows / 8], `qzeros` [groups, rows / 8], `scales` [groups, rows].

A word holds eight neighbouring rows; its nibbles, lowest first, are the rows 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

import numpy as np

from deepinfer.kernels.cpu.word_rows import EIGHT_ROWS
from deepinfer.kernels.stored_words import CodeWords
from deepinfer.stages.model.int4_matrix import Int4Matrix, nibbles
from deepinfer.stages.model.packing import FLOATS, Layout, Parts

ROW_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
_NIBBLE_OF_ROW = np.argsort(ROW_OF_NIBBLE)


class AwqPacking:
    type_name = "AWQ"
    parts = (".qweight", ".qzeros", ".scales")

    def __init__(self, parts: Parts):
        self._parts = parts

    def layout(self, prefix: str) -> Layout:
        """See `Packing`."""
        parts = self._parts
        columns, words = parts.shape(f"{prefix}.qweight", ("I32",))
        groups, _ = parts.shape(f"{prefix}.scales", FLOATS)
        group = parts.group(f"{prefix}.scales", groups, columns)
        parts.expect(f"{prefix}.scales", FLOATS, groups, 8 * words)
        parts.expect(f"{prefix}.qzeros", ("I32",), groups, words)
        return Layout(8 * words, columns, group, np.arange(columns) // group, has_zeros=True)

    def unpack(self, prefix: str, layout: Layout) -> Int4Matrix:
        words, zeros = (self._parts.integers(f"{prefix}.{part}") for part in ("qweight", "qzeros"))
        scales = np.ascontiguousarray(self._parts.floats(f"{prefix}.scales").T)
        numbers = scales, _rows(zeros).astype(np.float32)
        return Int4Matrix(lambda: _rows(words), *numbers, layout.group_of, CodeWords(words, EIGHT_ROWS))

    def report(self) -> dict[str, object]:
        return {"method": "awq"}


def _rows(words: np.ndarray) -> np.ndarray:
    """int32 [n, rows / 8] to uint8 [rows, n]."""
    ordered = nibbles(words).reshape(len(words), -1, 8)[..., _NIBBLE_OF_ROW]
    return np.ascontiguousarray(ordered.reshape(len(words), -1).T)
