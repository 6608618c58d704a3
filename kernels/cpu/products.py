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

from deepinfer.kernels.cpu.tiles import token_sums
from deepinfer.kernels.cpu.vec16 import (
    LANES,
    VF32,
    constant,
    fused,
    load,
    offset,
    shuffle,
    store,
    vec16,
)

GROUP = 2 * LANES
"""k of a row that are multiplied in a go."""


def _at(builder: Any, base: Any, index: int, stride: Any) -> Any:
    return builder.add(base, builder.mul(stride, ir.Constant(stride.type, index)))


@intrinsic(prefer_literal=True)
def products(_typing, rows, x, x_stride, w, w_stride, groups):  # type: ignore[no-untyped-def]
    """Lane r * (16 / rows) + c = x[r] . w[c], over `groups` groups of 32 along K.

    x, w: fp32 rows. Strides are in bytes. `rows` is a literal.
    """
    if not isinstance(rows, nt.IntegerLiteral):
        return None
    num_rows = rows.literal_value
    outputs = LANES // num_rows

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, x_stride, w, w_stride, groups = args[1:]
        totals = [cgutils.alloca_once(builder, VF32) for _ in range(LANES)]
        for slot in totals:
            builder.store(constant(0.0), slot)
        with cgutils.for_range(builder, groups) as loop:
            at = builder.mul(loop.index, ir.Constant(groups.type, 4 * GROUP))
            places = [builder.add(_at(builder, x, r, x_stride), at) for r in range(num_rows)]
            active = [[load(builder, offset(builder, place, part)) for part in (0, 4 * LANES)] for place in places]
            for c in range(outputs):
                place = builder.add(_at(builder, w, c, w_stride), at)
                low, high = (load(builder, offset(builder, place, part)) for part in (0, 4 * LANES))
                for r in range(num_rows):
                    slot = totals[r * outputs + c]
                    total = fused(builder, active[r][0], low, builder.load(slot))
                    builder.store(fused(builder, active[r][1], high, total), slot)
        return token_sums(builder, [builder.load(slot) for slot in totals])

    return vec16(rows, *[nt.int64] * 5), emit


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
