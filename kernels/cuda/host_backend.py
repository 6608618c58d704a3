"""Runs the text of a CUDA kernel on the CPU: compiled by the C++ compiler under a shim, CTA after CTA.

For proofs, not for service: it is as correct as the kernel and many times slower than the CPU kernels.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from deepinfer.kernels.cuda import disk_cache
from deepinfer.kernels.cuda.host_graph import HostGraph, Recorder
from deepinfer.kernels.cuda.host_stream import HostStream
from deepinfer.kernels.cuda.launcher import Argument, check_tensor
from deepinfer.kernels.cuda.nvrtc import CompileError
from deepinfer.kernels.cuda.source import FOLDER, KernelSource, fingerprint, headers

_SHIM = FOLDER / "host" / "shim.h"
_OPTIONS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas")


class HostBackend:
    """See `Backend`. Raises CompileError where there is no C++ compiler."""

    name = "host-emulation"
    device = "cpu"

    def __init__(self) -> None:
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
        if compiler is None:
            raise CompileError("the host shim needs a C++ compiler: install g++, or name one in CXX")
        self._compiler = compiler
        self._capturing = threading.local()

    def compile(self, source: KernelSource) -> Any:
        """The entry of a shared object, which is taken from the disk cache where it can."""
        options = [*_OPTIONS, *source.defines]
        texts = [text for item in headers().items() for text in item]
        path = disk_cache.cache_folder() / (
            "host-" + fingerprint(self._compiler, _SHIM.read_text(), source.text, *texts, *options) + ".so"
        )
        try:
            os.utime(path)
        except FileNotFoundError:
            self._build(source, options, path)
        entry = ctypes.CDLL(str(path)).dp_host_launch
        entry.restype = ctypes.c_char_p
        return entry

    def launch(self, kernel: Any, grid: tuple[int, int, int], block: int, shared_bytes: int, *args: Argument) -> None:
        """See `Backend.launch`. Raises RuntimeError for what would hang or be undefined on a GPU."""
        values = [self._convert(arg) for arg in args]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value, _ in values))
        kinds = "".join(kind for _, kind in values).encode()

        def run() -> None:
            fault = kernel((ctypes.c_uint * 3)(*grid), block, shared_bytes, addresses, kinds)
            if fault:
                raise RuntimeError(f"kernel launch failed: {fault.decode()}")

        recorder: Recorder | None = getattr(self._capturing, "recorder", None)
        if recorder is None:
            run()
        else:
            recorder.keep(run, (values, args))

    def capture(self, function: Callable[[], None]) -> HostGraph:
        """See `Backend.capture`. Raises RuntimeError for what a capture on a GPU would not survive."""
        with Recorder() as recorder:
            self._capturing.recorder = recorder
            try:
                function()
            finally:
                self._capturing.recorder = None
        return recorder.graph()

    def new_stream(self, name: str) -> HostStream:
        return HostStream(name)

    def synchronize(self) -> None:
        """Every launch is done when it returns."""

    def _convert(self, arg: Argument) -> tuple[ctypes.c_void_p | ctypes.c_int32 | ctypes.c_float, str]:
        if isinstance(arg, Tensor):
            return ctypes.c_void_p(check_tensor(arg, self.device)), "p"
        return (ctypes.c_int32(arg), "i") if isinstance(arg, int) else (ctypes.c_float(arg), "f")

    def _build(self, source: KernelSource, options: list[str], path: Path) -> None:
        main = f'#include "{_SHIM}"\n#include "{FOLDER / source.file}"\nDP_HOST_ENTRY({source.name})\n'
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "kernel.so"
            command = [self._compiler, *options, f"-I{FOLDER}", "-x", "c++", "-", "-o", str(output)]
            result = subprocess.run(command, input=main, capture_output=True, text=True, check=False)
            if result.returncode:
                raise CompileError(f"{source.file} ({' '.join(options)}) does not compile:\n{result.stderr}")
            disk_cache.publish(path, output.read_bytes())
