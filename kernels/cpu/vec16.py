"""A numba type of sixteen fp32 lanes, and its arithmetic as LLVM vector instructions.

Written as vectors, the order of every reduction is fixed by the source and not by what an optimiser makes of
a loop: that is what makes a row's bits independent of its neighbours. LLVM splits the type on CPUs with
narrower registers.

Addresses are int64 byte addresses. Who passes one keeps its memory alive and answers for its bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numba.core.types as nt
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
F32 = ir.FloatType()
I32 = ir.IntType(32)
VF32 = ir.VectorType(F32, LANES)
VI32 = ir.VectorType(I32, LANES)
VI1 = ir.VectorType(ir.IntType(1), LANES)


class Vec16Type(nt.Type):
    """Sixteen fp32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="Vec16")


vec16 = Vec16Type()


@register_model(Vec16Type)
class Vec16Model(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, VF32)


def literal_values(*kinds: Any) -> list[int] | None:
    """Of the arguments of an intrinsic that must be literals; None where one is not, and numba asks again."""
    literal = all(isinstance(kind, nt.IntegerLiteral) for kind in kinds)
    return [kind.literal_value for kind in kinds] if literal else None


def call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Call the LLVM intrinsic `name`."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def outlined(builder: Any, name: str, args: Sequence[Any], body: Callable[..., None]) -> None:
    """Call a function of the module whose code is what `body(builder, *args)` emits, made where there is none of that
    name yet. It has the registers for itself: inlined, what one of many long pieces of code keeps from one round of a
    loop to the next leaves too few to the others."""
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [arg.type for arg in args]), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        inner = ir.IRBuilder(function.append_basic_block())
        body(inner, *function.args)
        inner.ret_void()
    builder.call(function, args)


@contextmanager
def counted_loop(builder: Any, count: Any) -> Iterator[Any]:
    """A loop over 0 .. `count`, which is at least 1, that stays one: LLVM holds some processors to be so fond of long
    code that it writes loops out until their registers do not suffice."""
    before = builder.block
    body, after = (builder.append_basic_block(name) for name in ("loop", "after_loop"))
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(count.type)
    index.add_incoming(ir.Constant(count.type, 0), before)
    yield index
    following = builder.add(index, ir.Constant(count.type, 1))
    index.add_incoming(following, builder.block)
    branch = builder.cbranch(builder.icmp_signed("<", following, count), body, after)
    branch.set_metadata("llvm.loop", _as_written(builder.module))
    builder.position_at_end(after)


def _as_written(module: Any) -> Any:
    """Metadata of a loop that is not to be unrolled: a node that begins with itself."""
    kept = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    node = module.add_metadata([kept, ir.Constant(I32, len(module.metadata))])
    node.operands = (node, kept)
    return node


def constant(value: float, kind: Any = VF32) -> Any:
    """`value` in every lane."""
    return ir.Constant(kind, [value] * LANES)


def spread(builder: Any, scalar: Any) -> Any:
    """`scalar` in every lane."""
    vector = ir.VectorType(scalar.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), constant(0, VI32))


def load(builder: Any, address: Any, kind: Any = VF32, align: int = 4) -> Any:
    """The vector of type `kind` at an address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder: Any, address: Any, value: Any, align: int = 4) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def offset(builder: Any, address: Any, num_bytes: int) -> Any:
    return builder.add(address, ir.Constant(address.type, num_bytes))


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return call(builder, "llvm.fma.v16f32", VF32, a, b, c)


def shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


@intrinsic
def splat(_typing: Any, value: Any) -> Any:
    """A float in every lane."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return spread(builder, args[0])

    return vec16(nt.float32), emit


@intrinsic
def load_f32(_typing: Any, address: Any) -> Any:
    """Sixteen fp32 at an address."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return load(builder, args[0])

    return vec16(nt.int64), emit


@intrinsic
def store_f32(_typing: Any, address: Any, value: Any) -> Any:
    """Write sixteen fp32."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        store(builder, args[0], args[1])
        return context.get_dummy_value()

    return nt.void(nt.int64, vec16), emit


