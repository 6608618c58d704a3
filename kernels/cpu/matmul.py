"""A matmul whose rows are bit-equal for every row count: y = x W^T + bias, summed in fp32."""

from __future__ import annotations

import functools
from typing import Any

import numba
from numba import literally, prange

from deepinfer.kernels.cpu.jit import compiled, helper
from deepinfer.kernels.cpu.products import GROUP, W_INT8, WEIGHT_BYTES, products, store_rows
from deepinfer.kernels.cpu.vec16 import LANES, add, load_f32, store_f32

OUTPUT_BLOCK = LANES
"""Outputs that a thread computes at once: the number of weight rows is a multiple of it."""


@helper
def row_block(kind, rows, x, x_stride, w, w_stride, scales, scale_stride, groups, y, y_stride):  # type: ignore[no-untyped-def]
    """`rows` rows of x against sixteen weight rows."""
    literally(kind)
    literally(rows)
    outputs = OUTPUT_BLOCK // rows
    for part in range(0, OUTPUT_BLOCK, outputs):
        sums = products(
            kind, rows, x, x_stride, w + part * w_stride, w_stride, scales + part * scale_stride,
            scale_stride, groups,
        )  # fmt: skip
        store_rows(rows, y + 4 * part, y_stride, sums)


@helper
def output_block(kind, x, x_stride, w, w_stride, scales, scale_stride, groups, bias, y, y_stride, num_rows):  # type: ignore[no-untyped-def]
    """All rows of x against sixteen weight rows: eight rows at a time, then what is left."""
    literally(kind)
    row = 0
    while num_rows - row >= 8:
        row_block(
            kind, 8, x + row * x_stride, x_stride, w, w_stride, scales, scale_stride, groups,
            y + row * y_stride, y_stride,
        )  # fmt: skip
        row += 8
    if num_rows - row >= 4:
        row_block(
            kind, 4, x + row * x_stride, x_stride, w, w_stride, scales, scale_stride, groups,
            y + row * y_stride, y_stride,
        )  # fmt: skip
        row += 4
    if num_rows - row >= 2:
        row_block(
            kind, 2, x + row * x_stride, x_stride, w, w_stride, scales, scale_stride, groups,
            y + row * y_stride, y_stride,
        )  # fmt: skip
        row += 2
    if num_rows - row >= 1:
        row_block(
            kind, 1, x + row * x_stride, x_stride, w, w_stride, scales, scale_stride, groups,
            y + row * y_stride, y_stride,
        )  # fmt: skip
    offsets = load_f32(bias)
    for row in range(num_rows):
        store_f32(y + row * y_stride, add(load_f32(y + row * y_stride), offsets))


@functools.cache
def matmul_kernel(kind: int) -> Any:
    """The compiled function for weights of a kind (see `products`), all operands contiguous and by address.

    x fp32 [rows, 32 * groups], w and scales as `products` has them, bias fp32 [outputs], y fp32 [rows,
    outputs]; outputs a multiple of 16.
    """
    group_bytes, in_blocks = WEIGHT_BYTES[kind] * GROUP, kind == W_INT8

    @compiled(numba.void(*[numba.int64] * 8), parallel=True)
    def matmul(x, w, scales, bias, y, num_rows, num_outputs, groups):  # type: ignore[no-untyped-def]
        w_stride = group_bytes if in_blocks else group_bytes * groups
        for block in prange(num_outputs // OUTPUT_BLOCK):
            first = block * OUTPUT_BLOCK
            output_block(
                kind, x, 4 * GROUP * groups, w + first * group_bytes * groups, w_stride,
                scales + 4 * first * groups, 4, groups, bias + 4 * first, y + 4 * first,
                4 * num_outputs, num_rows,
            )  # fmt: skip

    return matmul
