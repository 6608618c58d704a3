"""Single values at addresses, for compiled kernels. Who passes an address keeps its memory alive."""

from __future__ import annotations

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
def fetch_add(_typing: Any, address: Any) -> Any:
    """Add one to the int64 at an address and return what it was: hands out work to threads."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(_I64, 1), "monotonic")

    return nt.int64(nt.int64), emit


@intrinsic
def prefetch(_typing: Any, address: Any) -> Any:
    """Ask for the cache line of an address that will be read soon."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        i32, pointer = ir.IntType(32), builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [pointer, *(ir.Constant(i32, value) for value in (0, 3, 1))])
        return context.get_dummy_value()

    return nt.void(nt.int64), emit
