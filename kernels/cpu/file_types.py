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

from deepinfer.kernels.codecs import BF16, FP16, FP32
from deepinfer.kernels.cpu.bf16_dot import VECTOR_BYTES, WORDS, available, round_pairs
from deepinfer.kernels.cpu.codecs import decode, round_bf16
from deepinfer.kernels.cpu.vec16 import F32, I32, LANES, VF32, VI32, load, offset, shuffle, spread, store

_I8, _HALF = ir.IntType(8), ir.HalfType()
_CODES = 32
"""Of a vector of bytes: codes are put together as bytes, before they become floats."""
_BYTES = ir.VectorType(_I8, _CODES)


def _half(builder: Any, address: Any) -> Any:
    """One fp16, widened."""
    return builder.fpext(builder.load(builder.inttoptr(address, _HALF.as_pointer()), align=2), F32)


def _byte(builder: Any, address: Any, widen: str = "zext") -> Any:
    value = builder.load(builder.inttoptr(address, _I8.as_pointer()), align=1)
    return getattr(builder, widen)(value, I32)


def _all(value: int, kind: Any) -> Any:
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def _field(builder: Any, words: Any, shift: int, mask: int, to: int = 0) -> Any:
    """Of every element: the bits of `mask` above `shift`, moved up to bit `to`."""
    kind = words.type
    found = builder.and_(builder.lshr(words, _all(shift, kind)) if shift else words, _all(mask, kind))
    return builder.shl(found, _all(to, kind)) if to else found


def _floats(builder: Any, codes: Any) -> list[Any]:
    """Both halves of 32 signed bytes."""
    halves = [shuffle(builder, codes, codes, list(range(at, at + LANES))) for at in (0, LANES)]
    return [builder.sitofp(builder.sext(half, VI32), VF32) for half in halves]


def _scaled(builder: Any, factor: Any, codes: Any, less: int = 0) -> list[Any]:
    """factor * (codes - less)."""
    codes = builder.sub(codes, _all(less, _BYTES)) if less else codes
    return [builder.fmul(spread(builder, factor), part) for part in _floats(builder, codes)]


def _nibbles(builder: Any, block: Any, codes: int, fifths: int | None) -> Any:
    """The 32 codes of 16 bytes and, if there are any, of four bytes of fifth bits."""
    pairs = load(builder, offset(builder, block, codes), ir.VectorType(_I8, LANES), 1)
    halves = [_field(builder, pairs, 4 * half, 0x0F) for half in range(2)]
    found = shuffle(builder, *halves, list(range(_CODES)))
    if fifths is None:
        return found
    bits = builder.load(builder.inttoptr(offset(builder, block, fifths), I32.as_pointer()), align=1)
    is_set = builder.bitcast(bits, ir.VectorType(ir.IntType(1), _CODES))
    return builder.select(is_set, builder.or_(found, _all(16, _BYTES)), found)


def _centred(builder: Any, block: Any, codes: int, fifths: int | None, less: int) -> list[Any]:
    return _scaled(builder, _half(builder, block), _nibbles(builder, block, codes, fifths), less)


def _with_minimum(builder: Any, block: Any, codes: int, fifths: int | None) -> list[Any]:
    scale, minimum = _half(builder, block), spread(builder, _half(builder, offset(builder, block, 2)))
    parts = _scaled(builder, scale, _nibbles(builder, block, codes, fifths))
    return [builder.fadd(part, minimum) for part in parts]


