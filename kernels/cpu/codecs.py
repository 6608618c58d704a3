"""The KV codecs as LLVM vector code: sixteen elements at a time, the same bytes as `reference_codecs`.

The codec's number is a literal, so a kernel contains the code of one codec only. bf16 and fp32 serve
activations too. Bit facts of FP8: E4M3FN has bias 7 and least subnormal 2^-9, E5M2 is the upper byte of a
half (OCP FP8, rev. 1.0).
"""

from __future__ import annotations

from typing import Any

import numba.core.types as nt
from llvmlite import ir
from numba.extending import intrinsic

from deepinfer.kernels.codecs import BF16, CODECS, FP8_E4M3, FP8_E5M2, FP16, FP32, INT8
from deepinfer.kernels.cpu.vec16 import LANES, VF32, VI32, call, constant, load, spread, store, vec16

VI8 = ir.VectorType(ir.IntType(8), LANES)
VI16 = ir.VectorType(ir.IntType(16), LANES)
VHALF = ir.VectorType(ir.HalfType(), LANES)


def decode(builder: Any, number: int, address: Any) -> Any:
    if number == FP32.number:
        return load(builder, address)
    if number == FP16.number:
        return builder.fpext(load(builder, address, VHALF, 2), VF32)
    if number == BF16.number:
        wide = builder.zext(load(builder, address, VI16, 2), VI32)
        return builder.bitcast(builder.shl(wide, constant(16, VI32)), VF32)
    codes = load(builder, address, VI8, 1)
    if number == INT8.number:
        return builder.sitofp(builder.sext(codes, VI32), VF32)
    if number == FP8_E5M2.number:
        half = builder.shl(builder.zext(codes, VI16), constant(8, VI16))
        return builder.fpext(builder.bitcast(half, VHALF), VF32)
    return _decode_e4m3(builder, codes)


def _decode_e4m3(builder: Any, codes: Any) -> Any:
    """As a half of 2^-8 times the value: conversion from half is exact for subnormals even where fp32 flushes
    them."""
    wide = builder.zext(codes, VI16)
    sign = builder.shl(builder.and_(wide, constant(0x80, VI16)), constant(8, VI16))
    body = builder.shl(builder.and_(wide, constant(0x7F, VI16)), constant(7, VI16))
    half = builder.bitcast(builder.or_(sign, body), VHALF)
    return builder.fmul(builder.fpext(half, VF32), constant(2.0**8))


def _encode(builder: Any, number: int, value: Any) -> Any:
    """`value` is finite and clamped (for int8: already divided by its scale); fp32 and bf16 also take the
    rest."""
    if number == FP32.number:
        return value
    if number == FP16.number:
        return builder.fptrunc(value, VHALF)
    if number == BF16.number:
        return round_bf16(builder, value)
    if number == INT8.number:
        whole = call(builder, "llvm.rint.v16f32", VF32, value)
        return builder.trunc(builder.fptosi(whole, VI32), VI8)
    if number == FP8_E4M3.number:
        return _encode_fp8(builder, value, mantissa_bits=3, bias=7)
    return _encode_fp8(builder, value, mantissa_bits=2, bias=15)


def round_bf16(builder: Any, value: Any) -> Any:
    """The bits of sixteen fp32 rounded to bf16, one NaN for all."""
    rounded = _round_bits(builder, builder.bitcast(value, VI32), 16)
    narrow = builder.trunc(builder.lshr(rounded, constant(16, VI32)), VI16)
    return builder.select(builder.fcmp_unordered("uno", value, value), constant(0x7FC0, VI16), narrow)


def _round_bits(builder: Any, bits: Any, dropped: int) -> Any:
    """Add what makes a cut of the `dropped` low bits round to nearest even."""
    odd = builder.and_(builder.lshr(bits, constant(dropped, VI32)), constant(1, VI32))
    return builder.add(builder.add(bits, odd), constant((1 << (dropped - 1)) - 1, VI32))


def _encode_fp8(builder: Any, value: Any, mantissa_bits: int, bias: int) -> Any:
    """Normals by rounding the fp32 bits; subnormals by adding 2^(23 - digits), which leaves the code in the
    low bits."""
    bits = builder.bitcast(value, VI32)
    sign = builder.and_(builder.lshr(bits, constant(24, VI32)), constant(0x80, VI32))
    body = builder.and_(bits, constant(0x7FFFFFFF, VI32))
    dropped = 23 - mantissa_bits
    normal = builder.lshr(_round_bits(builder, body, dropped), constant(dropped, VI32))
    normal = builder.sub(normal, constant((127 - bias) << mantissa_bits, VI32))
    magic = 2.0 ** (23 + 1 - bias - mantissa_bits)
    shifted = builder.fadd(builder.bitcast(body, VF32), constant(magic))
    small = builder.sub(builder.bitcast(shifted, VI32), builder.bitcast(constant(magic), VI32))
    is_small = builder.fcmp_ordered("<", builder.bitcast(body, VF32), constant(2.0 ** (1 - bias)))
    return builder.trunc(builder.or_(sign, builder.select(is_small, small, normal)), VI8)


@intrinsic(prefer_literal=True)
def load16(_typing: Any, codec: Any, address: Any) -> Any:
    """Sixteen decoded elements (int8 without its scale) at an address. `codec` is a literal codec number."""
    if not isinstance(codec, nt.IntegerLiteral):
        return None
    number = codec.literal_value

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return decode(builder, number, args[1])

    return vec16(codec, nt.int64), emit


@intrinsic(prefer_literal=True)
def store16(_typing: Any, codec: Any, address: Any, value: Any) -> Any:
    """Encode sixteen finite, clamped elements at an address."""
    if not isinstance(codec, nt.IntegerLiteral):
        return None
    number = codec.literal_value

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        store(builder, args[1], _encode(builder, number, args[2]), align=CODECS[number].itemsize)
        return context.get_dummy_value()

    return nt.void(codec, nt.int64, vec16), emit


@intrinsic
def zero_nonfinite(_typing: Any, value: Any) -> Any:
    """0 in the lanes that are NaN or infinite."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.select(_is_finite(builder, args[0]), args[0], constant(0.0))

    return vec16(vec16), emit


@intrinsic
def count_nonfinite(_typing: Any, value: Any) -> Any:
    """How many lanes are NaN or infinite."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return _count(builder, builder.not_(_is_finite(builder, args[0])))

    return nt.int64(vec16), emit


@intrinsic
def count_above(_typing: Any, value: Any, limit: Any) -> Any:
    """How many lanes have a magnitude above `limit`."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        size = call(builder, "llvm.fabs.v16f32", VF32, args[0])
        return _count(builder, builder.fcmp_ordered(">", size, spread(builder, args[1])))

    return nt.int64(vec16, nt.float32), emit


@intrinsic
def clamp(_typing: Any, value: Any, limit: Any) -> Any:
    """Lanes clamped to -limit .. limit. Not for NaN."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        limit = spread(builder, args[1])
        low = call(builder, "llvm.maxnum.v16f32", VF32, args[0], builder.fneg(limit))
        return call(builder, "llvm.minnum.v16f32", VF32, low, limit)

    return vec16(vec16, nt.float32), emit


def _is_finite(builder: Any, value: Any) -> Any:
    size = call(builder, "llvm.fabs.v16f32", VF32, value)
    return builder.fcmp_ordered("<", size, constant(float("inf")))


def _count(builder: Any, flags: Any) -> Any:
    i16 = ir.IntType(16)
    return builder.zext(call(builder, "llvm.ctpop.i16", i16, builder.bitcast(flags, i16)), ir.IntType(64))
