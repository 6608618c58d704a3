"""The write half of paged attention: normalise and rotate q and k of a row, store its K and V in their
slots."""

from __future__ import annotations

import math

import numpy as np
from numba import literally

from deepinfer.kernels.codecs import BF16, INT8
from deepinfer.kernels.cpu.codecs import clamp, count_above, count_nonfinite, load16, store16, zero_nonfinite
from deepinfer.kernels.cpu.jit import helper
from deepinfer.kernels.cpu.memory import load_float, load_half, store_float, store_half
from deepinfer.kernels.cpu.vec16 import (
    LANES,
    add,
    div,
    fma,
    lane_max,
    lane_sum,
    load_f32,
    magnitude_max,
    mul,
    splat,
    store_f32,
    sub,
)

_BF16, _INT8 = BF16.number, INT8.number
_LARGEST_SCALE = np.float32(65504.0)
_ZERO, _ONE, _LARGEST_CODE = np.float32(0.0), np.float32(1.0), np.float32(127.0)


@helper
def unpack_head(act_codec, act_bytes, source, target, head_dim):  # type: ignore[no-untyped-def]
    """One head of activations, widened to fp32."""
    literally(act_codec)
    for lane in range(0, head_dim, LANES):
        store_f32(target + 4 * lane, load16(act_codec, source + act_bytes * lane))


@helper
def normalise_head(head, weight, eps, head_dim):  # type: ignore[no-untyped-def]
    """RMS norm of one fp32 head in place."""
    squares = splat(_ZERO)
    for lane in range(0, head_dim, LANES):
        value = load_f32(head + 4 * lane)
        squares = fma(value, value, squares)
    mean = lane_sum(squares) / np.float32(head_dim)
    inverse = _ONE / np.float32(math.sqrt(mean + eps))
    for d in range(head_dim):
        store_float(head + 4 * d, load_float(head + 4 * d) * inverse * load_float(weight + 4 * d))


@helper
def rotate_head(head, cos, sin, factor, head_dim):  # type: ignore[no-untyped-def]
    """head = RoPE(head) * factor in place, half-split. Not fused, so that it rounds as plain torch does."""
    half = head_dim // 2
    whole = half - half % LANES
    factors = splat(factor)
    for d in range(0, whole, LANES):
        low, high = head + 4 * d, head + 4 * (half + d)
        first, second = load_f32(low), load_f32(high)
        c, s = load_f32(cos + 4 * d), load_f32(sin + 4 * d)
        store_f32(low, mul(sub(mul(first, c), mul(second, s)), factors))
        store_f32(high, mul(add(mul(second, c), mul(first, s)), factors))
    for d in range(whole, half):
        low, high = head + 4 * d, head + 4 * (half + d)
        first, second = load_float(low), load_float(high)
        c, s = load_float(cos + 4 * d), load_float(sin + 4 * d)
        store_float(low, (first * c - second * s) * factor)
        store_float(high, (second * c + first * s) * factor)


@helper
def scale_head(head, factor, head_dim):  # type: ignore[no-untyped-def]
    """head = head * factor in place: what is left of `rotate_head` where nothing is rotated."""
    for d in range(head_dim):
        store_float(head + 4 * d, load_float(head + 4 * d) * factor)


@helper
def round_head(head, head_dim):  # type: ignore[no-untyped-def]
    """One fp32 head to bf16, written from its own beginning on."""
    for lane in range(0, head_dim, LANES):
        store16(_BF16, head + 2 * lane, load_f32(head + 4 * lane))


@helper
def make_storable(head, limit, head_dim):  # type: ignore[no-untyped-def]
    """Zero what is not finite, clamp the rest, in place: (saturated, non-finite elements, largest
    magnitude)."""
    saturated, nonfinite = 0, 0
    largest = splat(_ZERO)
    for lane in range(0, head_dim, LANES):
        value = load_f32(head + 4 * lane)
        nonfinite += count_nonfinite(value)
        value = zero_nonfinite(value)
        saturated += count_above(value, limit)
        value = clamp(value, limit)
        store_f32(head + 4 * lane, value)
        largest = magnitude_max(largest, value)
    return saturated, nonfinite, lane_max(largest)


@helper
def store_head(codec, itemsize, head, largest, codes, scale_at, head_dim):  # type: ignore[no-untyped-def]
    """Encode one storable fp32 head into its slot."""
    literally(codec)
    if codec == _INT8:
        store_half(scale_at, min(largest / _LARGEST_CODE, _LARGEST_SCALE))
        scale = load_half(scale_at)
        for lane in range(0, head_dim, LANES):
            value = splat(_ZERO)
            if scale > _ZERO:
                value = clamp(div(load_f32(head + 4 * lane), splat(scale)), _LARGEST_CODE)
            store16(codec, codes + lane, value)
    else:
        for lane in range(0, head_dim, LANES):
            store16(codec, codes + itemsize * lane, load_f32(head + 4 * lane))