@intrinsic
def add(_typing: Any, a: Any, b: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fadd(*args)

    return vec16(vec16, vec16), emit


@intrinsic
def mul(_typing: Any, a: Any, b: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fmul(*args)

    return vec16(vec16, vec16), emit


@intrinsic
def sub(_typing: Any, a: Any, b: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fsub(*args)

    return vec16(vec16, vec16), emit


@intrinsic
def div(_typing: Any, a: Any, b: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fdiv(*args)

    return vec16(vec16, vec16), emit


@intrinsic
def fma(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return fused(builder, *args)

    return vec16(vec16, vec16, vec16), emit


@intrinsic
def magnitude_max(_typing: Any, a: Any, b: Any) -> Any:
    """The larger of |a| and |b|, lane by lane. Not for NaN."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        a, b = (call(builder, "llvm.fabs.v16f32", VF32, arg) for arg in args)
        return call(builder, "llvm.maxnum.v16f32", VF32, a, b)

    return vec16(vec16, vec16), emit


@intrinsic
def larger(_typing: Any, a: Any, b: Any) -> Any:
    """The larger of both, lane by lane. A NaN gives way."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return call(builder, "llvm.maxnum.v16f32", VF32, *args)

    return vec16(vec16, vec16), emit


def largest(builder: Any, a: Any, b: Any) -> Any:
    """One instruction; b where one of them is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic
def largest_of(_typing: Any, a: Any, b: Any) -> Any:
    """The larger of both, lane by lane; b where one of them is NaN."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return largest(builder, *args)

    return vec16(vec16, vec16), emit


@intrinsic
def any_larger(_typing: Any, a: Any, b: Any) -> Any:
    """Whether a lane of a is larger than that of b. NaN is not."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = builder.bitcast(builder.fcmp_ordered(">", *args), ir.IntType(LANES))
        return builder.icmp_unsigned("!=", lanes, ir.Constant(lanes.type, 0))

    return nt.boolean(vec16, vec16), emit


@intrinsic
def spread_largest(_typing: Any, value: Any) -> Any:
    """The largest lane, in every lane. Any lane may be passed over if one is NaN."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        (value,) = args
        for step in (8, 4, 2, 1):
            value = largest(builder, value, shuffle(builder, value, value, [lane ^ step for lane in range(LANES)]))
        return value

    return vec16(vec16), emit


@intrinsic
def keep_lanes(_typing: Any, value: Any, first: Any, end: Any, fill: Any) -> Any:
    """Lanes first <= i < end of `value`, `fill` in the others: a select, so what was there cannot leak."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        value, first, end, fill = args
        lanes = ir.Constant(VI32, list(range(LANES)))
        first, end = (spread(builder, builder.trunc(bound, I32)) for bound in (first, end))
        inside = builder.and_(builder.icmp_signed(">=", lanes, first), builder.icmp_signed("<", lanes, end))
        return builder.select(inside, value, spread(builder, fill))

    return vec16(vec16, nt.int64, nt.int64, nt.float32), emit


def _fold(builder: Any, value: Any, combine: Any) -> Any:
    """Reduce the lanes by halves: lane i with lane i + 8, + 4, + 2, + 1."""
    width = LANES // 2
    while width:
        lower = shuffle(builder, value, value, list(range(width)))
        upper = shuffle(builder, value, value, list(range(width, 2 * width)))
        value, width = combine(lower, upper, width), width // 2
    return builder.extract_element(value, ir.Constant(I32, 0))


def fold_sum(builder: Any, value: Any) -> Any:
    """The sum of the lanes, by halves."""
    return _fold(builder, value, lambda a, b, _: builder.fadd(a, b))


def fold_max(builder: Any, value: Any) -> Any:
    """The largest lane. NaN lanes are passed over unless all are NaN."""

    def larger(a: Any, b: Any, width: int) -> Any:
        return call(builder, f"llvm.maxnum.v{width}f32", ir.VectorType(F32, width), a, b)

    return _fold(builder, value, larger)


@intrinsic
def lane_sum(_typing: Any, value: Any) -> Any:
    """The sum of the lanes, by halves."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return fold_sum(builder, args[0])

    return nt.float32(vec16), emit


@intrinsic
def lane_max(_typing: Any, value: Any) -> Any:
    """The largest lane. NaN lanes are passed over unless all are NaN."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return fold_max(builder, args[0])

    return nt.float32(vec16), emit


# exp by Cody-Waite reduction and the polynomial of Cephes' expf (relative error about 1e-7).
_LOG2E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_EXP_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_EXP_LOWEST = -87.0


def _exp(builder: Any, x: Any) -> Any:
    bounded = call(builder, "llvm.maxnum.v16f32", VF32, x, constant(_EXP_LOWEST))
    bounded = call(builder, "llvm.minnum.v16f32", VF32, bounded, constant(0.0))
    power = call(builder, "llvm.rint.v16f32", VF32, builder.fmul(bounded, constant(_LOG2E)))
    rest = fused(builder, power, constant(-_LN2_HIGH), bounded)
    rest = fused(builder, power, constant(-_LN2_LOW), rest)
    series = constant(_EXP_POLYNOMIAL[0])
    for coefficient in _EXP_POLYNOMIAL[1:]:
        series = fused(builder, series, rest, constant(coefficient))
    series = fused(builder, builder.fmul(rest, rest), series, builder.fadd(rest, constant(1.0)))
    exponent = builder.add(builder.fptosi(power, VI32), constant(127, VI32))
    scale = builder.bitcast(builder.shl(exponent, constant(23, VI32)), VF32)
    result = builder.fmul(series, scale)
    result = builder.select(builder.fcmp_ordered("<", x, constant(_EXP_LOWEST)), constant(0.0), result)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, result)


@intrinsic
def exp_nonpositive(_typing: Any, value: Any) -> Any:
    """exp(x) for x <= 0: exactly 1 at 0, exactly 0 below -87 (-inf too), NaN stays NaN."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return _exp(builder, args[0])

    return vec16(vec16), emit


def _gated(builder: Any, x: Any, turn: Any) -> Any:
    """x * sigmoid(turn), from exp(-|turn|) so that it cannot overflow."""
    small = _exp(builder, builder.fneg(call(builder, "llvm.fabs.v16f32", VF32, turn)))
    top = builder.select(builder.fcmp_ordered("<", turn, constant(0.0)), small, constant(1.0))
    return builder.fdiv(builder.fmul(x, top), builder.fadd(small, constant(1.0)))


@intrinsic
def silu(_typing: Any, value: Any) -> Any:
    """x * sigmoid(x)."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return _gated(builder, args[0], args[0])

    return vec16(vec16), emit


_TWICE_SQRT_2_OVER_PI, _CUBE = 1.5957691216057308, 0.044715


@intrinsic
def gelu_tanh(_typing: Any, value: Any) -> Any:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), which is x * sigmoid of twice what tanh is taken of."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x = args[0]
        inner = fused(builder, builder.fmul(x, x), constant(_CUBE), constant(1.0))
        return _gated(builder, x, builder.fmul(builder.fmul(x, constant(_TWICE_SQRT_2_OVER_PI)), inner))

    return vec16(vec16), emit


@intrinsic
def tanh(_typing: Any, value: Any) -> Any:
    """(1 - e) / (1 + e) with e = exp(-2 |x|), and the sign of x. Off by at most 1e-7; NaN stays NaN."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x = args[0]
        small = _exp(builder, builder.fmul(call(builder, "llvm.fabs.v16f32", VF32, x), constant(-2.0)))
        one = constant(1.0)
        size = builder.fdiv(builder.fsub(one, small), builder.fadd(one, small))
        return call(builder, "llvm.copysign.v16f32", VF32, size, x)

    return vec16(vec16), emit
