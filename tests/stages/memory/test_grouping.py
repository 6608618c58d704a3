"""Which layers share a row of the pool."""

import pytest

from deepinfer.stages.memory.layer_groups import group_layers


@pytest.mark.parametrize(
    ("windows", "rows", "layers", "padding"),
    [
        ([0] * 12, (1,), 12, 0),
        ([7] * 12, (1,), 12, 0),
        ([4096, 0] * 13, (1, 1), 13, 0),
        (([512] * 5 + [0]) * 3, (1, 5), 3, 0),
        (([512] * 5 + [0]) * 4 + [512] * 2, (1, 6), 4, 2),
        (([1024] * 5 + [0]) * 5 + [1024] * 4, (1, 6), 5, 1),
        (([1024] * 5 + [0]) * 8, (1, 5), 8, 0),
        (([1024] * 5 + [0]) * 10 + [1024] * 2, (2, 11), 5, 3),
        ([0] * 7 + [64], (7, 1), 1, 0),
    ],
)
def test_rows_hold_as_many_layers_as_padding_of_a_tenth_of_either_kind_allows(windows, rows, layers, padding):
    grouped = group_layers(windows)
    assert tuple(kind.rows for kind in grouped.kinds) == rows
    assert grouped.padding == padding
    assert grouped.window == max(windows)
    if grouped.groups:
        assert max(len(group) for group in grouped.groups) == layers
        assert sorted(layer for group in grouped.groups for layer in group) == list(range(len(windows)))
        assert all(len({windows[layer] > 0 for layer in group}) == 1 for group in grouped.groups)
