"""Products of activation rows and packed weights (`records`), as LLVM vector code.

A lane is an output: one instruction adds the products of two neighbouring k, or of four, for all outputs of a vector.
Weights take part as their codes, which are exact; scale and minimum come in once for a group along K, in fp32. A row's
order of sums depends on K and the group alone, so that one row and many rows are bit-equal.

How products are made depends on the form of the activations (`activation_forms`): of bf16 by AVX512-BF16, of 16-bit
integers by AVX2 (and AVX-VNNI where LLVM finds it), of bytes and 4-bit codes by AVX512-VNNI or AVX2, of fp32 by fused
multiplications. Other processors multiply integers by what LLVM makes of their products, written out.
"""

from __future__ import annotations

import functools
from typing import Any

import numba.core.types as nt
from llvmlite import binding, ir
from numba.core import cgutils
from numba.extending import intrinsic

from deepinfer.kernels.codecs import BF16, FP16, FP32
from deepinfer.kernels.cpu import bf16_dot
from deepinfer.kernels.cpu.activation_forms import (
    A_BF16,
    A_FP32,
    A_INT16,
    BYTE_ORDER,
    CHUNK,
    FORM_BYTES,
    INTEGERS,
)
from deepinfer.kernels.cpu.bf16_dot import (
    VECTOR_BYTES,
    WORDS,
    dot,
    load_scalar,
    spread_pair,
)
from deepinfer.kernels.cpu.codecs import decode, round_bf16
from deepinfer.kernels.cpu.records import (
    BLOCK,
    CODE_BITS,
    P_INT4,
    P_INT4_WORDS,
    SCALES,
    record_bytes,
)
from deepinfer.kernels.cpu.vec16 import (
    I32,
    LANES,
    VF32,
    VI32,
    call,
    constant,
    fused,
    literal_values,
    load,
    offset,
    shuffle,
    spread,
    store,
)
from deepinfer.kernels.cpu.weight_codes import HALF_WORDS, code_places, filled, plus, weight_pairs, weight_words

