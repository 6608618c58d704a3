"""Runs kernels on the GPU through CuPy, on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.cuda.launcher import Argument, check_tensor
from deepinfer.kernels.cuda.nvrtc import compile_kernel
from deepinfer.kernels.cuda.source import KernelSource
from deepinfer.kernels.graphs import Graph
from deepinfer.kernels.streams import Stream

_DEFAULT_SHARED_BYTES = 48 * 1024


class CudaStream:
    """See `kernels.streams.Stream`. Used by one thread at a time."""

    def __init__(self, name: str, device: str) -> None:
        self.name = name
        self._stream = torch.cuda.Stream(device, priority=-1 if name == "decode" else 0)
        self._inside: Any = None

    def __enter__(self) -> CudaStream:
        self._inside = torch.cuda.stream(self._stream)
        self._inside.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside.__exit__(kind, error, trace)

    def record(self) -> torch.cuda.Event:
        return self._stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        self._stream.wait_event(event)


class CupyBackend:
    """See `Backend`. Raises ImportError without CuPy, RuntimeError without a usable GPU."""

    def __init__(self, device: int = 0) -> None:
        import cupy

        if not torch.cuda.is_available():
            raise RuntimeError("no CUDA device: torch sees no usable GPU")
        self._cupy = cupy
        major, minor = torch.cuda.get_device_capability(device)
        self._arch = f"sm_{major}{minor}"
        self.name = f"cuda: {torch.cuda.get_device_name(device)}"
        self.device = f"cuda:{device}"
        self._graph_memory: Any = None

    def compile(self, source: KernelSource) -> Any:
        """The CuPy function of a cubin for this device. The function keeps its module alive."""
        module = self._cupy.cuda.function.Module()
        module.load(compile_kernel(source, self._arch).cubin)
        return module.get_function(source.name)

    def launch(self, kernel: Any, grid: tuple[int, int, int], block: int, shared_bytes: int, *args: Argument) -> None:
        """See `Backend.launch`."""
        if shared_bytes > _DEFAULT_SHARED_BYTES:
            raise ValueError(
                f"{shared_bytes} bytes of shared memory, more than the {_DEFAULT_SHARED_BYTES} of a launch"
            )
        stream = self._cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        kernel(grid, (block, 1, 1), [self._convert(arg) for arg in args], shared_mem=shared_bytes, stream=stream)

    def capture(self, function: Callable[[], None]) -> Graph:
        """See `Backend.capture`. Other threads go on using the device meanwhile.

        Not by `torch.cuda.graph`, which waits for the whole device and gives the allocator's unused memory away. All
        graphs take their temporary memory from one pool: they are replayed one at a time.
        """
        if self._graph_memory is None:
            self._graph_memory = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._graph_memory, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        return graph

    def new_stream(self, name: str) -> Stream:
        return CudaStream(name, self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def _convert(self, arg: Argument) -> Any:
        if isinstance(arg, Tensor):
            return np.uintp(check_tensor(arg, self.device))
        return np.int32(arg) if isinstance(arg, int) else np.float32(arg)
