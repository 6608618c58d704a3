"""Matmul forms of the CUDA kernels, on whatever back end runs them. Called as those of kernels.linear.

Their rows are bit-equal for every row count, but for `CudaW4A16Linear` with many rows unless told so.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.cuda.gemv_plan import (
    DEQUANT_WARPS,
    MAX_ROWS,
    GemvPlan,
    dequant_source,
    gemv_source,
    plan_gemv,
)
from deepinfer.kernels.cuda.kernel_table import compiled
from deepinfer.kernels.cuda.launcher import Backend
from deepinfer.kernels.cuda.weight_tiles import TILE_OUTPUTS, WeightTiles, pack_dense, pack_w4, pack_w8

LOAD_BYTES = 16
"""Kernels load activations in pieces of as many."""
WORKSPACE_BYTES = 16 << 20
"""16-bit weights that exist at a time when many rows are multiplied."""


class TiledLinear:
    """Weights in tiles, bf16 or fp16 activations, summed in fp32, up to 16 rows a launch.

    Args:
        bias: [M], kept in fp32, or None. out_dtype: dtype of y if it is not that of x.

    Raises ValueError for shapes that do not fit, CompileError with the compiler's log.
    """

    def __init__(
        self, backend: Backend, tiles: WeightTiles, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> None:
        if bias is not None and bias.shape != (tiles.outputs,):
            raise ValueError(f"bias {tuple(bias.shape)} does not fit weights with {tiles.outputs} outputs")
        self.tiles = tiles
        self._backend, self._out_dtype = backend, out_dtype
        self._bias = None if bias is None else bias.to(backend.device, torch.float32).contiguous()
        self._gemv: dict[tuple[int, torch.dtype, torch.dtype], tuple[Any, GemvPlan]] = {}
        self.kind = f"w{tiles.bits}a16 gemv ({backend.name})"

    @property
    def weight_bytes(self) -> int:
        return self.tiles.nbytes + (0 if self._bias is None else self._bias.nbytes)

    @property
    def step_bytes(self) -> int:
        return self.weight_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, K] to [N, M]."""
        y = torch.empty(len(x), self.tiles.outputs, dtype=self._out_dtype or x.dtype, device=x.device)
        self.multiply(x, y)
        return y

    def multiply(self, x: Tensor, y: Tensor) -> None:
        """Write the product of x, bf16 or fp16 [N, K], to y, fp32, bf16 or fp16 [N, M]. Both contiguous."""
        if x.dim() != 2 or x.shape[1] != self.tiles.inputs or y.shape != (len(x), self.tiles.outputs):
            want = f"[N, {self.tiles.inputs}] and [N, {self.tiles.outputs}]"
            raise ValueError(f"x {tuple(x.shape)} and y {tuple(y.shape)} must be {want}")
        if x.data_ptr() % LOAD_BYTES:
            raise ValueError(f"x must start at a multiple of {LOAD_BYTES} bytes, not at {x.data_ptr():#x}")
        for first in range(0, len(x), MAX_ROWS):
            self._multiply_rows(x[first : first + MAX_ROWS], y[first : first + MAX_ROWS])

    def _multiply_rows(self, x: Tensor, y: Tensor) -> None:
        """Up to `MAX_ROWS` rows."""
        tiles, (kernel, plan) = self.tiles, self._gemv_for(len(x), x.dtype, y.dtype)
        self._backend.launch(
            kernel,
            (tiles.output_tiles // plan.m_tiles, 1, 1),
            plan.threads,
            plan.shared_bytes,
            y,
            x,
            tiles.codes,
            tiles.scales,
            tiles.scales if self._bias is None else self._bias,
            len(x),
            tiles.inputs,
            tiles.outputs,
            tiles.unit,
        )

    def _gemv_for(self, rows: int, dtype: torch.dtype, out_dtype: torch.dtype) -> tuple[Any, GemvPlan]:
        plan = plan_gemv(self.tiles, rows)
        key = plan.n_tiles, dtype, out_dtype
        if key not in self._gemv:
            source = gemv_source(plan, self.tiles, dtype, out_dtype, self._bias is not None)
            self._gemv[key] = compiled(self._backend, source), plan
        return self._gemv[key]


class CudaTiledDenseLinear(TiledLinear):
    """Weights as they are, bf16 or fp16 [M, K], for activations of the same dtype."""

    def __init__(
        self, backend: Backend, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(backend, pack_dense(weight, backend.device), bias, out_dtype)


class CudaW8A16Linear(TiledLinear):
    """Group-wise int8 weights w = scale * code (GGUF's Q8_0). codes: int8 [M, K]. scales: fp32 [M, K / 32]."""

    def __init__(
        self,
        backend: Backend,
        codes: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(backend, pack_w8(codes, scales, backend.device), bias, out_dtype)


class CudaW4A16Linear(TiledLinear):
    """Group-wise 4-bit weights w = scale * code + minimum.

    Args:
        codes: uint8 [M, K], 0 .. 15. scales, minima: fp32 [M, K / group_size]; none of them is rounded.
        group_size: 32, 64 or 128.
        batch_invariant: more than 16 rows are multiplied 16 at a time. Otherwise the weights become 16-bit ones, a
            piece at a time, for the library's matmul.
    """

    def __init__(
        self,
        backend: Backend,
        codes: Tensor,
        scales: Tensor,
        minima: Tensor,
        bias: Tensor | None,
        group_size: int,
        batch_invariant: bool,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(backend, pack_w4(codes, scales, minima, group_size, backend.device), bias, out_dtype)
        self._batch_invariant = batch_invariant

    def multiply(self, x: Tensor, y: Tensor) -> None:
        """See `TiledLinear.multiply`."""
        if len(x) > MAX_ROWS and not self._batch_invariant:
            self._multiply_dense(x, y)
        else:
            super().multiply(x, y)

    def _multiply_dense(self, x: Tensor, y: Tensor) -> None:
        tiles = self.tiles
        step = max(1, WORKSPACE_BYTES // (2 * TILE_OUTPUTS * tiles.inputs))
        workspace = torch.empty(step * TILE_OUTPUTS, tiles.inputs, dtype=x.dtype, device=x.device)
        for first_tile in range(0, tiles.output_tiles, step):
            first, last = first_tile * TILE_OUTPUTS, min((first_tile + step) * TILE_OUTPUTS, tiles.outputs)
            weights = self.dequantise(workspace, first_tile)[: last - first]
            bias = None if self._bias is None else self._bias[first:last].to(x.dtype)
            y[:, first:last] = F.linear(x, weights, bias)

    def dequantise(self, weights: Tensor, first_tile: int) -> Tensor:
        """Write the weights of the outputs from 16 * `first_tile` on to `weights`, bf16 or fp16 [16 n, K]; give it
        back. Rows of outputs that do not exist stay as they are."""
        tiles = self.tiles
        output_tiles = min(len(weights) // TILE_OUTPUTS, tiles.output_tiles - first_tile)
        self._backend.launch(
            compiled(self._backend, dequant_source(tiles, weights.dtype)),
            (-(-tiles.input_tiles // DEQUANT_WARPS), output_tiles, 1),
            32 * DEQUANT_WARPS,
            0,
            weights,
            tiles.codes,
            tiles.scales,
            tiles.inputs,
            tiles.outputs,
            first_tile,
            tiles.unit,
        )
        return weights
