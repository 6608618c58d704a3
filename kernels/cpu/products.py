"""Sixteen dot products of activation rows and weight rows, as LLVM vector code with a fixed order of sums.

Whatever the split into rows and outputs (1 x 16, 2 x 8, 4 x 4, 8 x 2), each product is summed in the same
order: sixteen lanes along K, then the lanes by halves. That makes the matmul of one row and of many rows
bit-equal.
"""

from __future__ import annotations

from typing import Any

import numba.core.types as nt
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from deepinfer.kernels.codecs import BF16, FP32, INT8
from deepinfer.kernels.cpu.codecs import decode
from deepinfer.kernels.cpu.tiles import token_sums
from deepinfer.kernels.cpu.vec16 import (
    F32,
    LANES,
    VF32,
    constant,
    fused,
    load,
    offset,
    shuffle,
    spread,
    store,
    vec16,
)

W_FP32, W_BF16, W_INT8 = range(3)
"""Kinds of weights. fp32 and bf16 lie row by row, [M, K]. int8 codes have an fp32 scale for every `GROUP`
along K; they lie in blocks of sixteen rows, [M / 16, K / 32, 16, 32] with scales [M / 16, K / 32, 16], so
that a thread reads memory in one stream with constant offsets."""
WEIGHT_BYTES = (4, 2, 1)
GROUP = 32


def _group_weights(builder: Any, kind: int, place: Any, scale_place: Any) -> list[Any]:
    """The 32 weights of a group, as two fp32 vectors."""
    codec = (FP32, BF16, INT8)[kind]
    step = LANES * codec.itemsize
    weights = [decode(builder, codec.number, offset(builder, place, at)) for at in (0, step)]
    if kind != W_INT8:
        return weights
    scale = spread(builder, builder.load(builder.inttoptr(scale_place, F32.as_pointer()), align=4))
    return [builder.fmul(weight, scale) for weight in weights]


def _at(builder: Any, base: Any, index: int, stride: Any) -> Any:
    return builder.add(base, builder.mul(stride, ir.Constant(stride.type, index)))


@intrinsic(prefer_literal=True)
def products(_typing, kind, rows, x, x_stride, w, w_stride, scales, scale_stride, groups):  # type: ignore[no-untyped-def]
    """Lane r * (16 / rows) + c = x[r] . w[c], over `groups` groups of 32 along K.

    x: fp32 rows; w: weights of `kind`; scales: read for int8. Strides are in bytes. `kind` and `rows` are
        literals.
    """
    if not all(isinstance(value, nt.IntegerLiteral) for value in (kind, rows)):
        return None
    number, num_rows = kind.literal_value, rows.literal_value
    outputs = LANES // num_rows

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, x_stride, w, w_stride, scales, scale_stride, groups = args[2:]
        group_bytes = WEIGHT_BYTES[number] * GROUP
        if number == W_INT8:
            w_stride, scale_stride = (ir.Constant(groups.type, step) for step in (group_bytes, 4))
            group_bytes *= LANES
        totals = [cgutils.alloca_once(builder, VF32) for _ in range(LANES)]
        for slot in totals:
            builder.store(constant(0.0), slot)
        with cgutils.for_range(builder, groups) as loop:
            x_at = builder.mul(loop.index, ir.Constant(groups.type, 4 * GROUP))
            w_at = builder.mul(loop.index, ir.Constant(groups.type, group_bytes))
            scale_at = builder.mul(loop.index, ir.Constant(groups.type, 4 * LANES))
            places = [builder.add(_at(builder, x, r, x_stride), x_at) for r in range(num_rows)]
            active = [[load(builder, offset(builder, place, at)) for at in (0, 4 * LANES)] for place in places]
            for c in range(outputs):
                place = builder.add(_at(builder, w, c, w_stride), w_at)
                scale_place = builder.add(_at(builder, scales, c, scale_stride), scale_at)
                low, high = _group_weights(builder, number, place, scale_place)
                for r in range(num_rows):
                    slot = totals[r * outputs + c]
                    total = fused(builder, active[r][0], low, builder.load(slot))
                    builder.store(fused(builder, active[r][1], high, total), slot)
        return token_sums(builder, [builder.load(slot) for slot in totals])

    return vec16(kind, rows, *[nt.int64] * 7), emit


@intrinsic(prefer_literal=True)
def store_rows(_typing: Any, rows: Any, address: Any, stride: Any, value: Any) -> Any:
    """Write what `products` returns: 16 / rows outputs at each of `rows` addresses, `stride` bytes apart."""
    if not isinstance(rows, nt.IntegerLiteral):
        return None
    num_rows = rows.literal_value
    outputs = LANES // num_rows

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, address, stride, value = args
        for row in range(num_rows):
            lanes = shuffle(builder, value, value, list(range(row * outputs, (row + 1) * outputs)))
            store(builder, _at(builder, address, row, stride), lanes)
        return context.get_dummy_value()

    return nt.void(rows, nt.int64, nt.int64, vec16), emit
