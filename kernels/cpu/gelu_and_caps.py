"""What Gemma has beside the rest: the gate with the tanh form of gelu, and soft caps."""

from __future__ import annotations

import functools
import math

import numpy as np
from numba import literally

from deepinfer.kernels.codecs import Codec
from deepinfer.kernels.cpu.codecs import load16, store16
from deepinfer.kernels.cpu.jit import helper
from deepinfer.kernels.cpu.memory import load_float, load_int, store_float
from deepinfer.kernels.cpu.tasks import unit
from deepinfer.kernels.cpu.vec16 import LANES, div, gelu_tanh, load_f32, mul, splat, store_f32, tanh


@helper
def gelu_row(act_codec, act_bytes, gate, up, width, out):  # type: ignore[no-untyped-def]
    literally(act_codec)
    for lane in range(0, width, LANES):
        value = gelu_tanh(load16(act_codec, gate + act_bytes * lane))
        store16(act_codec, out + act_bytes * lane, mul(value, load16(act_codec, up + act_bytes * lane)))


@functools.cache
def gelu_mul_unit(activations: Codec) -> int:
    """(gate and up, out, width): a row for each unit. The width is a multiple of 16."""
    act_codec, act_bytes = activations.number, activations.itemsize

    @unit
    def gelu_mul(arguments, row, worker):  # type: ignore[no-untyped-def]
        gate_up, out, width = load_int(arguments), load_int(arguments + 8), load_int(arguments + 16)
        gate = gate_up + act_bytes * 2 * row * width
        gelu_row(act_codec, act_bytes, gate, gate + act_bytes * width, width, out + act_bytes * row * width)

    return gelu_mul.address


CAP_PIECE = 4096
"""Logits that a unit of `soft_cap_unit` takes."""


@functools.cache
def soft_cap_unit() -> int:
    """(rows of fp32 values, width of a row, cap fp32): cap * tanh(value / cap) in place, `CAP_PIECE` values for each
    unit."""

    @unit
    def soft_cap(arguments, index, worker):  # type: ignore[no-untyped-def]
        width, cap = load_int(arguments + 8), load_float(arguments + 16)
        pieces = (width + CAP_PIECE - 1) // CAP_PIECE
        row, first = load_int(arguments) + 4 * width * (index // pieces), CAP_PIECE * (index % pieces)
        end = min(first + CAP_PIECE, width)
        whole = end - (end - first) % LANES
        for place in range(first, whole, LANES):
            at = row + 4 * place
            store_f32(at, mul(tanh(div(load_f32(at), splat(cap))), splat(cap)))
        for place in range(whole, end):
            at = row + 4 * place
            store_float(at, np.float32(math.tanh(load_float(at) / cap)) * cap)

    return soft_cap.address
