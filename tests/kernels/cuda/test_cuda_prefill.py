"""The prefill attention of tiles of rows, executed through the host shim, against the plain torch reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_harness import Stored, check_close
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.kernels.attention import AttentionBatch
from deepinfer.kernels.cuda.decode_plan import DecodePlan
from deepinfer.kernels.cuda.prefill_plan import PrefillPlan, most_prefill_partitions, prefill_partitions
from deepinfer.kernels.kv_formats import resolve_kv_format

SHAPES = (
    ("fp16", 64, 3, 16),
    ("int8", 128, 8, 16),
    ("e4m3", 80, 1, 8),
    ("bf16", 96, 2, 32),
    ("e5m2/int8", 256, 16, 64),
)
"""Format, head_dim, query heads for each KV head, block size."""


def both(backend, case, layer=1):
    expected, got, *pools = case.both(backend, layer, batch_invariant=False)
    assert torch.equal(*pools)
    return expected, got


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from(SHAPES),
    kv_heads=st.integers(1, 2),
    lengths=st.lists(st.integers(1, 250), min_size=1, max_size=2),
    new=st.integers(16, 60),
    window=st.sampled_from((0, 0, 1, 50, 129)),
    seed=st.integers(0, 2**16),
)
def test_random_shapes_agree_with_the_reference(backend, shape, kv_heads, lengths, new, window, seed):
    fmt, head_dim, group, block_size = shape
    case = Stored(fmt, [*lengths, 16], (group * kv_heads, kv_heads), head_dim, block_size, new, window, seed)
    check_close(*both(backend, case))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_takes_whole_prompts_and_chunks_of_them(backend, shape):
    fmt, head_dim, group, block_size = shape
    case = Stored(fmt, (33, 1, 90), (group, 1), head_dim, block_size, new=40, window=20)
    check_close(*both(backend, case))


@pytest.mark.parametrize("length", [2048, 2049, 8200])
def test_partitions_of_every_length_and_rows_on_both_sides_of_a_change_agree_with_the_reference(backend, length):
    case = Stored("fp16", (length, 40), heads=(1, 1), new=30, seed=length)
    check_close(*both(backend, case))


def attend(case, backend, layer=1, chunk=None):
    """Output of all new rows of one sequence, chunk by chunk."""
    attention, rows, out = case.cuda(backend, case.contents.clone(), batch_invariant=False), case.batch(), []
    for first in range(0, rows.num_rows, chunk or rows.num_rows):
        part = slice(first, first + (chunk or rows.num_rows))
        positions = rows.positions[part]
        batch = AttentionBatch(positions, np.zeros(len(positions)), case.tables[:1], [0, len(positions)])
        out.append(torch.empty(len(positions), case.spec.num_q_heads * case.spec.head_dim))
        attention.forward(layer, case.qkv[part], batch, out[-1])
        assert batch.workspace.tiles is not None
    return torch.cat(out)


@pytest.mark.parametrize(("fmt", "window"), [("fp16", 0), ("fp16", 60), ("bf16", 0)])
def test_a_row_says_the_same_in_every_chunking(backend, fmt, window):
    head_dim, group = (64, 3) if fmt == "fp16" else (96, 2)
    case = Stored(fmt, (310,), (group, 1), head_dim, 16 if fmt == "fp16" else 32, new=96, window=window)
    assert torch.equal(attend(case, backend), attend(case, backend, chunk=16))


def test_nan_in_unused_slots_is_harmless_and_in_used_ones_is_not(backend):
    case = Stored("e4m3", (37, 130), (1, 1), 80, 8, new=20, window=60)
    clean, _ = case.run(case.cuda(backend, case.contents.clone(), batch_invariant=False))
    assert torch.isfinite(clean).all()
    pool = case.contents.clone()
    case.reference(pool)._codes(1, 1)[int(case.tables[1, 12]), 0, 3] = 0x7F
    broken, _ = case.run(case.cuda(backend, pool, batch_invariant=False))
    assert not torch.isfinite(broken[20:]).all()
    assert torch.equal(broken[:20], clean[:20])


@pytest.mark.parametrize("layer", [0, 1])
def test_keys_without_their_bias_get_it_when_they_are_read(backend, layer):
    """Only layer 1 has a bias; it is far larger than the keys, as in Qwen2."""
    case = Stored("int8", (70, 20), (4, 2), 128, new=40, window=33, bias=60.0)
    expected, got = both(backend, case, layer)
    check_close(expected, got)
    case.spec = replace(case.spec, key_bias=None)
    without, _ = case.run(case.cuda(backend, case.contents.clone(), batch_invariant=False), layer)
    assert torch.equal(without, got) == (layer == 0)


def test_small_probabilities_of_a_long_context_are_not_lost(backend):
    """One key has all the weight but for a little that each of two thousand others has: together as much as its own."""
    case = Stored("fp16", (2040,), (1, 1), new=20)
    pool = case.contents.clone()
    reference = case.reference(pool)
    keys, values = reference._codes(1, 0), reference._codes(1, 1)
    blocks, slots = torch.from_numpy(case.tables[0]).long()[torch.arange(2020) // 16], torch.arange(2020) % 16
    keys[blocks, :, slots] = 0
    values[blocks, :, slots] = torch.ones(64).half().view(torch.uint8)
    query, _, _ = reference._project(1, case.qkv, torch.arange(2020, 2040))
    sharp = query[19, 0] * (7.6 / (query[19, 0].square().sum() / 8))
    keys[int(case.tables[0, 0]), 0, 0] = sharp.half().view(torch.uint8)
    values[int(case.tables[0, 0]), 0, 0] = torch.zeros(64).half().view(torch.uint8)
    expected, _ = case.run(case.reference(pool.clone()))
    got, _ = case.run(case.cuda(backend, pool, batch_invariant=False))
    assert 0.3 < expected[19].mean() < 0.7
    check_close(expected, got)


def test_int8_values_of_very_different_scales_keep_their_accuracy(backend):
    case = Stored("int8", (200,), (8, 1), 128, new=32)
    pool = case.contents.clone()
    reference = case.reference(pool)
    scales = reference._scales(1, 1)
    for position, scale in enumerate((2.0**-20, 3.0, 2.0**-9)):
        scales[int(case.tables[0, 0]), 0, position] = torch.tensor([scale]).half().view(torch.uint8)
    expected, _ = case.run(case.reference(pool.clone()))
    got, _ = case.run(case.cuda(backend, pool, batch_invariant=False))
    error = (expected - got).abs().max()
    assert error <= 2e-3 * expected.abs().max()


def test_every_visible_token_is_in_one_partition_and_no_tile_mixes_their_lengths():
    pair = resolve_kv_format("fp16")
    for group in (1, 3, 7, 16):
        plan = PrefillPlan(DecodePlan(pair.k, pair.v, 64, group, 16))
        positions = np.concatenate([np.arange(2000, 2100), np.arange(3), np.arange(8190, 8200)])
        batch = AttentionBatch(positions, np.repeat([0, 1, 2], [100, 3, 10]), np.zeros((3, 1)), [0, 100, 103, 113])
        tiles = plan.tiles(batch)
        assert np.array_equal(np.concatenate([np.arange(*tile) for tile in tiles.tolist()]), np.arange(113))
        assert max(last - first for first, last in tiles) <= 64 // group
        for first, last in tiles:
            assert len(set(batch.row_seq[first:last])) == 1
            assert len(set(np.searchsorted([2048, 8192, 32768], positions[first:last], side="right"))) == 1


def test_no_context_is_cut_into_more_than_eight_partitions():
    every = prefill_partitions(np.arange(131072))
    assert every.max() == 8
    for context in (1, 256, 257, 2048, 2049, 2100, 8192, 40000, 131072):
        assert most_prefill_partitions(context) == every[:context].max()


def test_few_rows_are_attended_one_by_one(backend):
    case = Stored("fp16", (50, 50), (3, 1), new=5)
    expected, got = both(backend, case)
    check_close(expected, got, limit=1e-5)
    assert case.run(case.cuda(backend, case.contents.clone(), batch_invariant=False))[1].workspace.tiles is None


def test_scores_with_a_soft_cap_agree_with_the_reference(backend):
    """A cap so low that leaving it out shows."""
    case = Stored("fp16", (90, 40), (3, 1), new=40)
    case.spec = replace(case.spec, soft_cap=1.5)
    expected, got = both(backend, case)
    check_close(expected, got)
    case.spec = replace(case.spec, soft_cap=0.0)
    without, _ = case.run(case.cuda(backend, case.contents.clone(), batch_invariant=False))
    assert (without - expected).abs().max() > 0.01
