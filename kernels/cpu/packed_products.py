"""Products of bf16 activation rows and packed weights, as LLVM vector code over the processor's bf16 dot product.

A lane is an output: one instruction adds the products of two neighbouring k for sixteen outputs. Weights take part
as their codes, which are exact in bf16; scale and minimum come in once for a group along K, in fp32. A row's order of
sums depends on K and the group alone, so that one row and many rows are bit-equal.

The weights of sixteen outputs and one group are a record: codes [group / 2, 16, 2] (pair of k, output, k of the
pair), then sixteen scales, then for 4-bit codes sixteen minima. 4-bit codes lie four pairs in a vector of 64
bytes: bits 4 i .. 4 i + 3 of its 16-bit word number 2 * output + (k of the pair) belong to its pair i.

Activations may also be rounded to 8 bits, each `CHUNK` of a row by its own scale, and be multiplied with 4-bit codes
in integers: four k for one instruction (AVX512-VNNI). The records are the same. The four bytes of an output then hold
k = 0, 4, 1, 5 of eight in their lower halves and 2, 6, 3, 7 in their upper ones, and activations lie in that order.
"""

from __future__ import annotations

import functools
from typing import Any

import numba.core.types as nt
from llvmlite import binding, ir
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
from deepinfer.kernels.cpu.vec16 import (
    F32,
    I32,
    LANES,
    VF32,
    VI32,
    call,
    constant,
    fold_max,
    fold_sum,
    fused,
    literal_values,
    load,
    offset,
    shuffle,
    spread,
    store,
)

