"""The products of `bf16_tiles` by matrix tiles, for sixteen records at a time, as LLVM code.

A record's own query and weights are rows of a tile, as many bytes apart as records are; keys and values lie as tiles
of the second operand anyway. Accumulators that decay are multiplied beforehand, since a tile only adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from deepinfer.kernels.cpu import amx
from deepinfer.kernels.cpu.bf16_dot import VECTOR_BYTES, load_scalar
from deepinfer.kernels.cpu.vec16 import F32, LANES, load, offset, store

_I64 = ir.IntType(64)
_Emit = Callable[[int, int], None]
"""(register of sums, register of rows)."""


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


def _rows_left(builder: Any, index: Any, last: Any) -> Any:
    """How many records there are from `index` on, 16 at most."""
    left = builder.add(builder.sub(last, index), _number(1))
    return builder.select(builder.icmp_signed("<", left, _number(amx.ROWS)), left, _number(amx.ROWS))


def _by_tiles(builder: Any, rows: Any, emit: _Emit) -> None:
    with builder.if_else(builder.icmp_signed("==", rows, _number(amx.ROWS))) as (all_there, some_there):
        with all_there:
            emit(amx.SUMS, amx.ROW_TILE)
        with some_there:
            emit(amx.SUMS_OF_REST, amx.ROW_TILE_OF_REST)


def emit_scores(builder: Any, record: Any, head_dim: int, keys: Any, records: Any, index: Any, last: Any) -> None:
    """As `pair_scores`. `record`: the `RowRecord` of this head_dim."""
    home = builder.add(records, builder.mul(index, _number(record.length)))

    def emit(sums: int, rows: int) -> None:
        for half in (0, 1):
            amx.zero_tile(builder, sums)
            for step in range(head_dim // amx.DEPTH):
                amx.load_tile(
                    builder, rows, offset(builder, home, record.query + 2 * amx.DEPTH * step), _number(record.length)
                )
                place = offset(builder, keys, step * LANES * 2 * VECTOR_BYTES + half * VECTOR_BYTES)
                amx.load_tile(builder, amx.COLUMN_TILE, place, _number(2 * VECTOR_BYTES))
                amx.multiply_tiles(builder, sums, rows, amx.COLUMN_TILE)
            place = offset(builder, home, record.scores + half * VECTOR_BYTES)
            amx.store_tile(builder, sums, place, _number(record.length))

    _by_tiles(builder, _rows_left(builder, index, last), emit)


def emit_accumulate(builder: Any, record: Any, head_dim: int, values: Any, records: Any, index: Any, last: Any) -> None:
    """As `pair_accumulate`."""
    home = builder.add(records, builder.mul(index, _number(record.length)))
    rows_left = _rows_left(builder, index, last)
    with cgutils.for_range(builder, rows_left) as loop:
        mine = builder.add(home, builder.mul(loop.index, _number(record.length)))
        decay = load_scalar(builder, offset(builder, mine, record.decay))
        first = builder.extract_element(decay, ir.Constant(ir.IntType(32), 0))
        # The usual case behind the first tiles: nothing decays.
        with builder.if_then(builder.fcmp_unordered("!=", first, ir.Constant(F32, 1.0))):
            for at in range(0, head_dim * 4, VECTOR_BYTES):
                place = offset(builder, mine, at)
                store(builder, place, builder.fmul(load(builder, place), decay))

    def emit(sums: int, rows: int) -> None:
        amx.load_tile(builder, rows, offset(builder, home, record.scores), _number(record.length))
        for chunk in range(head_dim // LANES):
            place = offset(builder, home, chunk * VECTOR_BYTES)
            amx.load_tile(builder, sums, place, _number(record.length))
            tile = offset(builder, values, chunk * VECTOR_BYTES)
            amx.load_tile(builder, amx.COLUMN_TILE, tile, _number(4 * head_dim))
            amx.multiply_tiles(builder, sums, rows, amx.COLUMN_TILE)
            amx.store_tile(builder, sums, place, _number(record.length))

    _by_tiles(builder, rows_left, emit)
