"""Weights as files hold them, plain or in ggml's blocks, to fp32: bit for bit what the `gguf` package makes of them.

Blocks of 32, one scale d and perhaps one minimum m, both fp16; byte j of 16 holds element j in its low and element
j + 16 in its high nibble. Q4_0: d, codes, w = d * (q - 8). Q4_1: d, m, codes, w = d * q + m. Q5_0 and Q5_1: the fifth
bits in four bytes before the codes, w = d * (q - 16) and d * q + m. Q8_0: d, 32 signed bytes.

Blocks of 256. Q4_K: d, dmin, 8 scales and 8 minima of six bits in 12 bytes, 128 bytes of which 32 hold 32 elements in
their low and the next 32 in their high nibbles. Q5_K: the fifth bits in 32 bytes before those, bit i of byte j that of
element 32 i + j. Q6_K: lower four bits, upper two, 16 signed scales, d.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba.core.types as nt
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from deepinfer.kernels.codecs import BF16, FP16, FP32, INT8
from deepinfer.kernels.cpu.codecs import VI8, decode
from deepinfer.kernels.cpu.vec16 import F32, LANES, VF32, VI32, constant, load, offset, spread, store

_I8, _HALF = ir.IntType(8), ir.HalfType()
_I32 = ir.IntType(32)


def _half(builder: Any, address: Any) -> Any:
    """One fp16, widened."""
    return builder.fpext(builder.load(builder.inttoptr(address, _HALF.as_pointer()), align=2), F32)


def _byte(builder: Any, address: Any, widen: str = "zext") -> Any:
    value = builder.load(builder.inttoptr(address, _I8.as_pointer()), align=1)
    return getattr(builder, widen)(value, _I32)


def _bytes(builder: Any, address: Any) -> Any:
    return builder.zext(load(builder, address, VI8, 1), VI32)


def _field(builder: Any, words: Any, shift: int, mask: int, to: int = 0) -> Any:
    """Of every lane (or a scalar): the bits of `mask` above `shift`, moved up to bit `to`."""
    kind = words.type
    number = (lambda value: constant(value, VI32)) if kind == VI32 else (lambda value: ir.Constant(kind, value))
    found = builder.and_(builder.lshr(words, number(shift)) if shift else words, number(mask))
    return builder.shl(found, number(to)) if to else found


def _scaled(builder: Any, factor: Any, codes: Any, less: int = 0) -> Any:
    """factor * (codes - less)."""
    codes = builder.sub(codes, constant(less, VI32)) if less else codes
    return builder.fmul(spread(builder, factor), builder.sitofp(codes, VF32))


def _nibbles(builder: Any, block: Any, codes: int, fifths: int | None) -> list[Any]:
    """The 32 codes of 16 bytes and, if there are any, of four bytes of fifth bits."""
    words = _bytes(builder, offset(builder, block, codes))
    found = [_field(builder, words, 4 * half, 0x0F) for half in range(2)]
    if fifths is None:
        return found
    place = builder.inttoptr(offset(builder, block, fifths), _I32.as_pointer())
    bits = spread(builder, builder.load(place, align=1))
    for half in range(2):
        lanes = ir.Constant(VI32, [LANES * half + lane for lane in range(LANES)])
        fifth = builder.and_(builder.lshr(bits, lanes), constant(1, VI32))
        found[half] = builder.or_(found[half], builder.shl(fifth, constant(4, VI32)))
    return found


def _centred(builder: Any, block: Any, codes: int, fifths: int | None, less: int) -> list[Any]:
    scale = _half(builder, block)
    return [_scaled(builder, scale, part, less) for part in _nibbles(builder, block, codes, fifths)]


def _with_minimum(builder: Any, block: Any, codes: int, fifths: int | None) -> list[Any]:
    scale, minimum = _half(builder, block), spread(builder, _half(builder, offset(builder, block, 2)))
    parts = _nibbles(builder, block, codes, fifths)
    return [builder.fadd(_scaled(builder, scale, part), minimum) for part in parts]


def _q8_0(builder: Any, block: Any) -> list[Any]:
    scale = spread(builder, _half(builder, block))
    places = (offset(builder, block, 2 + at) for at in (0, LANES))
    return [builder.fmul(scale, decode(builder, INT8.number, place)) for place in places]


def k_factors(builder: Any, block: Any, part: int) -> tuple[Any, Any]:
    """d * scale and dmin * minimum of 32 weights of a Q4_K or Q5_K block."""
    low, high, both = (_byte(builder, offset(builder, block, at + part % 4)) for at in (4, 8, 12))
    scale, minimum = _field(builder, low, 0, 0x3F), _field(builder, high, 0, 0x3F)
    if part >= 4:
        scale = builder.or_(_field(builder, both, 0, 0x0F), _field(builder, low, 6, 0x03, 4))
        minimum = builder.or_(_field(builder, both, 4, 0x0F), _field(builder, high, 6, 0x03, 4))
    d, dmin = _half(builder, block), _half(builder, offset(builder, block, 2))
    return builder.fmul(d, builder.sitofp(scale, F32)), builder.fmul(dmin, builder.sitofp(minimum, F32))


def _k_block(builder: Any, block: Any, codes: int, fifths: int | None) -> list[Any]:
    found = []
    for part in range(8):
        factor, least = k_factors(builder, block, part)
        for at in (0, LANES):
            words = _bytes(builder, offset(builder, block, codes + 32 * (part // 2) + at))
            code = _field(builder, words, 4 * (part % 2), 0x0F)
            if fifths is not None:
                fifth = _bytes(builder, offset(builder, block, fifths + at))
                code = builder.or_(code, _field(builder, fifth, part, 1, 4))
            found.append(builder.fsub(_scaled(builder, factor, code), spread(builder, least)))
    return found


def _q6_k(builder: Any, block: Any) -> list[Any]:
    d, found = _half(builder, offset(builder, block, 208)), []
    for part in range(16):
        half, quarter, at = part // 8, part // 2 % 4, LANES * (part % 2)
        low = _bytes(builder, offset(builder, block, 64 * half + 32 * (quarter % 2) + at))
        high = _bytes(builder, offset(builder, block, 128 + 32 * half + at))
        code = builder.or_(_field(builder, low, 4 * (quarter // 2), 0x0F), _field(builder, high, 2 * quarter, 3, 4))
        scale = builder.sitofp(_byte(builder, offset(builder, block, 192 + part), "sext"), F32)
        found.append(_scaled(builder, builder.fmul(d, scale), code, 32))
    return found


class FileType(NamedTuple):
    name: str
    size: int
    """Bytes of a block."""
    weights: int
    """Of a block. Plain floats come sixteen at a time, but may end anywhere."""
    decode: Callable[[Any, Any], list[Any]]
    """(builder, address of a block): its weights in vectors of sixteen fp32."""
    is_plain: bool = False


def _plain(codec: Any) -> FileType:
    names = {FP32: "F32", FP16: "F16", BF16: "BF16"}
    return FileType(names[codec], LANES * codec.itemsize, LANES, lambda b, at: [decode(b, codec.number, at)], True)


FILE_TYPES = (
    _plain(FP32),
    _plain(FP16),
    _plain(BF16),
    FileType("Q8_0", 34, 32, _q8_0),
    FileType("Q4_0", 18, 32, lambda b, at: _centred(b, at, 2, None, 8)),
    FileType("Q4_1", 20, 32, lambda b, at: _with_minimum(b, at, 4, None)),
    FileType("Q5_0", 22, 32, lambda b, at: _centred(b, at, 6, 2, 16)),
    FileType("Q5_1", 24, 32, lambda b, at: _with_minimum(b, at, 8, 4)),
    FileType("Q4_K", 144, 256, lambda b, at: _k_block(b, at, 16, None)),
    FileType("Q5_K", 176, 256, lambda b, at: _k_block(b, at, 48, 16)),
    FileType("Q6_K", 210, 256, _q6_k),
)
NUMBER_OF = {kind.name: number for number, kind in enumerate(FILE_TYPES)}
STRETCH = 256
"""Weights of a row that are decoded at a time: a whole number of blocks of every type."""


@intrinsic
def decode_blocks(_typing: Any, number: Any, row: Any, first: Any, count: Any, out: Any) -> Any:
    """Weights `first` to `first + count` of a row of FILE_TYPES[number], as fp32 to `out`; the last ones only as far as
    there are whole blocks. `first` is a multiple of the weights of a block."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        number, row, first, count, out = args
        end = builder.append_basic_block("decoded")
        switch = builder.switch(number, end)
        for value, kind in enumerate(FILE_TYPES):
            case = builder.append_basic_block(kind.name)
            switch.add_case(ir.Constant(number.type, value), case)
            builder.position_at_end(case)
            weights, size = (ir.Constant(count.type, n) for n in (kind.weights, kind.size))
            begin = builder.add(row, builder.mul(builder.sdiv(first, weights), size))
            with cgutils.for_range(builder, builder.sdiv(count, weights)) as loop:
                block = builder.add(begin, builder.mul(loop.index, size))
                target = builder.add(out, builder.mul(loop.index, ir.Constant(count.type, 4 * kind.weights)))
                for at, vector in enumerate(kind.decode(builder, block)):
                    store(builder, offset(builder, target, 4 * LANES * at), vector)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return nt.void(nt.int64, nt.int64, nt.int64, nt.int64, nt.int64), emit


@intrinsic
def k_numbers(_typing: Any, block: Any, out: Any) -> Any:
    """Scale and minimum (to be subtracted) of each 32 weights of a Q4_K block: sixteen fp32."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        for part in range(8):
            for at, number in enumerate(k_factors(builder, args[0], part)):
                builder.store(number, builder.inttoptr(offset(builder, args[1], 8 * part + 4 * at), F32.as_pointer()))
        return context.get_dummy_value()

    return nt.void(nt.int64, nt.int64), emit
