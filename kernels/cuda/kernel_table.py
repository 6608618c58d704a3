"""Compiled kernels, each once for a back end, however many layers use it."""

from __future__ import annotations

import functools
from typing import Any

from deepinfer.kernels.cuda.launcher import Backend
from deepinfer.kernels.cuda.source import KernelSource


@functools.cache
def compiled(backend: Backend, source: KernelSource) -> Any:
    """The handle for `backend.launch`. Raises CompileError with the compiler's log."""
    return backend.compile(source)
