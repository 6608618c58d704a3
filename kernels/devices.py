"""From `--device` to the kernels that run there."""

from __future__ import annotations

import logging

import torch

from deepinfer.kernels.ops import CpuOps, Ops

logger = logging.getLogger(__name__)

DEVICES = ("auto", "cpu", "cuda", "host-emulation")


class DeviceError(RuntimeError):
    """The device that was asked for cannot be used, in one line."""


def open_device(name: str) -> Ops:
    """`auto` is the GPU where torch sees one and CuPy is installed, else the CPU, and the log says why.

    `host-emulation` runs the CUDA kernels on the CPU: a proof for tests, many times slower than `cpu`.
    Raises DeviceError.
    """
    if name == "cpu":
        return CpuOps()
    if name == "host-emulation":
        from deepinfer.kernels.cuda.host_backend import HostBackend
        from deepinfer.kernels.cuda.ops import CudaOps

        return CudaOps(HostBackend())
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
    from deepinfer.kernels.cuda.ops import CudaOps

    try:
        return CudaOps(CupyBackend())
    except ImportError as error:
        raise DeviceError(
            "device is cuda, but CuPy is not installed: pip install 'deepinfer-daemon[cuda12]' (or cuda13)"
        ) from error
    except RuntimeError as error:
        raise DeviceError(f"device is cuda, but it cannot be used: {error}") from error
