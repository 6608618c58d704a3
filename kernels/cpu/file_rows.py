"""Rows of weights as files hold them, straight into the order of kernels or into plain rows: one pass, in pieces that
stay in the processor's cache, which also sees values that are not finite."""

from __future__ import annotations

import functools
from typing import Any

import numba.core.types as nt
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from deepinfer.kernels.cpu.activation_forms import CHUNK
from deepinfer.kernels.cpu.bf16_dot import VECTOR_BYTES, WORDS
from deepinfer.kernels.cpu.file_types import (
    FILE_TYPES,
    NUMBER_OF,
    STRETCH,
    decode_narrow,
    decode_wide,
    k_numbers,
    round_chunk,
)
from deepinfer.kernels.cpu.jit import helper
from deepinfer.kernels.cpu.memory import (
    add_int,
    as_half,
    load_bf16,
    load_byte,
    load_float,
    load_half,
    load_int,
    load_int16,
    load_unaligned,
    store_float,
    store_half,
    store_int,
    store_int16,
    store_int32,
)
from deepinfer.kernels.cpu.records import BLOCK
from deepinfer.kernels.cpu.repack import eight_codes
from deepinfer.kernels.cpu.tasks import unit
from deepinfer.kernels.cpu.vec16 import LANES, VI32, literal_values, load, offset, shuffle, store

_ROW_ROOM = 2 * STRETCH + VECTOR_BYTES
"""Bytes between rows of bf16: not a power of two, which would put them all in the same places of the cache."""
_SPARE = BLOCK * _ROW_ROOM
ROOM = _SPARE + 4 * CHUNK
"""Bytes that each worker needs: rows, and behind them one chunk of fp32."""
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F
_PLAIN = sum(kind.is_plain for kind in FILE_TYPES)
"""The plain types have the first numbers."""
_F32, _F16, _Q4_1, _Q4_K = (NUMBER_OF[name] for name in ("F32", "F16", "Q4_1", "Q4_K"))


def _magnitude(builder: Any, values: Any) -> Any:
    """Of fp32 as int32, of bf16 as int16: the bits without the sign."""
    return builder.and_(
        values, ir.Constant(values.type, [(1 << (values.type.element.width - 1)) - 1] * values.type.count)
    )


def _has_strange(builder: Any, largest: Any) -> Any:
    """int64: whether a magnitude is that of an infinity or a NaN."""
    kind = largest.type
    infinite = 0x7F800000 if kind.element.width == 32 else 0x7F80
    lanes = builder.icmp_unsigned(">=", largest, ir.Constant(kind, [infinite] * kind.count))
    found = builder.bitcast(lanes, ir.IntType(kind.count))
    return builder.zext(found, ir.IntType(64))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_unsigned(">", a, b), a, b)


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Sixteen vectors of sixteen words, rows to columns: each step swaps one bit of the places."""
    for step in (1, 2, 4, 8):
        upper = [lane for lane in range(LANES) if lane & step]
        low = [LANES + lane - step if lane in upper else lane for lane in range(LANES)]
        high = [LANES + lane if lane in upper else lane + step for lane in range(LANES)]
        swapped = list(rows)
        for row in (row for row in range(LANES) if not row & step):
            swapped[row] = shuffle(builder, rows[row], rows[row + step], low)
            swapped[row + step] = shuffle(builder, rows[row], rows[row + step], high)
        rows = swapped
    return rows


@intrinsic
def _pack_chunk(_typing: Any, rows: Any, out: Any) -> Any:
    """`BLOCK` rows of `CHUNK` bf16, `_ROW_ROOM` bytes apart: pairs of columns, each of all rows. Gives a number that is
    not 0 if a value is not finite."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        rows = [load(builder, offset(builder, args[0], _ROW_ROOM * row), WORDS, 2) for row in range(BLOCK)]
        largest = functools.reduce(functools.partial(_larger, builder), [_magnitude(builder, words) for words in rows])
        pairs = _transposed(builder, [builder.bitcast(words, VI32) for words in rows])
        for pair, lanes in enumerate(pairs):
            store(builder, offset(builder, args[1], VECTOR_BYTES * pair), lanes)
        return _has_strange(builder, largest)

    return nt.int64(nt.int64, nt.int64), emit


