"""Compiles many specialisations at once, and what must hold of each of them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

from deepinfer.kernels.cuda.nvrtc import Compiled, compile_kernel
from deepinfer.kernels.cuda.source import KernelSource

PROCESSES = len(os.sched_getaffinity(0))
"""The compiler takes one source at a time in each process, and a processor all the while."""


def compile_all(sources: Iterable[KernelSource]) -> dict[KernelSource, Compiled]:
    """For sm_86, from the disk cache where it can. Raises what the compiler raised."""
    unique = list(dict.fromkeys(sources))
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        return dict(zip(unique, pool.map(compile_kernel, unique, chunksize=4), strict=True))


def check(source: KernelSource, compiled: Compiled, registers: int) -> None:
    """Machine code for sm_86, no spills, no more registers than so many CTAs leave it."""
    assert compiled.cubin[:4] == b"\x7fELF"
    assert b".target sm_86" in compiled.ptx
    assert source.name.encode() in compiled.ptx
    used = compiled.resources
    assert (used.spill_stores, used.spill_loads, used.stack_bytes) == (0, 0, 0), f"{source}: {used}"
    assert used.registers <= registers, f"{source}: {used}"
