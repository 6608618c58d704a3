"""The processor's bf16 dot product (AVX512-BF16) as LLVM vector code: sixteen fp32 sums, two products each."""

from __future__ import annotations

import functools
import struct
from typing import Any

from llvmlite import binding, ir

from deepinfer.kernels.cpu.vec16 import F32, I32, LANES, VF32, call, load, spread, store

VECTOR_BYTES = 64
WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)


class _BFloatType(ir.types._BaseFloatType):
    """LLVM's bfloat, for which llvmlite has no name."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloatType._create_instance()
_PAIRS = ir.VectorType(_BFloatType(), 2 * LANES)
_HALF_PAIRS = ir.VectorType(_BFloatType(), LANES)


@functools.cache
def available() -> bool:
    """Whether this processor has AVX512-BF16."""
    return bool(binding.get_host_cpu_features().get("avx512bf16", False))


def words(values: list[int]) -> Any:
    """32 constants of 16 bits."""
    return ir.Constant(WORDS, values)


def bits(value: float) -> int:
    """Of a value that bf16 holds exactly."""
    return struct.unpack("<I", struct.pack("<f", value))[0] >> 16


def as_pairs(builder: Any, vector: Any) -> Any:
    """64 bytes as sixteen pairs of bf16."""
    return builder.bitcast(vector, _PAIRS)


def load_pairs(builder: Any, address: Any) -> Any:
    return as_pairs(builder, load(builder, address, WORDS, 2))


def spread_pair(builder: Any, address: Any) -> Any:
    """Two neighbouring bf16 at an address, in every lane."""
    return as_pairs(builder, spread(builder, builder.load(builder.inttoptr(address, I32.as_pointer()), align=2)))


def round_pairs(builder: Any, low: Any, high: Any) -> Any:
    """32 fp32, in two vectors, rounded to bf16."""
    return call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", _PAIRS, high, low)


def dot(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """total + a0 * b0 + a1 * b1 in every lane. Subnormals count as zero. If b is a `spread_pair`, it costs no
    instruction of its own."""
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VF32, total, a, b)


def store_bf16(builder: Any, address: Any, value: Any) -> None:
    """Write sixteen fp32 rounded to bf16."""
    store(builder, address, call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", _HALF_PAIRS, value), 2)


def load_scalar(builder: Any, address: Any) -> Any:
    """One fp32 in every lane."""
    return spread(builder, builder.load(builder.inttoptr(address, F32.as_pointer()), align=4))
