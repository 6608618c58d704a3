"""The codes of packed weights (`records`) as vectors that multiply, and unpacked in memory for many rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba.core.types as nt
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from deepinfer.kernels.codecs import FP16, FP32, INT8
from deepinfer.kernels.cpu.activation_forms import CHUNK
from deepinfer.kernels.cpu.bf16_dot import VECTOR_BYTES, WORDS, as_pairs, bits, load_pairs, round_pairs, words
from deepinfer.kernels.cpu.codecs import decode
from deepinfer.kernels.cpu.records import (
    BLOCK,
    CODE_BITS,
    P_INT4,
    P_INT4_WORDS,
    P_INT8,
    P_INT8_WORDS,
    SCALES,
    record_bytes,
)
from deepinfer.kernels.cpu.vec16 import LANES, call, literal_values, load, offset, store

HALF_WORDS = ir.VectorType(ir.IntType(16), LANES)
"""Sixteen integers of 16 bits: half of the 64 bytes that lie together."""
_BYTES = ir.VectorType(ir.IntType(8), LANES)


def plus(builder: Any, base: Any, index: Any, step: int) -> Any:
    """base + step * index."""
    return builder.add(base, builder.mul(index, ir.Constant(index.type, step)))


def _int4_pairs(builder: Any, place: Any) -> list[Any]:
    """A lookup sees five bits of each word. The table repeats after sixteen, so that the fifth does not count."""
    table = words([bits(float(code % 16)) for code in range(2 * LANES)])
    packed = load(builder, place, WORDS, 2)
    pairs = []
    for nibble in range(4):
        index = builder.lshr(packed, words([4 * nibble] * 2 * LANES)) if nibble else packed
        pairs.append(as_pairs(builder, call(builder, "llvm.x86.avx512.permvar.hi.512", WORDS, table, index)))
    return pairs


def _int8_pairs(builder: Any, place: Any) -> list[Any]:
    quarters = [decode(builder, INT8.number, offset(builder, place, LANES * part)) for part in range(4)]
    return [round_pairs(builder, *quarters[:2]), round_pairs(builder, *quarters[2:])]


def weight_pairs(builder: Any, kind: int, place: Any) -> list[Any]:
    """The pairs of bf16 in the 64 bytes at an address, one for each lane of each vector."""
    if kind == P_INT4:
        return _int4_pairs(builder, place)
    return _int8_pairs(builder, place) if kind == P_INT8 else [load_pairs(builder, place)]


def weight_words(builder: Any, kind: int, place: Any) -> list[tuple[Any, Any]]:
    """The pairs of 16-bit codes in the 64 bytes at an address, of eight outputs and of the other eight."""
    if kind == P_INT8:
        parts = [load(builder, offset(builder, place, LANES * part), _BYTES, 1) for part in range(4)]
        wide = [builder.sext(part, HALF_WORDS) for part in parts]
        return [(wide[0], wide[1]), (wide[2], wide[3])]
    halves = [load(builder, offset(builder, place, half * VECTOR_BYTES // 2), HALF_WORDS, 2) for half in (0, 1)]
    if kind != P_INT4:
        return [(halves[0], halves[1])]
    low, shifts = filled(HALF_WORDS, 15), [filled(HALF_WORDS, 4 * nibble) for nibble in range(4)]
    return [
        (builder.and_(builder.lshr(halves[0], shift), low), builder.and_(builder.lshr(halves[1], shift), low))
        for shift in shifts
    ]


def filled(kind: Any, value: int) -> Any:
    """A constant vector of this type."""
    return ir.Constant(kind, [value] * kind.count)


def code_places(builder: Any, kind: int, codes: Any) -> list[Any]:
    """Of the codes of a chunk, 64 bytes at each."""
    return [offset(builder, codes, at) for at in range(0, BLOCK * CHUNK * CODE_BITS[kind] // 8, VECTOR_BYTES)]


def _unpacked(builder: Any, kind: int, places: Sequence[Any], out: Any) -> None:
    at = 0
    for place in places:
        for halves in weight_words(builder, kind, place):
            for half in halves:
                store(builder, offset(builder, out, at), half, 2)
                at += VECTOR_BYTES // 2


@intrinsic(prefer_literal=True)
def unpack_records(_typing, kind, group, wide, records, count, out):  # type: ignore[no-untyped-def]
    """`count` records of P_INT4 or P_INT8 as wide ones of P_INT4_WORDS or P_INT8_WORDS. kind, group and wide are
    literals."""
    literals = literal_values(kind, group, wide)
    if literals is None:
        return None
    number, width, is_wide = literals
    codec, words_kind = FP32 if is_wide else FP16, words_of(number)
    code_bytes = BLOCK * width * CODE_BITS[number] // 8
    chunk_bytes, chunk_words = code_bytes * CHUNK // width, 2 * BLOCK * CHUNK

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        records, count, out = args[3:]
        with cgutils.for_range(builder, count) as loop:
            record = plus(builder, records, loop.index, record_bytes(number, width, bool(is_wide)))
            target = plus(builder, out, loop.index, record_bytes(words_kind, width, True))
            with cgutils.for_range(builder, ir.Constant(count.type, width // CHUNK)) as inner:
                codes = plus(builder, record, inner.index, chunk_bytes)
                _unpacked(
                    builder, number, code_places(builder, number, codes),
                    plus(builder, target, inner.index, chunk_words),
                )  # fmt: skip
            for i in range(SCALES[number]):
                factors = decode(
                    builder, codec.number, offset(builder, record, code_bytes + BLOCK * codec.itemsize * i)
                )
                store(builder, offset(builder, target, 2 * BLOCK * width + 4 * BLOCK * i), factors)
        return context.get_dummy_value()

    return nt.void(kind, group, wide, nt.int64, nt.int64, nt.int64), emit


def words_of(kind: int) -> int:
    """The kind of P_INT4's or P_INT8's codes with 16 bits each."""
    return {P_INT4: P_INT4_WORDS, P_INT8: P_INT8_WORDS}[kind]
