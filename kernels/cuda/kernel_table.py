"""Compiled kernels, each once for a back end, however many layers use it."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from deepinfer.kernels.cuda.launcher import Backend
from deepinfer.kernels.cuda.source import KernelSource

_kernels: WeakKeyDictionary[Backend, dict[KernelSource, Any]] = WeakKeyDictionary()


def compiled(backend: Backend, source: KernelSource) -> Any:
    """The handle for `backend.launch`. Raises CompileError with the compiler's log."""
    table = _kernels.setdefault(backend, {})
    if source not in table:
        table[source] = backend.compile(source)
    return table[source]
