"""Layers in groups, each with block tables of its own, through the CUDA kernels of prompts and of decode steps."""

import pytest
import torch
from kernel_harness import rope_tables
from layer_groups import GROUPS, Grouped

from deepinfer.kernels.cuda.paged_attention import CudaAttention


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_layers_in_groups_say_what_they_say_in_one(backend, batch_invariant):
    def make(case, layout, pool):
        tables = rope_tables(case.longest, layout.head_dim)
        return CudaAttention(backend, case.spec, layout, pool, *tables, batch_invariant)

    case = Grouped("int8", head_dim=64)
    assert torch.equal(case.run(make, GROUPS), case.run(make))
    assert not torch.equal(case.run(make, GROUPS, stored_elsewhere=True), case.run(make))
