"""Gives memory that loading has freed back to the operating system."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """glibc keeps the holes that temporaries of loading leave in its heap: 140 to 210 MB for a model of 135M
    parameters, more than its 4-bit weights. Other C libraries have no such call and no such habit.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
