"""Memory in pages of 2 MiB: fewer faults when it is first written, and fewer look-ups when it is read."""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os

import torch

logger = logging.getLogger(__name__)

PAGE = 2 << 20


def untouched_bytes(count: int) -> torch.Tensor:
    """uint8 [count], not initialised. Large ones lie in pages of 2 MiB where the system grants them (Linux,
    unless transparent huge pages are switched off). What lies before is never touched, so it takes no memory.
    """
    if count < PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=torch.uint8)
    memory = torch.empty(count + 2 * PAGE, dtype=torch.uint8)
    first = -memory.data_ptr() % PAGE
    address, size = ctypes.c_void_p(memory.data_ptr() + first), ctypes.c_size_t(-(-count // PAGE) * PAGE)
    if _library().madvise(address, size, mmap.MADV_HUGEPAGE):
        _say_refused(os.strerror(ctypes.get_errno()))
    return memory[first : first + count]


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@functools.cache
def _say_refused(reason: str) -> None:
    """Once: it is slower, and no error."""
    logger.info("the system grants weights no pages of 2 MiB (%s); they lie in small ones, which takes longer", reason)
