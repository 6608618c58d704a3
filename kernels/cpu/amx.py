"""The processor's matrix tiles (AMX-BF16): sixteen rows of 32 bf16 times 32 bf16 of sixteen columns, added to fp32.

A tile of the first operand is [16, 32]: rows of bf16. One of the second is [16, 16, 2] (pair of k, column, k of the
pair), as packed weights and tiles of keys and values lie. Sums are [16, 16] fp32; even and odd k are summed apart.
A thread sets its tiles up before it uses them and lets go of them afterwards, so that none is saved when it waits.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
from typing import Any

import numba.core.types as nt
from llvmlite import binding, ir
from numba.core import cgutils
from numba.extending import intrinsic

from deepinfer.kernels.cpu.vec16 import call, literal_values, offset

log = logging.getLogger(__name__)

ROWS = 16
"""Of a tile; and columns of sums."""
DEPTH = 32
"""k of a tile."""
TILE_BYTES = 1024
SUMS, ROW_TILE, COLUMN_TILE, SUMS_OF_REST, ROW_TILE_OF_REST = range(5)
"""Tile registers. Those of the rest have as many rows as `set_up_tiles` says."""
_BYTE, _VOID = ir.IntType(8), ir.VoidType()
_PLACE = _BYTE.as_pointer()
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Numbers of Linux on x86-64: a process asks once before it may use tiles."""


@functools.cache
def available() -> bool:
    """Whether this processor has tiles for bf16 and the system lets this process use them. Logs it if it does not."""
    features = binding.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16")) or platform.system() != "Linux":
        return False
    system_call = ctypes.CDLL(None, use_errno=True).syscall
    if system_call(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) != 0:
        reason = os.strerror(ctypes.get_errno())
        log.warning("the processor has AMX, but the system does not let this process use it (%s): slower", reason)
        return False
    return True


def _place(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _PLACE)


def _register(tile: int) -> Any:
    return ir.Constant(_BYTE, tile)


def zero_tile(builder: Any, tile: int) -> None:
    call(builder, "llvm.x86.tilezero", _VOID, _register(tile))


def load_tile(builder: Any, tile: int, address: Any, stride: Any) -> None:
    """Rows of 64 bytes, `stride` bytes apart."""
    call(builder, "llvm.x86.tileloadd64", _VOID, _register(tile), _place(builder, address), stride)


def store_tile(builder: Any, tile: int, address: Any, stride: Any) -> None:
    call(builder, "llvm.x86.tilestored64", _VOID, _register(tile), _place(builder, address), stride)


def multiply_tiles(builder: Any, sums: int, rows: int, columns: int) -> None:
    """Adds the products of two tiles to a third. Subnormals count as zero."""
    call(builder, "llvm.x86.tdpbf16ps", _VOID, _register(sums), _register(rows), _register(columns))


def emit_set_up(builder: Any, rest: Any) -> None:
    """Gives this thread its tiles: of full size, and for `rest` rows, 1 .. 16. It takes as long as ten products."""
    last = builder.trunc(rest, _BYTE)
    config = cgutils.alloca_once(builder, ir.ArrayType(_BYTE, 64))
    builder.store(ir.Constant(ir.ArrayType(_BYTE, 64), bytearray([1] + [0] * 63)), config)
    start = builder.ptrtoint(config, ir.IntType(64))
    for tile in range(ROW_TILE_OF_REST + 1):
        width, height = offset(builder, start, 16 + 2 * tile), offset(builder, start, 48 + tile)
        builder.store(_register(64), _place(builder, width))
        builder.store(last if tile >= SUMS_OF_REST else _register(ROWS), _place(builder, height))
    call(builder, "llvm.x86.ldtilecfg", _VOID, _place(builder, start))


def emit_let_go(builder: Any) -> None:
    """This thread has no tiles then."""
    call(builder, "llvm.x86.tilerelease", _VOID)


@intrinsic
def set_up_tiles(_typing: Any, rest: Any) -> Any:
    """See `emit_set_up`."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        emit_set_up(builder, args[0])
        return context.get_dummy_value()

    return nt.void(nt.int64), emit


@intrinsic
def let_go_of_tiles(_typing: Any) -> Any:
    """See `emit_let_go`."""

    def emit(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        emit_let_go(builder)
        return context.get_dummy_value()

    return nt.void(), emit


@intrinsic(prefer_literal=True)
def stack_memory(_typing: Any, size: Any):  # type: ignore[no-untyped-def]
    """The address of `size` (a literal) bytes of this function's own, aligned to a cache line."""
    literals = literal_values(size)
    if literals is None:
        return None
    (number,) = literals

    def emit(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        with builder.goto_entry_block():  # numba's own `alloca_once` would fill it with zeros, byte by byte
            place = builder.alloca(ir.ArrayType(_BYTE, number))
        place.align = 64
        return builder.ptrtoint(place, ir.IntType(64))

    return nt.int64(size), emit
