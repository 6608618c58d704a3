"""The compiled paged attention, for each (K codec, V codec, activation dtype, head_dim, split key bias, soft
cap)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numba import literally

from deepinfer.kernels.codecs import BF16, FP32, Codec
from deepinfer.kernels.cpu import attend as fp32
from deepinfer.kernels.cpu import bf16_tiles, plan
from deepinfer.kernels.cpu.attend import MANY_ROWS, attend_part, attend_unit, fold_parts, read_as
from deepinfer.kernels.cpu.attend_pairs import attend_pairs, attend_segment, fold_segments, places
from deepinfer.kernels.cpu.bf16_rows import MATRIX_ROWS, row_record
from deepinfer.kernels.cpu.context import SEGMENT, block_at, first_seen, prefetch_first
from deepinfer.kernels.cpu.fp32_rows import fp32_record
from deepinfer.kernels.cpu.jit import helper
from deepinfer.kernels.cpu.kv_write import (
    make_storable,
    normalise_head,
    rotate_head,
    round_head,
    scale_head,
    store_head,
    unpack_head,
)
from deepinfer.kernels.cpu.memory import (
    add_int,
    load_float,
    load_int,
    load_int32,
    set_byte,
)
from deepinfer.kernels.cpu.tasks import unit


@helper
def write_head(  # type: ignore[no-untyped-def]
    k_codec, k_bytes, k_limit, v_codec, v_bytes, v_limit, act_codec, act_bytes, head_dim,
    rounded, layer, table, position, qkv, queries, head, scale, eps,
):  # fmt: skip
    """For one KV head of a row: rotate its query heads into `queries` (fp32, times `scale`), store its key and value.
    Returns how many elements were clamped and how many were not finite. `rounded`: to bf16, in the place of fp32."""
    literally(rounded)
    num_q, num_kv = load_int(layer + plan.NUM_Q_HEADS), load_int(layer + plan.NUM_KV_HEADS)
    cos = load_int(layer + plan.COS_ADDRESS) + 4 * position * (head_dim // 2)
    sin = load_int(layer + plan.SIN_ADDRESS) + 4 * position * (head_dim // 2)
    rotates = load_int(layer + plan.COS_ADDRESS) != 0
    shift = load_int(layer + plan.BLOCK_SHIFT)
    block = block_at(layer, table, position)
    head_bytes, group = act_bytes * head_dim, num_q // num_kv
    for member in range(head * group, (head + 1) * group):
        target = queries + 4 * head_dim * member
        unpack_head(act_codec, act_bytes, qkv + member * head_bytes, target, head_dim)
        if load_int(layer + plan.Q_WEIGHT_ADDRESS) != 0:
            normalise_head(target, load_int(layer + plan.Q_WEIGHT_ADDRESS), eps, head_dim)
        if rotates:
            rotate_head(target, cos, sin, scale, head_dim)
        else:
            scale_head(target, scale, head_dim)
        if rounded:
            round_head(target, head_dim)
    work = queries + 4 * head_dim * (num_q + head)
    place = (head << shift) + (position & ((1 << shift) - 1))
    unpack_head(act_codec, act_bytes, qkv + (num_q + head) * head_bytes, work, head_dim)
    if load_int(layer + plan.K_WEIGHT_ADDRESS) != 0:
        normalise_head(work, load_int(layer + plan.K_WEIGHT_ADDRESS), eps, head_dim)
    if rotates:
        rotate_head(work, cos, sin, np.float32(1.0), head_dim)
    saturated, nonfinite, largest = make_storable(work, k_limit, head_dim)
    codes = load_int(layer + plan.K_ADDRESS) + block + place * head_dim * k_bytes
    scale_at = load_int(layer + plan.K_SCALES_ADDRESS) + block + 2 * place
    store_head(k_codec, k_bytes, work, largest, codes, scale_at, head_dim)
    unpack_head(act_codec, act_bytes, qkv + (num_q + num_kv + head) * head_bytes, work, head_dim)
    above, bad, largest = make_storable(work, v_limit, head_dim)
    codes = load_int(layer + plan.V_ADDRESS) + block + place * head_dim * v_bytes
    scale_at = load_int(layer + plan.V_SCALES_ADDRESS) + block + 2 * place
    store_head(v_codec, v_bytes, work, largest, codes, scale_at, head_dim)
    return saturated + above, nonfinite + bad


class AttentionUnits(NamedTuple):
    """Addresses of unit functions that take the arguments of `Arguments`."""

    write: int
    """Stores the key and value of a row, one for each unit."""
    attend: int
    """One KV head of a tile of rows for each unit."""
    decode: int
    """Both, for tiles of one row whose sequence has no other: it reads no key but its own that is written now."""
    segment: int
    """One segment of a row's context and one KV head for each unit: [rows, kv heads, segments] of them. To STATES."""
    fold: int
    """One KV head of a row for each unit, from STATES."""