P_INT4, P_INT8, P_BF16, P_INT4_A8 = range(4)
"""Kinds of weights: w = scale * code + minimum, w = scale * code, w = code; and the first for 8-bit activations."""
CODE_BITS = (4, 8, 16, 4)
SCALES = (2, 1, 0, 2)
"""Vectors of scales and minima in a record."""
WITH_MINIMA = (P_INT4, P_INT4_A8)
BLOCK = LANES
"""Outputs of a record."""
CHUNK = 32
"""k that are multiplied between two looks at the loop counter; divides every group."""
_CHAINS = 2
"""Sums of a chunk that do not wait for one another."""
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The k of eight in the order in which bytes hold them (see above)."""
_BYTE_MAX = 127.0


def vnni_available() -> bool:
    """Whether this processor multiplies bytes four at a time (AVX512-VNNI)."""
    return bool(binding.get_host_cpu_features().get("avx512vnni", False))


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


def weight_pairs(builder: Any, kind: int, place: Any) -> list[Any]:
    """The pairs in the 64 bytes at an address, one for each lane of each vector."""
    if kind == P_INT4:
        return _int4_pairs(builder, place)
    return _int8_pairs(builder, place) if kind == P_INT8 else [load_pairs(builder, place)]


def _plus(builder: Any, base: Any, index: Any, step: int) -> Any:
    return builder.add(base, builder.mul(index, ir.Constant(index.type, step)))


def _add_chunk(builder: Any, kind: int, rows: list[Any], codes: Any, chains: list[list[Any]]) -> None:
    """Adds the products of `CHUNK` k, at the addresses `rows` and `codes`, to the sums of each row."""
    sums = [[builder.load(slot) for slot in row] for row in chains]
    pair = 0
    for at in range(0, BLOCK * CHUNK * CODE_BITS[kind] // 8, VECTOR_BYTES):
        for weights in weight_pairs(builder, kind, offset(builder, codes, at)):
            chain = pair * 2 * _CHAINS // CHUNK
            for row, place in zip(sums, rows, strict=True):
                row[chain] = dot(builder, row[chain], weights, spread_pair(builder, offset(builder, place, 4 * pair)))
            pair += 1
    for slots, row in zip(chains, sums, strict=True):
        for slot, value in zip(slots, row, strict=True):
            builder.store(value, slot)


def _add_int8_chunk(builder: Any, rows: list[Any], scales: list[Any], codes: Any, sums: list[Any]) -> None:
    """As `_add_chunk` for `CHUNK` k of 8-bit activations, whose scales are at the addresses `scales`."""
    totals = [constant(0, VI32)] * len(rows)
    low_bits = constant(0x0F0F0F0F, VI32)
    for vector in range(CHUNK // len(_ORDER)):
        packed = load(builder, offset(builder, codes, vector * VECTOR_BYTES), VI32)
        upper = builder.lshr(packed, constant(4, VI32))
        for half, word in enumerate((packed, upper)):
            weights, at = builder.and_(word, low_bits), len(_ORDER) * vector + 4 * half
            for r, place in enumerate(rows):
                four = spread(builder, builder.load(builder.inttoptr(offset(builder, place, at), I32.as_pointer())))
                totals[r] = call(builder, "llvm.x86.avx512.vpdpbusd.512", VI32, totals[r], weights, four)
    for slot, total, scale in zip(sums, totals, scales, strict=True):
        product = builder.sitofp(total, VF32)
        builder.store(fused(builder, product, load_scalar(builder, scale), builder.load(slot)), slot)


@intrinsic(prefer_literal=True)
def packed_products(  # type: ignore[no-untyped-def]
    _typing, kind, group, wide, out, rows, x, x_stride, last, sums, sums_stride, w, groups, bias, y, y_stride
):
    """y[r] = x[r] W^T + bias for `rows` rows and sixteen outputs.

    kind, group (k in a group), wide (scales are fp32), out (number of y's codec, BF16 or FP32) and rows are literals,
        the others int64.
    x: bf16 rows, `x_stride` bytes apart; those beyond the row `last` are that row again, and so are y's.
    sums: for 4-bit codes fp32 [groups] of each row, the sums of x by group. w: `groups` records. bias: fp32.
    For P_INT4_A8 x is what `round_to_bytes` writes, and behind the sums of a row are the scales of its chunks, fp32.
    """
    literals = literal_values(kind, group, wide, out, rows)
    if literals is None:
        return None
    number, width, is_wide, out_number, num_rows = literals
    codec = FP32 if is_wide else FP16
    code_bytes = BLOCK * width * CODE_BITS[number] // 8
    chunk_bytes, chunks, x_bytes = code_bytes * CHUNK // width, width // CHUNK, 1 if number == P_INT4_A8 else 2

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, x_stride, last, sums, sums_stride, w, groups, bias, y, y_stride = args[5:]
        index = []
        for r in range(num_rows):
            row = ir.Constant(last.type, r)
            index.append(builder.select(builder.icmp_signed("<", row, last), row, last))
        totals = [cgutils.alloca_once(builder, VF32) for _ in index]
        chains = [[cgutils.alloca_once(builder, VF32) for _ in range(_CHAINS if x_bytes == 2 else 1)] for _ in index]
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
            with cgutils.for_range(builder, ir.Constant(groups.type, chunks)) as inner:
                chunk = _plus(builder, inner.index, loop.index, chunks)
                places = [_plus(builder, row, chunk, x_bytes * CHUNK) for row in x_rows]
                codes = _plus(builder, record, inner.index, chunk_bytes)
                if number == P_INT4_A8:
                    behind = builder.add(groups, chunk)
                    scales = [_plus(builder, row, behind, 4) for row in sum_rows]
                    _add_int8_chunk(builder, places, scales, codes, [slot for (slot,) in chains])
                else:
                    _add_chunk(builder, number, places, codes, chains)
            factors = [
                decode(builder, codec.number, offset(builder, record, code_bytes + BLOCK * codec.itemsize * i))
                for i in range(SCALES[number])
            ]
            for total, slots, summed in zip(totals, chains, sum_rows, strict=True):
                value = builder.load(total)
                product = functools.reduce(builder.fadd, [builder.load(slot) for slot in slots])
                value = fused(builder, product, factors[0], value) if factors else builder.fadd(product, value)
                if number in WITH_MINIMA:
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
    literals = literal_values(group)
    if literals is None:
        return None

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        ones, total = as_pairs(builder, words([bits(1.0)] * 2 * LANES)), constant(0.0)
        for at in range(0, 2 * literals[0], VECTOR_BYTES):
            total = dot(builder, total, load_pairs(builder, offset(builder, args[1], at)), ones)
        return fold_sum(builder, total)

    return nt.float32(group, nt.int64), emit


@intrinsic
def round_to_bytes(_typing: Any, x: Any, codes: Any, scale: Any) -> Any:
    """Rounds `CHUNK` bf16 at x to whole multiples of their largest magnitude / 127, which goes to `scale` (fp32), and
    writes these as int8 in the order of `packed_products`. Returns their sum times the scale, in fp32. NaN or infinity
    among them makes the scale NaN.
    """

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, codes, scale_at = args
        halves = [decode(builder, BF16.number, offset(builder, x, 2 * LANES * half)) for half in (0, 1)]
        sizes = [call(builder, "llvm.fabs.v16f32", VF32, half) for half in halves]
        largest = fold_max(builder, call(builder, "llvm.maxnum.v16f32", VF32, *sizes))
        # Zero times any number is zero; times infinity or NaN it is NaN.
        poison = fold_sum(builder, builder.fmul(builder.fadd(*sizes), constant(0.0)))
        scale = builder.fadd(builder.fmul(largest, ir.Constant(F32, 1 / _BYTE_MAX)), poison)
        builder.store(scale, builder.inttoptr(scale_at, F32.as_pointer()), align=4)
        usable = builder.fcmp_ordered(">", scale, ir.Constant(F32, 0.0))
        inverse = builder.select(usable, builder.fdiv(ir.Constant(F32, 1.0), scale), ir.Constant(F32, 0.0))
        numbers = []
        for half in halves:
            steps = builder.fmul(half, spread(builder, inverse))
            for bound, name in ((_BYTE_MAX, "minnum"), (-_BYTE_MAX, "maxnum")):
                steps = call(builder, f"llvm.{name}.v16f32", VF32, steps, constant(bound))
            numbers.append(call(builder, "llvm.rint.v16f32", VF32, steps))
        whole = [builder.fptosi(number, VI32) for number in numbers]
        order = [8 * eight + k for eight in range(CHUNK // 8) for k in _ORDER]
        both = shuffle(builder, *whole, order)
        store(builder, codes, builder.trunc(both, ir.VectorType(ir.IntType(8), CHUNK)), 1)
        return builder.fmul(fold_sum(builder, builder.fadd(*numbers)), scale)

    return nt.float32(nt.int64, nt.int64, nt.int64), emit
