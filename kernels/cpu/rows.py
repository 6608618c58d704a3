"""Norms and the gated activation, row by row: one pass over memory each, sixteen lanes with a fixed order of
sums."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from numba import literally

from deepinfer.kernels.codecs import Codec
from deepinfer.kernels.cpu.codecs import load16, store16
from deepinfer.kernels.cpu.jit import helper
from deepinfer.kernels.cpu.memory import load_float, load_int, store_int32
from deepinfer.kernels.cpu.tasks import unit
from deepinfer.kernels.cpu.vec16 import (
    LANES,
    add,
    fma,
    gelu_tanh,
    lane_max,
    lane_sum,
    larger,
    load_f32,
    mul,
    silu,
    splat,
    store_f32,
)


class RowUnits(NamedTuple):
    """Addresses of unit functions, for one activation dtype: a row for each unit."""

    rms_norm: int
    """(x fp32, weight, out, eps, width)."""
    add_rms_norm: int
    """(residual fp32, delta, weight, out, eps, width)."""


_PIECE = 256
"""Logits between two looks at the highest so far."""


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
def gated_row(act_codec, act_bytes, gelu, gate, up, width, out):  # type: ignore[no-untyped-def]
    """out = act(gate) * up, act being silu or the tanh form of gelu."""
    literally(act_codec)
    literally(gelu)
    for lane in range(0, width, LANES):
        value = load16(act_codec, gate + act_bytes * lane)
        value = gelu_tanh(value) if gelu else silu(value)
        store16(act_codec, out + act_bytes * lane, mul(value, load16(act_codec, up + act_bytes * lane)))


@functools.cache
def gated_unit(activations: Codec, gelu: bool) -> int:
    """(gate and up, out, width): a row for each unit. The width is a multiple of 16."""
    act_codec, act_bytes, is_gelu = activations.number, activations.itemsize, int(gelu)

    @unit
    def gated(arguments, row, worker):  # type: ignore[no-untyped-def]
        gate_up, out, width = load_int(arguments), load_int(arguments + 8), load_int(arguments + 16)
        gate = gate_up + act_bytes * 2 * row * width
        gated_row(act_codec, act_bytes, is_gelu, gate, gate + act_bytes * width, width, out + act_bytes * row * width)

    return gated.address


@functools.cache
def row_units(activations: Codec) -> RowUnits:
    """For rows of fp32 or bf16 activations whose width is a multiple of 16."""
    act_codec, act_bytes = activations.number, activations.itemsize

    @unit
    def rms_norm(arguments, row, worker):  # type: ignore[no-untyped-def]
        x, weight, out = load_int(arguments), load_int(arguments + 8), load_int(arguments + 16)
        eps, width = load_float(arguments + 24), load_int(arguments + 32)
        norm_row(act_codec, act_bytes, x + 4 * row * width, weight, eps, width, out + act_bytes * row * width)

    @unit
    def add_rms_norm(arguments, row, worker):  # type: ignore[no-untyped-def]
        residual, delta = load_int(arguments), load_int(arguments + 8)
        weight, out = load_int(arguments + 16), load_int(arguments + 24)
        eps, width = load_float(arguments + 32), load_int(arguments + 40)
        at = row * width
        add_norm_row(
            act_codec, act_bytes, residual + 4 * at, delta + act_bytes * at, weight, eps, width, out + act_bytes * at
        )

    return RowUnits(rms_norm.address, add_rms_norm.address)


@functools.cache
def argmax_unit() -> int:
    """(logits fp32 [rows, width], ids int32 [rows], width, number of valid logits): a row for each unit. The lowest id
    among the highest valid logits; -1 if one of them is not finite."""

    @unit
    def argmax(arguments, row, worker):  # type: ignore[no-untyped-def]
        width, num_valid = load_int(arguments + 16), load_int(arguments + 24)
        logits = load_int(arguments) + 4 * row * width
        best, place, lowest, zero = np.float32(-np.inf), 0, splat(np.float32(-np.inf)), splat(np.float32(0.0))
        taint = zero
        whole = num_valid - num_valid % LANES
        for first in range(0, whole, _PIECE):
            highest = lowest
            for lane in range(first, min(first + _PIECE, whole), LANES):
                values = load_f32(logits + 4 * lane)
                highest, taint = larger(highest, values), fma(values, zero, taint)
            peak = lane_max(highest)
            if peak > best:
                best, place = peak, first
        rest = lane_sum(taint)
        token = np.int64(-1)
        for index in range(place, min(place + _PIECE, whole)):
            if token < 0 and load_float(logits + 4 * index) == best:
                token = index
        for index in range(whole, num_valid):
            value = load_float(logits + 4 * index)
            rest += value * np.float32(0.0)
            if value > best:
                best, token = value, index
        store_int32(load_int(arguments + 8) + 4 * row, token if rest == np.float32(0.0) else np.int64(-1))

    return argmax.address
