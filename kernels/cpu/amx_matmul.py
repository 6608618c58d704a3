"""The matmul of `packed_matmul` by matrix tiles."""

from __future__ import annotations

import functools

import numpy as np
from numba import literally

from deepinfer.kernels.codecs import BF16, FP32
from deepinfer.kernels.cpu.activation_forms import group_sum
from deepinfer.kernels.cpu.amx import ROWS, TILE_BYTES, let_go_of_tiles, set_up_tiles, stack_memory
from deepinfer.kernels.cpu.amx_products import add_products, decode_tiles, store_output
from deepinfer.kernels.cpu.bf16_dot import VECTOR_BYTES
from deepinfer.kernels.cpu.jit import helper, shared_helper
from deepinfer.kernels.cpu.memory import load_int, store_float
from deepinfer.kernels.cpu.records import BLOCK, P_BF16, record_bytes
from deepinfer.kernels.cpu.tasks import unit
from deepinfer.kernels.cpu.vec16 import load_f32, splat, store_f32

MOST_ROWS = 256
"""That go through the blocks together: tiles of weights are made once for them."""
_PIECE = 1024
"""k whose tiles are made at a time: they stay in the caches while the rows go by."""
_TOTALS_BYTES, _TILES_BYTES = MOST_ROWS * VECTOR_BYTES, _PIECE * 2 * BLOCK


@helper
def padded_rows(rows):  # type: ignore[no-untyped-def]
    """To whole tiles."""
    return (rows + ROWS - 1) // ROWS * ROWS


@helper
def operands(arguments):  # type: ignore[no-untyped-def]
    """Of `PackedUnits.matmul`: x, w, bias, sums, y, rows, blocks, groups."""
    return (
        load_int(arguments), load_int(arguments + 8), load_int(arguments + 16), load_int(arguments + 24),
        load_int(arguments + 32), load_int(arguments + 40), load_int(arguments + 48), load_int(arguments + 56),
    )  # fmt: skip


@helper
def share_of(arguments, index, row_tile):  # type: ignore[no-untyped-def]
    """What unit `index` of `PackedUnits.matmul` takes: rows from which one on, blocks from which one to which."""
    num_blocks, share, units = load_int(arguments + 48), load_int(arguments + 64), load_int(arguments + 72)
    first = index % units * share
    return index // units * row_tile, first, min(first + share, num_blocks)


@shared_helper
def tile_products(  # type: ignore[no-untyped-def]
    kind, group, wide, rounded, out, x, x_stride, num_rows, sums, sums_stride, w, record, groups, bias, y, y_stride,
):  # fmt: skip
    """Up to `MOST_ROWS` rows against sixteen outputs. The tiles of this thread are set up for the rows that are left
    behind whole ones. rounded: the weights, to bf16. sums: as `add_products` has them, of all rows. record: bytes of
    one."""
    literally(kind)
    literally(group)
    literally(wide)
    literally(rounded)
    literally(out)
    totals, tiles, work = stack_memory(_TOTALS_BYTES), stack_memory(_TILES_BYTES), stack_memory(TILE_BYTES)
    # Rows that a tile lacks are summed as well, up to its sixteenth: nothing there may be subnormal, which is slow.
    for row in range(ROWS):
        store_f32(work + row * VECTOR_BYTES, splat(np.float32(0.0)))
    offsets = load_f32(bias)
    for row in range(padded_rows(num_rows)):
        store_f32(totals + row * VECTOR_BYTES, offsets)
    step = _PIECE // group
    for first in range(0, groups, step):
        count, records = min(step, groups - first), w + first * record
        if kind == P_BF16:
            ready = records
        else:
            ready = tiles
            decode_tiles(kind, group, wide, rounded, records, count, tiles)
        for row in range(0, num_rows, ROWS):
            left, total = num_rows - row, totals + row * VECTOR_BYTES
            x_at, sums_at = x + row * x_stride + first * group * 2, sums + 4 * row + first * sums_stride
            add_products(
                kind, group, wide, rounded, left, x_at, x_stride, sums_at, sums_stride, ready, records, count, total,
                work,
            )  # fmt: skip
    for row in range(num_rows):
        store_output(out, y + row * y_stride, load_f32(totals + row * VECTOR_BYTES))


@functools.cache
def matmul_unit(kind: int, group: int, wide: bool, out_bf16: bool, rounded: bool) -> int:
    """The address of `PackedUnits.matmul` by tiles, for row tiles of `MOST_ROWS`. rounded (P_INT4):
    weights are rounded to bf16 before they are multiplied, and no sums are read."""
    record, is_wide, is_rounded = record_bytes(kind, group, wide), int(wide), int(rounded)
    out = BF16 if out_bf16 else FP32
    out_number, block_bytes = out.number, out.itemsize * BLOCK

    @unit
    def matmul_by_tiles(arguments, index, worker):  # type: ignore[no-untyped-def]
        x, w, bias, sums, y, num_rows, num_blocks, groups = operands(arguments)
        row, first, end = share_of(arguments, index, MOST_ROWS)
        x_stride, y_stride, rows = 2 * group * groups, block_bytes * num_blocks, min(num_rows - row, MOST_ROWS)
        set_up_tiles((rows - 1) % ROWS + 1)
        for block in range(first, end):
            tile_products(
                kind, group, is_wide, is_rounded, out_number, x + row * x_stride, x_stride, rows, sums + 4 * row,
                4 * padded_rows(num_rows), w + block * record * groups, record, groups, bias + 4 * BLOCK * block,
                y + row * y_stride + block * block_bytes, y_stride,
            )  # fmt: skip
        let_go_of_tiles()

    return matmul_by_tiles.address


@functools.cache
def sums_unit(group: int) -> int:
    """The address of `PackedUnits.sums` by tiles: (x, sums fp32 [groups, padded_rows(rows)], groups, rows)."""

    @unit
    def sums_of_row(arguments, index, worker):  # type: ignore[no-untyped-def]
        x, sums, groups = load_int(arguments), load_int(arguments + 8), load_int(arguments + 16)
        padded = padded_rows(load_int(arguments + 24))
        for g in range(groups):
            store_float(sums + 4 * (g * padded + index), group_sum(group, x + 2 * group * (index * groups + g)))

    return sums_of_row.address
