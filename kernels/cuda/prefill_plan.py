"""The shapes of the prefill attention kernel: which rows make a tile, how contexts are cut, which macros say so."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer.kernels.attention_batch import AttentionBatch
from deepinfer.kernels.cuda.decode_plan import DecodePlan
from deepinfer.kernels.cuda.source import KernelSource

TILE_ROWS, FEWEST_ROWS = 64, 16
"""Rows of the tensor core's left operand in a CTA and in a warp: each is one query head of one row."""
_LIMITS, _SIZES = (2048, 8192, 32768), (256, 1024, 4096, 16384)
"""Positions from which partitions are longer, and their tokens."""


def prefill_partitions(positions: np.ndarray) -> np.ndarray:
    """Partitions of rows at these positions, those before a window included: as in prefill_partitions.h."""
    size = np.array(_SIZES)[np.searchsorted(_LIMITS, positions, side="right")]
    return positions // size + 1


def most_prefill_partitions(context: int) -> int:
    """The most partitions of any row of a context of that many tokens."""
    return int(
        prefill_partitions(np.minimum(context - 1, np.array((*(limit - 1 for limit in _LIMITS), context)))).max()
    )


@dataclass(frozen=True)
class PrefillPlan:
    """One specialisation of the prefill attention, for what `shape` says of K, V and heads."""

    shape: DecodePlan

    @property
    def tile_tokens(self) -> int:
        """Tokens of a K or V tile: what shared memory and registers have room for."""
        return 16 if self.shape.head_dim == 256 else 32

    @property
    def rows_per_tile(self) -> int:
        """Rows of the batch."""
        return TILE_ROWS // self.shape.group

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: a K and a V tile of 16-bit floats, what rounding biased keys left, and scales."""
        half = self.shape.head_dim // 2
        k_stride, v_stride = half + (8 if half % 16 == 0 else 0), half + 4
        return 4 * self.tile_tokens * (k_stride * (1 + self.shape.key_bias) + v_stride + 2)

    @property
    def ctas_per_sm(self) -> int:
        """CTAs per multiprocessor that the assembler keeps registers for."""
        return 3 if self.shape.head_dim == 64 else 2

    def source(self) -> KernelSource:
        macros = (
            *self.shape.macros,
            ("GROUP", self.shape.group),
            ("KEY_BIAS", int(self.shape.key_bias)),
            ("SOFT_CAP", int(self.shape.soft_cap)),
            ("TILE_TOKENS", self.tile_tokens),
            ("CTAS_PER_SM", self.ctas_per_sm),
        )
        return KernelSource("paged_prefill.cu", f"dp_paged_gqa_prefill_{self.shape.name}", macros)

    def pays(self, batch: AttentionBatch) -> bool:
        """Whether a sequence has several rows, enough for a warp: fewer leave the tensor cores idle."""
        longest = int(np.diff(batch.seq_starts).max())
        return longest > 1 and longest * self.shape.group >= FEWEST_ROWS

    def tiles(self, batch: AttentionBatch) -> np.ndarray:
        """int32 [T, 2]: first and last + 1 row of each tile. All rows of one have partitions of one length."""
        starts = batch.seq_starts
        lengths = np.searchsorted(_LIMITS, batch.positions, side="right")
        cuts = np.flatnonzero(np.diff(lengths)) + 1
        edges = np.union1d(starts, cuts)
        pieces = [
            (row, min(row + self.rows_per_tile, end))
            for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
            for row in range(first, end, self.rows_per_tile)
        ]
        return np.array(pieces, dtype=np.int32).reshape(-1, 2)
