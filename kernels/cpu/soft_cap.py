"""Soft caps of logits (Gemma 2)."""

from __future__ import annotations

import functools
import math

import numpy as np

from deepinfer.kernels.cpu.memory import load_float, load_int, store_float
from deepinfer.kernels.cpu.tasks import unit
from deepinfer.kernels.cpu.vec16 import LANES, div, load_f32, mul, splat, store_f32, tanh

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
