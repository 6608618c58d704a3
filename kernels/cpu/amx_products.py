"""The products of `packed_products` by matrix tiles: many rows of bf16 activations against sixteen outputs.

A chunk of a record is a tile once its codes are bf16. Codes are exact; the products of a group are summed in a tile,
and scale and minimum come in once for a group, in fp32. A row's sums do not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any

import numba.core.types as nt
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from deepinfer.kernels.codecs import FP16, FP32
from deepinfer.kernels.cpu import amx
from deepinfer.kernels.cpu.activation_forms import CHUNK
from deepinfer.kernels.cpu.bf16_dot import VECTOR_BYTES, WORDS, load_scalar, round_pairs
from deepinfer.kernels.cpu.codecs import decode
from deepinfer.kernels.cpu.packed_products import WITH_MINIMA, store_rounded
from deepinfer.kernels.cpu.records import BLOCK, CODE_BITS, P_BF16, SCALES, record_bytes
from deepinfer.kernels.cpu.vec16 import (
    LANES,
    VF32,
    VI32,
    constant,
    fused,
    literal_values,
    load,
    offset,
    shuffle,
    store,
    vec16,
)
from deepinfer.kernels.cpu.weight_codes import weight_pairs


def _times(builder: Any, value: Any, factor: int) -> Any:
    return builder.mul(value, ir.Constant(value.type, factor))


def _factors(builder: Any, kind: int, group: int, wide: int, record: Any) -> list[Any]:
    """Scales, and minima where there are any, of the sixteen outputs of a record, fp32."""
    codec, at = FP32 if wide else FP16, BLOCK * group * CODE_BITS[kind] // 8
    places = [offset(builder, record, at + BLOCK * codec.itemsize * i) for i in range(SCALES[kind])]
    return [decode(builder, codec.number, place) for place in places]


def _scaled_pairs(builder: Any, pairs: Any, scale: Any, minimum: Any) -> Any:
    """scale * code + minimum of sixteen pairs of codes, rounded to bf16."""
    both = builder.bitcast(pairs, VI32)
    halves = (builder.shl(both, constant(16, VI32)), builder.and_(both, constant(0xFFFF0000, VI32)))
    values = [fused(builder, builder.bitcast(half, VF32), scale, minimum) for half in halves]
    apart = builder.bitcast(round_pairs(builder, *values), WORDS)
    order = [LANES * part + lane for lane in range(LANES) for part in (0, 1)]
    return shuffle(builder, apart, apart, order)


@intrinsic(prefer_literal=True)
def decode_tiles(_typing, kind, group, wide, rounded, records, groups, tiles):  # type: ignore[no-untyped-def]
    """The codes of `groups` records to tiles of bf16, [groups * group / 32] at `tiles`. rounded: scale * code + minimum
    instead, of P_INT4. kind, group, wide and rounded are literals."""
    literals = literal_values(kind, group, wide, rounded)
    if literals is None:
        return None
    number, width, is_wide, is_rounded = literals
    chunk_bytes = BLOCK * CHUNK * CODE_BITS[number] // 8

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        records, groups, tiles = args[4:]
        with cgutils.for_range(builder, groups) as loop:
            record = builder.add(records, _times(builder, loop.index, record_bytes(number, width, bool(is_wide))))
            factors = _factors(builder, number, width, is_wide, record) if is_rounded else []
            target = builder.add(tiles, _times(builder, loop.index, width // CHUNK * amx.TILE_BYTES))
            with cgutils.for_range(builder, ir.Constant(groups.type, width // CHUNK)) as inner:
                codes = builder.add(record, _times(builder, inner.index, chunk_bytes))
                place = builder.add(target, _times(builder, inner.index, amx.TILE_BYTES))
                pairs = [
                    pair
                    for at in range(0, chunk_bytes, VECTOR_BYTES)
                    for pair in weight_pairs(builder, number, offset(builder, codes, at))
                ]
                if is_rounded:
                    pairs = [_scaled_pairs(builder, pair, *factors) for pair in pairs]
                for i, pair in enumerate(pairs):
                    store(builder, offset(builder, place, VECTOR_BYTES * i), pair, VECTOR_BYTES)
        return context.get_dummy_value()

    return nt.void(kind, group, wide, rounded, nt.int64, nt.int64, nt.int64), emit


_WHOLE, _REST = (amx.SUMS, amx.ROW_TILE), (amx.SUMS_OF_REST, amx.ROW_TILE_OF_REST)
_VARIANTS = ((16, 16, _WHOLE), (9, 16, _REST), (5, 8, _REST), (1, 4, _REST))
"""From so many rows on: how many are scaled, and by which tiles they are multiplied."""


@intrinsic(prefer_literal=True)
def add_products(  # type: ignore[no-untyped-def]
    _typing, kind, group, wide, rounded, left, x, x_stride, sums, sums_stride, tiles, records, groups, totals, work
):
    """totals[r] += x[r] W^T over `groups` groups, for `left` rows, of which sixteen at most are taken, and sixteen
    outputs.

    kind, group, wide and rounded (the tiles are) are literals, the others int64.
    x: bf16 rows of these groups, `x_stride` bytes apart. sums: of the rows of x in the first group, fp32 [16], those of
        the next one `sums_stride` bytes further.
    tiles, records: of the groups. totals: fp32 [16, 16]. work: memory of a tile.
    """
    literals = literal_values(kind, group, wide, rounded)
    if literals is None:
        return None
    number, width, is_wide, is_rounded = literals
    chunks, unscaled = width // CHUNK, number == P_BF16 or is_rounded

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        left, x, x_stride, sums, sums_stride, tiles, records, groups, totals, work = args[4:]
        line = ir.Constant(x.type, VECTOR_BYTES)

        def multiply_group(index: Any, registers: tuple[int, int]) -> None:
            for chunk in range(chunks):
                number_of_chunk = offset(builder, _times(builder, index, chunks), chunk)
                at = builder.add(x, _times(builder, number_of_chunk, 2 * CHUNK))
                amx.load_tile(builder, registers[1], at, x_stride)
                place = builder.add(tiles, _times(builder, number_of_chunk, amx.TILE_BYTES))
                amx.load_tile(builder, amx.COLUMN_TILE, place, line)
                amx.multiply_tiles(builder, *registers, amx.COLUMN_TILE)

        def scaled(product: Any, total: Any, factors: list[Any], in_group: Any) -> Any:
            if number in WITH_MINIMA:
                total = fused(builder, load_scalar(builder, in_group), factors[1], total)
            return fused(builder, product, factors[0], total)

        def add_rows(num_rows: int, registers: tuple[int, int]) -> None:
            places = [offset(builder, totals, VECTOR_BYTES * r) for r in range(num_rows)]
            products = [offset(builder, work, VECTOR_BYTES * r) for r in range(num_rows)]
            slots = [cgutils.alloca_once(builder, VF32) for _ in places]
            for place, slot in zip(places, slots, strict=True):
                builder.store(load(builder, place), slot)
            if unscaled:
                amx.zero_tile(builder, registers[0])
            with cgutils.for_range(builder, groups) as loop:
                if not unscaled:
                    amx.zero_tile(builder, registers[0])
                multiply_group(loop.index, registers)
                if not unscaled:
                    amx.store_tile(builder, registers[0], work, line)
                    size = record_bytes(number, width, bool(is_wide))
                    record = builder.add(records, _times(builder, loop.index, size))
                    factors = _factors(builder, number, width, is_wide, record)
                    in_group = builder.add(sums, builder.mul(loop.index, sums_stride))
                    for r, (slot, product) in enumerate(zip(slots, products, strict=True)):
                        place = offset(builder, in_group, 4 * r)
                        builder.store(scaled(load(builder, product), builder.load(slot), factors, place), slot)
            if unscaled:
                amx.store_tile(builder, registers[0], work, line)
                for slot, product in zip(slots, products, strict=True):
                    builder.store(builder.fadd(load(builder, product), builder.load(slot)), slot)
            for place, slot in zip(places, slots, strict=True):
                store(builder, place, builder.load(slot))

        def choose(first: int) -> None:
            least, num_rows, registers = _VARIANTS[first]
            if first + 1 == len(_VARIANTS):
                add_rows(num_rows, registers)
                return
            enough = builder.icmp_signed(">=", left, ir.Constant(left.type, least))
            with builder.if_else(enough) as (these, fewer):
                with these:
                    add_rows(num_rows, registers)
                with fewer:
                    choose(first + 1)

        choose(0)
        return context.get_dummy_value()

    return nt.void(kind, group, wide, rounded, *[nt.int64] * 10), emit


@intrinsic(prefer_literal=True)
def store_output(_typing, out, address, value):  # type: ignore[no-untyped-def]
    """Write sixteen fp32 as `out`, the number of BF16 or FP32, a literal."""
    literals = literal_values(out)
    if literals is None:
        return None

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        store_rounded(builder, literals[0], args[1], args[2])
        return context.get_dummy_value()

    return nt.void(out, nt.int64, vec16), emit
