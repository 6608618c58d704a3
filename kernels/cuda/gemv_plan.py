"""The specialisations of the GEMV and of the dequantiser, and which shape takes which."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.kernels.cuda.source import KernelSource
from deepinfer.kernels.cuda.weight_tiles import TILE_OUTPUTS, WIDE, WeightTiles

MAX_ROWS = 16
"""Rows of x that one launch of the GEMV takes."""
DEQUANT_WARPS = 4
_ACTIVATIONS = {torch.bfloat16: 1, torch.float16: 2}
_OUT_KINDS = {torch.float32: 0, **_ACTIVATIONS}
_LONG_ROW_TILES, _WIDE_TILES, _WARPS_PER_SM = 16, 128, 16


@dataclass(frozen=True)
class GemvPlan:
    """One GEMV: `warps` share the inputs of `m_tiles` tiles of outputs, for 8 * `n_tiles` rows.

    The sums depend on `warps` alone, and `warps` on the weights' shape alone.
    """

    warps: int
    m_tiles: int
    n_tiles: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def ctas_per_sm(self) -> int:
        """16 warps: the assembler may give a thread 128 registers, and the loads of 16 warps hide DRAM's latency."""
        return _WARPS_PER_SM // self.warps

    @property
    def shared_bytes(self) -> int:
        """The warps' sums."""
        return self.warps * 8 * self.n_tiles * (TILE_OUTPUTS * self.m_tiles + 4) * 4


def plan_gemv(tiles: WeightTiles, rows: int) -> GemvPlan:
    """Few outputs are spread over more CTAs, short rows over fewer warps. Wide weights, and small groups with many
    rows, leave no registers for a second tile."""
    warps = 8 if tiles.input_tiles >= _LONG_ROW_TILES else 4
    n_tiles = 1 if rows <= 8 else 2
    full = tiles.bits > 4 or tiles.minima == WIDE or (n_tiles == 2 and tiles.group_size == 32)
    return GemvPlan(warps, 1 if full or tiles.output_tiles < _WIDE_TILES else 2, n_tiles)


def gemv_source(
    plan: GemvPlan, tiles: WeightTiles, dtype: torch.dtype, out_dtype: torch.dtype, has_bias: bool
) -> KernelSource:
    """Raises ValueError for dtypes that no kernel exists for."""
    if dtype not in _ACTIVATIONS or out_dtype not in _OUT_KINDS:
        raise ValueError(f"the GEMV takes bf16 or fp16 and gives fp32, bf16 or fp16, not {dtype} and {out_dtype}")
    if tiles.dtype not in (None, dtype):
        raise ValueError(f"weights of {tiles.dtype} are multiplied with activations of that dtype, not with {dtype}")
    macros = (
        *tiles.macros,
        ("ACTIVATION", _ACTIVATIONS[dtype]),
        ("OUT_KIND", _OUT_KINDS[out_dtype]),
        ("WARPS", plan.warps),
        ("M_TILES", plan.m_tiles),
        ("N_TILES", plan.n_tiles),
        ("CTAS_PER_SM", plan.ctas_per_sm),
        ("HAS_BIAS", int(has_bias)),
    )
    return KernelSource("gemv.cu", f"dp_w{tiles.bits}a16_gemv", macros)


def dequant_source(tiles: WeightTiles, dtype: torch.dtype) -> KernelSource:
    """Raises ValueError for a dtype that no kernel exists for."""
    if dtype not in _ACTIVATIONS:
        raise ValueError(f"4-bit weights become bf16 or fp16, not {dtype}")
    macros = (*tiles.macros, ("ACTIVATION", _ACTIVATIONS[dtype]))
    return KernelSource("dequant.cu", "dp_w4a16_dequant", macros)
