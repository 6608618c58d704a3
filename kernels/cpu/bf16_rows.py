"""What rows of queries do with a tile of `bf16_tiles`: scores, softmax weights, sums of values, as LLVM vector code."""

from __future__ import annotations

from typing import Any

import numba.core.types as nt
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from deepinfer.kernels.cpu import amx
from deepinfer.kernels.cpu.amx_attention import emit_accumulate, emit_scores
from deepinfer.kernels.cpu.bf16_dot import (
    VECTOR_BYTES,
    dot,
    load_pairs,
    load_scalar,
    round_pairs,
    spread_pair,
)
from deepinfer.kernels.cpu.row_states import RowRecord
from deepinfer.kernels.cpu.vec16 import (
    I32,
    LANES,
    VF32,
    call,
    constant,
    fused,
    largest,
    literal_values,
    load,
    offset,
    outlined,
    store,
    vec16,
)

MATRIX_ROWS = amx.ROWS
"""Rows that are multiplied together by matrix tiles."""
_I64 = ir.IntType(64)


def row_record(head_dim: int) -> RowRecord:
    """The weights are bf16 [32], the query is bf16 [head_dim]."""
    sums = 4 * head_dim
    scores = sums + 3 * VECTOR_BYTES
    query = scores + 2 * VECTOR_BYTES
    return RowRecord(sums, sums + VECTOR_BYTES, sums + 2 * VECTOR_BYTES, scores, query, query + 2 * head_dim)


def _records_at(builder: Any, records: Any, index: Any, last: Any, count: int, length: int) -> list[Any]:
    """Addresses of `count` records from `index` on; those beyond `last` are that one again."""
    rows = [builder.add(index, ir.Constant(_I64, i)) for i in range(count)]
    bounded = [builder.select(builder.icmp_signed("<", row, last), row, last) for row in rows]
    return [builder.add(records, builder.mul(row, ir.Constant(_I64, length))) for row in bounded]


