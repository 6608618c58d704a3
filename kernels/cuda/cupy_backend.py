"""Runs kernels on the GPU through CuPy, on torch's current stream."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.cuda.launcher import Argument, check_tensor
from deepinfer.kernels.cuda.nvrtc import compile_kernel, target_arch
from deepinfer.kernels.cuda.source import KernelSource
from deepinfer.kernels.graphs import Graph
from deepinfer.kernels.streams import Stream

OLDEST_CAPABILITY = 8, 0
"""Asynchronous copies, bf16 arithmetic and the tensor cores' m16n8k16 begin here."""
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


class CudaGraph:
    """See `kernels.graphs.Graph`. Holds on to what was captured: a graph has addresses only, and whoever forgets a
    tensor gives its memory away."""

    def __init__(self, graph: torch.cuda.CUDAGraph, function: Callable[[], None]) -> None:
        self._graph, self._function = graph, function

    def replay(self) -> None:
        self._graph.replay()


class CupyBackend:
    """See `Backend`. Raises ImportError without CuPy, RuntimeError without a usable GPU."""

    def __init__(self, device: int = 0) -> None:
        import cupy

        if not torch.cuda.is_available():
            raise RuntimeError("no CUDA device: torch sees no usable GPU")
        self._cupy = cupy
        self.name = f"cuda: {torch.cuda.get_device_name(device)}"
        self.device = f"cuda:{device}"
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST_CAPABILITY:
            have, need = (".".join(map(str, numbers)) for numbers in (capability, OLDEST_CAPABILITY))
            raise RuntimeError(f"{torch.cuda.get_device_name(device)} has compute capability {have}; {need} is needed")
        self._arch = target_arch(capability)
        self._streams: dict[int, Any] = {}
        self._capture_stream: torch.cuda.Stream | None = None
        self._graph_memory: Any = None

    def compile(self, source: KernelSource) -> Any:
        """The CuPy function of a cubin for this device, or of PTX, which the driver assembles, where the compiler does
        not know the device. The function keeps its module alive."""
        module, made = self._cupy.cuda.function.Module(), compile_kernel(source, self._arch)
        module.load(made.cubin or made.ptx)
        return module.get_function(source.name)

    def launch(self, kernel: Any, grid: tuple[int, int, int], block: int, shared_bytes: int, *args: Argument) -> None:
        """See `Backend.launch`."""
        if shared_bytes > _DEFAULT_SHARED_BYTES:
            raise ValueError(
                f"{shared_bytes} bytes of shared memory, more than the {_DEFAULT_SHARED_BYTES} of a launch"
            )
        stream = self._current_stream()
        kernel(grid, (block, 1, 1), [self._convert(arg) for arg in args], shared_mem=shared_bytes, stream=stream)

    def capture(self, function: Callable[[], None]) -> Graph:
        """See `Backend.capture`. Other threads go on using the device meanwhile.

        Not by `torch.cuda.graph`, which waits for the whole device and gives the allocator's unused memory away. All
        graphs take their temporary memory from one pool: they are replayed one at a time. And all are captured on one
        stream. Torch has 32 streams and hands them out in turn: a new one for each graph would soon be the one that
        another thread computes on, whose work would then be captured; and memory of one stream is not used for another.
        """
        if self._capture_stream is None:
            self._capture_stream = torch.cuda.Stream(self.device)
            self._graph_memory = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), self._capture_stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._graph_memory, capture_error_mode="thread_local")
            try:
                function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # that a failed capture cannot be ended: the cause says more
                    graph.capture_end()
                raise
            graph.capture_end()
        return CudaGraph(graph, function)

    def new_stream(self, name: str) -> Stream:
        return CudaStream(name, self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def _current_stream(self) -> Any:
        """Torch's current stream as CuPy knows it: one object for each, which costs time to make and warns in CuPy 14
        that it will be replaced by one that destroys the stream it stands for."""
        handle = torch.cuda.current_stream(self.device).cuda_stream
        found = self._streams.get(handle)
        if found is None:
            found = self._streams[handle] = self._cupy.cuda.ExternalStream(handle, torch.device(self.device).index)
        return found

    def _convert(self, arg: Argument) -> Any:
        if isinstance(arg, Tensor):
            return np.uintp(check_tensor(arg, self.device))
        return np.int32(arg) if isinstance(arg, int) else np.float32(arg)
