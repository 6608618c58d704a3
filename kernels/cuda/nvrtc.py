"""Compiles CUDA sources through NVRTC: needs neither a GPU, nor a driver, nor the CUDA headers."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
import re
import sys
from pathlib import Path
from typing import NamedTuple

import msgpack

from deepinfer.kernels.cuda import disk_cache
from deepinfer.kernels.cuda.source import KernelSource, fingerprint, headers

REFERENCE_ARCH = "sm_86"
_OPTIONS = ("--std=c++17", "--ptxas-options=-v")


class CompileError(RuntimeError):
    """A source that the compiler refuses, with the compiler's log; or no compiler."""


class Resources(NamedTuple):
    """What a kernel takes on the device, as the assembler reported it."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_stores: int
    spill_loads: int


class Compiled(NamedTuple):
    """A compiled kernel. `cubin` runs on its architecture alone, `ptx` (text) on later ones too."""

    cubin: bytes
    ptx: bytes
    log: str

    @property
    def resources(self) -> Resources:
        """Read from the log. Raises CompileError if the assembler reported nothing."""
        used = re.search(r"Used (\d+) registers", self.log)
        spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", self.log)
        if used is None or spills is None:
            raise CompileError(f"the assembler did not report registers and spills: {self.log!r}")
        shared = re.search(r"(\d+) bytes smem", self.log)
        return Resources(int(used[1]), int(shared[1]) if shared else 0, *(int(n) for n in spills.groups()))


def compile_kernel(source: KernelSource, arch: str = REFERENCE_ARCH) -> Compiled:
    """Compile one specialisation for `arch` ("sm_86"), or take it from the disk cache.

    Raises CompileError with the compiler's log.
    """
    major, minor = version()
    options = [f"--gpu-architecture={arch}", *_OPTIONS, *source.defines]
    texts = [text for item in headers().items() for text in item]
    key = "cubin-" + fingerprint(f"nvrtc {major}.{minor}", source.text, *texts, *options)
    payload = disk_cache.load(key)
    if payload is None:
        compiled = _compile(source, options)
        disk_cache.store(key, msgpack.packb(tuple(compiled)))
        return compiled
    return Compiled(*msgpack.unpackb(payload))


def version() -> tuple[int, int]:
    """Major and minor version of the compiler."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def target_arch(capability: tuple[int, int]) -> str:
    """What to compile for a device: its own architecture where the compiler knows it, else PTX for the newest one below
    it, which the driver assembles for the device. Raises CompileError if the compiler knows no such one."""
    number = 10 * capability[0] + capability[1]
    known = _supported_archs()
    if number in known:
        return f"sm_{number}"
    older = [arch for arch in known if arch < number]
    if not older:
        have = ".".join(map(str, version()))
        raise CompileError(f"NVRTC {have} makes nothing for compute capability {capability[0]}.{capability[1]}")
    return f"compute_{max(older)}"


def _supported_archs() -> list[int]:
    library, count = _library(), ctypes.c_int()
    failed = library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    archs = (ctypes.c_int * count.value)()
    failed = failed or library.nvrtcGetSupportedArchs(archs)
    if failed:
        raise CompileError(f"NVRTC error {failed} when asked what it compiles for")
    return list(archs)


def _compile(source: KernelSource, options: list[str]) -> Compiled:
    library, program, included = _library(), ctypes.c_void_p(), headers()
    texts, names = ((ctypes.c_char_p * len(included))(*map(str.encode, part)) for part in (included.values(), included))
    created = library.nvrtcCreateProgram(
        ctypes.byref(program), source.text.encode(), source.file.encode(), len(included), texts, names
    )
    if created:
        raise CompileError(f"{source.file}: NVRTC error {created} before compiling")
    try:
        status = library.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options))
        )
        log = _fetch(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if status:
            raise CompileError(f"{source.file} ({' '.join(options)}) does not compile:\n{log}")
        return Compiled(_fetch(program, "CUBIN"), _fetch(program, "PTX"), log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _fetch(program: ctypes.c_void_p, what: str) -> bytes:
    library, size = _library(), ctypes.c_size_t()
    failed = getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    failed = failed or getattr(library, f"nvrtcGet{what}")(program, buffer)
    if failed:
        raise CompileError(f"NVRTC error {failed} when asked for the {what}")
    return buffer.raw


@functools.cache
def _library() -> ctypes.CDLL:
    path = _find_library()
    if path is None:
        raise CompileError("no NVRTC library: install nvidia-cuda-nvrtc-cu12, or a CuPy that brings it")
    return ctypes.CDLL(path)


def _find_library() -> str | None:
    """NVRTC out of the installed packages (CUDA 12 and 13 have different folders), that of torch's own CUDA if there
    are several: the driver is new enough for that one. Else the system's."""
    spec = importlib.util.find_spec("nvidia")
    torch = sys.modules.get("torch")  # what compiles for no device does without it
    own = f".so.{((torch and torch.version.cuda) or '').partition('.')[0]}"
    for folder in spec.submodule_search_locations or () if spec else ():
        found = sorted(Path(folder).glob("*/lib/libnvrtc.so.*"), key=lambda path: (not path.name.endswith(own), path))
        if found:
            return str(found[0])
    return ctypes.util.find_library("nvrtc")
