"""Rows of models that normalise what attention and MLP give, and whole projections: one pass each, as in `rows`."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from numba import literally

from deepinfer.kernels.codecs import Codec
from deepinfer.kernels.cpu.codecs import load16, store16
from deepinfer.kernels.cpu.jit import helper
from deepinfer.kernels.cpu.memory import load_float, load_int
from deepinfer.kernels.cpu.rows import scale_row
from deepinfer.kernels.cpu.tasks import unit
from deepinfer.kernels.cpu.vec16 import LANES, add, fma, lane_sum, load_f32, mul, splat, store_f32


class OutputNormUnits(NamedTuple):
    """Addresses of unit functions, for one activation dtype."""

    add_normed: int
    """(residual fp32, delta, delta's weight, weight or 0, out, eps, width): a row for each unit."""
    norm_parts: int
    """(activations, weight of q, weight of k, width of q, width of k, width of a row, eps): two units for a row."""
    narrow: int
    """(x fp32, out, width): a row for each unit."""


@helper
def narrow_row(act_codec, act_bytes, x, width, out):  # type: ignore[no-untyped-def]
    literally(act_codec)
    for lane in range(0, width, LANES):
        store16(act_codec, out + act_bytes * lane, load_f32(x + 4 * lane))


@helper
def inverse_rms(act_codec, act_bytes, x, eps, width):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean of squares + eps) of activations, in every lane."""
    literally(act_codec)
    squares = splat(np.float32(0.0))
    for lane in range(0, width, LANES):
        value = load16(act_codec, x + act_bytes * lane)
        squares = fma(value, value, squares)
    mean = lane_sum(squares) / np.float32(width)
    return splat(np.float32(1.0) / np.float32(math.sqrt(mean + eps)))


@helper
def norm_part(act_codec, act_bytes, x, weight, eps, width):  # type: ignore[no-untyped-def]
    """RMS norm of activations in place."""
    literally(act_codec)
    inverse = inverse_rms(act_codec, act_bytes, x, eps, width)
    for lane in range(0, width, LANES):
        value = mul(mul(load16(act_codec, x + act_bytes * lane), inverse), load_f32(weight + 4 * lane))
        store16(act_codec, x + act_bytes * lane, value)


@helper
def add_normed_row(act_codec, act_bytes, residual, delta, delta_weight, weight, eps, width, out):  # type: ignore[no-untyped-def]
    """residual += norm(delta); then out = norm(residual), or the residual itself where there is no weight for it."""
    literally(act_codec)
    inverse = inverse_rms(act_codec, act_bytes, delta, eps, width)
    squares = splat(np.float32(0.0))
    for lane in range(0, width, LANES):
        value = mul(mul(load16(act_codec, delta + act_bytes * lane), inverse), load_f32(delta_weight + 4 * lane))
        value = add(load_f32(residual + 4 * lane), value)
        store_f32(residual + 4 * lane, value)
        squares = fma(value, value, squares)
    if weight != 0:
        scale_row(act_codec, act_bytes, residual, weight, squares, eps, width, out)
    else:
        narrow_row(act_codec, act_bytes, residual, width, out)


@functools.cache
def output_norm_units(activations: Codec) -> OutputNormUnits:
    """For rows of fp32 or bf16 activations whose widths are multiples of 16."""
    act_codec, act_bytes = activations.number, activations.itemsize

    @unit
    def add_normed(arguments, row, worker):  # type: ignore[no-untyped-def]
        residual, delta, delta_weight = load_int(arguments), load_int(arguments + 8), load_int(arguments + 16)
        weight, out = load_int(arguments + 24), load_int(arguments + 32)
        eps, width = load_float(arguments + 40), load_int(arguments + 48)
        at = row * width
        add_normed_row(
            act_codec, act_bytes, residual + 4 * at, delta + act_bytes * at, delta_weight, weight, eps, width,
            out + act_bytes * at,
        )  # fmt: skip

    @unit
    def norm_parts(arguments, index, worker):  # type: ignore[no-untyped-def]
        q_width, stride, eps = load_int(arguments + 24), load_int(arguments + 40), load_float(arguments + 48)
        row = load_int(arguments) + act_bytes * stride * (index // 2)
        if index % 2 == 0:
            norm_part(act_codec, act_bytes, row, load_int(arguments + 8), eps, q_width)
        else:
            k_width = load_int(arguments + 32)
            norm_part(act_codec, act_bytes, row + act_bytes * q_width, load_int(arguments + 16), eps, k_width)

    @unit
    def narrow(arguments, row, worker):  # type: ignore[no-untyped-def]
        x, out, width = load_int(arguments), load_int(arguments + 8), load_int(arguments + 16)
        narrow_row(act_codec, act_bytes, x + 4 * row * width, width, out + act_bytes * row * width)

    return OutputNormUnits(add_normed.address, norm_parts.address, narrow.address)
