"""Weights from the order of files into the order of kernels: one pass, all threads, nothing held beside source and
target."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numba
import numpy as np

from deepinfer.kernels.cpu.jit import helper
from deepinfer.kernels.cpu.memory import (
    add_int,
    as_half,
    load_float,
    load_half,
    load_int,
    load_int16,
    load_int32,
    load_unaligned,
    store_float,
    store_half,
    store_int,
    store_int16,
    store_int32,
)
from deepinfer.kernels.cpu.records import BLOCK, CODE_BITS, record_bytes
from deepinfer.kernels.cpu.tasks import Program, Task, unit

_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F
_SPLIT_BYTES, _FIT_SHARE = 1 << 15, 1 << 14
"""What a thread takes before it looks for more: bytes to split, numbers to look at."""
WORTH_WAKING = 1 << 23
"""Codes, which one thread takes about two milliseconds for."""


def pack_records(
    kind: int, group: int, wide: bool, codes: int, factors: Sequence[int], records: int, rows: int, width: int
) -> None:
    """Writes every record of a matrix, laid out as `packed_products` says.

    codes: address of [rows, width]: uint8 0 .. 15, int8 or bf16. factors: of fp32 [rows, width / group], the scales and
    the minima, as far as the kind has them. What fills up the last records is zero.
    """
    scales, minima = (*factors, 0, 0)[:2]
    record = record_bytes(kind, group, wide)
    sizes = (rows, width, -(-width // group), group, record, CODE_BITS[kind], len(factors), int(wide))
    run_task(Task(_pack_unit(), -(-rows // BLOCK), (codes, scales, minima, records, *sizes)), rows * width)


def split_blocks(blocks: np.ndarray, halves: int, first: int, run: int) -> tuple[np.ndarray, np.ndarray]:
    """Of blocks that begin with fp16 numbers and end with bytes of two 4-bit codes: codes, uint8 [blocks, codes], and
    numbers, fp32 [halves, blocks].

    blocks: uint8 [blocks, bytes], contiguous. halves: how many numbers. first: where the codes begin. run: of so many
    bytes, a multiple of 8, the lower nibbles come before the upper ones.
    """
    count, size = blocks.shape
    if blocks.dtype != np.uint8 or not blocks.flags.c_contiguous or (size - first) % run or run % 8:
        raise ValueError(f"{blocks.dtype} blocks of {size} bytes do not hold runs of {run} from byte {first} on")
    codes, numbers = np.empty((count, 2 * (size - first)), np.uint8), np.empty((halves, count), np.float32)
    share = max(1, _SPLIT_BYTES // size)
    sizes = (count, size, halves, first, run, share)
    addresses = (blocks.ctypes.data, codes.ctypes.data, numbers.ctypes.data)
    run_task(Task(_split_unit(), -(-count // share), (*addresses, *sizes)), codes.nbytes)
    return codes, numbers


def fit_half(address: int, count: int) -> bool:
    """Whether fp16 holds all of `count` fp32 numbers exactly."""
    misfits = np.zeros(1, np.int64)
    units = -(-count // _FIT_SHARE)
    run_task(Task(_fit_unit(), units, (address, count, misfits.ctypes.data)), count)
    return not misfits[0]


def run_task(task: Task, num_bytes: int) -> None:
    """On all threads if that is worth waking them for. Where others use the cores as well, it takes milliseconds."""
    Program([task]).run(numba.get_num_threads() if num_bytes >= WORTH_WAKING else 1)


@helper
def eight_codes(codes):  # type: ignore[no-untyped-def]
    """Eight codes of a byte each as nibbles: c0 c2 c4 c6 in the lower 16 bits, c1 c3 c5 c7 in the upper ones."""
    codes |= codes >> 12
    return (codes & 0xFF) | (codes >> 24 & 0xFF00) | (codes << 8 & 0xFF0000) | (codes >> 16 & 0xFF000000)


@helper
def _pack_row(bits, codes, left, group, out):  # type: ignore[no-untyped-def]
    """An output's codes of one group, of which `left` are there, into its lane of a record."""
    if bits == 4:
        for k in range(0, group, 8):
            store_int32(out + BLOCK // 2 * k, eight_codes(load_unaligned(codes + k)) if k < left else 0)
    elif bits == 8:
        for k in range(0, group, 2):
            store_int16(out + BLOCK * k, load_int16(codes + k) if k < left else 0)
    else:
        for k in range(0, group, 2):
            pair = 0
            if k + 1 < left:
                pair = load_int32(codes + 2 * k)
            elif k < left:
                pair = load_int16(codes + 2 * k) & 0xFFFF
            store_int32(out + 2 * BLOCK * k, pair)


@functools.cache
def _pack_unit() -> int:
    """(codes, scales, minima, records, and the sizes of `pack_records`): sixteen outputs for each unit."""

    @unit
    def pack(arguments, block, worker):  # type: ignore[no-untyped-def]
        codes, records = load_int(arguments), load_int(arguments + 24)
        rows, width, groups = load_int(arguments + 32), load_int(arguments + 40), load_int(arguments + 48)
        group, record, bits = load_int(arguments + 56), load_int(arguments + 64), load_int(arguments + 72)
        num_factors, wide = load_int(arguments + 80), load_int(arguments + 88)
        code_bytes = max(1, bits // 8)
        lane_bytes, factor_bytes = 2 if bits == 8 else 4, 4 if wide else 2
        for g in range(groups):
            out = records + (block * groups + g) * record
            factors = out + BLOCK * group * bits // 8
            for lane in range(BLOCK):
                row = block * BLOCK + lane
                left = min(group, width - g * group) if row < rows else 0
                _pack_row(bits, codes + code_bytes * (row * width + g * group), left, group, out + lane_bytes * lane)
                for number in range(num_factors):
                    value = np.float32(0.0)
                    if row < rows:
                        value = load_float(load_int(arguments + 8 + 8 * number) + 4 * (row * groups + g))
                    at = factors + factor_bytes * (number * BLOCK + lane)
                    if wide:
                        store_float(at, value)
                    else:
                        store_half(at, value)

    return pack.address


@functools.cache
def _split_unit() -> int:
    """(blocks, codes, numbers, and the sizes of `split_blocks`): `share` blocks for each unit."""

    @unit
    def split(arguments, index, worker):  # type: ignore[no-untyped-def]
        blocks, codes, numbers = load_int(arguments), load_int(arguments + 8), load_int(arguments + 16)
        count, size, halves = load_int(arguments + 24), load_int(arguments + 32), load_int(arguments + 40)
        first, run, share = load_int(arguments + 48), load_int(arguments + 56), load_int(arguments + 64)
        for block in range(index * share, min((index + 1) * share, count)):
            source = blocks + block * size
            target = codes + 2 * block * (size - first)
            for number in range(halves):
                store_float(numbers + 4 * (number * count + block), load_half(source + 2 * number))
            for begin in range(first, size, run):
                for at in range(begin, begin + run, 8):
                    pairs = load_unaligned(source + at)
                    store_int(target, pairs & _LOW_NIBBLES)
                    store_int(target + run, pairs >> 4 & _LOW_NIBBLES)
                    target += 8
                target += run

    return split.address


@functools.cache
def _fit_unit() -> int:
    """(numbers, count, misfits): `_FIT_SHARE` numbers for each unit."""

    @unit
    def fit(arguments, index, worker):  # type: ignore[no-untyped-def]
        numbers, misfits = load_int(arguments), 0
        for at in range(index * _FIT_SHARE, min((index + 1) * _FIT_SHARE, load_int(arguments + 8))):
            number = load_float(numbers + 4 * at)
            misfits += np.int64(as_half(number) != number)
        if misfits:
            add_int(load_int(arguments + 16), misfits)

    return fit.address
