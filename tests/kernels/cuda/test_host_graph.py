"""What the host shim captures and replays, which stands for a CUDA graph where there is no GPU."""

import pytest
import torch

from deepinfer.kernels.cuda.elementwise import CudaElementwise


@pytest.fixture
def ops(backend):
    return CudaElementwise(backend)


def test_a_capture_does_nothing_and_a_replay_works_on_what_the_memory_then_holds(backend, ops):
    gate_up, out = torch.ones(2, 16), torch.full((2, 8), 7.0)
    graph = backend.capture(lambda: ops.silu_mul(gate_up, out))
    assert (out == 7).all()
    for scale in (1.0, -3.0):
        gate_up.fill_(scale)
        graph.replay()
        assert torch.allclose(out, scale * torch.nn.functional.silu(torch.tensor(scale)).expand(2, 8))


def test_torch_operations_between_launches_are_replayed_into_the_memory_that_was_captured(backend, ops):
    table, ids, kept = torch.randn(10, 16), torch.tensor([1, 2]), []

    def step():
        rows = torch.embedding(table, ids)
        out = torch.empty(2, 8)
        ops.silu_mul(rows, out)
        rows[:, :8] += out
        kept.append(torch.nn.functional.linear(rows, torch.eye(16)[:3]))

    with torch.inference_mode():
        graph = backend.capture(step)
        for chosen in ([1, 2], [9, 0]):
            ids.copy_(torch.tensor(chosen))
            graph.replay()
            expected = table[ids].clone()
            gate, up = expected.chunk(2, dim=1)
            expected[:, :8] += torch.nn.functional.silu(gate) * up
            assert torch.allclose(kept[0], expected[:, :3], atol=1e-6)


def test_memory_that_a_captured_step_takes_is_nan_until_it_is_written(backend):
    kept = []
    graph = backend.capture(lambda: kept.append(torch.empty(3) * 2))
    graph.replay()
    assert kept[0].isnan().all()


WAITS = {
    "cpu": lambda x: x.cpu(),
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "bool": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "to a device": lambda x: x.to("cpu"),
    "to a device by name": lambda x: x.to(device=torch.device("cpu")),
    "new tensor": lambda x: torch.tensor([1.0]),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_would_end_a_capture_on_a_gpu_is_refused_by_name(backend, name):
    x = torch.ones(2)
    WAITS[name](x)
    with pytest.raises(RuntimeError, match=r"inside a captured step"):
        backend.capture(lambda: WAITS[name](x))
    backend.capture(lambda: x.to(torch.bfloat16))
    WAITS[name](x)


def test_another_thread_goes_on_launching_while_one_captures(backend, ops):
    from threading import Thread

    gate_up, out = torch.ones(1, 8), torch.zeros(1, 4)

    def step():
        other = Thread(target=ops.silu_mul, args=(gate_up, out))
        other.start()
        other.join()

    assert len(backend.capture(step)) == 0
    assert (out > 0).all()
