"""What attention keeps of a row and query head, whatever kind of products it takes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import literally

from deepinfer.kernels.cpu.codecs import store16
from deepinfer.kernels.cpu.jit import helper
from deepinfer.kernels.cpu.memory import load_unaligned, store_int
from deepinfer.kernels.cpu.vec16 import LANES, add, lane_sum, load_f32, mul, splat, store_f32

_ZERO, _ONE, _LOWEST = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)
_VECTOR = 4 * LANES


class RowRecord(NamedTuple):
    """What is kept of a row and query head while it goes through the tiles of its context: byte offsets of an
    accumulator fp32 [head_dim], of [16] fp32 lane sums, maxima (all equal) and decays (all equal), of the scores fp32
    [32] of the present tile, whose place its weights take, and of its query. What lies before the decays is its
    state."""

    sums: int
    maximum: int
    decay: int
    scores: int
    query: int
    length: int


@helper
def copy_row(source, target, num_bytes):  # type: ignore[no-untyped-def]
    """A multiple of eight bytes."""
    whole = num_bytes - num_bytes % _VECTOR
    for at in range(0, whole, _VECTOR):
        store_f32(target + at, load_f32(source + at))
    for at in range(whole, num_bytes, 8):
        store_int(target + at, load_unaligned(source + at))


@helper
def zero_row(target, num_bytes):  # type: ignore[no-untyped-def]
    """A multiple of eight bytes."""
    whole = num_bytes - num_bytes % _VECTOR
    for at in range(0, whole, _VECTOR):
        store_f32(target + at, splat(_ZERO))
    for at in range(whole, num_bytes, 8):
        store_int(target + at, 0)


@helper
def forget(state, record):  # type: ignore[no-untyped-def]
    """No token seen yet."""
    zero_row(state, record.maximum)
    store_f32(state + record.maximum, splat(_LOWEST))


@helper
def write_output(act_codec, act_bytes, head_dim, state, sums, target):  # type: ignore[no-untyped-def]
    literally(act_codec)
    inverse = splat(_ONE / lane_sum(load_f32(sums)))
    for lane in range(0, head_dim, LANES):
        # Adding zero turns -0 into 0, which is all that a tile's masked slots could change.
        value = add(mul(load_f32(state + 4 * lane), inverse), splat(_ZERO))
        store16(act_codec, target + act_bytes * lane, value)