@intrinsic(prefer_literal=True)
def pair_scores(_typing: Any, count: Any, dim: Any, keys: Any, records: Any, index: Any, last: Any):  # type: ignore[no-untyped-def]
    """The scores of a tile for `count` rows from `index` on, written to their records.

    count, dim: literals. keys: the tile. Rows beyond `last` are that row again. A count of `MATRIX_ROWS` means by
    matrix tiles, which `set_up_rows` has set up for the rows that there are.
    """
    literals = literal_values(count, dim)
    if literals is None:
        return None
    num_rows, head_dim = literals
    record = row_record(head_dim)
    slots = range(4 * num_rows)  # of a row: two halves of the tile, two sums of each that do not wait for one another

    def body(builder: Any, keys: Any, records: Any, index: Any, last: Any) -> None:
        homes = _records_at(builder, records, index, last, num_rows, record.length)
        queries = [offset(builder, home, record.query) for home in homes]
        sums = [cgutils.alloca_once(builder, VF32) for _ in slots]
        for slot in sums:
            builder.store(constant(0.0), slot)
        with cgutils.for_range(builder, ir.Constant(_I64, head_dim // 32)) as loop:
            sources = [builder.add(query, builder.mul(loop.index, ir.Constant(_I64, 64))) for query in queries]
            tile = builder.add(keys, builder.mul(loop.index, ir.Constant(_I64, LANES * 2 * VECTOR_BYTES)))
            values = [builder.load(slot) for slot in sums]
            for pair in range(LANES):
                at = [offset(builder, tile, (2 * pair + half) * VECTOR_BYTES) for half in (0, 1)]
                halves = [load_pairs(builder, place) for place in at]
                for row, source in enumerate(sources):
                    query = spread_pair(builder, offset(builder, source, 4 * pair))
                    for half, key in enumerate(halves):
                        slot = 4 * row + 2 * half + pair % 2
                        values[slot] = dot(builder, values[slot], key, query)
            for slot, value in zip(sums, values, strict=True):
                builder.store(value, slot)
        for row, home in enumerate(homes):
            for half in (0, 1):
                even, odd = (builder.load(sums[4 * row + 2 * half + chain]) for chain in (0, 1))
                place = offset(builder, home, record.scores + half * VECTOR_BYTES)
                store(builder, place, builder.fadd(even, odd))

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if num_rows == MATRIX_ROWS:
            emit_scores(builder, record, head_dim, *args[2:])
        else:
            outlined(builder, f"pair_scores_{num_rows}_{head_dim}", args[2:], body)
        return context.get_dummy_value()

    return nt.void(count, dim, nt.int64, nt.int64, nt.int64, nt.int64), emit


@intrinsic(prefer_literal=True)
def set_up_rows(_typing: Any, count: Any, rest: Any):  # type: ignore[no-untyped-def]
    """Before rows are multiplied `count` (a literal) together: where that is by matrix tiles, for a last tile of `rest`
    rows."""
    literals = literal_values(count)
    if literals is None:
        return None

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if literals[0] == MATRIX_ROWS:
            amx.emit_set_up(builder, args[1])
        return context.get_dummy_value()

    return nt.void(count, nt.int64), emit


@intrinsic(prefer_literal=True)
def let_go_of_rows(_typing: Any, count: Any):  # type: ignore[no-untyped-def]
    """After the last product of rows, `count` (a literal) together."""
    literals = literal_values(count)
    if literals is None:
        return None

    def emit(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if literals[0] == MATRIX_ROWS:
            amx.emit_let_go(builder)
        return context.get_dummy_value()

    return nt.void(count), emit


# 2^f for |f| <= 1/2, by the polynomial of degree 5 that is 1 at 0 and whose greatest relative error is least (1e-7).
_EXP2 = (
    *(1.326472716108287e-3, 9.671512837598022e-3, 5.5507337451964366e-2),
    *(0.24022242082260747, 0.6931469775969838, 1.0),
)
_LOG2E, _LOG2E_REST = 1.4426950216293335, 1.925963033500011e-8
"""The rest is what fp32 leaves of it."""
_LOWEST_POWER = -200.0


@intrinsic
def softmax_weight(_typing: Any, score: Any, top: Any) -> Any:
    """exp(score - top) for score <= top, with a relative error below 3e-7: exactly 1 where they are equal, exactly 0
    far below and for -inf; NaN stays NaN."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        below = largest(builder, constant(_LOWEST_POWER / _LOG2E), builder.fsub(*args))
        whole = call(builder, "llvm.rint.v16f32", VF32, builder.fmul(below, constant(_LOG2E)))
        rest = fused(builder, below, constant(_LOG2E), builder.fneg(whole))
        rest, series = fused(builder, below, constant(_LOG2E_REST), rest), constant(_EXP2[0])
        for coefficient in _EXP2[1:]:
            series = fused(builder, series, rest, constant(coefficient))
        everywhere, as_set = ir.Constant(ir.IntType(16), -1), ir.Constant(I32, 4)
        return call(builder, "llvm.x86.avx512.mask.scalef.ps.512", VF32, series, whole, series, everywhere, as_set)

    return vec16(vec16, vec16), emit


@intrinsic
def store_pairs(_typing: Any, address: Any, low: Any, high: Any) -> Any:
    """Write 32 fp32, given as two vectors, rounded to bf16."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        store(builder, args[0], round_pairs(builder, args[1], args[2]), 2)
        return context.get_dummy_value()

    return nt.void(nt.int64, vec16, vec16), emit


@intrinsic(prefer_literal=True)
def pair_accumulate(_typing: Any, count: Any, dim: Any, values: Any, records: Any, index: Any, last: Any):  # type: ignore[no-untyped-def]
    """accumulator = accumulator * decay + weights . values for `count` rows from `index` on. As `pair_scores`."""
    literals = literal_values(count, dim)
    if literals is None:
        return None
    num_rows, head_dim = literals
    record = row_record(head_dim)
    width = 4 if num_rows <= 4 else 2  # vectors of sums of a row, so that those of all rows stay in registers

    def body(builder: Any, values: Any, records: Any, index: Any, last: Any) -> None:
        homes = _records_at(builder, records, index, last, num_rows, record.length)
        decays = [load_scalar(builder, offset(builder, home, record.decay)) for home in homes]
        for chunk in range(0, head_dim // LANES, width):
            places = [[offset(builder, home, (chunk + i) * VECTOR_BYTES) for i in range(width)] for home in homes]
            totals = [
                [builder.fmul(load(builder, place), decay) for place in row]
                for row, decay in zip(places, decays, strict=True)
            ]
            for pair in range(LANES):
                at = pair * head_dim * 4 + chunk * VECTOR_BYTES
                tile = [load_pairs(builder, offset(builder, values, at + i * VECTOR_BYTES)) for i in range(width)]
                for row, home in enumerate(homes):
                    weight = spread_pair(builder, offset(builder, home, record.scores + 4 * pair))
                    totals[row] = [dot(builder, t, v, weight) for t, v in zip(totals[row], tile, strict=True)]
            # A row that is there twice is read twice before it is written.
            for row_places, row in zip(places, totals, strict=True):
                for place, total in zip(row_places, row, strict=True):
                    store(builder, place, total)

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if num_rows == MATRIX_ROWS:
            emit_accumulate(builder, record, head_dim, *args[2:])
        else:
            outlined(builder, f"pair_accumulate_{num_rows}_{head_dim}", args[2:], body)
        return context.get_dummy_value()

    return nt.void(count, dim, nt.int64, nt.int64, nt.int64, nt.int64), emit
