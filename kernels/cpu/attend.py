"""The read half of paged attention: one tile of query rows against the stored context of their sequence.

Online softmax (Milakov and Gimelshein 2018) in fp32 over tiles of sixteen tokens, aligned in the context.
Each query row goes through the tiles that its own context touches, one after the other, whatever rows share
the decoded tile.
"""

from __future__ import annotations

import numpy as np
from numba import literally

from deepinfer.kernels.codecs import INT8
from deepinfer.kernels.cpu import plan
from deepinfer.kernels.cpu.codecs import load16, store16
from deepinfer.kernels.cpu.jit import helper
from deepinfer.kernels.cpu.memory import load_float, load_half, load_int, load_int32, prefetch, store_float
from deepinfer.kernels.cpu.tiles import TILE, add_rotated, tile_accumulate, tile_scores
from deepinfer.kernels.cpu.vec16 import (
    LANES,
    add,
    div,
    exp_nonpositive,
    fma,
    keep_lanes,
    lane_max,
    lane_sum,
    load_f32,
    mul,
    splat,
    store_f32,
    sub,
    tanh,
)

_INT8 = INT8.number
_ZERO, _ONE, _LOWEST = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)


@helper
def heads_of_group(layer):  # type: ignore[no-untyped-def]
    """Query heads of a KV head."""
    return load_int(layer + plan.NUM_Q_HEADS) // load_int(layer + plan.NUM_KV_HEADS)


@helper
def block_at(layer, table, place):  # type: ignore[no-untyped-def]
    """Where the block of a token begins, in bytes from block 0 on."""
    return load_int32(table + 4 * (place >> load_int(layer + plan.BLOCK_SHIFT))) * load_int(layer + plan.BLOCK_BYTES)


@helper
def load_tile(codec, itemsize, codes, scales, layer, table, head, first, count, head_dim, tile, tile_scales):  # type: ignore[no-untyped-def]
    """Decode tokens first .. first + count of one KV head to fp32 [16, head_dim], and their scales to [16].

    Slots past `count` are not read: what lies there may be anything. Their rows and scales become zeros.
    """
    literally(codec)
    shift = load_int(layer + plan.BLOCK_SHIFT)
    for token in range(TILE):
        target = tile + 4 * head_dim * token
        if token >= count:
            for lane in range(0, head_dim, LANES):
                store_f32(target + 4 * lane, splat(_ZERO))
            store_float(tile_scales + 4 * token, _ZERO)
            continue
        place = first + token
        block = block_at(layer, table, place)
        slot = (head << shift) + (place & ((1 << shift) - 1))
        source = codes + block + slot * head_dim * itemsize
        for lane in range(0, head_dim, LANES):
            store_f32(target + 4 * lane, load16(codec, source + itemsize * lane))
        if codec == _INT8:
            store_float(tile_scales + 4 * token, load_half(scales + block + 2 * slot))


