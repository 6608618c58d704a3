"""The write half: RoPE, norm, saturating encode, scatter, counters, against the torch reference byte for byte."""

import pytest
import torch
from cuda_harness import FORMATS, Stored, check_close
from kernel_harness import Case

from deepinfer.kernels.cuda.paged_attention import CudaAttention


def attention(backend, case, pool):
    return CudaAttention(backend, case.spec, case.layout, pool, case.cos, case.sin, True)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_chunks_then_decode_store_the_bytes_of_the_reference(backend, fmt, dtype):
    case = Case(fmt, heads=(4, 2), head_dim=64, lengths=(41, 17), seed=3, dtype=dtype)
    pools = case.pool(0xFF), case.pool(0xFF)
    sides = case.attention("reference", pools[0]), attention(backend, case, pools[1])
    for pieces in ([(0, 0, 19)], [(0, 19, 40), (1, 0, 16)], [(0, 40, 41), (1, 16, 17)]):
        expected, got = (torch.cat(case.forward(side, pieces)) for side in sides)
        check_close(expected, got, limit=1e-5 if dtype == torch.float32 else 2e-2)
    assert torch.equal(*pools)


@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
def test_every_head_dim_stores_the_bytes_of_the_reference(backend, head_dim):
    expected, got, *pools = Stored("int8/e4m3", (30,), head_dim=head_dim, new=30).both(backend)
    assert torch.equal(*pools)
    check_close(expected, got, limit=1e-5)


def test_magnitudes_far_beyond_a_format_store_the_bytes_of_the_reference(backend):
    for fmt in FORMATS:
        case = Stored(fmt, (20,), new=20, seed=9)
        case.qkv *= torch.exp(8 * torch.randn(case.qkv.shape, generator=torch.Generator().manual_seed(1)))
        pools = case.contents.clone(), case.contents.clone()
        reference, ours = case.reference(pools[0]), case.cuda(backend, pools[1])
        case.run(reference)
        case.run(ours)
        assert torch.equal(*pools), fmt
        assert ours.kv_saturated_total == reference.kv_saturated_total, fmt
        assert (reference.kv_saturated_total > 0) == (fmt != "bf16"), fmt


def test_non_finite_elements_are_stored_as_zero_counted_and_their_rows_named(backend):
    for fmt in FORMATS:
        case = Stored(fmt, (20,), heads=(2, 1), new=20)
        case.qkv[3, 130] = torch.nan
        case.qkv[3, 200] = torch.inf
        case.qkv[11, 255] = -torch.inf
        pools = case.contents.clone(), case.contents.clone()
        reference, ours = case.reference(pools[0]), case.cuda(backend, pools[1])
        _, expected = case.run(reference)
        _, batch = case.run(ours)
        assert torch.equal(*pools), fmt
        assert ours.kv_nonfinite_total == reference.kv_nonfinite_total > 0, fmt
        assert batch.nonfinite_rows.tolist() == expected.nonfinite_rows.tolist(), fmt
        assert batch.nonfinite_rows.nonzero()[0].tolist() == [3, 11], fmt


@pytest.mark.parametrize("head_dim", [64, 80])
def test_the_qk_norm_agrees_with_the_reference(backend, head_dim):
    """Sums of squares are taken in another order than torch's: a key may round to a neighbouring code, rarely."""
    expected, got, *pools = Stored("e5m2", (50,), head_dim=head_dim, new=50, qk_norm=True).both(backend)
    assert (pools[0] != pools[1]).sum() <= 10
    check_close(expected, got, limit=1e-3)


def test_a_layer_writes_nothing_outside_its_own_slots(backend):
    case = Stored("int8", (20,), new=3)
    pool = case.contents.clone()
    case.run(case.cuda(backend, pool), layer=1)
    offsets, layer = case.layout.layer_offsets(1), pool != case.contents
    assert not layer[:, : offsets.k].any()
    changed = case.reference(layer.to(torch.uint8))._codes(1, 0).any(dim=3).any(dim=1)
    blocks, slots = changed.nonzero(as_tuple=True)
    assert sorted(zip(blocks.tolist(), slots.tolist(), strict=True)) == sorted(
        (int(case.tables[0, position // 16]), position % 16) for position in (17, 18, 19)
    )
