"""The products of `packed_products` by matrix tiles: many rows of bf16 activations against sixteen outputs.

A chunk of a record is a tile once its codes are bf16. Codes are exact; the products of a group are summed in a tile,
and scale and minimum come in once for a group, in fp32. A row's sums do not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any

import numba.core.types as nt
import numpy as np
from llvmlite import ir
from numba import literally
from numba.core import cgutils
from numba.extending import intrinsic

from deepinfer.kernels.codecs import BF16, FP16, FP32
from deepinfer.kernels.cpu import amx
from deepinfer.kernels.cpu.amx import stack_memory
from deepinfer.kernels.cpu.bf16_dot import VECTOR_BYTES, load_scalar, store_bf16
from deepinfer.kernels.cpu.codecs import decode
from deepinfer.kernels.cpu.jit import helper
from deepinfer.kernels.cpu.packed_products import (
    BLOCK,
    CHUNK,
    CODE_BITS,
    P_BF16,
    SCALES,
    WITH_MINIMA,
    literal_values,
    record_bytes,
    weight_pairs,
)
from deepinfer.kernels.cpu.vec16 import VF32, fused, load, load_f32, offset, splat, store, store_f32, vec16

SEGMENT = 1024
"""k whose tiles are made at a time: they stay in the first-level cache while the rows go by."""
MOST_ROWS = 64
_TOTALS_BYTES, _TILES_BYTES, _WORK_BYTES = MOST_ROWS * VECTOR_BYTES, SEGMENT * 2 * BLOCK, amx.TILE_BYTES


def _times(builder: Any, value: Any, factor: int) -> Any:
    return builder.mul(value, ir.Constant(value.type, factor))


@intrinsic(prefer_literal=True)
def decode_tiles(_typing, kind, group, wide, records, groups, tiles):  # type: ignore[no-untyped-def]
    """The codes of `groups` records to tiles of bf16, [groups * group / 32] at `tiles`. kind, group, wide: literals."""
    literals = literal_values(kind, group, wide)
    if literals is None:
        return None
    number, width, is_wide = literals
    chunk_bytes = BLOCK * CHUNK * CODE_BITS[number] // 8

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        records, groups, tiles = args[3:]
        with cgutils.for_range(builder, groups) as loop:
            record = builder.add(records, _times(builder, loop.index, record_bytes(number, width, bool(is_wide))))
            target = builder.add(tiles, _times(builder, loop.index, width // CHUNK * amx.TILE_BYTES))
            with cgutils.for_range(builder, ir.Constant(groups.type, width // CHUNK)) as inner:
                codes = builder.add(record, _times(builder, inner.index, chunk_bytes))
                place = builder.add(target, _times(builder, inner.index, amx.TILE_BYTES))
                pairs = [
                    pair
                    for at in range(0, chunk_bytes, VECTOR_BYTES)
                    for pair in weight_pairs(builder, number, offset(builder, codes, at))
                ]
                for i, pair in enumerate(pairs):
                    store(builder, offset(builder, place, VECTOR_BYTES * i), pair, VECTOR_BYTES)
        return context.get_dummy_value()

    return nt.void(kind, group, wide, nt.int64, nt.int64, nt.int64), emit


@intrinsic(prefer_literal=True)
def add_products(
    _typing, kind, group, wide, rows, rest, x, x_stride, last, sums, sums_stride, tiles, records, groups, totals, work
):  # type: ignore[no-untyped-def]
    """totals[r] += x[r] W^T over `groups` groups, for `rows` rows and sixteen outputs.

    kind, group, wide, rows and rest (1: by the tiles of the rest) are literals, the others int64.
    x, sums: as `packed_products` has them, of the first group; sums beyond the row `last` are that row's again.
    tiles, records: of the groups. totals: fp32 [rows, 16]. work: memory of a tile.
    """
    literals = literal_values(kind, group, wide, rows, rest)
    if literals is None:
        return None
    number, width, is_wide, num_rows, is_rest = literals
    codec = FP32 if is_wide else FP16
    code_bytes, chunks = BLOCK * width * CODE_BITS[number] // 8, width // CHUNK
    registers = (amx.SUMS_OF_REST, amx.ROW_TILE_OF_REST) if is_rest else (amx.SUMS, amx.ROW_TILE)

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, x_stride, last, sums, sums_stride, tiles, records, groups, totals, work = args[5:]
        line = ir.Constant(x.type, VECTOR_BYTES)
        slots = [cgutils.alloca_once(builder, VF32) for _ in range(num_rows)]
        for r, slot in enumerate(slots):
            builder.store(load(builder, offset(builder, totals, VECTOR_BYTES * r)), slot)
        sum_rows = []
        for r in range(num_rows if number in WITH_MINIMA else 0):
            row = ir.Constant(last.type, r)
            row = builder.select(builder.icmp_signed("<", row, last), row, last)
            sum_rows.append(builder.add(sums, builder.mul(row, sums_stride)))

        def multiply_group(index: Any) -> None:
            for chunk in range(chunks):
                at = offset(builder, _times(builder, index, width * 2), chunk * CHUNK * 2)
                amx.load_tile(builder, registers[1], builder.add(x, at), x_stride)
                place = offset(builder, _times(builder, index, chunks * amx.TILE_BYTES), chunk * amx.TILE_BYTES)
                amx.load_tile(builder, amx.COLUMN_TILE, builder.add(tiles, place), line)
                amx.multiply_tiles(builder, *registers, amx.COLUMN_TILE)

        def take_sums(combine: Any) -> None:
            amx.store_tile(builder, registers[0], work, line)
            for r, slot in enumerate(slots):
                product = load(builder, offset(builder, work, VECTOR_BYTES * r))
                builder.store(combine(r, product, builder.load(slot)), slot)

        if number == P_BF16:
            amx.zero_tile(builder, registers[0])
        with cgutils.for_range(builder, groups) as loop:
            if number != P_BF16:
                amx.zero_tile(builder, registers[0])
            multiply_group(loop.index)
            if number != P_BF16:
                record = builder.add(records, _times(builder, loop.index, record_bytes(number, width, bool(is_wide))))
                factors = [
                    decode(builder, codec.number, offset(builder, record, code_bytes + BLOCK * codec.itemsize * i))
                    for i in range(SCALES[number])
                ]

                def scaled(r: int, product: Any, total: Any) -> Any:
                    if number in WITH_MINIMA:
                        in_group = load_scalar(builder, builder.add(sum_rows[r], _times(builder, loop.index, 4)))
                        total = fused(builder, in_group, factors[1], total)
                    return fused(builder, product, factors[0], total)

                take_sums(scaled)
        if number == P_BF16:
            take_sums(lambda _, product, total: builder.fadd(product, total))
        for r, slot in enumerate(slots):
            store(builder, offset(builder, totals, VECTOR_BYTES * r), builder.load(slot))
        return context.get_dummy_value()

    return nt.void(kind, group, wide, rows, rest, *[nt.int64] * 10), emit


@intrinsic(prefer_literal=True)
def store_output(_typing, out, address, value):  # type: ignore[no-untyped-def]
    """Write sixteen fp32 as `out`, the number of BF16 or FP32, a literal."""
    literals = literal_values(out)
    if literals is None:
        return None
    write = store_bf16 if literals[0] == BF16.number else store

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        write(builder, args[1], args[2])
        return context.get_dummy_value()

    return nt.void(out, nt.int64, vec16), emit


@helper
def tile_products(
    kind, group, wide, out, x, x_stride, num_rows, sums, sums_stride, w, record, groups, bias, y, y_stride
):  # type: ignore[no-untyped-def]
    """Up to `MOST_ROWS` rows against sixteen outputs. The tiles of this thread are set up for num_rows % 16."""
    literally(kind)
    literally(group)
    literally(wide)
    literally(out)
    totals, tiles, work = stack_memory(_TOTALS_BYTES), stack_memory(_TILES_BYTES), stack_memory(_WORK_BYTES)
    # Rows that a tile of the rest lacks are summed as well: what lies there must not be subnormal, which is slow.
    for row in range(amx.ROWS):
        store_f32(work + row * VECTOR_BYTES, splat(np.float32(0.0)))
    for row in range((num_rows + amx.ROWS - 1) // amx.ROWS * amx.ROWS):
        store_f32(totals + row * VECTOR_BYTES, load_f32(bias))
    step = SEGMENT // group
    for first in range(0, groups, step):
        count, records = min(step, groups - first), w + first * record
        if kind == P_BF16:
            ready = records
        else:
            ready = tiles
            decode_tiles(kind, group, wide, records, count, tiles)
        for row in range(0, num_rows, amx.ROWS):
            left = num_rows - row
            x_at, sums_at = x + row * x_stride + first * group * 2, sums + row * sums_stride + first * 4
            total = totals + row * VECTOR_BYTES
            if left >= 16:
                add_products(
                    kind, group, wide, 16, 0, x_at, x_stride, left - 1, sums_at, sums_stride, ready, records, count,
                    total, work,
                )  # fmt: skip
            elif left > 8:
                add_products(
                    kind, group, wide, 16, 1, x_at, x_stride, left - 1, sums_at, sums_stride, ready, records, count,
                    total, work,
                )  # fmt: skip
            elif left > 4:
                add_products(
                    kind, group, wide, 8, 1, x_at, x_stride, left - 1, sums_at, sums_stride, ready, records, count,
                    total, work,
                )  # fmt: skip
            else:
                add_products(
                    kind, group, wide, 4, 1, x_at, x_stride, left - 1, sums_at, sums_stride, ready, records, count,
                    total, work,
                )  # fmt: skip
    for row in range(num_rows):
        store_output(out, y + row * y_stride, load_f32(totals + row * VECTOR_BYTES))
