"""Where the stored tokens of a context lie, and how memory is asked for them ahead of time."""

from __future__ import annotations

import numpy as np
from numba import literally

from deepinfer.kernels.codecs import FP16, INT8
from deepinfer.kernels.cpu import plan
from deepinfer.kernels.cpu.codecs import load16
from deepinfer.kernels.cpu.jit import helper
from deepinfer.kernels.cpu.memory import load_half, load_int, load_int32, prefetch, store_float
from deepinfer.kernels.cpu.row_states import copy_row, zero_row
from deepinfer.kernels.cpu.vec16 import LANES, store_f32

TILE = 2 * LANES
"""Tokens of a tile, always aligned to a multiple of it in the context."""
SEGMENT = 16 * TILE
"""Tokens of a segment, always aligned to a multiple of it in the context."""
AHEAD = 2 * TILE
"""How far in front of what is read memory is asked for."""
_FP16, _INT8 = FP16.number, INT8.number
_ZERO = np.float32(0.0)


@helper
def heads_of_group(layer):  # type: ignore[no-untyped-def]
    """Query heads of a KV head."""
    return load_int(layer + plan.NUM_Q_HEADS) // load_int(layer + plan.NUM_KV_HEADS)


@helper
def block_at(layer, table, place):  # type: ignore[no-untyped-def]
    """Where the block of a token begins, in bytes from block 0 on."""
    return load_int32(table + 4 * (place >> load_int(layer + plan.BLOCK_SHIFT))) * load_int(layer + plan.BLOCK_BYTES)


@helper
def rows_of(codes, row_bytes, layer, table, head, first, count, staged):  # type: ignore[no-untyped-def]
    """Address of the codes of sixteen tokens from `first` on, one after the other: in their block, or, where they lie
    in two blocks or there are only `count` of them, copied, with zeros for those that are missing."""
    shift = load_int(layer + plan.BLOCK_SHIFT)
    if count >= LANES and shift >= 4:
        slot = (head << shift) + (first & ((1 << shift) - 1))
        return codes + block_at(layer, table, first) + slot * row_bytes
    for token in range(LANES):
        target = staged + token * row_bytes
        if token >= count:
            zero_row(target, row_bytes)
            continue
        place = first + token
        slot = (head << shift) + (place & ((1 << shift) - 1))
        copy_row(codes + block_at(layer, table, place) + slot * row_bytes, target, row_bytes)
    return staged


@helper
def load_scales(scales, layer, table, head, first, count, target):  # type: ignore[no-untyped-def]
    """Scales of sixteen tokens as fp32, zeros for those beyond `count`."""
    shift = load_int(layer + plan.BLOCK_SHIFT)
    if count >= LANES and shift >= 4:
        slot = (head << shift) + (first & ((1 << shift) - 1))
        store_f32(target, load16(_FP16, scales + block_at(layer, table, first) + 2 * slot))
        return
    for token in range(LANES):
        value = _ZERO
        if token < count:
            place = first + token
            slot = (head << shift) + (place & ((1 << shift) - 1))
            value = load_half(scales + block_at(layer, table, place) + 2 * slot)
        store_float(target + 4 * token, value)


@helper
def first_seen(layer, position):  # type: ignore[no-untyped-def]
    """The first token of the first tile that a row at a position sees."""
    window = load_int(layer + plan.WINDOW)
    start = max(0, position - window + 1) if window > 0 else 0
    return start - start % TILE


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
def _prefetch(codec, codes, row_bytes, scales, layer, table, head, first, end):  # type: ignore[no-untyped-def]
    """Ask for the keys or the values of at most sixteen tokens, first .. end."""
    literally(codec)
    prefetch_tokens(codes, row_bytes, layer, table, head, first, end)
    if codec == _INT8 and first < end:
        shift = load_int(layer + plan.BLOCK_SHIFT)
        slot = (head << shift) + (first & ((1 << shift) - 1))
        prefetch(scales + block_at(layer, table, first) + 2 * slot)


@helper
def prefetch_keys(codec, row_bytes, layer, table, head, first, end):  # type: ignore[no-untyped-def]
    codes, scales = load_int(layer + plan.K_ADDRESS), load_int(layer + plan.K_SCALES_ADDRESS)
    _prefetch(codec, codes, row_bytes, scales, layer, table, head, first, end)


@helper
def prefetch_values(codec, row_bytes, layer, table, head, first, end):  # type: ignore[no-untyped-def]
    codes, scales = load_int(layer + plan.V_ADDRESS), load_int(layer + plan.V_SCALES_ADDRESS)
    _prefetch(codec, codes, row_bytes, scales, layer, table, head, first, end)


@helper
def prefetch_first(k_codec, k_bytes, v_codec, v_bytes, head_dim, layer, table, head, position):  # type: ignore[no-untyped-def]
    """Ask for what `attend_pairs` reads before its own prefetching is ahead of it."""
    start = first_seen(layer, position)
    for first in range(start, min(start + AHEAD, position), LANES):
        end = min(first + LANES, position)
        prefetch_keys(k_codec, head_dim * k_bytes, layer, table, head, first, end)
        prefetch_values(v_codec, head_dim * v_bytes, layer, table, head, first, end)
