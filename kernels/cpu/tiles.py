"""Stored codes as fp32 vectors of the processor's width, and sums of lanes in a fixed order, as LLVM vector code."""

from __future__ import annotations

from typing import Any

import numba.core.types as nt
from llvmlite import binding, ir
from numba.extending import intrinsic

from deepinfer.kernels.codecs import BF16, CODECS, FP8_E4M3, FP8_E5M2, FP16, FP32, INT8
from deepinfer.kernels.cpu.codecs import VHALF, VI16
from deepinfer.kernels.cpu.vec16 import (
    F32,
    I32,
    LANES,
    VF32,
    call,
    constant,
    counted_loop,
    literal_values,
    load,
    offset,
    outlined,
    shuffle,
    store,
)

WIDTH = LANES if binding.get_host_cpu_features().get("avx512f", False) else LANES // 2
"""fp32 lanes of one of the processor's vectors."""
CODE_FACTORS = tuple(256.0 if codec is FP8_E4M3 else 1.0 for codec in CODECS)
"""What is left to multiply an element by that `load_codes` gives, by the codec's number. E4M3 is moved to a half's
place, which makes 2^-8 of it, exactly; a score or a weight takes the factor, so that no element has to."""
IN_REGISTERS = tuple(codec.number for codec in (FP32, FP16, BF16, INT8))
"""Codecs that are decoded on their way into products. FP8 takes too many instructions for that."""
VECTOR, _WORDS = ir.VectorType(F32, WIDTH), ir.VectorType(I32, WIDTH)
_ELEMENTS = {
    FP32.number: (F32, 4),
    FP16.number: (ir.HalfType(), 2),
    BF16.number: (ir.IntType(16), 2),
    INT8.number: (ir.IntType(8), 1),
}


def _pair_sums(builder: Any, a: Any, b: Any, width: int) -> Any:
    """Vectors of `width` partial sums for each of several tokens, folded to half the width and joined."""
    groups = LANES // width
    half = width // 2
    lower = [group * width + lane for group in range(groups) for lane in range(half)]
    upper = [lane + half for lane in lower]
    joined_lower = lower + [lane + LANES for lane in lower]
    joined_upper = upper + [lane + LANES for lane in upper]
    return builder.fadd(shuffle(builder, a, b, joined_lower), shuffle(builder, a, b, joined_upper))


def token_sums(builder: Any, vectors: list[Any]) -> Any:
    """One vector whose lane t is the sum of the lanes of `vectors[t]`, sixteen of them, added by halves."""
    width = LANES
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors, width = [_pair_sums(builder, a, b, width) for a, b in pairs], width // 2
    return vectors[0]


def fold_four(builder: Any, vectors: list[Any]) -> Any:
    """Four sums, of the lanes of each of four vectors of 8 or 16 fp32: within each 128 bits first."""
    count = vectors[0].type.count

    def mixed(a: Any, b: Any, lanes: list[int]) -> Any:
        """Of each 128 bits the lanes, those of b from 4 on."""
        places = [base + lane if lane < 4 else count + base + lane - 4 for base in range(0, count, 4) for lane in lanes]
        return shuffle(builder, a, b, places)

    # One of two terms leaves its lanes where they are, which costs least.
    pairs = [
        builder.fadd(mixed(*two, [0, 1, 6, 7]), mixed(*two, [2, 3, 4, 5])) for two in (vectors[::2], vectors[1::2])
    ]
    total = builder.fadd(mixed(*pairs, [0, 5, 2, 7]), mixed(*pairs, [1, 4, 3, 6]))
    while count > 4:
        count //= 2
        lower, upper = (shuffle(builder, total, total, list(range(at, at + count))) for at in (0, count))
        total = builder.fadd(lower, upper)
    return total


def load_codes(builder: Any, number: int, address: Any) -> Any:
    """`WIDTH` stored elements of a codec of `IN_REGISTERS` as fp32."""
    element, num_bytes = _ELEMENTS[number]
    codes = load(builder, address, ir.VectorType(element, WIDTH), num_bytes)
    if number == FP16.number:
        return builder.fpext(codes, VECTOR)
    if number == BF16.number:
        return builder.bitcast(builder.shl(builder.zext(codes, _WORDS), ir.Constant(_WORDS, [16] * WIDTH)), VECTOR)
    if number == INT8.number:
        return builder.sitofp(builder.sext(codes, _WORDS), VECTOR)
    return codes


