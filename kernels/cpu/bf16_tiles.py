"""Tiles of stored keys and values as pairs of bf16, as LLVM vector code over the processor's bf16 dot product.

bf16 holds every int8 and FP8 code exactly. A tile is 32 tokens of one KV head. Its keys lie as [head_dim / 2, 2, 16, 2]
(pair of dims, half of the tile, token, dim of the pair): one instruction adds two products to the scores of sixteen
tokens. Its values lie as [16, head_dim, 2] (pair of tokens, dim, token of the pair): one adds two tokens to sixteen
elements of an output.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numba.core.types as nt
from llvmlite import binding, ir
from numba.core import cgutils
from numba.extending import intrinsic

from deepinfer.kernels.codecs import BF16, CODECS, FP8_E4M3, FP8_E5M2, INT8
from deepinfer.kernels.cpu import amx, bf16_dot
from deepinfer.kernels.cpu.amx_attention import emit_accumulate, emit_scores
from deepinfer.kernels.cpu.bf16_dot import (
    VECTOR_BYTES,
    WORDS,
    dot,
    load_pairs,
    load_scalar,
    round_pairs,
    spread_pair,
)
from deepinfer.kernels.cpu.vec16 import (
    I32,
    LANES,
    VF32,
    VI32,
    call,
    constant,
    fused,
    literal_values,
    load,
    offset,
    outlined,
    shuffle,
    store,
    vec16,
)

TILE = 2 * LANES
"""Tokens of a tile, always aligned to a multiple of it in the context."""
MATRIX_ROWS = amx.ROWS
"""Rows that are multiplied together by matrix tiles."""
CHUNK = 64
"""Divides every head_dim that these tiles take."""
CODES = tuple(codec.number for codec in (INT8, FP8_E4M3, FP8_E5M2, BF16))
"""Codecs whose every code is a bf16."""
_BYTES = ir.VectorType(ir.IntType(8), CHUNK)
_I64 = ir.IntType(64)


def available() -> bool:
    """Whether this processor has AVX512-BF16 and the byte permutations of AVX512-VBMI."""
    return bf16_dot.available() and bool(binding.get_host_cpu_features().get("avx512vbmi", False))


def _byte_constants(values: list[int]) -> Any:
    return ir.Constant(_BYTES, values)


def _magnitude_bits(number: int, code: int) -> int:
    """bf16 of the code 0 .. 127, which has no sign (of int8: of the number)."""
    if number == INT8.number:
        return bf16_dot.bits(float(code))
    if number == FP8_E4M3.number and code == 0x7F:
        return bf16_dot.bits(float("nan"))
    # E5M2 is the upper byte of a half; E4M3, moved to a half's place, is 2^-8 of its value.
    shift, factor = (8, 1.0) if number == FP8_E5M2.number else (7, 256.0)
    (half,) = struct.unpack("<e", struct.pack("<H", code << shift))
    return bf16_dot.bits(half * factor)


def _decode_bytes(builder: Any, number: int, codes: Any) -> tuple[Any, Any]:
    """64 codes of 8 bits to the lower and the upper bytes of their bf16, each by a lookup among 128."""
    magnitudes = [_magnitude_bits(number, code) for code in range(2 * CHUNK)]
    index = codes
    if number == INT8.number:
        negative = builder.icmp_signed("<", codes, _byte_constants([0] * CHUNK))
        index = builder.select(negative, builder.neg(codes), codes)

    def lookup(table: list[int]) -> Any:
        first, second = _byte_constants(table[:CHUNK]), _byte_constants(table[CHUNK:])
        return call(builder, "llvm.x86.avx512.vpermi2var.qi.512", _BYTES, first, index, second)

    upper = lookup([bits >> 8 for bits in magnitudes])
    signs = builder.and_(codes, _byte_constants([0x80] * CHUNK))
    return lookup([bits & 0xFF for bits in magnitudes]), builder.or_(upper, signs)


def _interleaved(builder: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """a0 b0 a1 b1 ... of two vectors, in two vectors."""
    count = a.type.count
    lanes = [part for i in range(count) for part in (i, count + i)]
    return shuffle(builder, a, b, lanes[:count]), shuffle(builder, a, b, lanes[count:])


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Sixteen rows, each of one or two pieces of sixteen elements, transposed piece by piece."""
    size = rows[0].type.count
    rows = list(rows)
    for step in (1, 2, 4, 8):
        upper = [i if i & step == 0 else size + i - step for i in range(size)]
        lower = [i + step if i & step == 0 else size + i for i in range(size)]
        for i in (i for i in range(LANES) if i & step == 0):
            a, b = rows[i], rows[i + step]
            rows[i], rows[i + step] = shuffle(builder, a, b, upper), shuffle(builder, a, b, lower)
    return rows


