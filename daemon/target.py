"""The memory that an engine would run in: that of this machine, or one that was only described."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from deepinfer.kernels.devices import open_device
from deepinfer.kernels.ops import Ops

CGROUP = Path("/sys/fs/cgroup")


class Target(NamedTuple):
    """Bytes. Where `gpu` is false, the engine's memory is the host's."""

    name: str
    gpu: bool
    cuda_kernels: bool
    """They also run without a GPU, in tests; what they need of scratch memory is theirs."""
    free: int
    total: int
    host_free: int


def target_of(ops: Ops) -> Target:
    """As it is now. On a GPU, what others hold and what this process's CUDA context has taken is not free."""
    host = available_bytes()
    gpu = ops.device.startswith("cuda")
    free, total = torch.cuda.mem_get_info() if gpu else (host, psutil.virtual_memory().total)
    return Target(ops.name, gpu, ops.name != "cpu", free, total, host)


def described(device: str, memory: int | None) -> Target:
    """`memory` bytes are free on `device` ("auto" is what this machine has); None asks the device itself. With a
    number, `cuda` needs no GPU. Raises DeviceError."""
    if memory is None or device == "auto":
        target = target_of(open_device(device))
        return target if memory is None else _with_memory(target, memory)
    gpu = device == "cuda"
    return _with_memory(Target(device, gpu, device != "cpu", 0, 0, available_bytes()), memory)


def _with_memory(target: Target, memory: int) -> Target:
    return target._replace(free=memory, total=memory, host_free=target.host_free if target.gpu else memory)


def available_bytes() -> int:
    """Memory that this process may still take: what the machine has free, or less if its control group is smaller."""
    free = psutil.virtual_memory().available
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - used)
