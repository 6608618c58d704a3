"""The compiled paged attention: one function per (K codec, V codec, activation dtype, head_dim, split key bias)."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
from numba import prange

from deepinfer.kernels.codecs import Codec
from deepinfer.kernels.cpu import plan
from deepinfer.kernels.cpu.attend import attend_unit
from deepinfer.kernels.cpu.jit import compiled, helper
from deepinfer.kernels.cpu.kv_write import make_storable, normalise_head, rotate_head, store_head, unpack_head
from deepinfer.kernels.cpu.memory import fetch_add

SATURATED, NONFINITE, NEXT_UNIT = range(3)
NUM_COUNTERS = 3
"""Entries of a call's int64 counters."""
_TABLE, _ROWS, _COUNTS = numba.int32[:, ::1], numba.int32[::1], numba.int64[::1]
_SIGNATURE = numba.void(
    _COUNTS, _ROWS, _ROWS, _TABLE, _TABLE, numba.boolean[::1], _COUNTS, *[numba.int64] * 6, numba.float32, numba.float32
)  # fmt: skip


@helper
def write_head(  # type: ignore[no-untyped-def]
    k_codec, k_bytes, k_limit, v_codec, v_bytes, v_limit, act_codec, act_bytes, head_dim,
    layer, table, position, qkv, queries, head, scale, eps,
):  # fmt: skip
    """For one KV head of a row: rotate its query heads into `queries` (fp32, times `scale`), store its key and value.
    Returns how many elements were clamped and how many were not finite."""
    num_q, num_kv = layer[plan.NUM_Q_HEADS], layer[plan.NUM_KV_HEADS]
    cos = layer[plan.COS_ADDRESS] + 4 * position * (head_dim // 2)
    sin = layer[plan.SIN_ADDRESS] + 4 * position * (head_dim // 2)
    shift = layer[plan.BLOCK_SHIFT]
    block = np.int64(table[position >> shift]) * layer[plan.BLOCK_BYTES]
    head_bytes, group = act_bytes * head_dim, num_q // num_kv
    for member in range(head * group, (head + 1) * group):
        target = queries + 4 * head_dim * member
        unpack_head(act_codec, act_bytes, qkv + member * head_bytes, target, head_dim)
        if layer[plan.Q_WEIGHT_ADDRESS] != 0:
            normalise_head(target, layer[plan.Q_WEIGHT_ADDRESS], eps, head_dim)
        rotate_head(target, cos, sin, scale, head_dim)
    work = queries + 4 * head_dim * (num_q + head)
    place = (head << shift) + (position & ((1 << shift) - 1))
    unpack_head(act_codec, act_bytes, qkv + (num_q + head) * head_bytes, work, head_dim)
    if layer[plan.K_WEIGHT_ADDRESS] != 0:
        normalise_head(work, layer[plan.K_WEIGHT_ADDRESS], eps, head_dim)
    rotate_head(work, cos, sin, np.float32(1.0), head_dim)
    saturated, nonfinite, largest = make_storable(work, k_limit, head_dim)
    codes = layer[plan.K_ADDRESS] + block + place * head_dim * k_bytes
    store_head(k_codec, k_bytes, work, largest, codes, layer[plan.K_SCALES_ADDRESS] + block + 2 * place, head_dim)
    unpack_head(act_codec, act_bytes, qkv + (num_q + num_kv + head) * head_bytes, work, head_dim)
    above, bad, largest = make_storable(work, v_limit, head_dim)
    codes = layer[plan.V_ADDRESS] + block + place * head_dim * v_bytes
    store_head(v_codec, v_bytes, work, largest, codes, layer[plan.V_SCALES_ADDRESS] + block + 2 * place, head_dim)
    return saturated + above, nonfinite + bad


@functools.cache
def paged_attention_kernel(
    k: Codec, v: Codec, activations: Codec, head_dim: int, parallel: bool, key_bias: bool
) -> Any:
    """The compiled function for these, on all threads or on one. A row's key and value are stored before anything
    attends to them. With `key_bias` it adds the layer's bias to the keys that it reads.

    Compiled, or loaded from disk, when it is first asked for.

    Only numbers are closed over: they become constants of the machine code, and keep the disk cache's key
        stable.
    """
    k_codec, k_bytes, k_limit = k.number, k.itemsize, np.float32(k.max_finite)
    v_codec, v_bytes, v_limit = v.number, v.itemsize, np.float32(v.max_finite)
    act_codec, act_bytes, biased = activations.number, activations.itemsize, int(key_bias)

    @compiled(_SIGNATURE, parallel=parallel)
    def paged_attention(  # type: ignore[no-untyped-def]
        layer, positions, row_seq, tables, tiles, nonfinite_rows, counters,
        qkv, out, queries, scratch, scratch_bytes, num_workers, scale, eps,
    ):  # fmt: skip
        num_rows, num_kv = len(positions), layer[plan.NUM_KV_HEADS]
        row_floats = (layer[plan.NUM_Q_HEADS] + num_kv) * head_dim
        row_bytes = act_bytes * (layer[plan.NUM_Q_HEADS] + 2 * num_kv) * head_dim
        saturated, nonfinite = 0, 0
        # A row whose sequence has no other row here reads no key but its own that is written now.
        each_alone = row_seq[num_rows - 1] == num_rows - 1
        if not each_alone:
            for row in prange(num_rows):
                for head in range(num_kv):
                    above, bad = write_head(
                        k_codec, k_bytes, k_limit, v_codec, v_bytes, v_limit, act_codec, act_bytes, head_dim,
                        layer, tables[row_seq[row]], np.int64(positions[row]), qkv + row * row_bytes,
                        queries + 4 * row * row_floats, head, scale, eps,
                    )  # fmt: skip
                    if bad > 0:
                        nonfinite_rows[row] = True
                    saturated += above
                    nonfinite += bad
        counters[NEXT_UNIT] = 0
        next_unit = counters.ctypes.data + 8 * NEXT_UNIT
        num_units = len(tiles) * num_kv
        for worker in prange(num_workers):
            unit = fetch_add(next_unit)
            while unit < num_units:
                first, end, head = tiles[unit // num_kv, 0], tiles[unit // num_kv, 1], unit % num_kv
                if each_alone:
                    above, bad = write_head(
                        k_codec, k_bytes, k_limit, v_codec, v_bytes, v_limit, act_codec, act_bytes, head_dim,
                        layer, tables[row_seq[first]], np.int64(positions[first]), qkv + first * row_bytes,
                        queries + 4 * first * row_floats, head, scale, eps,
                    )  # fmt: skip
                    if bad > 0:
                        nonfinite_rows[first] = True
                    saturated += above
                    nonfinite += bad
                attend_unit(
                    k_codec, k_bytes, v_codec, v_bytes, biased, act_codec, act_bytes, head_dim,
                    layer, tables[row_seq[first]], positions, np.int64(first), np.int64(end), head,
                    queries, row_floats, out, scratch + worker * scratch_bytes,
                )  # fmt: skip
                unit = fetch_add(next_unit)
        counters[SATURATED] = saturated
        counters[NONFINITE] = nonfinite

    return paged_attention
