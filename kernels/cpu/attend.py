"""The read half of paged attention in fp32: tiles of query rows against the stored context of their sequence.

Online softmax (Milakov and Gimelshein 2018) over tiles of 32 tokens, aligned in the context: a row goes through the
tiles that its own context touches, whatever rows share them. Where a few rows share a tile (a decode step: the query
heads of a KV head) its codes are decoded in registers on their way into the products; where many do, once, to memory.

Each `SEGMENT` tokens of a context start anew, and the states of the segments are folded in their order. So threads can
take segments of one row, and its bits do not depend on whether they do.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import literally

from deepinfer.kernels.codecs import BF16, FP16, FP32, INT8
from deepinfer.kernels.cpu import plan
from deepinfer.kernels.cpu.context import (
    AHEAD,
    SEGMENT,
    TILE,
    first_seen,
    heads_of_group,
    load_scales,
    prefetch_keys,
    prefetch_values,
    rows_of,
)
from deepinfer.kernels.cpu.fp32_rows import ROWS_AT_ONCE, fp32_record, fp32_weight, row_accumulate, row_scores
from deepinfer.kernels.cpu.jit import helper, shared_helper
from deepinfer.kernels.cpu.memory import load_float, load_int, load_int32
from deepinfer.kernels.cpu.row_states import copy_row, forget, write_output
from deepinfer.kernels.cpu.tiles import CODE_FACTORS, IN_REGISTERS, add_rotated, expand_rows
from deepinfer.kernels.cpu.vec16 import (
    LANES,
    add,
    any_larger,
    div,
    keep_lanes,
    largest_of,
    load_f32,
    mul,
    splat,
    spread_largest,
    store_f32,
    tanh,
)

_FP32, _FP16, _BF16, _INT8 = FP32.number, FP16.number, BF16.number, INT8.number
_FACTORS = tuple(np.float32(factor) for factor in CODE_FACTORS)
_ONE, _LOWEST = np.float32(1.0), np.float32(-np.inf)
_VECTOR = 4 * LANES
_FEW_ROWS = 16

MANY_ROWS = 32
"""So many rows, or more, share the tiles of a prompt."""


def read_as(codec: int, biased: int, rows: int) -> int:
    """The codec of which the products of so many rows read what is stored as `codec`: itself, decoded in registers; or
    that to which its tiles are expanded first. Conversions from halves cost next to nothing there, others are worth it
    for the query heads of a KV head only. Keys to which a bias is added are fp32."""
    if biased or (codec in (_INT8, _BF16) and rows > _FEW_ROWS):
        return _FP32
    return codec if codec in IN_REGISTERS else _FP16


class Places(NamedTuple):
    """Byte offsets within a worker's scratch: decoded keys fp32 [32, head_dim] first, decoded values, codes that do not
    lie together (of sixteen keys, then of 32 values), scales fp32 [2, 32], records of the rows, and then their states:
    of a row and query head, as its record begins, over all segments so far."""

    values: int
    staged_keys: int
    staged_values: int
    scales: int
    records: int


def places(head_dim: int) -> Places:
    tile, staged = 4 * TILE * head_dim, 4 * LANES * head_dim
    scales = 2 * tile + 3 * staged
    return Places(tile, 2 * tile, 2 * tile + staged, scales, scales + 2 * 4 * TILE)


def scratch_bytes(head_dim: int, rows: int) -> int:
    """Of a worker, for at most `rows` rows, counted once for each query head."""
    record = fp32_record(head_dim)
    return places(head_dim).records + rows * (record.length + record.decay)


_rows_of = shared_helper(rows_of.py_func)
"""Not inlined: what it does for the last tokens of a context is long and seldom needed."""


@helper
def _add_key_bias(codec, layer, head, first, count, head_dim, tile, scales):  # type: ignore[no-untyped-def]
    """Turn the decoded keys of tokens first .. first + count into whole ones: scaled, with RoPE(b, position) added."""
    literally(codec)
    literally(head_dim)
    bias = load_int(layer + plan.KEY_BIAS_ADDRESS) + 4 * head_dim * head
    cos, sin = load_int(layer + plan.COS_ADDRESS), load_int(layer + plan.SIN_ADDRESS)
    for token in range(count):
        turn = 4 * (head_dim // 2) * (first + token)
        factor = load_float(scales + 4 * token) if codec == _INT8 else _FACTORS[codec]
        add_rotated(tile + 4 * head_dim * token, factor, bias, cos + turn, sin + turn, head_dim)


@helper
def _scores(codec, head_dim, source, records, index, last, half):  # type: ignore[no-untyped-def]
    """Of sixteen tokens for the rows index .. last: three at a time, or two where that leaves no single one over."""
    literally(codec)
    literally(head_dim)
    while index <= last:
        rest = last + 1 - index
        if rest == 4 or rest < ROWS_AT_ONCE:
            row_scores(codec, 2, head_dim, source, records, index, last, half)
            index += 2
        else:
            row_scores(codec, 3, head_dim, source, records, index, last, half)
            index += 3


@helper
def _accumulate(codec, head_dim, first, second, records, index, last):  # type: ignore[no-untyped-def]
    """As `_scores`, of a whole tile."""
    literally(codec)
    literally(head_dim)
    while index <= last:
        rest = last + 1 - index
        if rest == 4 or rest < ROWS_AT_ONCE:
            row_accumulate(codec, 2, head_dim, first, second, records, index, last)
            index += 2
        else:
            row_accumulate(codec, 3, head_dim, first, second, records, index, last)
            index += 3


@helper
def _weigh(k_codec, v_codec, capped, cap, record, row, scales, low, high):  # type: ignore[no-untyped-def]
    """Scores of a row's record to its weights, in the same place. Tokens low .. high of the tile are seen.

    `k_codec` is fp32 where keys are whole already. `capped`: scores become cap * tanh(score / cap).
    """
    literally(k_codec)
    literally(v_codec)
    literally(capped)
    scores, sums = row + record.scores, row + record.sums
    first, second = load_f32(scores), load_f32(scores + _VECTOR)
    if k_codec == _INT8:
        first, second = mul(first, load_f32(scales)), mul(second, load_f32(scales + _VECTOR))
    if capped:
        first = mul(tanh(div(first, splat(cap))), splat(cap))
        second = mul(tanh(div(second, splat(cap))), splat(cap))
    if low > 0 or high < TILE:
        first = keep_lanes(first, low, high, _LOWEST)
        second = keep_lanes(second, low - LANES, high - LANES, _LOWEST)
    top, largest = load_f32(row + record.maximum), largest_of(first, second)
    if any_larger(largest, top):
        before = top
        top = spread_largest(largest_of(before, largest))
        decay = fp32_weight(before, top)
        store_f32(sums, mul(load_f32(sums), decay))
        store_f32(row + record.maximum, top)
        store_f32(row + record.decay, decay)
    else:
        store_f32(row + record.decay, splat(_ONE))
    first, second = fp32_weight(first, top), fp32_weight(second, top)
    store_f32(sums, add(load_f32(sums), add(first, second)))
    if v_codec == _INT8:
        first, second = mul(first, load_f32(scales + 4 * TILE)), mul(second, load_f32(scales + 4 * TILE + _VECTOR))
    elif _FACTORS[v_codec] != _ONE:
        first, second = mul(first, splat(_FACTORS[v_codec])), mul(second, splat(_FACTORS[v_codec]))
    store_f32(scores, first)
    store_f32(scores + _VECTOR, second)


@helper
def _fold(state, part, record):  # type: ignore[no-untyped-def]
    """Adds the state of a segment to that of the segments before it."""
    before, largest = load_f32(state + record.maximum), load_f32(part + record.maximum)
    if load_float(part + record.maximum) == _LOWEST:
        return
    top = largest_of(before, largest)
    old, new = fp32_weight(before, top), fp32_weight(largest, top)
    for at in range(0, record.maximum, _VECTOR):
        store_f32(state + at, add(mul(load_f32(state + at), old), mul(load_f32(part + at), new)))
    store_f32(state + record.maximum, top)


@helper
def _take_queries(k_codec, biased, head_dim, record, records, group, head, first, end, queries, row_floats):  # type: ignore[no-untyped-def]
    """To the records, multiplied by what the codes of keys lack."""
    literally(k_codec)
    literally(biased)
    factor = splat(_ONE if biased else _FACTORS[k_codec])
    for row in range(first, end):
        for member in range(group):
            mine = records + ((row - first) * group + member) * record.length + record.query
            query = queries + 4 * (row * row_floats + (head * group + member) * head_dim)
            for lane in range(0, 4 * head_dim, _VECTOR):
                store_f32(mine + lane, mul(load_f32(query + lane), factor))


@helper
def _attend_span(  # type: ignore[no-untyped-def]
    k_codec, k_bytes, v_codec, v_bytes, k_read, v_read, weighed, biased, capped, cap, head_dim, record, place, layer,
    table, begin, rows, context, head, low, high, scratch,
):  # fmt: skip
    """The records of rows whose positions go up from `begin` to the states of what they see of tokens low .. high, all
    within one segment.

    k_read, v_read: the codecs of what is multiplied, see `read_as`. weighed: that of keys whose scores are weighed.
    """
    literally(k_codec)
    literally(v_codec)
    literally(k_read)
    literally(v_read)
    literally(weighed)
    literally(biased)
    literally(capped)
    literally(head_dim)
    group, window = heads_of_group(layer), load_int(layer + plan.WINDOW)
    keys, values, scales = scratch, scratch + place.values, scratch + place.scales
    staged_keys, staged_values = scratch + place.staged_keys, scratch + place.staged_values
    records = scratch + place.records
    k_row, v_row = head_dim * k_bytes, head_dim * v_bytes
    for index in range(rows * group):
        forget(records + index * record.length, record)
    for token in range(low, high, TILE):
        # Positions ascend by one, so the rows that see something of this tile lie side by side.
        seen_from = max(0, token - begin)
        seen_to = min(rows, token + TILE - 1 + window - begin) if window > 0 else rows
        first, last = seen_from * group, seen_to * group - 1
        for half in range(2):
            at = token + half * LANES
            count = context - at
            ahead = at + AHEAD
            prefetch_keys(k_codec, k_row, layer, table, head, ahead, min(ahead + LANES, context))
            if k_codec == _INT8:
                target = scales + half * _VECTOR
                load_scales(load_int(layer + plan.K_SCALES_ADDRESS), layer, table, head, at, count, target)
            if v_codec == _INT8:
                target = scales + 4 * TILE + half * _VECTOR
                load_scales(load_int(layer + plan.V_SCALES_ADDRESS), layer, table, head, at, count, target)
            source = _rows_of(load_int(layer + plan.K_ADDRESS), k_row, layer, table, head, at, count, staged_keys)
            if biased or k_read != k_codec:
                decoded = keys + half * 4 * LANES * head_dim
                expand_rows(k_codec, k_read, LANES * head_dim, source, decoded)
                source = decoded
            if biased:
                target = scales + half * _VECTOR
                _add_key_bias(k_codec, layer, head, at, min(LANES, count), head_dim, source, target)
            _scores(k_read, head_dim, source, records, first, last, half)
            prefetch_values(v_codec, v_row, layer, table, head, ahead, min(ahead + LANES, context))
        for row in range(seen_from, seen_to):
            seen_high = begin + row + 1 - token
            seen_low = seen_high - window if window > 0 else 0
            for member in range(group):
                mine = records + (row * group + member) * record.length
                _weigh(weighed, v_codec, capped, cap, record, mine, scales, seen_low, seen_high)
        codes, at, count = load_int(layer + plan.V_ADDRESS), token + LANES, context - token
        upper = _rows_of(codes, v_row, layer, table, head, token, count, staged_values)
        lower = _rows_of(codes, v_row, layer, table, head, at, count - LANES, staged_values + LANES * v_row)
        if v_read != v_codec:
            expand_rows(v_codec, v_read, LANES * head_dim, upper, values)
            expand_rows(v_codec, v_read, LANES * head_dim, lower, values + 4 * LANES * head_dim)
            upper, lower = values, values + 4 * LANES * head_dim
        _accumulate(v_read, head_dim, upper, lower, records, first, last)


@helper
def attend_unit(  # type: ignore[no-untyped-def]
    k_codec, k_bytes, v_codec, v_bytes, k_read, v_read, weighed, biased, capped, cap, act_codec, act_bytes, head_dim,
    record, place, layer, table, positions, first, end, head, queries, row_floats, out, scratch,
):  # fmt: skip
    """Rows first .. end of one sequence, the query heads of one KV head. Writes their output.

    k_read, v_read, weighed: see `_attend_span`. record: `RowRecord` of this head_dim. place: its `Places`.
    """
    literally(k_codec)
    literally(v_codec)
    literally(k_read)
    literally(v_read)
    literally(weighed)
    literally(biased)
    literally(capped)
    literally(act_codec)
    literally(head_dim)
    group, records = heads_of_group(layer), scratch + place.records
    begin, context = load_int32(positions + 4 * first), load_int32(positions + 4 * (end - 1)) + 1
    count = (end - first) * group
    states, state_length = records + count * record.length, record.decay
    _take_queries(k_codec, biased, head_dim, record, records, group, head, first, end, queries, row_floats)
    start = first_seen(layer, begin)
    several = start // SEGMENT != (context - 1) // SEGMENT
    for index in range(count if several else 0):
        forget(states + index * state_length, record)
    for segment in range(start - start % SEGMENT, context, SEGMENT):
        _attend_span(
            k_codec, k_bytes, v_codec, v_bytes, k_read, v_read, weighed, biased, capped, cap, head_dim, record, place,
            layer, table, begin, end - first, context, head, max(start, segment), min(context, segment + SEGMENT),
            scratch,
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
def attend_part(  # type: ignore[no-untyped-def]
    k_codec, k_bytes, v_codec, v_bytes, k_read, v_read, weighed, biased, capped, cap, head_dim, record, place, layer,
    table, position, row, head, segment, queries, row_floats, states, scratch,
):  # fmt: skip
    """A segment of one row's context, for one KV head: to `states`, one for each of its query heads."""
    literally(k_codec)
    literally(v_codec)
    literally(k_read)
    literally(v_read)
    literally(weighed)
    literally(biased)
    literally(capped)
    literally(head_dim)
    group, records = heads_of_group(layer), scratch + place.records
    _take_queries(k_codec, biased, head_dim, record, records, group, head, row, row + 1, queries, row_floats)
    low, high = max(first_seen(layer, position), segment * SEGMENT), min(position + 1, (segment + 1) * SEGMENT)
    _attend_span(
        k_codec, k_bytes, v_codec, v_bytes, k_read, v_read, weighed, biased, capped, cap, head_dim, record, place,
        layer, table, position, np.int64(1), position + 1, head, low, high, scratch,
    )  # fmt: skip
    for member in range(group):
        copy_row(records + member * record.length, states + member * record.decay, record.decay)


@helper
def fold_parts(  # type: ignore[no-untyped-def]
    act_codec, act_bytes, head_dim, record, layer, position, row, head, states, out, scratch,
):  # fmt: skip
    """The output of a row and KV head, from the states [segments, query heads of it] that `attend_part` left."""
    literally(act_codec)
    literally(head_dim)
    group = heads_of_group(layer)
    for member in range(group):
        forget(scratch, record)
        for segment in range(first_seen(layer, position) // SEGMENT, position // SEGMENT + 1):
            _fold(scratch, states + (segment * group + member) * record.decay, record)
        target = out + act_bytes * head_dim * (row * load_int(layer + plan.NUM_Q_HEADS) + head * group + member)
        write_output(act_codec, act_bytes, head_dim, scratch, scratch + record.sums, target)