@helper
def add_key_bias(codec, layer, head, first, count, head_dim, tile, tile_scales):  # type: ignore[no-untyped-def]
    """Turn the decoded keys of tokens first .. first + count into whole ones: scaled, with RoPE(b, position) added."""
    literally(codec)
    literally(head_dim)
    bias = load_int(layer + plan.KEY_BIAS_ADDRESS) + 4 * head_dim * head
    cos, sin = load_int(layer + plan.COS_ADDRESS), load_int(layer + plan.SIN_ADDRESS)
    for token in range(count):
        turn = 4 * (head_dim // 2) * (first + token)
        factor = load_float(tile_scales + 4 * token) if codec == _INT8 else _ONE
        add_rotated(tile + 4 * head_dim * token, factor, bias, cos + turn, sin + turn, head_dim)


@helper
def prefetch_tokens(codes, row_bytes, layer, table, head, first, end):  # type: ignore[no-untyped-def]
    """Ask for the codes of tokens first .. end of one KV head, if there are any: eight of them lie side by side."""
    shift = load_int(layer + plan.BLOCK_SHIFT)
    for place in range(first, end, 8):
        slot = (head << shift) + (place & ((1 << shift) - 1))
        source = codes + block_at(layer, table, place) + slot * row_bytes
        for line in range(0, 8 * row_bytes, 64):
            prefetch(source + line)


@helper
def attend_row(k_codec, v_codec, biased, capped, cap, head_dim, query, tile, tile_scales, low, high, state):  # type: ignore[no-untyped-def]
    """Fold the lanes low .. high of a decoded tile into one query head's softmax state.

    `tile`: K then V, fp32 [2, 16, head_dim]; `tile_scales`: fp32 [2, 16]; `state`: accumulator [head_dim],
    lane sums [16], running maximum [16, all equal]. `biased` keys are already scaled. `capped`: scores become
    cap * tanh(score / cap).
    """
    literally(k_codec)
    literally(v_codec)
    literally(biased)
    literally(capped)
    literally(head_dim)
    sums, maximum = state + 4 * head_dim, state + 4 * (head_dim + LANES)
    scores = tile_scores(query, tile, head_dim)
    if k_codec == _INT8 and not biased:
        scores = mul(scores, load_f32(tile_scales))
    if capped:
        scores = mul(tanh(div(scores, splat(cap))), splat(cap))
    scores = keep_lanes(scores, low, high, _LOWEST)
    before = load_f32(maximum)
    top = splat(max(lane_max(scores), lane_max(before)))
    decay = exp_nonpositive(sub(before, top))
    probs = exp_nonpositive(sub(scores, top))
    store_f32(maximum, top)
    store_f32(sums, fma(load_f32(sums), decay, probs))
    if v_codec == _INT8:
        probs = mul(probs, load_f32(tile_scales + 4 * LANES))
    tile_accumulate(probs, tile + 4 * TILE * head_dim, state, decay, head_dim)


@helper
def attend_unit(  # type: ignore[no-untyped-def]
    k_codec, k_bytes, v_codec, v_bytes, biased, capped, cap, act_codec, act_bytes, head_dim,
    layer, table, positions, first, end, head, queries, row_floats, out, scratch,
):  # fmt: skip
    """Rows first .. end of one sequence, the query heads of one KV head. Writes their output."""
    literally(act_codec)
    literally(biased)
    literally(capped)
    group = heads_of_group(layer)
    window = load_int(layer + plan.WINDOW)
    tile_scales = scratch + 4 * 2 * TILE * head_dim
    states = tile_scales + 4 * 2 * LANES
    stride = 4 * (head_dim + 2 * LANES)
    for index in range((end - first) * group):
        for lane in range(0, head_dim + LANES, LANES):
            store_f32(states + index * stride + 4 * lane, splat(_ZERO))
        store_f32(states + index * stride + 4 * (head_dim + LANES), splat(_LOWEST))
    context = load_int32(positions + 4 * (end - 1)) + 1
    start = max(0, load_int32(positions + 4 * first) - window + 1) if window > 0 else 0
    for token in range(start - start % TILE, context, TILE):
        count = min(TILE, context - token)
        load_tile(
            k_codec, k_bytes, load_int(layer + plan.K_ADDRESS), load_int(layer + plan.K_SCALES_ADDRESS),
            layer, table, head, token, count, head_dim, scratch, tile_scales,
        )  # fmt: skip
        if biased:
            add_key_bias(k_codec, layer, head, token, count, head_dim, scratch, tile_scales)
        load_tile(
            v_codec, v_bytes, load_int(layer + plan.V_ADDRESS), load_int(layer + plan.V_SCALES_ADDRESS),
            layer, table, head, token, count, head_dim,
            scratch + 4 * TILE * head_dim, tile_scales + 4 * LANES,
        )  # fmt: skip
        ahead, ahead_end = token + TILE, min(token + 2 * TILE, context)
        prefetch_tokens(load_int(layer + plan.K_ADDRESS), head_dim * k_bytes, layer, table, head, ahead, ahead_end)
        prefetch_tokens(load_int(layer + plan.V_ADDRESS), head_dim * v_bytes, layer, table, head, ahead, ahead_end)
        for row in range(first, end):
            high = load_int32(positions + 4 * row) + 1 - token
            low = high - window if window > 0 else 0
            if high <= 0 or low >= TILE:
                continue
            for member in range(group):
                attend_row(
                    k_codec, v_codec, biased, capped, cap, head_dim,
                    queries + 4 * (row * row_floats + (head * group + member) * head_dim),
                    scratch, tile_scales, low, high, states + stride * ((row - first) * group + member),
                )  # fmt: skip
    for row in range(first, end):
        for member in range(group):
            state = states + stride * ((row - first) * group + member)
            target = out + act_bytes * head_dim * (row * load_int(layer + plan.NUM_Q_HEADS) + head * group + member)
            inverse = splat(_ONE / lane_sum(load_f32(state + 4 * head_dim)))
            for lane in range(0, head_dim, LANES):
                # Adding zero turns -0 into 0, which is all that a tile's masked slots could change.
                value = add(mul(load_f32(state + 4 * lane), inverse), splat(_ZERO))
                store16(act_codec, target + act_bytes * lane, value)
