"""A matmul over packed weights, y = x W^T + bias for bf16 x, whose rows are bit-equal for every row count."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numba import literally

from deepinfer.kernels.codecs import BF16, FP32
from deepinfer.kernels.cpu import amx_matmul, bf16_dot, vector_matmul
from deepinfer.kernels.cpu.activation_forms import (
    A_BF16,
    A_FP32,
    A_INT8,
    A_INT16,
    CHUNK,
    FORM_BYTES,
    INTEGERS,
    group_sum,
    round_chunk,
    widen_chunk,
)
from deepinfer.kernels.cpu.amx_matmul import operands, share_of
from deepinfer.kernels.cpu.bf16_dot import VECTOR_BYTES
from deepinfer.kernels.cpu.jit import shared_helper
from deepinfer.kernels.cpu.memory import (
    load_bf16,
    load_byte,
    load_float,
    load_half,
    load_int,
    load_int16,
    load_int32,
    store_float,
)
from deepinfer.kernels.cpu.packed_products import packed_products, vnni_available
from deepinfer.kernels.cpu.records import BLOCK, CODE_BITS, P_BF16, P_INT4, P_INT8, record_bytes
from deepinfer.kernels.cpu.tasks import unit

ROW_TILE = 64
"""Rows that go through all blocks together: their activations stay in the second-level cache."""


@shared_helper
def tile(kind, form, group, wide, out, x, x_stride, num_rows, sums, sums_stride, w, groups, bias, y, y_stride):  # type: ignore[no-untyped-def]
    """`num_rows` rows against sixteen outputs: eight at a time, the rest as one, two, four or eight."""
    literally(kind)
    literally(form)
    literally(group)
    literally(wide)
    literally(out)
    row = 0
    while row < num_rows:
        left = num_rows - row
        x_at, sums_at, y_at = x + row * x_stride, sums + row * sums_stride, y + row * y_stride
        scales_at = sums_at + 4 * groups
        if left > 4:
            packed_products(
                kind, form, group, wide, out, 8, x_at, x_stride, left - 1, sums_at, scales_at, sums_stride, w, groups,
                bias, 0, y_at, y_stride,
            )  # fmt: skip
        elif left > 2:
            packed_products(
                kind, form, group, wide, out, 4, x_at, x_stride, left - 1, sums_at, scales_at, sums_stride, w, groups,
                bias, 0, y_at, y_stride,
            )  # fmt: skip
        elif left > 1:
            packed_products(
                kind, form, group, wide, out, 2, x_at, x_stride, left - 1, sums_at, scales_at, sums_stride, w, groups,
                bias, 0, y_at, y_stride,
            )  # fmt: skip
        else:
            packed_products(
                kind, form, group, wide, out, 1, x_at, x_stride, left - 1, sums_at, scales_at, sums_stride, w, groups,
                bias, 0, y_at, y_stride,
            )  # fmt: skip
        row += 8


class PackedUnits(NamedTuple):
    """Addresses of unit functions."""

    matmul: int
    """(x [rows, groups * group], w records [blocks, groups], bias fp32 [16 * blocks], sums fp32 [rows, groups],
    y [rows, 16 * blocks], rows, blocks, groups, blocks of a unit, units of a row tile). All are contiguous. Unit u
    takes the rows of the tile u // units and its share of the blocks. x and sums are what `convert` wrote, where that
    is not 0, and x is bf16 where it is."""
    sums: int
    """(x, sums, groups): sums of x by group, a row for each unit. By tiles: `amx_matmul.sums_unit`."""
    convert: int
    """(x, sums, groups, converted): for each unit a row of x, in the form that is multiplied, [groups * group]. For
    forms of integers also its sums by group and behind them the scales of its chunks, fp32 [groups + groups * group /
    32]."""
    rows: int
    """(ids int32, w, out fp32 [ids, width], groups, width): a row of the weights for each unit."""


def form_for(kind: int, int8_activations: bool) -> int:
    """The form in which this processor multiplies bf16 activations with weights of a kind."""
    if int8_activations:
        return A_INT8
    if bf16_dot.available():
        return A_BF16
    return A_FP32 if kind == P_BF16 else A_INT16


@functools.cache
def packed_units(kind: int, form: int, group: int, wide: bool, out_bf16: bool, by_tiles: bool) -> PackedUnits:
    """Compiled for weights packed with these parameters (see `packed_products`). by_tiles: by matrix tiles, which
    sum in another order than dot products; for A_BF16 only."""
    rows = _rows_unit(kind, group, wide)
    if by_tiles:
        matmul = amx_matmul.matmul_unit(kind, group, wide, out_bf16, False)
        return PackedUnits(matmul, amx_matmul.sums_unit(group), 0, rows)
    if form == A_BF16:
        return PackedUnits(_dots_unit(kind, form, group, wide, out_bf16), _sums_unit(group), 0, rows)
    convert = _rounding_unit(form, group) if form in INTEGERS else _widening_unit(group)
    eight_rows = form == A_INT8 and vnni_available()
    make = _dots_unit if eight_rows else vector_matmul.matmul_unit
    return PackedUnits(make(kind, form, group, wide, out_bf16), 0, convert, rows)


@functools.cache
def _dots_unit(kind: int, form: int, group: int, wide: bool, out_bf16: bool) -> int:
    """By instructions of AVX-512, whose registers hold the sums of eight rows."""
    record, is_wide = record_bytes(kind, group, wide), int(wide)
    out = BF16 if out_bf16 else FP32
    out_number, block_bytes = out.number, out.itemsize * BLOCK
    x_bytes, factors = FORM_BYTES[form], 1 + group // CHUNK if form in INTEGERS else 1

    @unit
    def matmul(arguments, index, worker):  # type: ignore[no-untyped-def]
        x, w, bias, sums, y, num_rows, num_blocks, groups = operands(arguments)
        row, first, end = share_of(arguments, index, ROW_TILE)
        x_stride, sums_stride, y_stride = x_bytes * group * groups, 4 * factors * groups, block_bytes * num_blocks
        for block in range(first, end):
            tile(
                kind, form, group, is_wide, out_number, x + row * x_stride, x_stride, min(num_rows - row, ROW_TILE),
                sums + row * sums_stride, sums_stride, w + block * record * groups, groups, bias + 4 * BLOCK * block,
                y + row * y_stride + block * block_bytes, y_stride,
            )  # fmt: skip

    return matmul.address


@functools.cache
def _rows_unit(kind: int, group: int, wide: bool) -> int:
    record, is_wide, code_bits = record_bytes(kind, group, wide), int(wide), CODE_BITS[kind]
    factors_at = BLOCK * group * code_bits // 8

    @unit
    def row_of_weights(arguments, index, worker):  # type: ignore[no-untyped-def]
        number = load_int32(load_int(arguments) + 4 * index)
        groups, width = load_int(arguments + 24), load_int(arguments + 32)
        place = load_int(arguments + 8) + (number // BLOCK) * groups * record
        out, lane = load_int(arguments + 16) + 4 * index * width, number % BLOCK
        for k in range(width):
            at, inside = place + (k // group) * record, k % group
            pair, factors = inside // 2, at + factors_at
            element = pair * BLOCK * 2 + 2 * lane + inside % 2
            if kind == P_INT4:
                word = load_int16(at + (pair // 4) * VECTOR_BYTES + 2 * (2 * lane + inside % 2))
                value = np.float32((word >> (4 * (pair % 4))) & 15)
            elif kind == P_INT8:
                value = np.float32(load_byte(at + element))
            else:
                value = load_bf16(at + 2 * element)
            if kind != P_BF16:
                value *= load_float(factors + 4 * lane) if is_wide else load_half(factors + 2 * lane)
            if kind == P_INT4:
                value += (
                    load_float(factors + 4 * (BLOCK + lane)) if is_wide else load_half(factors + 2 * (BLOCK + lane))
                )
            store_float(out + 4 * k, value)

    return row_of_weights.address


@functools.cache
def _sums_unit(group: int) -> int:
    @unit
    def sums_of_row(arguments, index, worker):  # type: ignore[no-untyped-def]
        x, sums, groups = load_int(arguments), load_int(arguments + 8), load_int(arguments + 16)
        for g in range(groups):
            store_float(
                sums + 4 * (index * groups + g), group_sum(group, x + 2 * group * (index * groups + g))
            )  # fmt: skip

    return sums_of_row.address


@functools.cache
def _rounding_unit(form: int, group: int) -> int:
    chunks, size = group // CHUNK, FORM_BYTES[form] * CHUNK

    @unit
    def rounded_row(arguments, index, worker):  # type: ignore[no-untyped-def]
        groups = load_int(arguments + 16)
        x = load_int(arguments) + 2 * group * groups * index
        sums = load_int(arguments + 8) + 4 * groups * (1 + chunks) * index
        codes = load_int(arguments + 24) + size * chunks * groups * index
        for g in range(groups):
            total = np.float32(0.0)
            for chunk in range(g * chunks, (g + 1) * chunks):
                total += round_chunk(form, x + 2 * CHUNK * chunk, codes + size * chunk, sums + 4 * (groups + chunk))
            store_float(sums + 4 * g, total)

    return rounded_row.address


@functools.cache
def _widening_unit(group: int) -> int:
    @unit
    def wide_row(arguments, index, worker):  # type: ignore[no-untyped-def]
        width = group * load_int(arguments + 16)
        x, out = load_int(arguments) + 2 * width * index, load_int(arguments + 24) + 4 * width * index
        for at in range(0, width, CHUNK):
            widen_chunk(x + 2 * at, out + 4 * at)

    return wide_row.address
