"""Tasks that run together: every unit once, however many threads there are."""

import numpy as np
import pytest

from deepinfer.kernels.cpu.memory import add_int, load_int
from deepinfer.kernels.cpu.tasks import Task, run_together, unit


@unit
def count(arguments, index, worker):
    add_int(load_int(arguments) + 8 * index, 1)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_unit_of_tasks_that_run_together_is_done_once(workers):
    counts = [np.zeros(units, np.int64) for units in (1, 0, 700, 3, 64)]
    tasks = [Task(count.address, len(found), (found.ctypes.data,)) for found in counts]
    for times in (1, 2):
        run_together(tasks, workers)
        assert all((found == times).all() for found in counts)
