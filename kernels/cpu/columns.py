"""Columns of 16-bit rows in another order."""

from __future__ import annotations

import functools

from deepinfer.kernels.cpu.memory import load_int, load_int16, load_int32, store_int16
from deepinfer.kernels.cpu.tasks import unit


@functools.cache
def take_unit() -> int:
    """(x, order int32 [width], out, width): a row for each unit; out[k] = x[order[k]]."""

    @unit
    def take(arguments, row, worker):  # type: ignore[no-untyped-def]
        order, width = load_int(arguments + 8), load_int(arguments + 24)
        x, out = load_int(arguments) + 2 * row * width, load_int(arguments + 16) + 2 * row * width
        for k in range(width):
            store_int16(out + 2 * k, load_int16(x + 2 * load_int32(order + 4 * k)))

    return take.address