def _halves(builder: Any, number: int, address: Any) -> Any:
    """Sixteen FP8 codes as halves, `CODE_FACTORS` too small."""
    codes = load(builder, address, ir.VectorType(ir.IntType(8), LANES), 1)
    if number == FP8_E5M2.number:
        bits = builder.shl(builder.zext(codes, VI16), constant(8, VI16))
    else:
        # The sign is in the two upper bits then, and the exponent of a half has one bit more.
        bits = builder.and_(builder.shl(builder.sext(codes, VI16), constant(7, VI16)), constant(0xBFFF, VI16))
    return builder.bitcast(bits, VHALF)


@intrinsic(prefer_literal=True)
def expand_rows(_typing: Any, codec: Any, target_codec: Any, count: Any, source: Any, target: Any):  # type: ignore[no-untyped-def]
    """`count` stored elements, a multiple of 16, `CODE_FACTORS` too small: to fp32, or FP8 to fp16. The codecs are
    literals."""
    literals = literal_values(codec, target_codec)
    if literals is None:
        return None
    number, to = literals

    def body(builder: Any, count: Any, source: Any, target: Any) -> None:
        with counted_loop(builder, builder.lshr(count, ir.Constant(count.type, 4))) as index:
            place = builder.add(source, builder.mul(index, _int(LANES * CODECS[number].itemsize)))
            out = builder.add(target, builder.mul(index, _int(LANES * CODECS[to].itemsize)))
            if to == FP16.number:
                store(builder, out, _halves(builder, number, place), 2)
            elif number in IN_REGISTERS:
                for at in range(0, LANES, WIDTH):
                    value = load_codes(builder, number, offset(builder, place, at * CODECS[number].itemsize))
                    store(builder, offset(builder, out, 4 * at), value)
            else:
                store(builder, out, builder.fpext(_halves(builder, number, place), VF32))

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        outlined(builder, f"expand_rows_{number}_{to}", args[2:], body)
        return context.get_dummy_value()

    return nt.void(codec, target_codec, nt.int64, nt.int64, nt.int64), emit


def _int(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


@intrinsic(prefer_literal=True)
def add_rotated(_typing: Any, key: Any, factor: Any, bias: Any, cos: Any, sin: Any, dim: Any) -> Any:
    """key = key * factor + RoPE(bias), half-split, for key and bias fp32 [dim], cos and sin fp32 [dim / 2] at four
    addresses. RoPE rounds as plain torch does; the rest is one fused step. `dim` is a literal multiple of 16.
    """
    literals = literal_values(dim)
    if literals is None:
        return None
    head_dim = literals[0]
    half = head_dim // 2
    width = LANES if half % LANES == 0 else LANES // 2
    kind = ir.VectorType(F32, width)

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        key, factor, bias, cos, sin, _ = args
        undefined = ir.Constant(kind, ir.Undefined)
        single = builder.insert_element(undefined, factor, ir.Constant(ir.IntType(32), 0))
        factors = builder.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(ir.IntType(32), width), None))
        fma = f"llvm.fma.v{width}f32"
        for first in range(0, half, width):
            low, high = 4 * first, 4 * (half + first)
            b0, b1 = (load(builder, offset(builder, bias, at), kind) for at in (low, high))
            c, s = (load(builder, offset(builder, table, low), kind) for table in (cos, sin))
            turned = (
                builder.fsub(builder.fmul(b0, c), builder.fmul(b1, s)),
                builder.fadd(builder.fmul(b1, c), builder.fmul(b0, s)),
            )
            for at, part in zip((low, high), turned, strict=True):
                place = offset(builder, key, at)
                store(builder, place, call(builder, fma, kind, load(builder, place, kind), factors, part))
        return context.get_dummy_value()

    return nt.void(nt.int64, nt.float32, nt.int64, nt.int64, nt.int64, dim), emit
