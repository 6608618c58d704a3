"""GGUF blocks of 5, 6 and 8 bits to fp32, operation by operation as the `gguf` package does it: bit for bit the same.

Q8_0, 34 bytes: d, 32 codes. Q6_K, 210 bytes: lower four bits of 256 codes, upper two, 16 scales, d. Q5_K, 176 bytes: d,
dmin, 8 scales and 8 minima of six bits in 12 bytes, upper bits of 256 codes, lower four.
"""

from __future__ import annotations

import functools

import numpy as np

from deepinfer.kernels.codecs import INT8
from deepinfer.kernels.cpu.codecs import load16
from deepinfer.kernels.cpu.jit import helper
from deepinfer.kernels.cpu.memory import load_byte, load_half, load_int, load_unaligned, store_int
from deepinfer.kernels.cpu.repack import run_task
from deepinfer.kernels.cpu.tasks import Task, unit
from deepinfer.kernels.cpu.vec16 import LANES, mul, splat, store_f32, sub

_INT8 = INT8.number
_KINDS = {"Q8_0": (0, 34, 32), "Q5_K": (1, 176, 256), "Q6_K": (2, 210, 256)}
"""Number, bytes of a block, and its weights."""
TYPES = tuple(_KINDS)
_SHARE = 1 << 14
"""Weights that a thread takes before it looks for more."""
_CODES_AT = 3 * 256
"""Codes of a block wait in the last quarter of its result, where what is written does not reach unread ones."""
_NIBBLE, _TWO, _ONE = 0x0F0F0F0F0F0F0F0F, 0x0303030303030303, 0x0101010101010101
_TOP, _OFFSET = 0x8080808080808080 - (1 << 64), 0x2020202020202020


def dequantise_blocks(type_name: str, raw: np.ndarray) -> np.ndarray:
    """raw: uint8 [rows, bytes], contiguous, of one of `TYPES`. Gives fp32 [rows, columns]."""
    kind, size, weights = _KINDS[type_name]
    if raw.dtype != np.uint8 or not raw.flags.c_contiguous or raw.shape[1] % size:
        raise ValueError(f"rows of {raw.shape[1]} bytes of {raw.dtype} are no blocks of {size} ({type_name})")
    out = np.empty((len(raw), raw.shape[1] // size * weights), np.float32)
    count, share = raw.size // size, _SHARE // weights
    arguments = (raw.ctypes.data, out.ctypes.data, count, size, weights, share)
    run_task(Task(_unit_of(kind), -(-count // share), arguments), out.size)
    return out


@helper
def _spread(codes, first, count, factor, minimum, out):  # type: ignore[no-untyped-def]
    """factor * code - minimum of `count` int8 codes."""
    for at in range(first, first + count, LANES):
        store_f32(out + 4 * at, sub(mul(load16(_INT8, codes + at), splat(factor)), splat(minimum)))


@helper
def _eight_bits(block, out):  # type: ignore[no-untyped-def]
    factor = splat(load_half(block))
    for at in range(0, 32, LANES):
        store_f32(out + 4 * at, mul(load16(_INT8, block + 2 + at), factor))


@helper
def _five_bits(block, out):  # type: ignore[no-untyped-def]
    codes = out + _CODES_AT
    for part in range(8):
        for at in range(0, 32, 8):
            low = load_unaligned(block + 48 + 32 * (part // 2) + at) >> (4 * (part % 2)) & _NIBBLE
            store_int(codes + 32 * part + at, low | (load_unaligned(block + 16 + at) >> part & _ONE) << 4)
    for part in range(8):
        low, high = load_byte(block + 4 + part % 4), load_byte(block + 8 + part % 4)
        both = load_byte(block + 12 + part % 4)
        scale, minimum = low & 0x3F, high & 0x3F
        if part >= 4:
            scale, minimum = both & 0x0F | low >> 2 & 0x30, both >> 4 & 0x0F | high >> 2 & 0x30
        factor, least = load_half(block) * np.float32(scale), load_half(block + 2) * np.float32(minimum)
        _spread(codes, 32 * part, 32, factor, least, out)


@helper
def _six_bits(block, out):  # type: ignore[no-untyped-def]
    codes = out + _CODES_AT
    for part in range(8):
        half, quarter = part // 4, part % 4
        for at in range(0, 32, 8):
            low = load_unaligned(block + 64 * half + 32 * (quarter % 2) + at) >> (4 * (quarter // 2)) & _NIBBLE
            high = load_unaligned(block + 128 + 32 * half + at) >> (2 * quarter) & _TWO
            # Less 32 in every byte, without a borrow from its neighbour.
            store_int(codes + 32 * part + at, ((low | high << 4 | _TOP) - _OFFSET) ^ _TOP)
    for part in range(16):
        factor = splat(load_half(block + 208) * np.float32(load_byte(block + 192 + part)))
        store_f32(out + 64 * part, mul(load16(_INT8, codes + 16 * part), factor))


@functools.cache
def _unit_of(kind: int) -> int:
    """(blocks, out, number of blocks, bytes of a block, its weights, blocks of a unit)."""

    @unit
    def dequantise(arguments, index, worker):  # type: ignore[no-untyped-def]
        blocks, out, count = load_int(arguments), load_int(arguments + 8), load_int(arguments + 16)
        size, weights, share = load_int(arguments + 24), load_int(arguments + 32), load_int(arguments + 40)
        for block in range(index * share, min((index + 1) * share, count)):
            source, target = blocks + size * block, out + 4 * weights * block
            if kind == 0:
                _eight_bits(source, target)
            elif kind == 1:
                _five_bits(source, target)
            else:
                _six_bits(source, target)

    return dequantise.address