WITH_MINIMA = (P_INT4, P_INT4_WORDS)
_HALF_BYTES = ir.VectorType(ir.IntType(8), 2 * LANES)
_HALF_SUMS = ir.VectorType(I32, LANES // 2)


@functools.cache
def avx2_available() -> bool:
    """Whether this processor multiplies pairs of integers and adds both products in one instruction."""
    return bool(binding.get_host_cpu_features().get("avx2", False))


@functools.cache
def vnni_available() -> bool:
    """Whether this processor multiplies bytes four at a time (AVX512-VNNI)."""
    return bool(binding.get_host_cpu_features().get("avx512vnni", False))


def _pair_sums(builder: Any, a: Any, b: Any) -> Any:
    """a0 b0 + a1 b1, ... of sixteen integers of 16 bits each, in eight of 32."""
    if avx2_available():
        return call(builder, "llvm.x86.avx2.pmadd.wd", _HALF_SUMS, a, b)
    return _added_pairs(builder, *(builder.sext(part, VI32) for part in (a, b)))


def _byte_pair_sums(builder: Any, a: Any, b: Any) -> Any:
    """The same of 32 bytes each, a without and b with a sign, in sixteen of 16 bits, which must hold them."""
    if avx2_available():
        return call(builder, "llvm.x86.avx2.pmadd.ub.sw", HALF_WORDS, a, b)
    return _added_pairs(builder, builder.zext(a, WORDS), builder.sext(b, WORDS))


def _added_pairs(builder: Any, a: Any, b: Any) -> Any:
    products, count = builder.mul(a, b), a.type.count
    return builder.add(*(shuffle(builder, products, products, list(range(k, count, 2))) for k in (0, 1)))


def _spread_bits(builder: Any, address: Any, kind: Any) -> Any:
    """32 bits at an address, all over a vector."""
    scalar = builder.load(builder.inttoptr(address, I32.as_pointer()), align=1)
    undefined = ir.Constant(_HALF_SUMS, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    all_over = builder.shuffle_vector(first, undefined, filled(_HALF_SUMS, 0))
    return builder.bitcast(all_over, kind)


# What follows adds the products of `CHUNK` k, of rows of one form at the addresses `rows` and of codes at the address
# `codes`, to the sums of each row, vectors of sixteen fp32 in its `slots`.
Slots = list[list[Any]]


def _add_bf16(builder: Any, kind: int, rows: list[Any], codes: Any, slots: Slots) -> None:
    sums, chains = [[builder.load(slot) for slot in row] for row in slots], len(slots[0])
    pair = 0
    for vector in code_places(builder, kind, codes):
        for weights in weight_pairs(builder, kind, vector):
            chain = pair * 2 * chains // CHUNK
            for row, place in zip(sums, rows, strict=True):
                row[chain] = dot(builder, row[chain], weights, spread_pair(builder, offset(builder, place, 4 * pair)))
            pair += 1
    for row_slots, row in zip(slots, sums, strict=True):
        for slot, value in zip(row_slots, row, strict=True):
            builder.store(value, slot)


def _add_fp32(builder: Any, kind: int, rows: list[Any], codes: Any, slots: Slots) -> None:
    sums = [builder.load(slot) for (slot,) in slots]
    for pair, vector in enumerate(code_places(builder, kind, codes)):
        both = load(builder, vector, VI32, 2)
        halves = (builder.shl(both, constant(16, VI32)), builder.and_(both, constant(0xFFFF0000, VI32)))
        for k, half in enumerate(halves):
            weights = builder.bitcast(half, VF32)
            for row, place in enumerate(rows):
                sums[row] = fused(
                    builder, weights, load_scalar(builder, offset(builder, place, 8 * pair + 4 * k)), sums[row]
                )
    for (slot,), value in zip(slots, sums, strict=True):
        builder.store(value, slot)


def _int16_sums(builder: Any, kind: int, rows: list[Any], codes: Any) -> list[Any]:
    """In integers, which cannot overflow: 32 products of 15 bits and 8."""
    totals, pair = [[filled(_HALF_SUMS, 0)] * 2 for _ in rows], 0
    for vector in code_places(builder, kind, codes):
        for weights in weight_words(builder, kind, vector):
            for total, place in zip(totals, rows, strict=True):
                two = _spread_bits(builder, offset(builder, place, 4 * pair), HALF_WORDS)
                for half in (0, 1):
                    product = _pair_sums(builder, weights[half], two)
                    total[half] = builder.add(total[half], product)
            pair += 1
    return [shuffle(builder, *total, list(range(LANES))) for total in totals]


def _int8_sums(builder: Any, kind: int, rows: list[Any], codes: Any) -> list[Any]:
    """As `_int16_sums` for 4-bit codes, four k for one instruction."""
    totals, low_bits = [constant(0, VI32)] * len(rows), constant(0x0F0F0F0F, VI32)
    for vector, place in enumerate(code_places(builder, kind, codes)):
        packed = load(builder, place, VI32)
        upper = builder.lshr(packed, constant(4, VI32))
        for half, word in enumerate((packed, upper)):
            weights, at = builder.and_(word, low_bits), len(BYTE_ORDER) * vector + 4 * half
            for r, row in enumerate(rows):
                four = spread(builder, builder.load(builder.inttoptr(offset(builder, row, at), I32.as_pointer())))
                totals[r] = call(builder, "llvm.x86.avx512.vpdpbusd.512", VI32, totals[r], weights, four)
    return totals


def _int8_sums_by_pairs(builder: Any, kind: int, rows: list[Any], codes: Any) -> list[Any]:
    """As `_int8_sums`. A 16-bit sum takes in 16 products of at most 15 and 127 in size, so that it cannot overflow."""
    totals: list[list[Any]] = [[None] * 2 for _ in rows]
    low_bits, ones = filled(_HALF_BYTES, 15), filled(HALF_WORDS, 1)
    for vector, place in enumerate(code_places(builder, kind, codes)):
        packed = [load(builder, offset(builder, place, half * VECTOR_BYTES // 2), HALF_WORDS, 2) for half in (0, 1)]
        for nibble in (0, 1):
            words_of = [builder.lshr(part, filled(HALF_WORDS, 4)) for part in packed] if nibble else packed
            weights = [builder.and_(builder.bitcast(part, _HALF_BYTES), low_bits) for part in words_of]
            at = len(BYTE_ORDER) * vector + 4 * nibble
            for total, row in zip(totals, rows, strict=True):
                four = _spread_bits(builder, offset(builder, row, at), _HALF_BYTES)
                for half in (0, 1):
                    product = _byte_pair_sums(builder, weights[half], four)
                    total[half] = product if total[half] is None else builder.add(total[half], product)
    sums = [[_pair_sums(builder, part, ones) for part in total] for total in totals]
    return [shuffle(builder, *both, list(range(LANES))) for both in sums]


def _add_integers(
    builder: Any, kind: int, form: int, rows: list[Any], scales: list[Any], codes: Any, slots: Slots
) -> None:
    """The scales of the rows' chunk are at the addresses `scales`."""
    if form == A_INT16:
        totals = _int16_sums(builder, kind, rows, codes)
    else:
        totals = (_int8_sums if vnni_available() else _int8_sums_by_pairs)(builder, kind, rows, codes)
    for (slot,), total, scale in zip(slots, totals, scales, strict=True):
        product = builder.sitofp(total, VF32)
        builder.store(fused(builder, product, load_scalar(builder, scale), builder.load(slot)), slot)


def store_rounded(builder: Any, number: int, address: Any, value: Any) -> None:
    """Write sixteen fp32 as the codec `number`, that of BF16 or FP32."""
    if number != BF16.number:
        store(builder, address, value)
    elif bf16_dot.available():
        bf16_dot.store_bf16(builder, address, value)
    else:
        store(builder, address, round_bf16(builder, value), 2)


@intrinsic(prefer_literal=True)
def packed_products(  # type: ignore[no-untyped-def]
    _typing, kind, form, group, wide, out, rows, x, x_stride, last, sums, scales, sums_stride, w, groups, start,
    start_stride, y, y_stride,
):  # fmt: skip
    """y[r] = x[r] W^T + start[r] for `rows` rows and sixteen outputs.

    kind, form (of x), group (k in a group), wide (scales are fp32), out (number of y's codec, BF16 or FP32) and rows
        are literals, the others int64.
    x: rows, `x_stride` bytes apart; those beyond the row `last` are that row again, and so are those of sums and y.
    sums: for 4-bit codes fp32 [groups] of each row, the sums of x by group. scales: for forms of integers fp32 of the
        chunks of each row. Those of the next row are `sums_stride` bytes further.
    w: `groups` records. start: fp32 [16] of each row, `start_stride` bytes apart.
    """
    literals = literal_values(kind, form, group, wide, out, rows)
    if literals is None:
        return None
    number, form_number, width, is_wide, out_number, num_rows = literals
    codec = FP32 if is_wide else FP16
    code_bytes = BLOCK * width * CODE_BITS[number] // 8
    chunk_bytes, chunks, x_bytes = code_bytes * CHUNK // width, width // CHUNK, FORM_BYTES[form_number]
    chains = 2 if form_number == A_BF16 else 1  # sums of a chunk that do not wait for one another

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, x_stride, last, sums, scales, sums_stride, w, groups, start, start_stride, y, y_stride = args[6:]
        index = []
        for r in range(num_rows):
            row = ir.Constant(last.type, r)
            index.append(builder.select(builder.icmp_signed("<", row, last), row, last))
        totals = [cgutils.alloca_once(builder, VF32) for _ in index]
        slots = [[cgutils.alloca_once(builder, VF32) for _ in range(chains)] for _ in index]
        bases = ((x, x_stride), (sums, sums_stride), (scales, sums_stride), (start, start_stride), (y, y_stride))
        x_rows, sum_rows, scale_rows, starts, y_rows = (
            [builder.add(base, builder.mul(row, stride)) for row in index] for base, stride in bases
        )
        for total, place in zip(totals, starts, strict=True):
            builder.store(load(builder, place), total)

        def add_chunk(places: list[Any], chunk: Any, codes: Any) -> None:
            if form_number in INTEGERS:
                of_chunk = [plus(builder, row, chunk, 4) for row in scale_rows]
                _add_integers(builder, number, form_number, places, of_chunk, codes, slots)
            else:
                (_add_fp32 if form_number == A_FP32 else _add_bf16)(builder, number, places, codes, slots)

        with cgutils.for_range(builder, groups) as loop:
            record = plus(builder, w, loop.index, record_bytes(number, width, bool(is_wide)))
            for slot in (slot for row in slots for slot in row):
                builder.store(constant(0.0), slot)
            with cgutils.for_range(builder, ir.Constant(groups.type, chunks)) as inner:
                chunk = plus(builder, inner.index, loop.index, chunks)
                places = [plus(builder, row, chunk, x_bytes * CHUNK) for row in x_rows]
                add_chunk(places, chunk, plus(builder, record, inner.index, chunk_bytes))
            factors = [
                decode(builder, codec.number, offset(builder, record, code_bytes + BLOCK * codec.itemsize * i))
                for i in range(SCALES[number])
            ]
            for total, row_slots, summed in zip(totals, slots, sum_rows, strict=True):
                value = builder.load(total)
                product = functools.reduce(builder.fadd, [builder.load(slot) for slot in row_slots])
                value = fused(builder, product, factors[0], value) if factors else builder.fadd(product, value)
                if number in WITH_MINIMA:
                    in_group = load_scalar(builder, plus(builder, summed, loop.index, 4))
                    value = fused(builder, in_group, factors[1], value)
                builder.store(value, total)
        for total, row in zip(totals, y_rows, strict=True):
            store_rounded(builder, out_number, row, builder.load(total))
        return context.get_dummy_value()

    return nt.void(kind, form, group, wide, out, rows, *[nt.int64] * 12), emit
