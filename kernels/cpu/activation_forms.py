"""What rows of bf16 activations become before they meet packed weights, as LLVM vector code.

A_BF16: they stay bf16, for the processor's bf16 dot product. A_INT16 and A_INT8: whole multiples of a step, one for
each `CHUNK` of a row, for integer products. A_FP32: widened.

The step of A_INT16 is a power of two, 2^-14 of that of the largest magnitude. A bf16 has eight bits, so whatever is at
least 2^-7 of that is exact, and the rest is off by at most half a step. Of A_INT8 the largest magnitude is 127 steps.
"""

from __future__ import annotations

from typing import Any

import numba.core.types as nt
from llvmlite import ir
from numba.extending import intrinsic

from deepinfer.kernels.codecs import BF16
from deepinfer.kernels.cpu.bf16_dot import VECTOR_BYTES, as_pairs, bits, dot, load_pairs, words
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
    literal_values,
    offset,
    shuffle,
    spread,
    store,
)

A_BF16, A_INT8, A_INT16, A_FP32 = range(4)
FORM_BYTES = (2, 1, 2, 4)
"""Of an activation."""
INTEGERS = (A_INT8, A_INT16)
"""Forms with a scale for each chunk."""
CHUNK = 32
"""k that are multiplied between two looks at the loop counter; divides every group."""
BYTE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The k of eight in the order in which they lie in A_INT8, which is that of 4-bit codes in memory."""
_LIMITS = {A_INT8: 127.0, A_INT16: 32767.0}
_EXPONENT_BITS, _ONE_EXPONENT, _MOST_STEPS = 23, 127, 14


@intrinsic(prefer_literal=True)
def group_sum(_typing: Any, group: Any, x: Any):  # type: ignore[no-untyped-def]
    """The sum of `group` bf16 at an address, in fp32, by the bf16 dot product. `group` is a literal."""
    literals = literal_values(group)
    if literals is None:
        return None

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        ones, total = as_pairs(builder, words([bits(1.0)] * 2 * LANES)), constant(0.0)
        for at in range(0, 2 * literals[0], VECTOR_BYTES):
            total = dot(builder, total, load_pairs(builder, offset(builder, args[1], at)), ones)
        return fold_sum(builder, total)

    return nt.float32(group, nt.int64), emit


def _step_and_inverse(builder: Any, form: int, largest: Any) -> tuple[Any, Any]:
    if form == A_INT8:
        step = builder.fmul(largest, ir.Constant(F32, 1 / _LIMITS[form]))
        usable = builder.fcmp_ordered(">", step, ir.Constant(F32, 0.0))
        inverse = builder.select(usable, builder.fdiv(ir.Constant(F32, 1.0), step), ir.Constant(F32, 0.0))
        return step, inverse

    def power(exponent: Any) -> Any:
        return builder.bitcast(builder.shl(exponent, ir.Constant(I32, _EXPONENT_BITS)), F32)

    exponent = builder.lshr(builder.bitcast(largest, I32), ir.Constant(I32, _EXPONENT_BITS))
    exponent = builder.sub(exponent, ir.Constant(I32, _MOST_STEPS))
    least = ir.Constant(I32, 1)  # a step that is not subnormal
    exponent = builder.select(builder.icmp_signed(">", exponent, least), exponent, least)
    return power(exponent), power(builder.sub(ir.Constant(I32, 2 * _ONE_EXPONENT), exponent))


@intrinsic(prefer_literal=True)
def round_chunk(_typing: Any, form: Any, x: Any, codes: Any, scale: Any):  # type: ignore[no-untyped-def]
    """Rounds `CHUNK` bf16 at x to whole multiples of a step, which goes to `scale` (fp32), and writes these as `form`,
    a literal, one of `INTEGERS`. Returns their sum times the step, in fp32. NaN or infinity among them makes the scale
    NaN.
    """
    literals = literal_values(form)
    if literals is None:
        return None
    (number,) = literals
    limit = _LIMITS[number]

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, x, codes, scale_at = args
        halves = [decode(builder, BF16.number, offset(builder, x, 2 * LANES * half)) for half in (0, 1)]
        sizes = [call(builder, "llvm.fabs.v16f32", VF32, half) for half in halves]
        largest = fold_max(builder, call(builder, "llvm.maxnum.v16f32", VF32, *sizes))
        # Zero times any number is zero; times infinity or NaN it is NaN.
        poison = fold_sum(builder, builder.fadd(*[builder.fmul(half, constant(0.0)) for half in halves]))
        step, inverse = _step_and_inverse(builder, number, largest)
        scale = builder.fadd(step, poison)
        builder.store(scale, builder.inttoptr(scale_at, F32.as_pointer()), align=4)
        numbers = []
        for half in halves:
            scaled = builder.fmul(half, spread(builder, inverse))
            for bound, name in ((limit, "minnum"), (-limit, "maxnum")):
                scaled = call(builder, f"llvm.{name}.v16f32", VF32, scaled, constant(bound))
            numbers.append(call(builder, "llvm.rint.v16f32", VF32, scaled))
        whole = [builder.fptosi(number, VI32) for number in numbers]
        order = list(range(CHUNK))
        if number == A_INT8:
            order = [8 * eight + k for eight in range(CHUNK // 8) for k in BYTE_ORDER]
        both, size = shuffle(builder, *whole, order), 8 * FORM_BYTES[number]
        store(builder, codes, builder.trunc(both, ir.VectorType(ir.IntType(size), CHUNK)), 1)
        return builder.fmul(fold_sum(builder, builder.fadd(*numbers)), scale)

    return nt.float32(form, nt.int64, nt.int64, nt.int64), emit


@intrinsic
def widen_chunk(_typing: Any, x: Any, out: Any) -> Any:
    """`CHUNK` bf16 at x as fp32 to out."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        for half in (0, 1):
            value = decode(builder, BF16.number, offset(builder, args[0], 2 * LANES * half))
            store(builder, offset(builder, args[1], 4 * LANES * half), value)
        return context.get_dummy_value()

    return nt.void(nt.int64, nt.int64), emit
