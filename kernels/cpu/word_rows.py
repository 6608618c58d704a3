"""4-bit codes of Hugging Face folders, in words of eight, straight into the records of `packed_products`.

Three layouts of int32 words, the lowest nibble first. ROWS [rows, columns / 8]: a word has eight neighbouring columns
of a row. COLUMNS [columns / 8, rows]: the same, but words of neighbouring rows lie side by side. EIGHT_ROWS [columns,
rows / 8]: a word has eight rows of a column, rows 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

import functools
from typing import Any

import numba.core.types as nt
from llvmlite import ir
from numba.extending import intrinsic

from deepinfer.kernels.cpu.jit import helper
from deepinfer.kernels.cpu.memory import load_float, load_int, store_float, store_half
from deepinfer.kernels.cpu.records import BLOCK
from deepinfer.kernels.cpu.tasks import unit
from deepinfer.kernels.cpu.vec16 import I32, LANES, VI32, constant, load, offset, shuffle, spread, store

ROWS, COLUMNS, EIGHT_ROWS = range(3)
BLOCKS_OF_UNIT = 8
"""Sixteen outputs each: so many that a cache line of words is read by one thread, whatever the layout."""
_ROW_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of the k of eight in a word of a record: even ones in its lower half, odd ones in its upper half."""


def _compressed(builder: Any, nibbles: Any) -> Any:
    """The nibbles at 0, 8, 16 and 24 side by side."""
    for step, mask in ((4, 0x00FF00FF), (8, 0x0000FFFF)):
        moved = builder.lshr(nibbles, constant(step, VI32))
        nibbles = builder.and_(builder.or_(nibbles, moved), constant(mask, VI32))
    return nibbles


def _reordered(builder: Any, words: Any) -> Any:
    """Words of eight k, lowest first, as records have them."""
    mask = constant(0x0F0F0F0F, VI32)
    even = _compressed(builder, builder.and_(words, mask))
    odd = _compressed(builder, builder.and_(builder.lshr(words, constant(4, VI32)), mask))
    return builder.or_(even, builder.shl(odd, constant(16, VI32)))


def _gathered(builder: Any, words: list[Any], shifts: list[Any]) -> Any:
    """Of eight k, each the nibble at `shifts` of the sixteen `words`, as records have them."""
    found = constant(0, VI32)
    for place, word, shift in zip(_PLACES, words, shifts, strict=True):
        nibble = builder.and_(builder.lshr(word, shift), constant(0x0F, VI32))
        found = builder.or_(found, builder.shl(nibble, constant(4 * place, VI32)))
    return found


@intrinsic
def _by_rows(_typing: Any, words: Any, stride: Any, out: Any) -> Any:
    """One word each of sixteen rows, `stride` bytes apart."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        found = ir.Constant(VI32, ir.Undefined)
        for lane in range(LANES):
            place = builder.add(args[0], builder.mul(args[1], ir.Constant(args[1].type, lane)))
            word = builder.load(builder.inttoptr(place, I32.as_pointer()), align=4)
            found = builder.insert_element(found, word, ir.Constant(I32, lane))
        store(builder, args[2], _reordered(builder, found))
        return context.get_dummy_value()

    return nt.void(nt.int64, nt.int64, nt.int64), emit


@intrinsic
def _by_columns(_typing: Any, words: Any, out: Any) -> Any:
    """The words of sixteen rows side by side."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        store(builder, args[1], _reordered(builder, load(builder, args[0], VI32)))
        return context.get_dummy_value()

    return nt.void(nt.int64, nt.int64), emit


