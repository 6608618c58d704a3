"""Layers in groups, each with block tables of its own: what attention says is what it says of one table for all."""

import numpy as np
import pytest
import torch
from kernel_harness import rope_tables
from layer_groups import GROUPS, Grouped

from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.attention import make_attention


def attention_of(backend):
    def make(case, layout, pool):
        return make_attention(
            backend, case.spec, layout, case.fmt, pool, *rope_tables(case.longest, layout.head_dim), True
        )

    return make


@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.parametrize("fmt", ["fp16", "int8", "e4m3"])
def test_layers_in_groups_say_what_they_say_in_one(backend, fmt):
    case = Grouped(fmt)
    assert torch.equal(case.run(attention_of(backend), GROUPS), case.run(attention_of(backend)))


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_rows_of_a_group_that_are_not_its_own_show(backend):
    """The control: with the tables of the two groups exchanged, the same steps say something else."""
    case = Grouped("fp16")
    swapped = case.run(attention_of(backend), GROUPS, stored_elsewhere=True)
    assert not torch.equal(swapped, case.run(attention_of(backend)))


def test_a_row_holds_the_layers_of_one_group():
    layout = resolve_kv_format("int8").layout(3, 2, 16, 16, GROUPS)
    assert (layout.num_groups, layout.layers_per_row) == (2, 2)
    assert layout.row_bytes == 2 * layout.layer_bytes
    assert layout.block_bytes == 2 * layout.row_bytes
    assert [layout.group_of(layer) for layer in range(3)] == [0, 1, 0]
    assert [layout.layer_offsets(layer).k for layer in range(3)] == [0, 0, layout.layer_bytes]


@pytest.mark.parametrize("groups", [((0, 1),), ((0, 1), (1, 2)), ((0, 1), (2, 3))])
def test_groups_must_have_every_layer_once(groups):
    with pytest.raises(ValueError, match=r"each of the layers 0 \.\. 2 once"):
        resolve_kv_format("int8").layout(3, 2, 16, 16, groups)


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_a_batch_without_a_table_for_every_group_is_refused(backend):
    case = Grouped("fp16")
    layout, pool = case.layout(GROUPS), case.pool(GROUPS)
    batch = case.batch([(0, 0, 3)], np.zeros((1, 1, 1), np.int32))
    qkv = torch.zeros(3, 6 * layout.head_dim)
    with pytest.raises(ValueError, match="1 groups of block tables for 2 groups of layers"):
        attention_of(backend)(case, layout, pool).forward(0, qkv, batch, torch.empty(3, 2 * layout.head_dim))
