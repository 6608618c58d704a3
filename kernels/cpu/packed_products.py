"""Products of bf16 activation rows and packed weights, as LLVM vector code over the processor's bf16 dot product.

A lane is an output: one instruction adds the products of two neighbouring k for sixteen outputs. Weights take part
as their codes, which are exact in bf16; scale and minimum come in once for a group along K, in fp32. A row's order of
sums depends on K and the group alone, so that one row and many rows are bit-equal.

The weights of sixteen outputs and one group are a record: codes [group / 2, 16, 2] (pair of k, output, k of the
pair), then sixteen scales, then for 4-bit codes sixteen minima. 4-bit codes lie four pairs in a vector of 64
bytes: bits 4 i .. 4 i + 3 of its 16-bit word number 2 * output + (k of the pair) belong to its pair i.
"""

from __future__ import annotations

from typing import Any

import numba.core.types as nt
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from deepinfer.kernels.codecs import BF16, FP16, FP32, INT8
from deepinfer.kernels.cpu.bf16_dot import (
    VECTOR_BYTES,
    WORDS,
    as_pairs,
    bits,
    dot,
    load_pairs,
    load_scalar,
    round_pairs,
    spread_pair,
    store_bf16,
    words,
)
from deepinfer.kernels.cpu.codecs import decode
from deepinfer.kernels.cpu.vec16 import LANES, VF32, call, constant, fold_sum, fused, load, offset, store

P_INT4, P_INT8, P_BF16 = range(3)
"""Kinds of weights: w = scale * code + minimum, w = scale * code, w = code."""
CODE_BITS = (4, 8, 16)
SCALES = (2, 1, 0)
"""Vectors of scales and minima in a record."""
BLOCK = LANES
"""Outputs of a record."""
CHUNK = 32
"""k that are multiplied between two looks at the loop counter; divides every group."""
_CHAINS = 2
"""Sums of a chunk that do not wait for one another."""


def record_bytes(kind: int, group: int, wide: bool) -> int:
    """Of sixteen outputs and `group` k. `wide`: scales and minima are fp32 and not fp16."""
    return BLOCK * (group * CODE_BITS[kind] // 8 + SCALES[kind] * (4 if wide else 2))


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


def _weight_pairs(builder: Any, kind: int, place: Any) -> list[Any]:
    """The pairs in the 64 bytes at an address, one for each lane of each vector."""
    if kind == P_INT4:
        return _int4_pairs(builder, place)
    return _int8_pairs(builder, place) if kind == P_INT8 else [load_pairs(builder, place)]


def _literal_values(*kinds: Any) -> list[int] | None:
    literal = all(isinstance(kind, nt.IntegerLiteral) for kind in kinds)
    return [kind.literal_value for kind in kinds] if literal else None


def _plus(builder: Any, base: Any, index: Any, step: int) -> Any:
    return builder.add(base, builder.mul(index, ir.Constant(index.type, step)))


def _add_chunk(builder: Any, kind: int, rows: list[Any], codes: Any, chains: list[list[Any]]) -> None:
    """Adds the products of `CHUNK` k, at the addresses `rows` and `codes`, to the sums of each row."""
    sums = [[builder.load(slot) for slot in row] for row in chains]
    pair = 0
    for at in range(0, BLOCK * CHUNK * CODE_BITS[kind] // 8, VECTOR_BYTES):
        for weights in _weight_pairs(builder, kind, offset(builder, codes, at)):
            chain = pair * 2 * _CHAINS // CHUNK
            for row, place in zip(sums, rows, strict=True):
                row[chain] = dot(builder, row[chain], weights, spread_pair(builder, offset(builder, place, 4 * pair)))
            pair += 1
    for slots, row in zip(chains, sums, strict=True):
        for slot, value in zip(slots, row, strict=True):
            builder.store(value, slot)


@intrinsic(prefer_literal=True)
def packed_products(  # type: ignore[no-untyped-def]
    _typing, kind, group, wide, out, rows, x, x_stride, last, sums, sums_stride, w, groups, bias, y, y_stride
):
    """y[r] = x[r] W^T + bias for `rows` rows and sixteen outputs.

    kind, group (k in a group), wide (scales are fp32), out (number of y's codec, BF16 or FP32) and rows are literals,
        the others int64.
    x: bf16 rows, `x_stride` bytes apart; those beyond the row `last` are that row again, and so are y's.
    sums: for 4-bit codes fp32 [groups] of each row, the sums of x by group. w: `groups` records. bias: fp32.
    """
    literals = _literal_values(kind, group, wide, out, rows)
    if literals is None:
        return None
    number, width, is_wide, out_number, num_rows = literals
    codec = FP32 if is_wide else FP16
    code_bytes = BLOCK * width * CODE_BITS[number] // 8
    chunk_bytes = code_bytes * CHUNK // width

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, x_stride, last, sums, sums_stride, w, groups, bias, y, y_stride = args[5:]
        index = []
        for r in range(num_rows):
            row = ir.Constant(last.type, r)
            index.append(builder.select(builder.icmp_signed("<", row, last), row, last))
        totals = [cgutils.alloca_once(builder, VF32) for _ in index]
        chains = [[cgutils.alloca_once(builder, VF32) for _ in range(_CHAINS)] for _ in index]
        for total in totals:
            builder.store(load(builder, bias), total)
        x_rows, sum_rows, y_rows = (
            [builder.add(base, builder.mul(row, stride)) for row in index]
            for base, stride in ((x, x_stride), (sums, sums_stride), (y, y_stride))
        )
        with cgutils.for_range(builder, groups) as loop:
            record = _plus(builder, w, loop.index, record_bytes(number, width, bool(is_wide)))
            for slot in (slot for slots in chains for slot in slots):
                builder.store(constant(0.0), slot)
            with cgutils.for_range(builder, ir.Constant(groups.type, width // CHUNK)) as inner:
                places = [
                    _plus(builder, _plus(builder, row, loop.index, 2 * width), inner.index, 2 * CHUNK) for row in x_rows
                ]
                _add_chunk(builder, number, places, _plus(builder, record, inner.index, chunk_bytes), chains)
            factors = [
                decode(builder, codec.number, offset(builder, record, code_bytes + BLOCK * codec.itemsize * i))
                for i in range(SCALES[number])
            ]
            for total, slots, summed in zip(totals, chains, sum_rows, strict=True):
                value, product = builder.load(total), builder.fadd(*(builder.load(slot) for slot in slots))
                value = fused(builder, product, factors[0], value) if factors else builder.fadd(product, value)
                if number == P_INT4:
                    in_group = load_scalar(builder, _plus(builder, summed, loop.index, 4))
                    value = fused(builder, in_group, factors[1], value)
                builder.store(value, total)
        for total, row in zip(totals, y_rows, strict=True):
            write = store_bf16 if out_number == BF16.number else store
            write(builder, row, builder.load(total))
        return context.get_dummy_value()

    return nt.void(kind, group, wide, out, rows, *[nt.int64] * 10), emit


@intrinsic(prefer_literal=True)
def group_sum(_typing, group, x):  # type: ignore[no-untyped-def]
    """The sum of `group` bf16 at an address, in fp32. `group` is a literal."""
    literals = _literal_values(group)
    if literals is None:
        return None

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        ones, total = as_pairs(builder, words([bits(1.0)] * 2 * LANES)), constant(0.0)
        for at in range(0, 2 * literals[0], VECTOR_BYTES):
            total = dot(builder, total, load_pairs(builder, offset(builder, args[1], at)), ones)
        return fold_sum(builder, total)

    return nt.float32(group, nt.int64), emit
