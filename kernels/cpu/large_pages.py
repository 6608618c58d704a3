"""Memory in pages of 2 MiB: fewer faults when it is first written, and fewer look-ups when it is read."""

from __future__ import annotations

import ctypes
import mmap

import torch

PAGE = 2 << 20


def untouched_bytes(count: int) -> torch.Tensor:
    """uint8 [count], not initialised. Large ones lie in pages of 2 MiB where the system grants them (Linux,
    unless transparent huge pages are switched off). What lies before is never touched, so it takes no memory.
    """
    if count < PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=torch.uint8)
    memory = torch.empty(count + 2 * PAGE, dtype=torch.uint8)
    first = -memory.data_ptr() % PAGE
    # Where it is refused, pages are small: that is slower, and no error.
    size = -(-count // PAGE) * PAGE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.data_ptr() + first), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return memory[first : first + count]