@intrinsic(prefer_literal=True)
def key_pairs(_typing: Any, codec: Any, dim: Any, source: Any, target: Any):  # type: ignore[no-untyped-def]
    """The keys of sixteen tokens, rows of `dim` codes at `source`, to pairs at `target`: the address of their half in
    a tile. `codec` is a literal of `CODES`, `dim` one that `CHUNK` divides."""
    literals = literal_values(codec, dim)
    if literals is None:
        return None
    number, head_dim = literals
    row_bytes = head_dim * CODECS[number].itemsize

    def put(builder: Any, target: Any, pair: int, value: Any) -> None:
        store(builder, offset(builder, target, pair * 2 * VECTOR_BYTES), value)

    def body(builder: Any, source: Any, target: Any) -> None:
        kind = VI32 if number == BF16.number else WORDS
        for chunk in range(row_bytes // VECTOR_BYTES):
            places = [offset(builder, source, token * row_bytes + chunk * VECTOR_BYTES) for token in range(LANES)]
            columns = _transposed(builder, [load(builder, place, kind, 1) for place in places])
            for i, column in enumerate(columns):
                if number == BF16.number:
                    put(builder, target, chunk * LANES + i, column)
                    continue
                halves = _interleaved(builder, *_decode_bytes(builder, number, builder.bitcast(column, _BYTES)))
                for piece, pairs in enumerate(halves):
                    put(builder, target, chunk * 2 * LANES + piece * LANES + i, pairs)

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        outlined(builder, f"key_pairs_{number}_{head_dim}", args[2:], body)
        return context.get_dummy_value()

    return nt.void(codec, dim, nt.int64, nt.int64), emit


@intrinsic(prefer_literal=True)
def value_pairs(_typing: Any, codec: Any, dim: Any, source: Any, target: Any):  # type: ignore[no-untyped-def]
    """The values of sixteen tokens, rows of `dim` codes at `source`, to pairs at `target`. As `key_pairs`."""
    literals = literal_values(codec, dim)
    if literals is None:
        return None
    number, head_dim = literals
    row_bytes = head_dim * CODECS[number].itemsize

    def body(builder: Any, source: Any, target: Any) -> None:
        kind = WORDS if number == BF16.number else _BYTES
        for pair in range(LANES // 2):
            place, out = offset(builder, source, 2 * pair * row_bytes), pair * head_dim * 4
            for at in range(0, row_bytes, VECTOR_BYTES):
                rows = [load(builder, offset(builder, place, at + row), kind, 1) for row in (0, row_bytes)]
                for mixed in _interleaved(builder, *rows):
                    pieces = [mixed]
                    if number != BF16.number:
                        pieces = list(_interleaved(builder, *_decode_bytes(builder, number, mixed)))
                    for piece in pieces:
                        store(builder, offset(builder, target, out), piece)
                        out += VECTOR_BYTES

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        outlined(builder, f"value_pairs_{number}_{head_dim}", args[2:], body)
        return context.get_dummy_value()

    return nt.void(codec, dim, nt.int64, nt.int64), emit


class RowRecord(NamedTuple):
    """What is kept of a row and query head while it goes through the tiles of its context: byte offsets of an
    accumulator fp32 [head_dim], of [16] fp32 lane sums, maxima (all equal) and decays (all equal), of the scores fp32
    [32] of the present tile, whose place its weights bf16 [32] take, and of its query bf16 [head_dim]."""

    sums: int
    maximum: int
    decay: int
    scores: int
    query: int
    length: int


def row_record(head_dim: int) -> RowRecord:
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


def _largest(builder: Any, a: Any, b: Any) -> Any:
    """One instruction; b where one of them is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic
def largest_of(_typing: Any, a: Any, b: Any) -> Any:
    """The larger of both, lane by lane; b where one of them is NaN."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return _largest(builder, *args)

    return vec16(vec16, vec16), emit


@intrinsic
def any_larger(_typing: Any, a: Any, b: Any) -> Any:
    """Whether a lane of a is larger than that of b. NaN is not."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = builder.bitcast(builder.fcmp_ordered(">", *args), ir.IntType(LANES))
        return builder.icmp_unsigned("!=", lanes, ir.Constant(lanes.type, 0))

    return nt.boolean(vec16, vec16), emit


@intrinsic
def spread_largest(_typing: Any, value: Any) -> Any:
    """The largest lane, in every lane. Any lane may be passed over if one is NaN."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        (value,) = args
        for step in (8, 4, 2, 1):
            value = _largest(builder, value, shuffle(builder, value, value, [lane ^ step for lane in range(LANES)]))
        return value

    return vec16(vec16), emit


@intrinsic
def softmax_weight(_typing: Any, score: Any, top: Any) -> Any:
    """exp(score - top) for score <= top, with a relative error below 3e-7: exactly 1 where they are equal, exactly 0
    far below and for -inf; NaN stays NaN."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        below = _largest(builder, constant(_LOWEST_POWER / _LOG2E), builder.fsub(*args))
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
