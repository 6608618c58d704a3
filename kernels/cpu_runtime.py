"""Threads of the CPU kernels, and what a status report says of them."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numba
import torch

from deepinfer.kernels import elementwise
from deepinfer.kernels.attention import AttentionBatch, AttentionSpec, make_attention
from deepinfer.kernels.cpu import jit
from deepinfer.kernels.cpu.vec16 import LANES
from deepinfer.kernels.kv_formats import BlockLayout, KVFormat

_SHOWN_FEATURES = ("avx2", "f16c", "fma", "avx512f", "avx512bf16", "avx512vnni", "amx-bf16", "neon")


def configure_threads(num_threads: int) -> None:
    """Let torch and numba use `num_threads` threads each, in calls from this thread.

    Numba keeps the number for each calling thread, so every thread that computes calls this once. Raises
    ValueError for a number that the machine does not have.
    """
    available = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    if not 1 <= num_threads <= available:
        raise ValueError(f"threads must be in 1 .. {available} on this machine, not {num_threads}")
    numba.set_num_threads(num_threads)
    torch.set_num_threads(num_threads)  # Last: numba's first call starts its threads, and that sets OpenMP's number.


def warm_up(spec: AttentionSpec, layout: BlockLayout, compute_dtype: torch.dtype) -> None:
    """Compile, or load from the disk cache, the attention and row kernels that a model of this shape will
    call.

    Matmul kernels are compiled where their weights are made.

    Runs on a pool of its own, so that the first request is as fast as those after it.
    """
    half = spec.head_dim // 2
    pool = torch.zeros((1, layout.row_bytes), dtype=torch.uint8)
    fmt = KVFormat(layout.k, layout.v)
    attention = make_attention("auto", spec, layout, fmt, pool, torch.ones(1, half), torch.zeros(1, half), False)
    width = spec.num_q_heads * spec.head_dim
    qkv = torch.zeros((1, width + 2 * spec.num_kv_heads * spec.head_dim), dtype=compute_dtype)
    out = torch.empty((1, width), dtype=compute_dtype)
    attention.forward(0, qkv, AttentionBatch([0], [0], [[[0]]] * layout.num_groups, [0, 1]), out)
    for rows in (1, -(-elementwise.PARALLEL_ELEMENTS // LANES)):
        x, weight = torch.zeros((rows, LANES)), torch.ones(LANES)
        small = torch.zeros((rows, LANES), dtype=compute_dtype)
        elementwise.rms_norm(x, weight, 1e-6, small)
        elementwise.add_rms_norm(x, small, weight, 1e-6, small)
        elementwise.silu_mul(torch.zeros((rows, 2 * LANES), dtype=compute_dtype), small)


def describe() -> dict[str, Any]:
    """Threads, numba's threading layer and why it is not `omp` if so, torch's instruction set, CPU
    features."""
    features = llvm.get_host_cpu_features()
    return {
        "cpu": llvm.get_host_cpu_name(),
        "features": [name for name in _SHOWN_FEATURES if features.get(name)],
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
        "numba_threads": numba.get_num_threads(),
        "numba_threading_layer": jit.THREADING_LAYER,
        "kernel_cache": str(jit.CACHE_FOLDER),
    }