@intrinsic(prefer_literal=True)
def _strange(_typing: Any, narrow: Any, address: Any) -> Any:
    """Not 0 if one of 64 bytes of bf16 (`narrow`, a literal 1) or fp32 (0) is not finite."""
    literal = literal_values(narrow)
    if literal is None:
        return None
    kind = WORDS if literal[0] else VI32

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return _has_strange(builder, _magnitude(builder, load(builder, args[1], kind, 2)))

    return nt.int64(narrow, nt.int64), emit


@intrinsic
def _round_spare(_typing: Any, spare: Any) -> Any:
    """`CHUNK` fp32 to bf16, in their place."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        halves = [load(builder, offset(builder, args[0], at)) for at in (0, 4 * LANES)]
        store(builder, args[0], round_chunk(builder, *halves), 2)
        return context.get_dummy_value()

    return nt.void(nt.int64), emit


@helper
def _read_rest(kind, row, first, count, spare):  # type: ignore[no-untyped-def]
    """Plain floats behind the last whole chunk of a row as fp32, and zeros up to a whole one."""
    for k in range(CHUNK):
        value = np.float32(0.0)
        if k < count and kind == _F32:
            value = load_float(row + 4 * (first + k))
        elif k < count and kind == _F16:
            value = load_half(row + 2 * (first + k))
        elif k < count:
            value = load_bf16(row + 2 * (first + k))
        store_float(spare + 4 * k, value)


@helper
def _copy_words(source, count, target):  # type: ignore[no-untyped-def]
    for k in range(count):
        store_int16(target + 2 * k, load_int16(source + 2 * k))


@functools.cache
def pack_bf16_unit() -> int:
    """(addresses, types, rows, columns, records, room, faults): sixteen rows for each unit. `room` has `ROOM` bytes for
    each worker; what is not finite is counted in `faults`."""

    @unit
    def pack(arguments, block, worker):  # type: ignore[no-untyped-def]
        addresses, types = load_int(arguments), load_int(arguments + 8)
        rows, columns = load_int(arguments + 16), load_int(arguments + 24)
        room, chunks, strange = load_int(arguments + 40) + worker * ROOM, -(-columns // CHUNK), 0
        out, spare = load_int(arguments + 32) + block * chunks * 2 * BLOCK * CHUNK, room + _SPARE
        for first in range(0, columns, STRETCH):
            count = min(STRETCH, columns - first)
            whole = count // CHUNK * CHUNK
            for lane in range(BLOCK):
                row, target = block * BLOCK + lane, room + lane * _ROW_ROOM
                if row >= rows:
                    for at in range(0, 2 * (whole + CHUNK), 8):
                        store_int(target + at, 0)
                    continue
                kind, address = load_byte(types + row), load_int(addresses + 8 * row)
                decode_narrow(kind, address, first, whole, target)
                if whole < count:
                    _read_rest(kind, address, first + whole, count - whole, spare)
                    _round_spare(spare)
                    _copy_words(spare, CHUNK, target + 2 * whole)
            for k in range(0, count, CHUNK):
                strange |= _pack_chunk(room + 2 * k, out)
                out += 2 * BLOCK * CHUNK
        if strange:
            add_int(load_int(arguments + 48), 1)

    return pack.address


@functools.cache
def plain_rows_unit(narrow: int) -> int:
    """(addresses, types, rows, columns, out, room, faults, rows of a unit): as they are, in fp32 (0) or rounded to bf16
    (`narrow`, 1)."""
    item, vector = (2, CHUNK) if narrow else (4, LANES)

    @unit
    def plain(arguments, index, worker):  # type: ignore[no-untyped-def]
        addresses, types = load_int(arguments), load_int(arguments + 8)
        rows, columns, share = load_int(arguments + 16), load_int(arguments + 24), load_int(arguments + 56)
        spare, strange = load_int(arguments + 40) + worker * ROOM + _SPARE, 0
        whole = columns // CHUNK * CHUNK
        for row in range(index * share, min((index + 1) * share, rows)):
            kind, address = load_byte(types + row), load_int(addresses + 8 * row)
            out = load_int(arguments + 32) + item * row * columns
            if narrow:
                decode_narrow(kind, address, 0, whole, out)
            else:
                decode_wide(kind, address, 0, whole, out)
            for k in range(0, whole, vector):
                strange |= _strange(narrow, out + item * k)
            if whole == columns:
                continue
            _read_rest(kind, address, whole, columns - whole, spare)
            if narrow:
                _round_spare(spare)
            for k in range(0, CHUNK, vector):
                strange |= _strange(narrow, spare + item * k)
            _copy_words(spare, (columns - whole) * item // 2, out + item * whole)
        if strange:
            add_int(load_int(arguments + 48), 1)

    return plain.address


@helper
def _store_factor(value, wide, at):  # type: ignore[no-untyped-def]
    """Gives 1 if it is not finite, 2 if it is and fp16 does not hold it."""
    if wide:
        store_float(at, value)
    else:
        store_half(at, value)
    if not abs(value) < np.inf:
        return 1
    return 2 if not wide and as_half(value) != value else 0


@functools.cache
def pack_int4_unit() -> int:
    """(addresses, types, rows, columns, records, room, faults, wide): sixteen rows of Q4_0, Q4_1 or Q4_K for each unit.
    `faults` counts units with values that are not finite, and in the int64 behind it those that fp16 does not hold."""

    @unit
    def pack(arguments, block, worker):  # type: ignore[no-untyped-def]
        addresses, types, rows = load_int(arguments), load_int(arguments + 8), load_int(arguments + 16)
        groups, room, wide = load_int(arguments + 24) // CHUNK, load_int(arguments + 40), load_int(arguments + 56)
        room += worker * ROOM
        factor_bytes, faults = 4 if wide else 2, 0
        record = BLOCK * (CHUNK // 2 + 2 * factor_bytes)
        for g in range(groups):
            out = load_int(arguments + 32) + (block * groups + g) * record
            factors = out + BLOCK * CHUNK // 2
            for lane in range(BLOCK):
                row, words = block * BLOCK + lane, out + 4 * lane
                scale = minimum = np.float32(0.0)
                if row >= rows:
                    for k in range(4):
                        store_int32(words + 4 * BLOCK * k, 0)
                elif load_byte(types + row) == _Q4_K:
                    part, numbers = g % 8, room + lane * _ROW_ROOM
                    source = load_int(addresses + 8 * row) + 144 * (g // 8)
                    if part == 0:
                        k_numbers(source, numbers)
                    scale, minimum = load_float(numbers + 8 * part), -load_float(numbers + 8 * part + 4)
                    for k in range(4):
                        codes = load_unaligned(source + 16 + 32 * (part // 2) + 8 * k) >> (4 * (part % 2))
                        store_int32(words + 4 * BLOCK * k, eight_codes(codes & _LOW_NIBBLES))
                else:
                    has_minimum = load_byte(types + row) == _Q4_1
                    first = 4 if has_minimum else 2
                    source = load_int(addresses + 8 * row) + (16 + first) * g
                    scale = load_half(source)
                    minimum = load_half(source + 2) if has_minimum else scale * np.float32(-8.0)
                    for k in range(4):
                        codes = load_unaligned(source + first + 8 * (k % 2)) >> (4 * (k // 2))
                        store_int32(words + 4 * BLOCK * k, eight_codes(codes & _LOW_NIBBLES))
                faults |= _store_factor(scale, wide, factors + factor_bytes * lane)
                faults |= _store_factor(minimum, wide, factors + factor_bytes * (BLOCK + lane))
        if faults & 1:
            add_int(load_int(arguments + 48), 1)
        if faults & 2:
            add_int(load_int(arguments + 48) + 8, 1)

    return pack.address


@functools.cache
def pack_int8_unit() -> int:
    """(addresses, types, rows, columns, records, room, faults): sixteen rows of Q8_0 for each unit."""

    @unit
    def pack(arguments, block, worker):  # type: ignore[no-untyped-def]
        addresses, rows, groups = load_int(arguments), load_int(arguments + 16), load_int(arguments + 24) // CHUNK
        strange = 0
        for g in range(groups):
            out = load_int(arguments + 32) + (block * groups + g) * BLOCK * (CHUNK + 2)
            for lane in range(BLOCK):
                row, scale = block * BLOCK + lane, np.float32(0.0)
                if row < rows:
                    source = load_int(addresses + 8 * row) + (CHUNK + 2) * g
                    scale = load_half(source)
                    for k in range(0, CHUNK, 2):
                        store_int16(out + BLOCK * k + 2 * lane, load_int16(source + 2 + k))
                else:
                    for k in range(0, CHUNK, 2):
                        store_int16(out + BLOCK * k + 2 * lane, 0)
                strange |= _store_factor(scale, 0, out + BLOCK * CHUNK + 2 * lane)
        if strange:
            add_int(load_int(arguments + 48), 1)

    return pack.address
