"""Single values at addresses, for compiled kernels. Who passes an address keeps its memory alive."""

from __future__ import annotations

import platform
from typing import Any

import numba.core.types as nt
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

_I64 = ir.IntType(64)


@intrinsic
def load_float(_typing: Any, address: Any) -> Any:
    """One fp32."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.FloatType().as_pointer()), align=4)

    return nt.float32(nt.int64), emit


@intrinsic
def store_float(_typing: Any, address: Any, value: Any) -> Any:
    """Write one fp32."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], ir.FloatType().as_pointer()), align=4)
        return context.get_dummy_value()

    return nt.void(nt.int64, nt.float32), emit


@intrinsic
def load_half(_typing: Any, address: Any) -> Any:
    """One fp16, widened."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        half = builder.load(builder.inttoptr(args[0], ir.HalfType().as_pointer()), align=2)
        return builder.fpext(half, ir.FloatType())

    return nt.float32(nt.int64), emit


@intrinsic
def store_half(_typing: Any, address: Any, value: Any) -> Any:
    """Write one fp32 rounded to fp16."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        half = builder.fptrunc(args[1], ir.HalfType())
        builder.store(half, builder.inttoptr(args[0], half.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return nt.void(nt.int64, nt.float32), emit


@intrinsic
def as_half(_typing: Any, value: Any) -> Any:
    """One fp32 rounded to fp16, widened."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fpext(builder.fptrunc(args[0], ir.HalfType()), ir.FloatType())

    return nt.float32(nt.float32), emit


@intrinsic
def load_byte(_typing: Any, address: Any) -> Any:
    """One int8, widened."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.sext(builder.load(builder.inttoptr(args[0], ir.IntType(8).as_pointer()), align=1), _I64)

    return nt.int64(nt.int64), emit


@intrinsic
def load_int16(_typing: Any, address: Any) -> Any:
    """One int16, widened."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.sext(builder.load(builder.inttoptr(args[0], ir.IntType(16).as_pointer()), align=2), _I64)

    return nt.int64(nt.int64), emit


@intrinsic
def load_bf16(_typing: Any, address: Any) -> Any:
    """One bf16, widened to fp32."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        upper = builder.load(builder.inttoptr(args[0], ir.IntType(16).as_pointer()), align=2)
        wide = builder.shl(builder.zext(upper, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, ir.FloatType())

    return nt.float32(nt.int64), emit


@intrinsic
def load_int(_typing: Any, address: Any) -> Any:
    """One int64."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], _I64.as_pointer()), align=8)

    return nt.int64(nt.int64), emit


@intrinsic
def load_unaligned(_typing: Any, address: Any) -> Any:
    """One int64 at any address."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], _I64.as_pointer()), align=1)

    return nt.int64(nt.int64), emit


@intrinsic
def load_int32(_typing: Any, address: Any) -> Any:
    """One int32, widened."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(32).as_pointer())
        return builder.sext(builder.load(pointer, align=4), _I64)

    return nt.int64(nt.int64), emit


def _store_low(bits: int) -> tuple[Any, Any]:
    """What an intrinsic that writes so many of an int64's bits returns."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        low = builder.trunc(args[1], ir.IntType(bits))
        builder.store(low, builder.inttoptr(args[0], low.type.as_pointer()), align=bits // 8)
        return context.get_dummy_value()

    return nt.void(nt.int64, nt.int64), emit


@intrinsic
def store_int32(_typing: Any, address: Any, value: Any) -> Any:
    """Write the lower half of an int64."""
    return _store_low(32)


@intrinsic
def store_int16(_typing: Any, address: Any, value: Any) -> Any:
    """Write the lower quarter of an int64."""
    return _store_low(16)


@intrinsic
def store_int(_typing: Any, address: Any, value: Any) -> Any:
    """Write one int64."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], _I64.as_pointer()), align=8)
        return context.get_dummy_value()

    return nt.void(nt.int64, nt.int64), emit


@intrinsic
def set_byte(_typing: Any, address: Any) -> Any:
    """Write 1 to a byte."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte = ir.IntType(8)
        builder.store(ir.Constant(byte, 1), builder.inttoptr(args[0], byte.as_pointer()), align=1)
        return context.get_dummy_value()

    return nt.void(nt.int64), emit


@intrinsic
def add_int(_typing: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at an address and return what it was. Whoever adds or looks later sees earlier writes."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "acq_rel")

    return nt.int64(nt.int64, nt.int64), emit


@intrinsic
def look_int(_typing: Any, address: Any) -> Any:
    """The int64 at an address to which other threads add."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "acquire", 8)

    return nt.int64(nt.int64), emit


@intrinsic
def relax(_typing: Any) -> Any:
    """Tell the processor that a loop waits. Nothing on other processors than x86."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if platform.machine().lower() in ("x86_64", "amd64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return nt.void(), emit


@intrinsic
def call_unit(_typing: Any, function: Any, arguments: Any, unit: Any, worker: Any) -> Any:
    """Call the C function at an address."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64, _I64, _I64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return nt.void(nt.int64, nt.int64, nt.int64, nt.int64), emit


@intrinsic
def prefetch(_typing: Any, address: Any) -> Any:
    """Ask for the cache line of an address that will be read soon, into the second cache: it has more lines under way
    than the first one, where a burst of them would make the processor wait."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        i32, pointer = ir.IntType(32), builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [pointer, *(ir.Constant(i32, value) for value in (0, 2, 1))])
        return context.get_dummy_value()

    return nt.void(nt.int64), emit