def _q8_0(builder: Any, block: Any) -> list[Any]:
    return _scaled(builder, _half(builder, block), load(builder, offset(builder, block, 2), _BYTES, 1))


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
        pairs = load(builder, offset(builder, block, codes + 32 * (part // 2)), _BYTES, 1)
        code = _field(builder, pairs, 4 * (part % 2), 0x0F)
        if fifths is not None:
            fifth = load(builder, offset(builder, block, fifths), _BYTES, 1)
            code = builder.or_(code, _field(builder, fifth, part, 1, 4))
        found += [builder.fsub(half, spread(builder, least)) for half in _scaled(builder, factor, code)]
    return found


def _q6_k(builder: Any, block: Any) -> list[Any]:
    d, found = _half(builder, offset(builder, block, 208)), []
    for part in range(8):
        half, quarter = part // 4, part % 4
        low = load(builder, offset(builder, block, 64 * half + 32 * (quarter % 2)), _BYTES, 1)
        high = load(builder, offset(builder, block, 128 + 32 * half), _BYTES, 1)
        code = builder.or_(_field(builder, low, 4 * (quarter // 2), 0x0F), _field(builder, high, 2 * quarter, 3, 4))
        for at, codes in enumerate(_floats(builder, builder.sub(code, _all(32, _BYTES)))):
            scale = builder.sitofp(_byte(builder, offset(builder, block, 192 + 2 * part + at), "sext"), F32)
            found.append(builder.fmul(spread(builder, builder.fmul(d, scale)), codes))
    return found


class FileType(NamedTuple):
    name: str
    size: int
    """Bytes of a block."""
    weights: int
    """Of a block. Plain floats come 32 at a time, but may end anywhere."""
    decode: Callable[[Any, Any], list[Any]]
    """(builder, address of a block): its weights in vectors of sixteen fp32."""
    is_plain: bool = False


def _plain(codec: Any) -> FileType:
    names = {FP32: "F32", FP16: "F16", BF16: "BF16"}

    def decode_both(builder: Any, address: Any) -> list[Any]:
        return [decode(builder, codec.number, offset(builder, address, at * codec.itemsize)) for at in (0, LANES)]

    return FileType(names[codec], _CODES * codec.itemsize, _CODES, decode_both, True)


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


def round_chunk(builder: Any, low: Any, high: Any) -> Any:
    """32 fp32 rounded to bf16, as words."""
    return shuffle(builder, round_bf16(builder, low), round_bf16(builder, high), list(range(_CODES)))


def _narrowed(builder: Any, kind: FileType, block: Any) -> list[Any]:
    """The weights of a block rounded to bf16, in vectors of 32 words. The processor's own rounding makes zeros of
    fp32's subnormals, which only plain floats can be: the numbers of blocks are multiples of 2^-24."""
    if kind.name == "BF16":
        return [load(builder, block, WORDS, 2)]
    vectors = kind.decode(builder, block)
    pairs = zip(vectors[::2], vectors[1::2], strict=True)
    if available() and not kind.is_plain:
        return [builder.bitcast(round_pairs(builder, *pair), WORDS) for pair in pairs]
    return [round_chunk(builder, *pair) for pair in pairs]


def _prefetch(builder: Any, begin: Any, kind: FileType) -> None:
    """The next stretch of a row, which is read after this one of fifteen others: the processor does not foresee blocks
    of odd sizes in so many places."""
    size = STRETCH // kind.weights * kind.size
    kinds = [ir.IntType(8).as_pointer(), I32, I32, I32]
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), kinds), "llvm.prefetch.p0")
    for at in range(size, 2 * size + VECTOR_BYTES, VECTOR_BYTES):
        place = builder.inttoptr(offset(builder, begin, at), kinds[0])
        builder.call(function, [place, *(ir.Constant(I32, value) for value in (0, 3, 1))])


def _decode_blocks(builder: Any, is_narrow: bool, args: Any) -> None:
    number, row, first, count, out = args
    width = 2 if is_narrow else 4
    end = builder.append_basic_block("decoded")
    switch = builder.switch(number, end)
    for value, kind in enumerate(FILE_TYPES):
        case = builder.append_basic_block(kind.name)
        switch.add_case(ir.Constant(number.type, value), case)
        builder.position_at_end(case)
        weights, size = (ir.Constant(count.type, n) for n in (kind.weights, kind.size))
        begin = builder.add(row, builder.mul(builder.sdiv(first, weights), size))
        if is_narrow and not kind.is_plain:
            _prefetch(builder, begin, kind)
        with cgutils.for_range(builder, builder.sdiv(count, weights)) as loop:
            block = builder.add(begin, builder.mul(loop.index, size))
            target = builder.add(out, builder.mul(loop.index, ir.Constant(count.type, width * kind.weights)))
            for at, vector in enumerate(_narrowed(builder, kind, block) if is_narrow else kind.decode(builder, block)):
                store(builder, offset(builder, target, VECTOR_BYTES * at), vector, width)
        builder.branch(end)
    builder.position_at_end(end)


@intrinsic
def decode_wide(_typing: Any, number: Any, row: Any, first: Any, count: Any, out: Any) -> Any:
    """Weights `first` to `first + count` of a row of FILE_TYPES[number], as fp32 to `out`; the last ones only as far as
    there are whole blocks. `first` is a multiple of the weights of a block."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _decode_blocks(builder, False, args)
        return context.get_dummy_value()

    return nt.void(nt.int64, nt.int64, nt.int64, nt.int64, nt.int64), emit


@intrinsic
def decode_narrow(_typing: Any, number: Any, row: Any, first: Any, count: Any, out: Any) -> Any:
    """The same, rounded to bf16."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _decode_blocks(builder, True, args)
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
