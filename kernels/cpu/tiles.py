"""What attention does to a decoded tile of sixteen tokens, as LLVM vector code with a fixed order of sums."""

from __future__ import annotations

from typing import Any

import numba.core.types as nt
from llvmlite import ir
from numba.extending import intrinsic

from deepinfer.kernels.cpu.vec16 import F32, LANES, call, fused, load, offset, shuffle, spread, store, vec16

TILE = LANES
"""Tokens of a tile, always aligned to a multiple of it in the context."""
_VECTOR_BYTES = 4 * LANES


def _literal(value: Any) -> int | None:
    return value.literal_value if isinstance(value, nt.IntegerLiteral) else None


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


@intrinsic(prefer_literal=True)
def tile_scores(_typing: Any, q: Any, k: Any, dim: Any) -> Any:
    """Lane t = q . k[t], for q fp32 [dim] and k fp32 [16, dim] at two addresses. `dim` is a literal."""
    head_dim = _literal(dim)
    if head_dim is None:
        return None

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        q, k = args[0], args[1]
        chunks = range(head_dim // LANES)
        query = [load(builder, offset(builder, q, chunk * _VECTOR_BYTES)) for chunk in chunks]
        partial = []
        for token in range(TILE):
            row = offset(builder, k, token * head_dim * 4)
            total = builder.fmul(query[0], load(builder, row))
            for chunk in chunks[1:]:
                key = load(builder, offset(builder, row, chunk * _VECTOR_BYTES))
                total = fused(builder, query[chunk], key, total)
            partial.append(total)
        return token_sums(builder, partial)

    return vec16(nt.int64, nt.int64, dim), emit


@intrinsic(prefer_literal=True)
def tile_accumulate(_typing: Any, probs: Any, v: Any, acc: Any, decay: Any, dim: Any) -> Any:
    """acc = acc * decay + sum over t of probs[t] * v[t], for acc fp32 [dim], v fp32 [16, dim] at two
    addresses."""
    head_dim = _literal(dim)
    if head_dim is None:
        return None

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        probs, v, acc, decay, _ = args
        weights = [spread(builder, builder.extract_element(probs, lane(t))) for t in range(TILE)]
        for chunk in range(head_dim // LANES):
            place = offset(builder, acc, chunk * _VECTOR_BYTES)
            total = builder.fmul(load(builder, place), decay)
            for token in range(TILE):
                value = load(builder, offset(builder, v, (token * head_dim + chunk * LANES) * 4))
                total = fused(builder, weights[token], value, total)
            store(builder, place, total)
        return context.get_dummy_value()

    def lane(index: int) -> Any:
        return ir.Constant(ir.IntType(32), index)

    return nt.void(vec16, nt.int64, nt.int64, vec16, dim), emit


@intrinsic(prefer_literal=True)
def add_rotated(_typing: Any, key: Any, factor: Any, bias: Any, cos: Any, sin: Any, dim: Any) -> Any:
    """key = key * factor + RoPE(bias), half-split, for key and bias fp32 [dim], cos and sin fp32 [dim / 2] at four
    addresses. RoPE rounds as plain torch does; the rest is one fused step. `dim` is a literal multiple of 16.
    """
    head_dim = _literal(dim)
    if head_dim is None:
        return None
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
