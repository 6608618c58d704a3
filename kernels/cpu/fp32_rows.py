"""What rows of queries do with stored tokens in fp32: scores, softmax weights, sums of values, as LLVM vector code.

Two or three rows share what is loaded and decoded: of four tokens for scores, of four vectors of an output for sums of
values. So their sums fill the registers, and a processor with two multipliers is kept busy. However many rows share,
the sums of a row run in the same order: a score's in the lanes of one vector along head_dim, those of an output token
by token.
"""

from __future__ import annotations

from typing import Any

import numba.core.types as nt
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from deepinfer.kernels.codecs import CODECS
from deepinfer.kernels.cpu.row_states import RowRecord
from deepinfer.kernels.cpu.tiles import VECTOR, WIDTH, fold_four, load_codes
from deepinfer.kernels.cpu.vec16 import (
    F32,
    I32,
    LANES,
    VF32,
    VI32,
    call,
    constant,
    counted_loop,
    fused,
    largest,
    literal_values,
    load,
    offset,
    outlined,
    store,
    vec16,
)

ROWS_AT_ONCE = 3
_TOKENS, _VECTORS = 4, 4
_I64 = ir.IntType(64)
_VECTOR_BYTES = 4 * WIDTH


def fp32_record(head_dim: int) -> RowRecord:
    """The weights are fp32 [32], the query is fp32 [head_dim]."""
    sums = 4 * head_dim
    scores = sums + 3 * 4 * LANES
    query = scores + 2 * 4 * LANES
    return RowRecord(sums, sums + 4 * LANES, sums + 2 * 4 * LANES, scores, query, query + 4 * head_dim)


def _int(value: int) -> Any:
    return ir.Constant(_I64, value)


def _records_at(builder: Any, records: Any, index: Any, last: Any, count: int, length: int) -> list[Any]:
    """Addresses of `count` records from `index` on; those beyond `last` are that one again."""
    rows = [builder.add(index, _int(i)) for i in range(count)]
    bounded = [builder.select(builder.icmp_signed("<", row, last), row, last) for row in rows]
    return [builder.add(records, builder.mul(row, _int(length))) for row in bounded]


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, f"llvm.fma.v{WIDTH}f32", VECTOR, a, b, c)


