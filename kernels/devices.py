"""From `--device` to the kernels that run there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from deepinfer.kernels import kernel_cache
from deepinfer.kernels.cpu import jit
from deepinfer.kernels.ops import CpuOps, Ops

if TYPE_CHECKING:
    from deepinfer.kernels.cuda.launcher import Backend

logger = logging.getLogger(__name__)

DEVICES = ("auto", "cpu", "cuda", "host-emulation")


class DeviceError(RuntimeError):
    """The device that was asked for cannot be used, in one line."""


def open_device(name: str, w4_activations: str = "auto") -> Ops:
    """`auto` is the GPU where torch sees one and CuPy is installed, else the CPU, and the log says why.

    `host-emulation` runs the CUDA kernels on the CPU: a proof for tests, many times slower than `cpu`.
    `w4_activations`: "auto", the compute dtype, or "int8": activations are rounded to 8 bits before they meet 4-bit
    weights. Raises DeviceError.

    Compiled kernels on disk that no program has used for long are removed.
    """
    jit.hold_cache()
    ops = _open(name)
    if w4_activations == "auto":
        return ops
    if not isinstance(ops, CpuOps):
        raise DeviceError(f"w4_activations is {w4_activations!r}, which {ops.name} does not have; it must be auto")
    return CpuOps(int8_activations=True)


def _open(name: str) -> Ops:
    if name == "cpu":
        return CpuOps()
    if name == "host-emulation":
        from deepinfer.kernels.cuda.host_backend import HostBackend

        return _cuda_ops(HostBackend)
    if name == "cuda":
        return _cuda()
    if name != "auto":
        raise DeviceError(f"device is {name!r}; it must be one of: {', '.join(DEVICES)}")
    if not torch.cuda.is_available():
        return CpuOps()
    try:
        return _cuda()
    except DeviceError as error:
        logger.warning("running on the CPU: %s", error)
        return CpuOps()


def _cuda() -> Ops:
    from deepinfer.kernels.cuda.cupy_backend import CupyBackend

    try:
        return _cuda_ops(CupyBackend)
    except ImportError as error:
        raise DeviceError(
            "device is cuda, but CuPy is not installed: pip install 'deepinfer-daemon[cuda12]' (or cuda13)"
        ) from error
    except RuntimeError as error:
        raise DeviceError(f"device is cuda, but it cannot be used: {error}") from error


def _cuda_ops(backend: Callable[[], Backend]) -> Ops:
    from deepinfer.kernels.cuda import disk_cache
    from deepinfer.kernels.cuda.ops import CudaOps

    kernel_cache.remove_unused_files(disk_cache.cache_folder())
    return CudaOps(backend())
