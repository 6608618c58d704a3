"""A matmul over packed weights, y = x W^T + bias for bf16 x, whose rows are bit-equal for every row count."""

from __future__ import annotations

import functools
from typing import Any

import numba
from numba import literally, prange

from deepinfer.kernels.codecs import BF16, FP32
from deepinfer.kernels.cpu.jit import compiled, helper
from deepinfer.kernels.cpu.memory import store_float
from deepinfer.kernels.cpu.packed_products import BLOCK, P_INT4, group_sum, packed_products, record_bytes

ROW_TILE = 64
"""Rows that go through all blocks together: their activations stay in the second-level cache."""
FEW_ROWS = 16
"""Up to this many rows their sums are not worth waking threads for."""


@helper
def tile(kind, group, wide, out, x, x_stride, num_rows, sums, sums_stride, w, groups, bias, y, y_stride):  # type: ignore[no-untyped-def]
    """`num_rows` rows against sixteen outputs: eight at a time, the rest as one, two, four or eight."""
    literally(kind)
    literally(group)
    literally(wide)
    literally(out)
    row = 0
    while row < num_rows:
        left = num_rows - row
        x_at, sums_at, y_at = x + row * x_stride, sums + row * sums_stride, y + row * y_stride
        if left > 4:
            packed_products(
                kind, group, wide, out, 8, x_at, x_stride, left - 1, sums_at, sums_stride, w, groups, bias,
                y_at, y_stride,
            )  # fmt: skip
        elif left > 2:
            packed_products(
                kind, group, wide, out, 4, x_at, x_stride, left - 1, sums_at, sums_stride, w, groups, bias,
                y_at, y_stride,
            )  # fmt: skip
        elif left > 1:
            packed_products(
                kind, group, wide, out, 2, x_at, x_stride, left - 1, sums_at, sums_stride, w, groups, bias,
                y_at, y_stride,
            )  # fmt: skip
        else:
            packed_products(
                kind, group, wide, out, 1, x_at, x_stride, left - 1, sums_at, sums_stride, w, groups, bias,
                y_at, y_stride,
            )  # fmt: skip
        row += 8


@helper
def sum_groups(group, x, groups, sums):  # type: ignore[no-untyped-def]
    """The sums of one row by group."""
    literally(group)
    for index in range(groups):
        store_float(sums + 4 * index, group_sum(group, x + 2 * group * index))


@functools.cache
def packed_matmul_kernel(kind: int, group: int, wide: bool, out_bf16: bool) -> Any:
    """The compiled function for weights packed with these parameters (see `packed_products`).

    All operands are contiguous and come by address: x bf16 [rows, groups * group], w records [blocks, groups],
    bias fp32 [16 * blocks], sums (written for 4-bit codes only) fp32 [rows, groups], y bf16 or fp32
    [rows, 16 * blocks].
    """
    record, is_wide, has_sums = record_bytes(kind, group, wide), int(wide), kind == P_INT4
    out = BF16 if out_bf16 else FP32
    out_number, block_bytes = out.number, out.itemsize * BLOCK

    @compiled(numba.void(*[numba.int64] * 8), parallel=True)
    def matmul(x, w, bias, sums, y, num_rows, num_blocks, groups):  # type: ignore[no-untyped-def]
        x_stride, sums_stride, y_stride = 2 * group * groups, 4 * groups, block_bytes * num_blocks
        if has_sums and num_rows <= FEW_ROWS:
            for row in range(num_rows):
                sum_groups(group, x + row * x_stride, groups, sums + row * sums_stride)
        elif has_sums:
            for row in prange(num_rows):
                sum_groups(group, x + row * x_stride, groups, sums + row * sums_stride)
        row_tiles = (num_rows + ROW_TILE - 1) // ROW_TILE
        for unit in prange(row_tiles * num_blocks):
            row = unit // num_blocks * ROW_TILE
            block = unit % num_blocks
            tile(
                kind, group, is_wide, out_number, x + row * x_stride, x_stride, min(num_rows - row, ROW_TILE),
                sums + row * sums_stride, sums_stride, w + block * record * groups, groups, bias + 4 * BLOCK * block,
                y + row * y_stride + block * block_bytes, y_stride,
            )  # fmt: skip

    return matmul