(
    LAYER,
    POSITIONS,
    ROW_SEQ,
    TABLES,
    TABLE_WIDTH,
    TILES,
    NONFINITE_ROWS,
    COUNTERS,
    QKV,
    OUT,
    QUERIES,
    SCRATCH,
    SCRATCH_BYTES,
    SCALE,
    EPS,
    STATES,
) = range(16)
"""Arguments: addresses of the layer's plan and of what `AttentionBatch` holds (NONFINITE_ROWS: bytes [rows], COUNTERS:
int64 [2] of this layer), of the activations, of the rotated queries fp32 [rows, heads, head_dim] and of each worker's
scratch. SCALE and EPS are fp32. STATES: where contexts are split, of an int64, the number of segments, in a cache line
of its own, and the states [rows, kv heads, segments, query heads of a KV head] behind it."""
SATURATED, NONFINITE = range(2)


def multiplies_pairs(k: Codec, v: Codec, activations: Codec, head_dim: int, key_bias: bool, soft_cap: float) -> bool:
    """Whether stored codes are multiplied as bf16: where that is exact for them, and what the model computes in."""
    exact = k.number in bf16_tiles.CODES and v.number in bf16_tiles.CODES
    fits = activations is BF16 and head_dim % bf16_tiles.CHUNK == 0 and not key_bias and not soft_cap
    return exact and fits and bf16_tiles.available()


