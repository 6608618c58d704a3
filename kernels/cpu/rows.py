"""Norms and the gated activation, row by row: one pass over memory each, sixteen lanes with a fixed order of
sums."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numba import literally, prange

from deepinfer.kernels.codecs import Codec
from deepinfer.kernels.cpu.codecs import load16, store16
from deepinfer.kernels.cpu.jit import compiled, helper
from deepinfer.kernels.cpu.vec16 import LANES, add, fma, lane_sum, load_f32, mul, silu, splat, store_f32


class RowKernels(NamedTuple):
    """Compiled functions over addresses, for one activation dtype. Each exists for one thread and for all."""

    rms_norm: Any
    add_rms_norm: Any
    silu_mul: Any


@helper
def scale_row(act_codec, act_bytes, x, weight, squares, eps, width, out):  # type: ignore[no-untyped-def]
    """out = x * weight / sqrt(mean of squares + eps)."""
    literally(act_codec)
    mean = lane_sum(squares) / np.float32(width)
    inverse = splat(np.float32(1.0) / np.float32(math.sqrt(mean + eps)))
    for lane in range(0, width, LANES):
        value = mul(mul(load_f32(x + 4 * lane), inverse), load_f32(weight + 4 * lane))
        store16(act_codec, out + act_bytes * lane, value)


@helper
def norm_row(act_codec, act_bytes, x, weight, eps, width, out):  # type: ignore[no-untyped-def]
    squares = splat(np.float32(0.0))
    for lane in range(0, width, LANES):
        value = load_f32(x + 4 * lane)
        squares = fma(value, value, squares)
    scale_row(act_codec, act_bytes, x, weight, squares, eps, width, out)


@helper
def add_norm_row(act_codec, act_bytes, residual, delta, weight, eps, width, out):  # type: ignore[no-untyped-def]
    literally(act_codec)
    squares = splat(np.float32(0.0))
    for lane in range(0, width, LANES):
        value = add(load_f32(residual + 4 * lane), load16(act_codec, delta + act_bytes * lane))
        store_f32(residual + 4 * lane, value)
        squares = fma(value, value, squares)
    scale_row(act_codec, act_bytes, residual, weight, squares, eps, width, out)


@helper
def silu_row(act_codec, act_bytes, gate, up, width, out):  # type: ignore[no-untyped-def]
    literally(act_codec)
    for lane in range(0, width, LANES):
        value = silu(load16(act_codec, gate + act_bytes * lane))
        store16(act_codec, out + act_bytes * lane, mul(value, load16(act_codec, up + act_bytes * lane)))


@functools.cache
def row_kernels(activations: Codec, parallel: bool) -> RowKernels:
    """The kernels for rows of fp32 or bf16 activations whose width is a multiple of 16."""
    act_codec, act_bytes = activations.number, activations.itemsize

    @compiled(parallel=parallel)
    def rms_norm(x, weight, eps, out, num_rows, width):  # type: ignore[no-untyped-def]
        for row in prange(num_rows):
            norm_row(act_codec, act_bytes, x + 4 * row * width, weight, eps, width, out + act_bytes * row * width)

    @compiled(parallel=parallel)
    def add_rms_norm(residual, delta, weight, eps, out, num_rows, width):  # type: ignore[no-untyped-def]
        for row in prange(num_rows):
            at = row * width
            add_norm_row(
                act_codec, act_bytes, residual + 4 * at, delta + act_bytes * at, weight, eps, width,
                out + act_bytes * at,
            )  # fmt: skip

    @compiled(parallel=parallel)
    def silu_mul(gate_up, out, num_rows, width):  # type: ignore[no-untyped-def]
        for row in prange(num_rows):
            gate = gate_up + act_bytes * 2 * row * width
            silu_row(act_codec, act_bytes, gate, gate + act_bytes * width, width, out + act_bytes * row * width)

    return RowKernels(rms_norm, add_rms_norm, silu_mul)
