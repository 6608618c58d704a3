"""Names of KV formats, and the bytes they cost."""

import pytest

from deepinfer.kernels import KV_FORMAT_NAMES, resolve_kv_format


@pytest.mark.parametrize(
    ("name", "expected"),
    [("fp16", 589_824), ("int8", 299_520), ("fp8_e4m3", 294_912), ("fp8_e5m2", 294_912)],
)
def test_a_block_of_36_layers_2_heads_128_dims_16_tokens_costs_the_published_bytes(name, expected):
    assert resolve_kv_format(name).block_bytes(36, 2, 128, 16) == expected


@pytest.mark.parametrize(
    ("alias", "canonical"),
    [
        ("i8", "int8"),
        ("fp8", "fp8_e4m3"),
        ("e4m3", "fp8_e4m3"),
        ("e5m2", "fp8_e5m2"),
        ("fp8_e4m3", "fp8_e4m3"),
    ],
)
def test_aliases_resolve_to_the_same_format(alias, canonical):
    assert resolve_kv_format(alias) == resolve_kv_format(canonical)
    assert resolve_kv_format(alias).name == canonical


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_auto_is_the_compute_dtype(dtype):
    assert resolve_kv_format("auto", dtype).name == dtype


def test_k_and_v_may_differ():
    fmt = resolve_kv_format("e4m3/e5m2")
    assert (fmt.k.name, fmt.v.name, fmt.name) == ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3/fp8_e5m2")
    assert resolve_kv_format("int8/fp16").block_bytes(1, 1, 64, 16) == 16 * (64 + 2 + 128)


@pytest.mark.parametrize("name", ["", "int4", "FP16", "fp16/", "/fp16", "fp16/fp16/fp16", "fp16/int4", None, 8])
def test_an_unknown_name_is_refused_with_the_list_of_names(name):
    with pytest.raises(ValueError, match="unknown KV format") as caught:
        resolve_kv_format(name)
    assert all(known in str(caught.value) for known in KV_FORMAT_NAMES)


def test_an_unknown_compute_dtype_is_refused():
    with pytest.raises(ValueError, match="'int3'"):
        resolve_kv_format("auto", "int3")


@pytest.mark.parametrize("name", ["fp32", "int8", "fp8", "int8/fp16", "fp16/int8", "e4m3/e5m2"])
def test_the_parts_of_a_block_follow_one_another_without_gap_or_overlap(name):
    layout = resolve_kv_format(name).layout(3, 2, 64, 16)
    end = 0
    for layer in range(3):
        at = layout.layer_offsets(layer)
        assert at.k == end
        assert at.v == at.k + layout.k_bytes
        assert at.k_scales == at.v + layout.v_bytes
        end = at.v_scales + 2 * 16 * layout.v.scale_itemsize
    assert end == layout.block_bytes


@pytest.mark.parametrize("sizes", [(0, 2, 64, 16), (3, -1, 64, 16), (3, 2, 64, 1.5)])
def test_sizes_that_are_not_positive_integers_are_refused(sizes):
    with pytest.raises(ValueError, match="must be a positive integer"):
        resolve_kv_format("fp16").layout(*sizes)
