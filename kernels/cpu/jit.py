"""How every compiled CPU kernel is made: strict arithmetic, numba's `omp` threads, compiled code kept on
disk."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

from deepinfer.kernels import kernel_cache


def _threading_layer() -> str:
    """Ask numba for its `omp` layer, and say "omp" or why there are no threads.

    Numba's own fallback may not be called from two threads at once (it ends the process), so without OpenMP
    the kernels are compiled for one thread. Must run before the first parallel function is compiled.
    """
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError as error:
        return f"none, kernels run on one thread (numba has no OpenMP: {error})"
    numba.config.THREADING_LAYER = "omp"
    return "omp"


THREADING_LAYER = _threading_layer()
CACHE_FOLDER = kernel_cache.cpu_folder()
_ALL_THREADS, _ONE_THREAD, _UNITS = "all-threads", "one-thread", "units"
PATIENCE = 30.0
"""Seconds in all to wait for other processes that compile the same, which takes two on a quiet core."""
_waited = 0.0


@functools.cache
def hold_cache() -> None:
    """Keep this process's compiled kernels on disk for as long as it lives, and remove those of versions that nobody
    uses any more."""
    kernel_cache.hold(CACHE_FOLDER)
    kernel_cache.remove_unused_versions(CACHE_FOLDER, (_ALL_THREADS, _ONE_THREAD, _UNITS, kernel_cache.STARTS))


@contextmanager
def _cached_in(folder: Path) -> Iterator[None]:
    """Two processes that want the same at once compile it once."""
    global _waited
    began = time.monotonic()
    with kernel_cache.one_at_a_time(folder, max(0.0, PATIENCE - _waited)):
        _waited += time.monotonic() - began
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
        try:
            yield
        finally:
            numba.config.CACHE_DIR = before


def compiled(signature: Any = None, *, parallel: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Compile for this CPU, and keep the result on disk: at once if a signature is given, else at the first
    call. Raises TypeError if the function closes over anything but numbers.

    No fast-math: the order of every sum is as written, so rows stay bit-equal.
    """
    parallel = parallel and THREADING_LAYER == "omp"

    def decorate(function: Callable[..., Any]) -> Any:
        _check_closure(function)
        # Numba's key on disk does not know of `parallel`: in one folder, what was compiled first would be both.
        with _cached_in(CACHE_FOLDER / (_ALL_THREADS if parallel else _ONE_THREAD)):
            return numba.njit(signature, parallel=parallel, cache=True, nogil=True, error_model="numpy")(function)

    return decorate


def _check_closure(function: Callable[..., Any]) -> None:
    """The disk cache's key is made of what is closed over, and a compiled function is another one in every process: it
    would be compiled at every start and kept each time."""
    for name, value in inspect.getclosurevars(function).nonlocals.items():
        parts = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(part, (int, float, np.generic)) for part in parts):
            raise TypeError(f"{function.__qualname__} closes over {name}, which is no number: {value!r}")


def _closure_digest(function: Callable[..., Any]) -> str:
    """Units that differ only in this must not share a folder: of two processes that add to one of numba's indices at
    once, the one's machine code can end up under the key of the other's."""
    closure = sorted(inspect.getclosurevars(function).nonlocals.items())
    return hashlib.sha256(repr((function.__qualname__, closure)).encode()).hexdigest()[:16]


_units: list[Any] = []
"""Whoever uses a unit has its address only; this keeps the code."""


def compiled_unit(function: Callable[[int, int, int], None]) -> Any:
    """Compile a function for `tasks`, as C calls it; `.address` is where it lies, for as long as the process lives.

    Raises TypeError if it closes over anything but numbers, as `compiled` does.
    """
    _check_closure(function)
    signature = numba.void(numba.int64, numba.int64, numba.int64)
    with _cached_in(CACHE_FOLDER / _UNITS / _closure_digest(function)):
        made = numba.cfunc(signature, cache=True, error_model="numpy")(function)
    _units.append(made)
    return made


class _NoEngine:
    """Where numba would set what a function's machine code refers to."""

    @staticmethod
    def set_env(name: str, environment: Any) -> None:
        pass


class _LinkedLibrary(JITCodeLibrary):
    """The code of a helper: simplified, and otherwise left to what it is linked into. Numba would optimise it and make
    machine code of it, and do both again with what calls it, and again with what calls that."""

    codegen = _NoEngine

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _HelperCompiler(Compiler):
    def __init__(self, typing_context: Any, target_context: Any, library: Any, *rest: Any) -> None:
        super().__init__(typing_context, target_context, _LinkedLibrary(target_context.codegen(), "helper"), *rest)


def helper(function: Callable[..., Any]) -> Any:
    """Compile a function that only other compiled functions call. It is inlined into them: it has no machine code, no
    wrapper for Python and no cache of its own."""
    return _linked(function, forceinline=True)


def shared_helper(function: Callable[..., Any]) -> Any:
    """As `helper`, but for long functions: once in whatever calls it, not inlined unless the compiler thinks so."""
    return _linked(function)


def _linked(function: Callable[..., Any], **options: Any) -> Any:
    return numba.njit(
        error_model="numpy",
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
        pipeline_class=_HelperCompiler,
        **options,
    )(function)