def _spread_at(builder: Any, address: Any) -> Any:
    """The fp32 at an address in every lane."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, load(builder, address, F32), ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, WIDTH), None))


def _slots(builder: Any, count: int) -> list[Any]:
    return [cgutils.alloca_once(builder, VECTOR) for _ in range(count)]


@intrinsic(prefer_literal=True)
def row_scores(_typing, codec, count, dim, source, records, index, last, half):  # type: ignore[no-untyped-def]
    """The scores of sixteen tokens, rows of `dim` codes at `source`, for `count` rows from `index` on: to that half of
    the scores in their records, `CODE_FACTORS` too small but for what their queries were multiplied by.

    codec, count, dim: literals. Rows beyond `last` are that row again.
    """
    literals = literal_values(codec, count, dim)
    if literals is None:
        return None
    number, num_rows, head_dim = literals
    record, itemsize = fp32_record(head_dim), CODECS[number].itemsize
    row_bytes = head_dim * itemsize

    def body(builder: Any, source: Any, records: Any, index: Any, last: Any, half: Any) -> None:
        homes = _records_at(builder, records, index, last, num_rows, record.length)
        queries = [offset(builder, home, record.query) for home in homes]
        scores = builder.add(_int(record.scores), builder.mul(half, _int(4 * LANES)))
        targets = [builder.add(home, scores) for home in homes]
        sums = _slots(builder, _TOKENS * num_rows)
        with counted_loop(builder, _int(LANES // _TOKENS)) as group:
            tokens = builder.add(source, builder.mul(group, _int(_TOKENS * row_bytes)))
            for slot in sums:
                builder.store(ir.Constant(VECTOR, None), slot)
            with counted_loop(builder, _int(head_dim // WIDTH)) as index:
                at = builder.add(tokens, builder.mul(index, _int(WIDTH * itemsize)))
                step = builder.mul(index, _int(_VECTOR_BYTES))
                mine = [load(builder, builder.add(query, step), VECTOR) for query in queries]
                for token in range(_TOKENS):
                    key = load_codes(builder, number, offset(builder, at, token * row_bytes))
                    for row in range(num_rows):
                        slot = sums[row * _TOKENS + token]
                        builder.store(_multiply_add(builder, mine[row], key, builder.load(slot)), slot)
            out = builder.mul(group, _int(4 * _TOKENS))
            for row, target in enumerate(targets):
                mine = [builder.load(slot) for slot in sums[row * _TOKENS : (row + 1) * _TOKENS]]
                store(builder, builder.add(target, out), fold_four(builder, mine))

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        outlined(builder, f"row_scores_{number}_{num_rows}_{head_dim}", args[3:], body)
        return context.get_dummy_value()

    return nt.void(codec, count, dim, *[nt.int64] * 5), emit


@intrinsic(prefer_literal=True)
def row_accumulate(_typing, codec, count, dim, first, second, records, index, last):  # type: ignore[no-untyped-def]
    """accumulator = accumulator * decay + weights . values for `count` rows from `index` on. The values of a tile are
    two times sixteen rows of `dim` codes, at `first` and at `second`. As `row_scores`."""
    literals = literal_values(codec, count, dim)
    if literals is None:
        return None
    number, num_rows, head_dim = literals
    record, itemsize = fp32_record(head_dim), CODECS[number].itemsize
    row_bytes = head_dim * itemsize

    def columns(builder: Any, homes: list[Any], sources: tuple[Any, Any], column: Any, width: int) -> None:
        """So many vectors of the outputs, from `column` on."""
        at = builder.mul(column, _int(4))
        places = [[offset(builder, builder.add(home, at), i * _VECTOR_BYTES) for i in range(width)] for home in homes]
        sums = _slots(builder, num_rows * width)
        for row, home in enumerate(homes):
            decay = _spread_at(builder, offset(builder, home, record.decay))
            for i, place in enumerate(places[row]):
                builder.store(builder.fmul(load(builder, place, VECTOR), decay), sums[row * width + i])
        for half, source in enumerate(sources):
            base = builder.add(source, builder.mul(column, _int(itemsize)))
            with counted_loop(builder, _int(LANES)) as token:
                values = builder.add(base, builder.mul(token, _int(row_bytes)))
                step = builder.add(_int(record.scores + half * 4 * LANES), builder.mul(token, _int(4)))
                weights = [_spread_at(builder, builder.add(home, step)) for home in homes]
                for i in range(width):
                    value = load_codes(builder, number, offset(builder, values, i * WIDTH * itemsize))
                    for row in range(num_rows):
                        slot = sums[row * width + i]
                        builder.store(_multiply_add(builder, weights[row], value, builder.load(slot)), slot)
        # A row that is there twice is read twice before it is written.
        for row, row_places in enumerate(places):
            for i, place in enumerate(row_places):
                store(builder, place, builder.load(sums[row * width + i]))

    def body(builder: Any, first: Any, second: Any, records: Any, index: Any, last: Any) -> None:
        homes = _records_at(builder, records, index, last, num_rows, record.length)
        at_once = _VECTORS * WIDTH
        whole, rest = divmod(head_dim, at_once)
        if whole:
            with counted_loop(builder, _int(whole)) as index:
                columns(builder, homes, (first, second), builder.mul(index, _int(at_once)), _VECTORS)
        if rest:
            columns(builder, homes, (first, second), _int(head_dim - rest), rest // WIDTH)

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        outlined(builder, f"row_accumulate_{number}_{num_rows}_{head_dim}", args[3:], body)
        return context.get_dummy_value()

    return nt.void(codec, count, dim, *[nt.int64] * 5), emit


# 2^f for |f| <= 1/2, by the polynomial of degree 5 that is 1 at 0 and whose greatest relative error is least (1e-7).
_EXP2 = (
    *(1.326472716108287e-3, 9.671512837598022e-3, 5.5507337451964366e-2),
    *(0.24022242082260747, 0.6931469775969838, 1.0),
)
_LOG2E, _LOG2E_REST = 1.4426950216293335, 1.925963033500011e-8
"""The rest is what fp32 leaves of it."""
_LOWEST_POWER = -127
_TO_WHOLE = 1.5 * 2.0**23
"""Added to a small number, it leaves the whole part in the low bits."""


@intrinsic
def fp32_weight(_typing: Any, score: Any, top: Any) -> Any:
    """exp(score - top) for score <= top, with a relative error below 3e-7: exactly 1 where they are equal, exactly 0
    below -88 and for -inf; NaN stays NaN."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        below = largest(builder, constant(_LOWEST_POWER / _LOG2E), builder.fsub(*args))
        shifted = fused(builder, below, constant(_LOG2E), constant(_TO_WHOLE))
        whole = builder.fsub(shifted, constant(_TO_WHOLE))
        rest = fused(builder, below, constant(_LOG2E), builder.fneg(whole))
        rest, series = fused(builder, below, constant(_LOG2E_REST), rest), constant(_EXP2[0])
        for coefficient in _EXP2[1:]:
            series = fused(builder, series, rest, constant(coefficient))
        # The power of two by its exponent's bits: those of 2^-127 are zeros, and so is what they make.
        exponent = builder.add(builder.bitcast(shifted, VI32), constant(127, VI32))
        scale = builder.bitcast(builder.shl(exponent, constant(23, VI32)), VF32)
        return builder.fmul(series, scale)

    return vec16(vec16, vec16), emit
