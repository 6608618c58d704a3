"""compressed-tensors `pack-quantized`: `weight_packed` int32 [rows, columns * bits / 32 rounded up], the lowest bits
first, codes that are signed numbers + 8, or + 128 in 8 bits; `weight_scale` [rows, groups]; `weight_zero_point` packed
the same way along the rows (int8 [rows, groups] in older files), absent when symmetric; `weight_shape`; `weight_g_idx`
in act-order files.
"""

from __future__ import annotations

import numpy as np

from deepinfer.kernels.cpu.word_rows import ROWS
from deepinfer.kernels.stored_words import CodeWords
from deepinfer.stages.model.errors import CheckpointError
from deepinfer.stages.model.int4_matrix import Int4Matrix, nibbles, octets
from deepinfer.stages.model.packing import FLOATS, Layout, Parts
from deepinfer.stages.model.quantisation import Scheme


class PackQuantized:
    type_name = "compressed-tensors"
    parts = (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx")

    def __init__(self, parts: Parts, scheme: Scheme):
        self._parts, self._symmetric, self._bits = parts, scheme.symmetric, scheme.bits

    def layout(self, prefix: str) -> Layout:
        """See `Packing`."""
        parts = self._parts
        rows, words = parts.shape(f"{prefix}.weight_packed", ("I32",))
        parts.expect(f"{prefix}.weight_shape", ("I64", "I32"), 2)
        stated = parts.integers(f"{prefix}.weight_shape").tolist()
        columns = stated[1]
        bits = next((bits for bits in sorted(self._bits) if -(-columns * bits // 32) == words), 0)
        if stated[0] != rows or not bits:
            raise CheckpointError(
                f"{parts.where}: tensor {prefix}.weight_shape says {stated}, which does not fit "
                f"{prefix}.weight_packed of {[rows, words]}"
            )
        _, groups = parts.shape(f"{prefix}.weight_scale", FLOATS)
        parts.expect(f"{prefix}.weight_scale", FLOATS, rows, groups)
        group = parts.group(f"{prefix}.weight_scale", groups, columns)
        zeros = f"{prefix}.weight_zero_point"
        has_zeros = parts.has(zeros)
        if has_zeros:
            is_packed = parts.dtype(zeros) != "I8"
            parts.expect(zeros, ("I32", "I8"), -(-rows * bits // 32) if is_packed else rows, groups)
        elif not self._symmetric:
            raise CheckpointError(f"{parts.where}: tensor {zeros} is missing, yet quantization_config says asymmetric")
        group_of = parts.group_of(f"{prefix}.weight_g_idx", columns, group, groups)
        return Layout(rows, columns, group, group_of, has_zeros, bits)

    def unpack(self, prefix: str, layout: Layout) -> Int4Matrix:
        unpacked = nibbles if layout.bits == 4 else octets
        words = self._parts.integers(f"{prefix}.weight_packed")
        scales = self._parts.floats(f"{prefix}.weight_scale")
        half = 2 ** (layout.bits - 1)
        zeros = np.full_like(scales, half)
        if layout.has_zeros:
            stored = self._parts.integers(f"{prefix}.weight_zero_point")
            is_packed = stored.dtype == np.int32
            zeros[:] = unpacked(stored.T)[:, : layout.rows].T if is_packed else stored.astype(np.float32) + half

        def codes() -> np.ndarray:
            return np.ascontiguousarray(unpacked(words)[:, : layout.columns])

        whole = layout.bits == 4 and layout.columns % 8 == 0
        return Int4Matrix(codes, scales, zeros, layout.group_of, CodeWords(words, ROWS) if whole else None)

    def report(self) -> dict[str, object]:
        return {"method": "compressed-tensors", "format": "pack-quantized"}
