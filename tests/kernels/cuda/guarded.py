"""Run as a program: launches the matmul kernels on tensors that end where readable memory ends.

One byte too far, read or written, ends the process with a signal.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import sys

import torch
from w4_harness import Case

from deepinfer.kernels.cuda.host_backend import HostBackend
from deepinfer.kernels.cuda.linear import CudaTiledDenseLinear, CudaW8A16Linear, TiledLinear

PROT_NONE = 0
_regions = []


def at_the_end(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` whose last byte is the last one of a mapping, before a page that nobody may touch."""
    if tensor.numel() == 0:
        return tensor
    size = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    region = mmap.mmap(-1, size + mmap.PAGESIZE)
    _regions.append(region)
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address + size), mmap.PAGESIZE, PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect failed")
    copy = torch.frombuffer(region, dtype=torch.uint8, count=tensor.nbytes, offset=size - tensor.nbytes)
    return copy.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def guard(linear: TiledLinear) -> None:
    tiles = linear.tiles
    linear.tiles = dataclasses.replace(tiles, codes=at_the_end(tiles.codes), scales=at_the_end(tiles.scales))
    linear._bias = None if linear._bias is None else at_the_end(linear._bias)


class Overreaching(HostBackend):
    """Tells the GEMV of one row more than x has."""

    def launch(self, kernel, grid, block, shared_bytes, *args):
        y, x, codes, scales, bias, rows, *others = args
        super().launch(kernel, grid, block, shared_bytes, y, x, codes, scales, bias, rows + 1, *others)


def main(backend: HostBackend) -> None:
    small, large = Case(37, 96, 32), Case(48, 384, 128)
    w8 = CudaW8A16Linear(backend, small.codes.view(torch.int8), torch.ones(37, 3), small.bias)
    dense = CudaTiledDenseLinear(backend, small.weights.to(small.dtype), small.bias)
    for case, linear in (
        (small, small.linear(backend)),
        (large, large.linear(backend)),
        (small, w8),
        (small, dense),
    ):
        guard(linear)
        for rows in (1, 8, 9):
            y = torch.zeros(rows, linear.tiles.outputs, dtype=case.dtype)
            linear.multiply(at_the_end(case.x(rows)), at_the_end(y))
        if linear.tiles.bits == 4:
            weights = torch.zeros(linear.tiles.outputs // 16 * 16, linear.tiles.inputs, dtype=case.dtype)
            linear.dequantise(at_the_end(weights), 0)


if __name__ == "__main__":
    main(Overreaching() if "overreach" in sys.argv else HostBackend())
