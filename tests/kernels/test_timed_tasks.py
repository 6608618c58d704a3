"""A timed program does what the program does, and its times are in the order of its tasks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer.kernels import elementwise
from deepinfer.kernels.cpu.tasks import Program, recording
from deepinfer.kernels.cpu.timed_tasks import TimedProgram

ROWS, WIDTH, TASKS = 7, 64, 5


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_same_is_computed_and_every_task_ends_before_the_next_begins(workers):
    torch.manual_seed(0)
    residual, weight = torch.randn(ROWS, WIDTH), torch.rand(WIDTH)
    out = torch.empty(ROWS, WIDTH)
    with recording() as taken:
        for _ in range(TASKS):
            elementwise.add_rms_norm(residual, out, weight, 1e-6, out)
    (tasks,) = taken.steps
    results = []
    for made in (Program(tasks), TimedProgram(tasks)):
        residual.copy_(torch.arange(ROWS * WIDTH).view(ROWS, WIDTH))
        out.zero_()
        made.run(workers)
        results.append((residual.clone(), out.clone()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    times = made.times()
    assert times.begin.shape == times.end.shape == times.busy.shape == (TASKS,)
    assert (times.end >= times.begin).all()
    assert (times.begin[1:] >= times.end[:-1]).all()
    assert (times.busy > 0).all()
    assert (times.busy <= times.end - times.begin).all()
    assert np.all(times.begin > 0)