@intrinsic
def _by_order(_typing: Any, words: Any, stride: Any, order: Any, out: Any) -> Any:
    """Of COLUMNS, `stride` bytes for eight columns: those of the eight int32 at `order`."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        words, stride, order, out = args
        found, shifts = [], []
        for k in range(8):
            column = builder.load(builder.inttoptr(offset(builder, order, 4 * k), I32.as_pointer()), align=4)
            shift = builder.shl(builder.and_(column, ir.Constant(I32, 7)), ir.Constant(I32, 2))
            eight = builder.zext(builder.lshr(column, ir.Constant(I32, 3)), stride.type)
            found.append(load(builder, builder.add(words, builder.mul(eight, stride)), VI32))
            shifts.append(spread(builder, shift))
        store(builder, out, _gathered(builder, found, shifts))
        return context.get_dummy_value()

    return nt.void(nt.int64, nt.int64, nt.int64, nt.int64), emit


@intrinsic
def _by_eight_rows(_typing: Any, words: Any, stride: Any, out: Any) -> Any:
    """Of EIGHT_ROWS, `stride` bytes for a column: eight columns of the rows of two words."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pair = ir.VectorType(I32, 2)
        nibbles = [_ROW_OF_NIBBLE.index(lane % 8) for lane in range(LANES)]
        shifts = ir.Constant(VI32, [4 * nibble for nibble in nibbles])
        found = []
        for k in range(8):
            place = builder.add(args[0], builder.mul(args[1], ir.Constant(args[1].type, k)))
            two = load(builder, place, pair)
            found.append(shuffle(builder, two, two, [lane // 8 for lane in range(LANES)]))
        store(builder, args[2], _gathered(builder, found, [shifts] * 8))
        return context.get_dummy_value()

    return nt.void(nt.int64, nt.int64, nt.int64), emit


@helper
def _octet(layout, words, order, rows, columns, row, k, out):  # type: ignore[no-untyped-def]
    """Eight k of sixteen outputs from `row` on."""
    if layout == ROWS:
        _by_rows(words + 4 * (row * (columns // 8) + k // 8), columns // 8 * 4, out)
    elif layout == EIGHT_ROWS:
        _by_eight_rows(words + 4 * (k * (rows // 8) + row // 8), rows // 8 * 4, out)
    elif order:
        _by_order(words + 4 * row, 4 * rows, order + 4 * k, out)
    else:
        _by_columns(words + 4 * (k // 8 * rows + row), out)


@helper
def _factors(numbers, row, groups, g, wide, out):  # type: ignore[no-untyped-def]
    """Of sixteen outputs, from fp32 [rows, groups]."""
    for lane in range(BLOCK):
        value = load_float(numbers + 4 * ((row + lane) * groups + g))
        if wide:
            store_float(out + 4 * lane, value)
        else:
            store_half(out + 2 * lane, value)


@functools.cache
def pack_words_unit() -> int:
    """(words, layout, order or 0, scales, minima, rows, columns, group, records, wide): `BLOCKS_OF_UNIT` blocks of
    outputs for each unit. rows: a multiple of 16. order: int32 [columns], the column of the file that each k is; of
    COLUMNS only. scales, minima: fp32 [rows, columns / group]."""

    @unit
    def pack(arguments, index, worker):  # type: ignore[no-untyped-def]
        words, layout, order = load_int(arguments), load_int(arguments + 8), load_int(arguments + 16)
        scales, minima = load_int(arguments + 24), load_int(arguments + 32)
        rows, columns, group = load_int(arguments + 40), load_int(arguments + 48), load_int(arguments + 56)
        records, wide = load_int(arguments + 64), load_int(arguments + 72)
        groups, factor_bytes = columns // group, 4 if wide else 2
        record = BLOCK * (group // 2 + 2 * factor_bytes)
        first, end = index * BLOCKS_OF_UNIT, min((index + 1) * BLOCKS_OF_UNIT, rows // BLOCK)
        for g in range(groups):
            for k in range(0, group, 8):
                for block in range(first, end):
                    out = records + (block * groups + g) * record + BLOCK // 2 * k
                    _octet(layout, words, order, rows, columns, block * BLOCK, g * group + k, out)
            for block in range(first, end):
                out = records + (block * groups + g) * record + BLOCK // 2 * group
                _factors(scales, block * BLOCK, groups, g, wide, out)
                _factors(minima, block * BLOCK, groups, g, wide, out + BLOCK * factor_bytes)

    return pack.address