def rows_at_once(rows: int) -> int:
    """In how many at a time `rows` are multiplied: at most seven, whose sums fill the registers; so that the last of
    them are not filled up with more rows than must be, and then as many as can be, which share what is loaded."""
    return min(range(min(rows, 3), 8), key=lambda size: (-(-rows // size) * size, -size))


@helper
def table_of(arguments, row):  # type: ignore[no-untyped-def]
    width = load_int(arguments + 8 * TABLE_WIDTH)
    sequence = load_int32(load_int(arguments + 8 * ROW_SEQ) + 4 * row)
    return load_int(arguments + 8 * TABLES) + 4 * sequence * width


@helper
def write_of(  # type: ignore[no-untyped-def]
    k_codec, k_bytes, k_limit, v_codec, v_bytes, v_limit, act_codec, act_bytes, head_dim, rounded,
    arguments, layer, row, head,
):  # fmt: skip
    """`write_head` of a row of the batch; counts what it clamped and what was not finite."""
    heads = load_int(layer + plan.NUM_Q_HEADS) + load_int(layer + plan.NUM_KV_HEADS)
    row_bytes = act_bytes * (heads + load_int(layer + plan.NUM_KV_HEADS)) * head_dim
    saturated, nonfinite = write_head(
        k_codec, k_bytes, k_limit, v_codec, v_bytes, v_limit, act_codec, act_bytes, head_dim,
        rounded, layer, table_of(arguments, row), load_int32(load_int(arguments + 8 * POSITIONS) + 4 * row),
        load_int(arguments + 8 * QKV) + row * row_bytes,
        load_int(arguments + 8 * QUERIES) + 4 * row * heads * head_dim, head,
        load_float(arguments + 8 * SCALE), load_float(arguments + 8 * EPS),
    )  # fmt: skip
    if saturated > 0:
        add_int(load_int(arguments + 8 * COUNTERS) + 8 * SATURATED, saturated)
    if nonfinite > 0:
        add_int(load_int(arguments + 8 * COUNTERS) + 8 * NONFINITE, nonfinite)
        set_byte(load_int(arguments + 8 * NONFINITE_ROWS) + row)


@helper
def tile_of(arguments, layer, head_dim, first, end, worker):  # type: ignore[no-untyped-def]
    """Of rows first .. end of one sequence: its table, the positions, then queries, their stride in floats, the output
    and the worker's scratch."""
    positions = load_int(arguments + 8 * POSITIONS)
    scratch = load_int(arguments + 8 * SCRATCH) + worker * load_int(arguments + 8 * SCRATCH_BYTES)
    row_floats = (load_int(layer + plan.NUM_Q_HEADS) + load_int(layer + plan.NUM_KV_HEADS)) * head_dim
    queries, out = load_int(arguments + 8 * QUERIES), load_int(arguments + 8 * OUT)
    return table_of(arguments, first), positions, queries, row_floats, out, scratch


@functools.cache
def attention_units(
    k: Codec, v: Codec, activations: Codec, head_dim: int, key_bias: bool, soft_cap: float, group: int, by_tiles: bool
) -> AttentionUnits:
    """Compiled for these, or loaded from disk, when it is first asked for. With `key_bias` the layer's bias is added to
    the keys that are read. `soft_cap`: of `AttentionSpec`. `group`: query heads of a KV head.
    by_tiles: products of bf16 are those of matrix tiles.

    Only numbers are closed over: they become constants of the machine code, and keep the disk cache's key stable.
    """
    k_codec, k_bytes, k_limit = k.number, k.itemsize, np.float32(k.max_finite)
    v_codec, v_bytes, v_limit = v.number, v.itemsize, np.float32(v.max_finite)
    act_codec, act_bytes, biased = activations.number, activations.itemsize, int(key_bias)
    capped, cap = int(soft_cap > 0), np.float32(soft_cap)
    pairs = int(multiplies_pairs(k, v, activations, head_dim, key_bias, soft_cap))
    record, place = row_record(head_dim), places(head_dim)
    together, alone = (MATRIX_ROWS, MATRIX_ROWS) if by_tiles else (4, rows_at_once(group))
    if not pairs:
        record, place = fp32_record(head_dim), fp32.places(head_dim)
    k_few, v_few = read_as(k_codec, biased, group), read_as(v_codec, 0, group)
    k_many, v_many = read_as(k_codec, biased, MANY_ROWS), read_as(v_codec, 0, MANY_ROWS)
    weighed = FP32.number if biased else k_codec

    @unit
    def write(arguments, row, worker):  # type: ignore[no-untyped-def]
        layer = load_int(arguments)
        for head in range(load_int(layer + plan.NUM_KV_HEADS)):
            write_of(
                k_codec, k_bytes, k_limit, v_codec, v_bytes, v_limit, act_codec, act_bytes, head_dim, pairs,
                arguments, layer, row, head,
            )  # fmt: skip

    @unit
    def attend(arguments, index, worker):  # type: ignore[no-untyped-def]
        layer = load_int(arguments)
        tile, head = index // load_int(layer + plan.NUM_KV_HEADS), index % load_int(layer + plan.NUM_KV_HEADS)
        bounds = load_int(arguments + 8 * TILES) + 8 * tile
        first, end = load_int32(bounds), load_int32(bounds + 4)
        table, positions, queries, row_floats, out, scratch = tile_of(arguments, layer, head_dim, first, end, worker)
        if pairs:
            attend_pairs(
                k_codec, k_bytes, v_codec, v_bytes, act_codec, act_bytes, head_dim, together, record, place, layer,
                table, positions, first, end, head, queries, row_floats, out, scratch,
            )  # fmt: skip
        else:
            attend_unit(
                k_codec, k_bytes, v_codec, v_bytes, k_many, v_many, weighed, biased, capped, cap, act_codec, act_bytes,
                head_dim, record, place, layer, table, positions, first, end, head, queries, row_floats, out, scratch,
            )  # fmt: skip

    @unit
    def decode(arguments, index, worker):  # type: ignore[no-untyped-def]
        layer = load_int(arguments)
        row, head = index // load_int(layer + plan.NUM_KV_HEADS), index % load_int(layer + plan.NUM_KV_HEADS)
        if pairs:
            position = load_int32(load_int(arguments + 8 * POSITIONS) + 4 * row)
            table = table_of(arguments, row)
            prefetch_first(k_codec, k_bytes, v_codec, v_bytes, head_dim, layer, table, head, position)
        write_of(
            k_codec, k_bytes, k_limit, v_codec, v_bytes, v_limit, act_codec, act_bytes, head_dim, pairs,
            arguments, layer, row, head,
        )  # fmt: skip
        table, positions, queries, row_floats, out, scratch = tile_of(arguments, layer, head_dim, row, row + 1, worker)
        if pairs:
            attend_pairs(
                k_codec, k_bytes, v_codec, v_bytes, act_codec, act_bytes, head_dim, alone, record, place, layer,
                table, positions, row, row + 1, head, queries, row_floats, out, scratch,
            )  # fmt: skip
        else:
            attend_unit(
                k_codec, k_bytes, v_codec, v_bytes, k_few, v_few, weighed, biased, capped, cap, act_codec, act_bytes,
                head_dim, record, place, layer, table, positions, row, row + 1, head, queries, row_floats, out, scratch,
            )  # fmt: skip

    @unit
    def segment(arguments, index, worker):  # type: ignore[no-untyped-def]
        layer = load_int(arguments)
        states = load_int(arguments + 8 * STATES)
        segments = load_int(states)
        head_of_row, number = index // segments, index % segments
        num_kv = load_int(layer + plan.NUM_KV_HEADS)
        row, head = head_of_row // num_kv, head_of_row % num_kv
        position = load_int32(load_int(arguments + 8 * POSITIONS) + 4 * row)
        if number * SEGMENT > position or (number + 1) * SEGMENT <= first_seen(layer, position):
            return
        table, _, queries, row_floats, _, scratch = tile_of(arguments, layer, head_dim, row, row + 1, worker)
        mine = states + 64 + index * group * record.decay
        if pairs:
            attend_segment(
                k_codec, k_bytes, v_codec, v_bytes, head_dim, alone, record, place, layer, table, position, row, head,
                number, queries, row_floats, mine, scratch,
            )  # fmt: skip
        else:
            attend_part(
                k_codec, k_bytes, v_codec, v_bytes, k_few, v_few, weighed, biased, capped, cap, head_dim, record, place,
                layer, table, position, row, head, number, queries, row_floats, mine, scratch,
            )  # fmt: skip

    @unit
    def fold(arguments, index, worker):  # type: ignore[no-untyped-def]
        layer = load_int(arguments)
        row, head = index // load_int(layer + plan.NUM_KV_HEADS), index % load_int(layer + plan.NUM_KV_HEADS)
        position = load_int32(load_int(arguments + 8 * POSITIONS) + 4 * row)
        states = load_int(arguments + 8 * STATES)
        segments = load_int(states)
        _, _, _, _, out, scratch = tile_of(arguments, layer, head_dim, row, row + 1, worker)
        mine = states + 64 + index * segments * group * record.decay
        if pairs:
            fold_segments(act_codec, act_bytes, head_dim, record, layer, position, row, head, mine, out, scratch)
        else:
            fold_parts(act_codec, act_bytes, head_dim, record, layer, position, row, head, mine, out, scratch)

    return AttentionUnits(write.address, attend.address, decode.address, segment.address, fold.address)
