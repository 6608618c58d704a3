"""The CUDA paged attention, executed through the host shim, against the plain torch reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_harness import FORMATS, Stored, check_close
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.kernels.attention import AttentionBatch
from deepinfer.kernels.cuda.decode_plan import HEAD_DIMS

SHAPES = (
    ("fp16", 64, 3, 16),
    ("fp16", 128, 7, 8),
    ("bf16", 96, 2, 32),
    ("int8", 128, 8, 16),
    ("int8", 80, 4, 64),
    ("e4m3", 64, 1, 8),
    ("e4m3", 128, 4, 16),
    ("e5m2", 80, 5, 32),
    ("e4m3/e5m2", 256, 16, 16),
    ("int8/e4m3", 96, 16, 64),
    ("fp16/e5m2", 128, 6, 64),
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from(SHAPES),
    kv_heads=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    new=st.sampled_from((1, 1, 2, 5)),
    window=st.sampled_from((0, 0, 1, 50, 129)),
    seed=st.integers(0, 2**16),
)
def test_random_shapes_agree_with_the_reference(backend, shape, kv_heads, lengths, new, window, seed):
    fmt, head_dim, group, block_size = shape
    case = Stored(fmt, lengths, (group * kv_heads, kv_heads), head_dim, block_size, new, window, seed)
    expected, got, expected_pool, got_pool = case.both(backend)
    assert torch.equal(expected_pool, got_pool)
    check_close(expected, got, limit=1e-5)


@pytest.mark.parametrize(
    ("fmt", "head_dim"),
    [(fmt, HEAD_DIMS[(place + step) % 5]) for place, fmt in enumerate(FORMATS) for step in (0, 2)],
)
def test_every_format_and_every_head_dim_agrees_with_the_reference(backend, fmt, head_dim):
    case = Stored(fmt, (1, 33, 150), heads=(2, 1), head_dim=head_dim)
    expected, got, expected_pool, got_pool = case.both(backend)
    assert torch.equal(expected_pool, got_pool)
    check_close(expected, got, limit=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_activations_round_once_on_the_way_out(backend, dtype):
    expected, got, expected_pool, got_pool = Stored("fp16", (40, 9)).both(backend, dtype=dtype)
    assert torch.equal(expected_pool, got_pool)
    assert (expected.float() - got.float()).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("length", [127, 128, 129, 256, 257, 4095, 4096, 4097, 16384, 16385])
def test_every_kind_of_partition_agrees_with_the_reference(backend, length):
    expected, got, *_ = Stored("e4m3/e5m2", (length, 5), heads=(1, 1), seed=length).both(backend)
    check_close(expected, got, limit=1e-5)


def test_the_longest_context_agrees_with_the_reference(backend):
    expected, got, *_ = Stored("int8", (131072,), heads=(1, 1), block_size=64).both(backend)
    check_close(expected, got, limit=1e-5)


def test_a_longer_context_is_refused(backend):
    case = Stored("e5m2", (131073,), heads=(1, 1), block_size=64)
    with pytest.raises(ValueError, match="131071"):
        case.run(case.cuda(backend, case.contents))


@pytest.mark.parametrize("needle", [0, 511, 512, 10000, 19998])
def test_a_needle_at_any_place_of_a_long_context_is_found(backend, needle):
    case = Stored("fp16", (20000,), heads=(1, 1))
    pool = case.contents.clone()
    reference = case.reference(pool)
    slot = int(case.tables[0, needle // 16]), 0, needle % 16
    query, _, _ = reference._project(1, case.qkv, torch.tensor([19999]))
    reference._codes(1, 0)[slot] = query[0, 0].mul(8).half().view(torch.uint8)
    reference._codes(1, 1)[slot] = torch.full((64,), 100.0).half().view(torch.uint8)
    assert (case.run(case.cuda(backend, pool))[0] > 90).all()


def test_a_row_says_the_same_alone_in_a_batch_and_in_any_chunking(backend):
    case = Stored("int8/e4m3", (300, 140, 17), new=9)
    together, _ = case.run(case.cuda(backend, case.contents.clone()))
    pool, alone = case.contents.clone(), []
    attention = case.cuda(backend, pool)
    whole = case.batch()
    for row in range(whole.num_rows):
        seq = whole.row_seq[row]
        batch = AttentionBatch(whole.positions[row : row + 1], [0], case.tables[seq : seq + 1], [0, 1])
        out = torch.empty(1, together.shape[1])
        attention.forward(1, case.qkv[row : row + 1], batch, out)
        alone.append(out)
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("fmt", FORMATS)
def test_nan_in_unused_slots_is_harmless_and_in_used_ones_is_not(backend, fmt):
    case = Stored(fmt, (37, 130), window=60)
    clean, _ = case.run(case.cuda(backend, case.contents.clone()))
    assert torch.isfinite(clean).all()
    pool = case.contents.clone()
    reference, used = case.reference(pool), int(case.tables[1, 129 // 16])
    reference._codes(1, 1)[used, :, 0] = 0xFF
    if case.layout.v.scaled:
        reference._scales(1, 1)[used, :, 0] = 0xFF
    broken, _ = case.run(case.cuda(backend, pool))
    assert not torch.isfinite(broken[1]).any()
    assert torch.equal(broken[0], clean[0])


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("group", [1, 3])
def test_all_256_fp8_values_pass_through_attention_exactly(backend, fmt, group):
    case = Stored(fmt, (2,), heads=(group, 1), head_dim=256)
    pool = torch.zeros_like(case.contents)
    reference = case.reference(pool)
    reference._codes(1, 1)[int(case.tables[0, 0]), 0, 0] = torch.arange(256, dtype=torch.uint8)
    case.qkv[:, -512:-256] = torch.randn(256) * 1e-30
    case.qkv[:, -256:] = 0
    got, _ = case.run(case.cuda(backend, pool))
    expected = case.fmt.v.decode(torch.arange(256, dtype=torch.uint8), None) / 2
    assert torch.equal(got.view(group, 256).nan_to_num(nan=-1e9), expected.nan_to_num(nan=-1e9).expand(group, 256))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_key_makes_its_row_nan(backend, code):
    case = Stored("e4m3", (20,), heads=(1, 1))
    pool = case.contents.clone()
    case.reference(pool)._codes(1, 0)[int(case.tables[0, 0]), 0, 3, 11] = code
    assert torch.isnan(case.run(case.cuda(backend, pool))[0]).all()


def test_what_no_kernel_exists_for_is_refused_with_what_works(backend):
    for kwargs, words in (
        ({"head_dim": 48}, "head_dim 48"),
        ({"block_size": 4}, "block size 4"),
        ({"heads": (17, 1)}, "17 query heads"),
        ({"fmt": "fp32"}, "K as fp32"),
    ):
        case = Stored(**{"fmt": "fp16", "lengths": (5,), **kwargs})
        with pytest.raises(ValueError, match=words):
            case.cuda(backend, case.contents)


def test_a_batch_without_rows_is_nothing_to_do(backend):
    case = Stored("fp16", (5,))
    batch = AttentionBatch(np.zeros(0), np.zeros(0), np.zeros((0, 1)), [0])
    case.cuda(backend, case.contents).forward(0, case.qkv[:0], batch, torch.empty(0, 256))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    ("fmt", "head_dim", "heads"),
    [
        ("fp16", 64, (2, 2)),
        ("int8", 128, (7, 1)),
        ("e4m3", 80, (3, 1)),
        ("e4m3/e5m2", 256, (16, 1)),
        ("bf16", 96, (4, 2)),
    ],
)
def test_keys_without_their_bias_get_it_when_they_are_read(backend, fmt, head_dim, heads, layer):
    """Only layer 1 has a bias; it is of the size of the keys, so that leaving it out shows."""
    case = Stored(fmt, (1, 150, 40), heads, head_dim, window=33, bias=2.0)
    expected, got, *pools = case.both(backend, layer)
    assert torch.equal(*pools)
    check_close(expected, got, limit=1e-5)
    case.spec = replace(case.spec, key_bias=None)
    without, _ = case.run(case.cuda(backend, case.contents), layer)
    assert torch.equal(without, got) == (layer == 0)


def test_large_key_biases_keep_their_accuracy(backend):
    expected, got, *_ = Stored("int8", (200,), (4, 2), 128, bias=60.0).both(backend)
    check_close(expected, got, limit=1e-3)


def test_activations_of_another_shape_are_refused(backend):
    case = Stored("fp16", (5,))
    attention = case.cuda(backend, case.contents)
    for qkv, out in ((case.qkv[:, :-1], (1, 256)), (case.qkv, (1, 255)), (case.qkv.half(), (1, 256))):
        with pytest.raises(ValueError, match="qkv and out must be"):
            attention.forward(0, qkv, case.batch(), torch.empty(out))
