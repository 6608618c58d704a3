"""Tiles of stored keys and values as pairs of bf16, as LLVM vector code over the processor's bf16 dot product.

bf16 holds every int8 and FP8 code exactly. A tile is 32 tokens of one KV head. Its keys lie as [head_dim / 2, 2, 16, 2]
(pair of dims, half of the tile, token, dim of the pair): one instruction adds two products to the scores of sixteen
tokens. Its values lie as [16, head_dim, 2] (pair of tokens, dim, token of the pair): one adds two tokens to sixteen
elements of an output.
"""

from __future__ import annotations

import struct
from typing import Any

import numba.core.types as nt
from llvmlite import binding, ir
from numba.extending import intrinsic

from deepinfer.kernels.codecs import BF16, CODECS, FP8_E4M3, FP8_E5M2, INT8
from deepinfer.kernels.cpu import bf16_dot
from deepinfer.kernels.cpu.bf16_dot import VECTOR_BYTES, WORDS
from deepinfer.kernels.cpu.vec16 import (
    LANES,
    VI32,
    call,
    literal_values,
    load,
    offset,
    outlined,
    shuffle,
    store,
)

TILE = 2 * LANES
"""Tokens of a tile, always aligned to a multiple of it in the context."""
CHUNK = 64
"""Divides every head_dim that these tiles take."""
CODES = tuple(codec.number for codec in (INT8, FP8_E4M3, FP8_E5M2, BF16))
"""Codecs whose every code is a bf16."""
_BYTES = ir.VectorType(ir.IntType(8), CHUNK)


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
