"""GPTQ: `qweight` int32 [columns / 8, rows], `qzeros` [groups, rows / 8], `scales` [groups, rows], lowest nibble first;
`g_idx` [columns] names the group of each column.

Two conventions share this layout: v1 stores every zero point less 1, v2 as it is, and files are labelled wrongly. So
the data decide. Where all zero points are stored as 7 it is v1, where all are 8 it is v2: such a file is symmetric, its
zero point is 8. Otherwise the codes tell: weights are near 0 on average, so their mean code is their mean zero point,
and the mean of code - stored zero over some matrices is near 1 for v1 and near 0 for v2. Only a mean that is near
neither leaves it to the label.
"""

from __future__ import annotations

import logging
from functools import cached_property

import numpy as np

from deepinfer.kernels.cpu.word_rows import COLUMNS
from deepinfer.kernels.stored_words import CodeWords
from deepinfer.stages.model.int4_matrix import Int4Matrix, nibbles
from deepinfer.stages.model.packing import FLOATS, Layout, Parts
from deepinfer.stages.model.quantisation import Scheme

logger = logging.getLogger(__name__)

_ONES = np.uint32(0x11111111)
_SAMPLES = 4
_SAMPLE_WORDS = 128
_NEAR = 0.25
_VERSION = {"gptq": "v1", "gptq_v2": "v2"}


class GptqPacking:
    type_name = "GPTQ"
    parts = (".qweight", ".qzeros", ".scales", ".g_idx")

    def __init__(self, parts: Parts, scheme: Scheme):
        self._parts, self._scheme = parts, scheme
        self._layouts: dict[str, Layout] = {}

    def layout(self, prefix: str) -> Layout:
        """See `Packing`."""
        parts = self._parts
        words, rows = parts.shape(f"{prefix}.qweight", ("I32",))
        columns = 8 * words
        groups, _ = parts.shape(f"{prefix}.scales", FLOATS)
        group = parts.group(f"{prefix}.scales", groups, columns)
        parts.expect(f"{prefix}.scales", FLOATS, groups, rows)
        parts.expect(f"{prefix}.qzeros", ("I32",), groups, -(-rows // 8))
        group_of = parts.group_of(f"{prefix}.g_idx", columns, group, groups)
        has_zeros = not self._scheme.symmetric
        self._layouts[prefix] = Layout(rows, columns, group, group_of, has_zeros)
        return self._layouts[prefix]

    def unpack(self, prefix: str, layout: Layout) -> Int4Matrix:
        codes = self._parts.integers(f"{prefix}.qweight")
        words = self._parts.integers(f"{prefix}.qzeros")
        if self._version == "v1":
            words = (words.view(np.uint32) + _ONES).view(np.int32)  # A zero point of 0 borrowed from its neighbour.
        zeros = nibbles(words)[:, : layout.rows].T.astype(np.float32)
        scales = np.ascontiguousarray(self._parts.floats(f"{prefix}.scales").T)
        numbers = scales, np.ascontiguousarray(zeros)
        return Int4Matrix(lambda: nibbles(codes.T), *numbers, layout.group_of, CodeWords(codes, COLUMNS))

    def report(self) -> dict[str, object]:
        return {"method": "gptq", "zero_points": self._version, "labelled": self._scheme.label}

    @cached_property
    def _version(self) -> str:
        labelled = _VERSION[self._scheme.label]
        version, reason = self._decide(labelled)
        level = logging.INFO if version == labelled else logging.WARNING
        logger.log(
            level,
            "%s: GPTQ zero points are read as %s (%s); checkpoint_format %s says %s",
            self._parts.where, version, reason, self._scheme.label, labelled,
        )  # fmt: skip
        return version

    def _decide(self, labelled: str) -> tuple[str, str]:
        names = sorted(self._layouts)
        chosen = names[:: -(-len(names) // _SAMPLES)]
        stored = {name: nibbles(self._parts.integers(f"{name}.qzeros")) for name in chosen}
        for value, version in ((7, "v1"), (8, "v2")):
            if all((zeros[:, : self._layouts[name].rows] == value).all() for name, zeros in stored.items()):
                return version, f"all are stored as {value}"
        mean = float(np.mean([self._mean_distance(name, zeros) for name, zeros in stored.items()]))
        for expected, version in ((1, "v1"), (0, "v2")):
            if abs(mean - expected) < _NEAR:
                return version, f"codes lie {mean:.2f} above them on average"
        return labelled, f"codes lie {mean:.2f} above them on average, which decides nothing: as labelled"

    def _mean_distance(self, name: str, stored: np.ndarray) -> float:
        """Of codes from the stored zero points, over the first columns of one matrix."""
        layout = self._layouts[name]
        codes = nibbles(self._parts.integers(f"{name}.qweight")[:_SAMPLE_WORDS].T)
        zeros = stored[layout.group_of[: codes.shape[1]], : layout.rows]
        return float(codes.mean() - zeros.mean())
