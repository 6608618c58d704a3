"""The seam between the Python wrappers and what runs their kernels: a GPU through CuPy, or the host shim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from deepinfer.kernels.cuda.source import KernelSource
from deepinfer.kernels.graphs import Graph
from deepinfer.kernels.streams import Stream

Argument = Tensor | int | float
"""A tensor is passed as the address of its first element, an int as int32, a float as fp32."""


class Backend(Protocol):
    """Compiles and launches kernels."""

    name: str
    """Said in status and results: "cuda: <card>" or "host-emulation"."""
    device: str
    """Where the tensors that are passed to kernels must lie, as torch names it."""

    def compile(self, source: KernelSource) -> Any:
        """A handle for `launch`. Raises CompileError with the compiler's log."""
        ...

    def launch(self, kernel: Any, grid: tuple[int, int, int], block: int, shared_bytes: int, *args: Argument) -> None:
        """Run `kernel` after everything that was launched before it.

        Raises ValueError for a tensor that lies on another device or is not contiguous.
        """
        ...

    def capture(self, function: Callable[[], None]) -> Graph:
        """What `function` does on the device, to be done again and again without Python. Nothing of it is done now.

        `function` has run before, so that everything is compiled. It may launch kernels and call torch on device
        tensors; it must neither wait for the device nor copy between host and device. Launches are replayed with the
        addresses and numbers of now. Who captures keeps the tensors alive that `function` uses and leaves.
        """
        ...

    def new_stream(self, name: str) -> Stream:
        """Beside all others. A stream named "decode" goes first where the device must choose."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        ...


def check_tensor(tensor: Tensor, device: str) -> int:
    """The address of a tensor that a kernel may be given. Raises ValueError otherwise."""
    if tensor.device.type != device.partition(":")[0]:
        raise ValueError(f"a kernel on {device} cannot use a tensor on {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"kernels need contiguous tensors, not strides {tensor.stride()}")
    return tensor.data_ptr()
