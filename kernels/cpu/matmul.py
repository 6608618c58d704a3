"""A matmul whose rows are bit-equal for every row count: y = x W^T + bias, summed in fp32."""

from __future__ import annotations

import functools
from typing import Any

import numba
from numba import literally, prange

from deepinfer.kernels.cpu.jit import compiled, helper
from deepinfer.kernels.cpu.products import GROUP, products, store_rows
from deepinfer.kernels.cpu.vec16 import LANES, add, load_f32, store_f32

OUTPUT_BLOCK = LANES
"""Outputs that a thread computes at once: the number of weight rows is a multiple of it."""


@helper
def row_block(rows, x, x_stride, w, w_stride, groups, y, y_stride):  # type: ignore[no-untyped-def]
    """`rows` rows of x against sixteen weight rows."""
    literally(rows)
    outputs = OUTPUT_BLOCK // rows
    for part in range(0, OUTPUT_BLOCK, outputs):
        sums = products(rows, x, x_stride, w + part * w_stride, w_stride, groups)
        store_rows(rows, y + 4 * part, y_stride, sums)


@helper
def output_block(x, x_stride, w, w_stride, groups, bias, y, y_stride, num_rows):  # type: ignore[no-untyped-def]
    """All rows of x against sixteen weight rows: eight rows at a time, then what is left."""
    row = 0
    while num_rows - row >= 8:
        row_block(8, x + row * x_stride, x_stride, w, w_stride, groups, y + row * y_stride, y_stride)
        row += 8
    if num_rows - row >= 4:
        row_block(4, x + row * x_stride, x_stride, w, w_stride, groups, y + row * y_stride, y_stride)
        row += 4
    if num_rows - row >= 2:
        row_block(2, x + row * x_stride, x_stride, w, w_stride, groups, y + row * y_stride, y_stride)
        row += 2
    if num_rows - row >= 1:
        row_block(1, x + row * x_stride, x_stride, w, w_stride, groups, y + row * y_stride, y_stride)
    offsets = load_f32(bias)
    for row in range(num_rows):
        store_f32(y + row * y_stride, add(load_f32(y + row * y_stride), offsets))


@functools.cache
def matmul_kernel() -> Any:
    """The compiled function, all operands fp32, contiguous and by address.

    x [rows, 32 * groups], w [outputs, 32 * groups], bias [outputs], y [rows, outputs]; outputs a multiple of 16.
    """

    @compiled(numba.void(*[numba.int64] * 7), parallel=True)
    def matmul(x, w, bias, y, num_rows, num_outputs, groups):  # type: ignore[no-untyped-def]
        stride = 4 * GROUP * groups
        for block in prange(num_outputs // OUTPUT_BLOCK):
            first = block * OUTPUT_BLOCK
            output_block(
                x, stride, w + first * stride, stride, groups, bias + 4 * first, y + 4 * first, 4 * num_outputs,
                num_rows,
            )  # fmt: skip

    return matmul
