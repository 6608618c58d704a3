"""What the CuPy back end asks of CuPy and torch, which are put in place by recorders: there is no GPU here."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from deepinfer.kernels.cuda import cupy_backend, nvrtc
from deepinfer.kernels.cuda.nvrtc import Compiled
from deepinfer.kernels.cuda.source import KernelSource
from deepinfer.kernels.devices import DeviceError, open_device


class FakeStream:
    """Torch hands out as few streams as this, in turn."""

    made = 0

    def __init__(self, device, priority=0):
        self.cuda_stream = 100 + FakeStream.made % 32
        FakeStream.made += 1

    def wait_stream(self, other):
        pass


class FakeGraph:
    captures: ClassVar[list] = []

    def capture_begin(self, pool, capture_error_mode):
        FakeGraph.captures.append((FakeGpu.current.cuda_stream, pool, capture_error_mode))

    def capture_end(self):
        if FakeGpu.broken:
            raise RuntimeError("the capture was invalidated")

    def replay(self):
        pass


class FakeGpu:
    """Of `torch.cuda`, what the back end uses."""

    current: FakeStream
    broken = False

    @staticmethod
    @contextlib.contextmanager
    def stream(stream):
        before, FakeGpu.current = FakeGpu.current, stream
        yield
        FakeGpu.current = before


@pytest.fixture
def gpu(monkeypatch):
    """The back end on a card of capability 8.6, and what it loads and launches."""
    FakeStream.made, FakeGraph.captures, FakeGpu.broken = 0, [], False
    FakeGpu.current = FakeStream("cuda:0")
    seen = SimpleNamespace(streams=[], loaded=[], launches=[], capability=(8, 6))

    def external(handle, device):
        seen.streams.append((handle, device))
        return SimpleNamespace(ptr=handle)

    class Module:
        load = staticmethod(seen.loaded.append)

        @staticmethod
        def get_function(name):
            return lambda *args, **options: seen.launches.append((name, args, options))

    cuda = SimpleNamespace(function=SimpleNamespace(Module=Module), ExternalStream=external)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    for name, value in {
        "is_available": lambda: True,
        "get_device_capability": lambda device: seen.capability,
        "get_device_name": lambda device: "a card",
        "current_stream": lambda device: FakeGpu.current,
        "graph_pool_handle": object,
        "Stream": FakeStream,
        "CUDAGraph": FakeGraph,
        "stream": FakeGpu.stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cupy_backend, "check_tensor", lambda tensor, device: tensor.data_ptr())
    seen.open = cupy_backend.CupyBackend
    return seen


def test_all_graphs_are_captured_on_one_stream_that_nobody_else_gets(gpu):
    """Torch's streams come round again after 32: a stream for each graph would be the prefill lane's before long."""
    backend = gpu.open()
    lanes = [backend.new_stream(name)._stream.cuda_stream for name in ("prefill", "offload")]
    graphs = [backend.capture(lambda: None) for _ in range(70)]
    streams, pools, modes = (set(column) for column in zip(*FakeGraph.captures, strict=True))
    assert len(graphs) == len(FakeGraph.captures) == 70
    assert (len(streams), len(pools), modes) == (1, 1, {"thread_local"})
    assert not streams & {*lanes, FakeGpu.current.cuda_stream}


def test_a_graph_keeps_alive_what_the_captured_function_uses(gpu):
    memory = torch.zeros(3)
    seen = weakref.ref(memory)
    graph = gpu.open().capture(lambda memory=memory: None)
    del memory
    gc.collect()
    assert seen() is not None
    graph.replay()
    del graph
    gc.collect()
    assert seen() is None


def test_a_capture_that_fails_says_why_and_not_that_it_could_not_be_ended(gpu):
    FakeGpu.broken = True

    def fails():
        raise ValueError("the reason")

    with pytest.raises(ValueError, match="the reason"):
        gpu.open().capture(fails)


def test_launches_go_to_torchs_current_stream_with_arguments_of_the_kernels_types(gpu):
    backend, memory = gpu.open(), torch.zeros(4)
    kernel = backend.compile(KernelSource("argmax.cu", "dp_argmax"))
    for stream in (FakeGpu.current, FakeStream("cuda:0"), FakeGpu.current):
        with FakeGpu.stream(stream):
            backend.launch(kernel, (3, 2, 1), 128, 64, memory, 7, 0.5)
    assert gpu.loaded[0][:4] == b"\x7fELF"
    assert gpu.streams == [(100, 0), (101, 0)]
    assert [options["stream"].ptr for _, _, options in gpu.launches] == [100, 101, 100]
    name, (grid, block, args), options = gpu.launches[0]
    assert (name, grid, block, options["shared_mem"]) == ("dp_argmax", (3, 2, 1), (128, 1, 1), 64)
    assert [type(arg) for arg in args] == [np.uintp, np.int32, np.float32]
    assert args[0] == memory.data_ptr()


def test_a_card_that_the_compiler_does_not_know_gets_ptx_that_its_driver_assembles(gpu, monkeypatch):
    asked = []

    def compile_kernel(source, arch):
        asked.append(arch)
        return Compiled(b"", b"// text\0", "")

    monkeypatch.setattr(cupy_backend, "compile_kernel", compile_kernel)
    monkeypatch.setattr(nvrtc, "_supported_archs", lambda: [80, 86, 90])
    gpu.capability = (12, 0)
    gpu.open().compile(KernelSource("argmax.cu", "dp_argmax"))
    assert (asked, gpu.loaded) == (["compute_90"], [b"// text\0"])


@pytest.mark.parametrize(
    ("capability", "arch"), [((8, 6), "sm_86"), ((9, 0), "sm_90"), ((8, 8), "compute_86"), ((12, 0), "compute_90")]
)
def test_a_device_gets_machine_code_where_the_compiler_knows_it_else_the_newest_ptx_below(
    capability, arch, monkeypatch
):
    monkeypatch.setattr(nvrtc, "_supported_archs", lambda: [75, 80, 86, 90])
    assert nvrtc.target_arch(capability) == arch


def test_a_card_that_is_too_old_is_refused_in_one_line(gpu):
    gpu.capability = (7, 5)
    with pytest.raises(DeviceError, match=r"a card has compute capability 7\.5; 8\.0 is needed$"):
        open_device("cuda")


def test_the_compiler_knows_the_reference_card():
    assert nvrtc.target_arch((8, 6)) == nvrtc.REFERENCE_ARCH
