"""The host shim means what a GPU means: barriers, shuffles, shared memory, and faults instead of hangs."""

import pytest
import torch

from deepinfer.kernels.cuda.source import KernelSource


@pytest.fixture
def run(tmp_path, monkeypatch, backend):
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))

    def launch(body, *args, grid=(1, 1, 1), block=64, parameters="int* out", shared=1024):
        path = tmp_path / "probe.cu"
        path.write_text(
            f'#include "device.h"\nextern "C" __global__ void KERNEL_NAME({parameters}) {{ DP_SHARED(shared); {body} }}'
        )
        backend.launch(backend.compile(KernelSource(str(path), "probe")), grid, block, shared, *args)

    return launch


def test_a_barrier_orders_what_all_threads_wrote(run):
    out = torch.zeros(3 * 64, dtype=torch.int32)
    run(
        """int* values = (int*)shared;
        for (int round = 0; round < 5; ++round) {
            values[threadIdx.x] = threadIdx.x + round;
            __syncthreads();
            const int theirs = values[(threadIdx.x + 1) % 64];
            __syncthreads();
            out[blockIdx.x * 64 + threadIdx.x] = theirs;
        }""",
        out,
        grid=(3, 1, 1),
    )
    assert torch.equal(out.view(3, 64), ((torch.arange(64) + 1) % 64 + 4).int().expand(3, 64))


def test_shuffles_exchange_within_each_warp(run):
    out = torch.zeros(64)
    run(
        """float x = float(threadIdx.x);
        for (int mask = 1; mask < 32; mask *= 2) x += shuffle_xor(x, mask);
        out[threadIdx.x] = x;""",
        out,
        parameters="float* out",
    )
    assert torch.equal(out, torch.tensor([496.0] * 32 + [1520.0] * 32))


def test_shared_memory_starts_as_nan_so_that_an_early_read_shows(run):
    out = torch.zeros(64)
    run("out[threadIdx.x] = ((float*)shared)[threadIdx.x];", out, parameters="float* out")
    assert torch.isnan(out).all()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("if (threadIdx.x < 40) __syncthreads();", "barrier that not every thread reaches"),
        ("if (threadIdx.x < 7) shuffle_xor(1.0f, 1);", "not every lane reaches"),
        ("if (threadIdx.x < 7) shuffle_xor(1.0f, 1); else shuffle_xor(2.0f, 1);", "different operations"),
    ],
)
def test_what_would_hang_on_a_gpu_is_a_fault(run, body, words):
    with pytest.raises(RuntimeError, match=words):
        run(body, torch.zeros(1, dtype=torch.int32))


def test_arguments_of_another_kind_are_refused(run):
    for args in ((1,), (1.0,), (), (torch.zeros(1), 1)):
        with pytest.raises(RuntimeError, match="arguments of other kinds"):
            run("", *args)


def test_tensors_that_are_not_contiguous_are_refused(run):
    with pytest.raises(ValueError, match="contiguous"):
        run("", torch.zeros(4, 4).t())


def test_more_shared_memory_than_a_launch_may_have_is_refused(run):
    with pytest.raises(RuntimeError, match="more threads or shared memory"):
        run("", torch.zeros(1), shared=49 * 1024)
