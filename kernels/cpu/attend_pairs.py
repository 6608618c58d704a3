"""The read half of paged attention in bf16 products: for bf16 activations over keys and values that bf16 holds exactly.

As `attend`, but queries (scaled, after RoPE) and softmax weights are rounded to bf16 before they are multiplied, as
models that compute in bf16 do everywhere; all sums are fp32. Online softmax over tiles of 32 tokens, aligned in the
context: a row goes through the tiles that its own context touches, whatever rows share them.

Each `SEGMENT` tokens of a context start anew, and the states of the segments are folded in their order. So threads can
take segments of one row, and its bits do not depend on whether they do.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import literally

from deepinfer.kernels.codecs import INT8
from deepinfer.kernels.cpu import plan
from deepinfer.kernels.cpu.bf16_rows import (
    let_go_of_rows,
    pair_accumulate,
    pair_scores,
    row_record,
    set_up_rows,
    softmax_weight,
    store_pairs,
)
from deepinfer.kernels.cpu.bf16_tiles import TILE, key_pairs, value_pairs
from deepinfer.kernels.cpu.context import (
    AHEAD,
    SEGMENT,
    first_seen,
    heads_of_group,
    load_scales,
    prefetch_keys,
    prefetch_values,
    rows_of,
)
from deepinfer.kernels.cpu.jit import helper
from deepinfer.kernels.cpu.memory import load_float, load_int, load_int32
from deepinfer.kernels.cpu.row_states import copy_row, forget, write_output
from deepinfer.kernels.cpu.vec16 import (
    LANES,
    add,
    any_larger,
    keep_lanes,
    largest_of,
    load_f32,
    mul,
    splat,
    spread_largest,
    store_f32,
)

_INT8 = INT8.number
_ONE, _LOWEST = np.float32(1.0), np.float32(-np.inf)
_VECTOR = 4 * LANES


class Places(NamedTuple):
    """Byte offsets within a worker's scratch. The records of the rows come last, and then their states: of a row and
    query head, as its record begins, over all segments so far."""

    values: int
    staged: int
    scales: int
    records: int


def places(head_dim: int) -> Places:
    tile, staged, scales = 64 * head_dim, 2 * LANES * head_dim, 2 * 4 * TILE
    return Places(tile, 2 * tile, 2 * tile + staged, 2 * tile + staged + scales)


def scratch_bytes(head_dim: int, rows: int) -> int:
    """Of a worker, for at most `rows` rows, counted once for each query head."""
    return places(head_dim).records + rows * (row_record(head_dim).length + state_bytes(head_dim))


def state_bytes(head_dim: int) -> int:
    """Of a state: an accumulator fp32 [head_dim], [16] fp32 lane sums and maxima."""
    return row_record(head_dim).decay


@helper
def _weigh(k_codec, v_codec, scores, sums, scales, low, high):  # type: ignore[no-untyped-def]
    """Scores of one row, fp32 [32], to its weights, bf16 [32], in the same place. `sums`: of its record; the maximum
    and the decay follow. Tokens low .. high of the tile are seen."""
    literally(k_codec)
    literally(v_codec)
    first, second = load_f32(scores), load_f32(scores + _VECTOR)
    if k_codec == _INT8:
        first, second = mul(first, load_f32(scales)), mul(second, load_f32(scales + _VECTOR))
    if low > 0 or high < TILE:
        first = keep_lanes(first, low, high, _LOWEST)
        second = keep_lanes(second, low - LANES, high - LANES, _LOWEST)
    top, largest = load_f32(sums + _VECTOR), largest_of(first, second)
    if any_larger(largest, top):
        before = top
        top = spread_largest(largest_of(before, largest))
        decay = softmax_weight(before, top)
        store_f32(sums, mul(load_f32(sums), decay))
        store_f32(sums + _VECTOR, top)
        store_f32(sums + 2 * _VECTOR, decay)
    else:
        store_f32(sums + 2 * _VECTOR, splat(_ONE))
    first, second = softmax_weight(first, top), softmax_weight(second, top)
    store_f32(sums, add(load_f32(sums), add(first, second)))
    if v_codec == _INT8:
        first, second = mul(first, load_f32(scales + 4 * TILE)), mul(second, load_f32(scales + 4 * TILE + _VECTOR))
    store_pairs(scores, first, second)


@helper
def _fold(state, part, record):  # type: ignore[no-untyped-def]
    """Adds the state of a segment to that of the segments before it."""
    before, largest = load_f32(state + record.maximum), load_f32(part + record.maximum)
    if load_float(part + record.maximum) == _LOWEST:
        return
    top = largest_of(before, largest)
    old, new = softmax_weight(before, top), softmax_weight(largest, top)
    for at in range(0, record.maximum, _VECTOR):
        store_f32(state + at, add(mul(load_f32(state + at), old), mul(load_f32(part + at), new)))
    store_f32(state + record.maximum, top)


@helper
def _take_queries(head_dim, record, records, group, head, first, end, queries, row_floats):  # type: ignore[no-untyped-def]
    for row in range(first, end):
        for member in range(group):
            mine = records + ((row - first) * group + member) * record.length
            query = queries + 4 * (row * row_floats + (head * group + member) * head_dim)
            copy_row(query, mine + record.query, 2 * head_dim)


@helper
def _attend_span(  # type: ignore[no-untyped-def]
    k_codec, k_bytes, v_codec, v_bytes, head_dim, at_once, record, place, layer, table, begin, rows, context, head,
    low, high, scratch,
):  # fmt: skip
    """The records of rows whose positions go up from `begin` to the states of what they see of tokens low .. high, all
    within one segment."""
    literally(k_codec)
    literally(v_codec)
    literally(head_dim)
    literally(at_once)
    group, window = heads_of_group(layer), load_int(layer + plan.WINDOW)
    keys, values, staged, scales = scratch, scratch + place.values, scratch + place.staged, scratch + place.scales
    records = scratch + place.records
    k_row, v_row = head_dim * k_bytes, head_dim * v_bytes
    for index in range(rows * group):
        forget(records + index * record.length, record)
    set_up_for = 0
    for token in range(low, high, TILE):
        ahead, middle = token + AHEAD, token + AHEAD + LANES
        half_end, ahead_end = min(middle, context), min(middle + LANES, context)
        prefetch_keys(k_codec, k_row, layer, table, head, ahead, half_end)
        for half in range(2):
            at = token + half * LANES
            count = context - at
            source = rows_of(load_int(layer + plan.K_ADDRESS), k_row, layer, table, head, at, count, staged)
            key_pairs(k_codec, head_dim, source, keys + half * _VECTOR)
            source = rows_of(load_int(layer + plan.V_ADDRESS), v_row, layer, table, head, at, count, staged)
            value_pairs(v_codec, head_dim, source, values + half * 2 * LANES * head_dim)
            if k_codec == _INT8:
                target = scales + half * _VECTOR
                load_scales(load_int(layer + plan.K_SCALES_ADDRESS), layer, table, head, at, count, target)
            if v_codec == _INT8:
                target = scales + 4 * TILE + half * _VECTOR
                load_scales(load_int(layer + plan.V_SCALES_ADDRESS), layer, table, head, at, count, target)
        prefetch_values(v_codec, v_row, layer, table, head, ahead, half_end)
        # Positions ascend by one, so the rows that see something of this tile lie side by side.
        seen_from = max(0, token - begin)
        seen_to = min(rows, token + TILE - 1 + window - begin) if window > 0 else rows
        low_index, last = seen_from * group, seen_to * group - 1
        rest = (last - low_index) % at_once + 1
        if rest != set_up_for:
            set_up_rows(at_once, rest)
            set_up_for = rest
        for index in range(low_index, last + 1, at_once):
            pair_scores(at_once, head_dim, keys, records, index, last)
        prefetch_keys(k_codec, k_row, layer, table, head, middle, ahead_end)
        for row in range(seen_from, seen_to):
            seen_high = begin + row + 1 - token
            seen_low = seen_high - window if window > 0 else 0
            for member in range(group):
                mine = records + (row * group + member) * record.length
                _weigh(k_codec, v_codec, mine + record.scores, mine + record.sums, scales, seen_low, seen_high)
        prefetch_values(v_codec, v_row, layer, table, head, middle, ahead_end)
        for index in range(low_index, last + 1, at_once):
            pair_accumulate(at_once, head_dim, values, records, index, last)
    let_go_of_rows(at_once)


@helper
def attend_pairs(  # type: ignore[no-untyped-def]
    k_codec, k_bytes, v_codec, v_bytes, act_codec, act_bytes, head_dim, at_once, record, place,
    layer, table, positions, first, end, head, queries, row_floats, out, scratch,
):  # fmt: skip
    """As `attend.attend_unit`; `queries` hold bf16 [head_dim] where that one has fp32.

    at_once: how many rows are multiplied together; `MATRIX_ROWS`: by matrix tiles. record: `RowRecord` of this
    head_dim. place: its `Places`.
    """
    literally(k_codec)
    literally(v_codec)
    literally(act_codec)
    literally(head_dim)
    literally(at_once)
    group, records = heads_of_group(layer), scratch + place.records
    begin, context = load_int32(positions + 4 * first), load_int32(positions + 4 * (end - 1)) + 1
    count = (end - first) * group
    states, state_length = records + count * record.length, record.decay
    _take_queries(head_dim, record, records, group, head, first, end, queries, row_floats)
    start = first_seen(layer, begin)
    several = start // SEGMENT != (context - 1) // SEGMENT
    for index in range(count if several else 0):
        forget(states + index * state_length, record)
    for segment in range(start - start % SEGMENT, context, SEGMENT):
        _attend_span(
            k_codec, k_bytes, v_codec, v_bytes, head_dim, at_once, record, place, layer, table, begin, end - first,
            context, head, max(start, segment), min(context, segment + SEGMENT), scratch,
        )  # fmt: skip
        for index in range(count if several else 0):
            _fold(states + index * state_length, records + index * record.length, record)
    for row in range(first, end):
        for member in range(group):
            index = (row - first) * group + member
            state = states + index * state_length if several else records + index * record.length
            target = out + act_bytes * head_dim * (row * load_int(layer + plan.NUM_Q_HEADS) + head * group + member)
            write_output(act_codec, act_bytes, head_dim, state, state + record.sums, target)


@helper
def attend_segment(  # type: ignore[no-untyped-def]
    k_codec, k_bytes, v_codec, v_bytes, head_dim, at_once, record, place, layer, table, position, row, head, segment,
    queries, row_floats, states, scratch,
):  # fmt: skip
    """A segment of one row's context, for one KV head: to `states`, one for each of its query heads."""
    literally(k_codec)
    literally(v_codec)
    literally(head_dim)
    literally(at_once)
    group, records = heads_of_group(layer), scratch + place.records
    _take_queries(head_dim, record, records, group, head, row, row + 1, queries, row_floats)
    low, high = max(first_seen(layer, position), segment * SEGMENT), min(position + 1, (segment + 1) * SEGMENT)
    _attend_span(
        k_codec, k_bytes, v_codec, v_bytes, head_dim, at_once, record, place, layer, table, position, np.int64(1),
        position + 1, head, low, high, scratch,
    )  # fmt: skip
    for member in range(group):
        copy_row(records + member * record.length, states + member * record.decay, record.decay)


@helper
def fold_segments(  # type: ignore[no-untyped-def]
    act_codec, act_bytes, head_dim, record, layer, position, row, head, states, out, scratch,
):  # fmt: skip
    """The output of a row and KV head, from the states [segments, query heads of it] that `attend_segment` left."""
    literally(act_codec)
    literally(head_dim)
    group = heads_of_group(layer)
    for member in range(group):
        forget(scratch, record)
        for segment in range(first_seen(layer, position) // SEGMENT, position // SEGMENT + 1):
            _fold(scratch, states + (segment * group + member) * record.decay, record)
        target = out + act_bytes * head_dim * (row * load_int(layer + plan.NUM_Q_HEADS) + head * group + member)
        write_output(act_codec, act_bytes, head_dim, scratch, scratch + record.sums, target)
