"""The fused paged attention against the plain torch reference, and the reference against torch's own
attention."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kernel_harness import Case, assert_bit_equal_in_any_chunking, rope_tables

from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.attention import AttentionBatch, AttentionSpec, make_attention

RAGGED = (1, 7, 15, 16, 17, 31, 32, 33, 48, 49)


def both(case, pieces=None):
    pools = case.pool(), case.pool()
    outs = [
        torch.cat(case.forward(case.attention(name, pool), pieces or case.everything()))
        for name, pool in zip(("reference", "numba"), pools, strict=True)
    ]
    return pools, outs


def test_the_reference_agrees_with_dense_causal_attention():
    case = Case("fp32", heads=(6, 2), lengths=(40,))
    got = case.forward(case.attention("reference", case.pool()), case.everything())[0]
    heads = case.qkv[0].unflatten(-1, (-1, 16)).transpose(0, 1)
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((first * case.cos - second * case.sin, second * case.cos + first * case.sin), dim=-1)
    q, k, v = turned[:6], turned[6:8].repeat_interleave(3, 0), heads[8:].repeat_interleave(3, 0)
    dense = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
    assert torch.allclose(got, dense, atol=1e-5)


@pytest.mark.parametrize(
    "fmt", ["fp32", "bf16", "fp16", "int8", "fp8_e4m3", "fp8_e5m2", "e4m3/e5m2", "int8/fp16", "fp16/int8"]
)
def test_every_format_agrees_with_the_reference_over_ragged_lengths(fmt):
    pools, outs = both(Case(fmt, lengths=RAGGED))
    assert torch.equal(*pools)
    assert torch.allclose(*outs, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("length", range(1, 50))
def test_every_length_around_the_block_boundaries_agrees(length):
    pools, outs = both(Case("fp8_e4m3", lengths=(length,), seed=length))
    assert torch.equal(*pools)
    assert torch.allclose(*outs, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (16, 1), (14, 2)])
def test_block_sizes_and_group_sizes_agree_with_the_reference(block_size, heads):
    pools, outs = both(Case("int8", heads=heads, block_size=block_size, lengths=(3, 70, 33)))
    assert torch.equal(*pools)
    assert torch.allclose(*outs, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("fmt", "head_dim"), [("fp16", 64), ("fp8", 80), ("int8", 96), ("fp8/fp16", 128), ("e5m2/fp16", 256), ("fp16", 256)]
)
def test_head_dims_agree_with_the_reference_in_bf16(fmt, head_dim):
    case = Case(fmt, heads=(6, 2), head_dim=head_dim, lengths=(5, 50), dtype=torch.bfloat16)
    pools, outs = both(case)
    assert torch.equal(*pools)
    assert torch.allclose(outs[0].float(), outs[1].float(), atol=4e-3, rtol=8e-3)


@pytest.mark.parametrize("window", [1, 7, 16, 17, 40])
def test_sliding_windows_agree_with_the_reference(window):
    pools, outs = both(Case("fp32", lengths=(5, 40, 65), window=window))
    assert torch.equal(*pools)
    assert torch.allclose(*outs, atol=3e-6, rtol=1e-5)


def test_a_window_of_one_returns_the_own_value():
    case = Case("fp32", heads=(2, 2), lengths=(40,), window=1)
    out = case.forward(case.attention("numba", case.pool()), case.everything())[0]
    assert torch.equal(out, case.qkv[0][:, 4 * 16 :])


def test_query_and_key_norms_agree_with_the_reference():
    _, outs = both(Case("fp32", lengths=(5, 40), qk_norm=True))
    assert torch.allclose(*outs, atol=3e-6, rtol=1e-5)
    _, plain = both(Case("fp32", lengths=(5, 40)))
    assert not torch.allclose(outs[1], plain[1], atol=1e-2)


@pytest.mark.parametrize("fmt", ["fp32", "fp16", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_rows_are_bit_equal_alone_in_a_batch_and_in_any_chunking(fmt):
    case = Case(fmt, heads=(6, 2), lengths=(49, 33, 7, 64))
    assert_bit_equal_in_any_chunking(case)


def test_rows_in_a_window_are_bit_equal_in_any_chunking():
    case = Case("fp32", lengths=(60,), window=21)
    whole = case.forward(case.attention("numba", case.pool()), case.everything())[0]
    attention = case.attention("numba", case.pool())
    single = torch.cat([case.forward(attention, [(0, row, row + 1)])[0] for row in range(60)])
    assert torch.equal(single, whole)


def test_a_decode_step_with_many_sequences_equals_each_alone():
    case = Case("fp8", heads=(9, 3), lengths=tuple(range(1, 41)))
    batched, single = case.attention("numba", case.pool()), case.attention("numba", case.pool())
    for seq, length in enumerate(case.lengths):
        for attention in (batched, single):
            if length > 1:
                case.forward(attention, [(seq, 0, length - 1)])
    last = [(seq, length - 1, length) for seq, length in enumerate(case.lengths)]
    together = case.forward(batched, last)
    assert all(torch.equal(out, case.forward(single, [piece])[0]) for out, piece in zip(together, last, strict=True))


@pytest.mark.parametrize(
    ("fmt", "poison"),
    [("fp8_e4m3", 0x7F), ("fp8_e5m2", 0x7E), ("fp16", 0x7E), ("int8", 0x7E), ("fp32", 0xFF)],
)
@pytest.mark.parametrize("window", [0, 9])
def test_nan_in_every_unused_slot_changes_no_bit(fmt, poison, window):
    case = Case(fmt, lengths=(1, 9, 31, 49), window=window)
    clean = torch.cat(case.forward(case.attention("numba", case.pool()), case.everything()))
    poisoned = case.forward(case.attention("numba", case.pool(poison)), case.everything())
    assert torch.isfinite(clean).all()
    assert torch.equal(torch.cat(poisoned), clean)


@pytest.mark.parametrize("fmt", ["fp32", "int8"])
def test_nan_left_in_scratch_memory_changes_no_bit(fmt):
    case = Case(fmt, lengths=(1, 9, 31, 49))
    attention = case.attention("numba", case.pool())
    want = torch.cat(case.forward(attention, case.everything()))
    rows = torch.cat(case.qkv)
    starts = np.cumsum([0, *case.lengths])
    positions = np.concatenate([np.arange(length) for length in case.lengths])
    batch = AttentionBatch(positions, np.repeat(np.arange(4), case.lengths), case.tables, starts)
    got = torch.empty_like(want)
    for _ in range(2):
        attention.forward(1, rows, batch, got)
        assert torch.equal(got, want)
        batch.workspace.scratch.fill(np.nan)
        batch.workspace.queries.fill(np.nan)


def test_nan_in_a_used_slot_is_seen():
    """The control arm of the poison test: the pattern does reach the output where masks do not hide it."""
    case = Case("fp16", lengths=(20,))
    pool = case.pool()
    attention = case.attention("numba", pool)
    case.forward(attention, [(0, 0, 19)])
    pool[case.tables[0][0]] = 0x7E
    assert torch.isnan(case.forward(attention, [(0, 19, 20)])[0]).all()


def test_layers_do_not_touch_one_another():
    case = Case("int8", lengths=(20,))
    pool = case.pool(0x55)
    case.forward(case.attention("numba", pool), case.everything(), layer=1)
    assert (pool[:, : case.layout.layer_bytes] == 0x55).all()
    assert (pool[case.unused] == 0x55).all()


def test_huge_scores_do_not_overflow():
    case = Case("fp32", lengths=(30,))
    case.qkv[0] *= 1e3
    _, outs = both(case)
    assert torch.isfinite(outs[1]).all()
    assert torch.allclose(*outs, rtol=1e-3, atol=1e-3)


def test_a_nan_query_gives_nan_and_touches_no_other_row():
    case = Case("fp32", lengths=(20, 20))
    clean = case.forward(case.attention("numba", case.pool()), case.everything())
    case.qkv[0][4, 0] = torch.nan
    spoilt = case.forward(case.attention("numba", case.pool()), case.everything())
    assert torch.isnan(spoilt[0][4, :16]).all()
    spoilt[0][4, :16] = clean[0][4, :16]
    assert torch.equal(torch.cat(spoilt), torch.cat(clean))


def test_concurrent_calls_from_two_threads_do_not_disturb_one_another():
    from concurrent.futures import ThreadPoolExecutor

    case = Case("fp16", lengths=(64, 64))
    attention = case.attention("numba", case.pool())
    expected = case.forward(attention, case.everything())
    with ThreadPoolExecutor(2) as threads:
        for _ in range(20):
            both_seqs = threads.map(lambda seq: case.forward(attention, [(seq, 0, 64)])[0], (0, 1))
            assert all(torch.equal(got, want) for got, want in zip(both_seqs, expected, strict=True))


@pytest.mark.parametrize(
    ("positions", "row_seq", "tables", "starts", "message"),
    [
        ([32], [0], [[0, 1]], [0, 1], "outside 0 .. 31"),
        ([-1], [0], [[0, 1]], [0, 1], "outside 0 .. 31"),
        ([5], [0], [[9, 1]], [0, 1], "block ids 9 .. 9"),
        ([17], [0], [[0, -3]], [0, 1], "block ids -3"),
        ([0, 0], [0, 0], [[0], [1]], [0, 1, 2], "row_seq"),
    ],
)
@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_a_batch_that_would_leave_the_pool_is_refused(backend, positions, row_seq, tables, starts, message):
    case = Case("fp16", heads=(2, 2), lengths=(64,))
    batch = AttentionBatch(positions, row_seq, tables, starts)
    rows = torch.zeros(len(positions), 6 * 16)
    with pytest.raises(ValueError, match=message):
        case.attention(backend, case.pool()).forward(0, rows, batch, torch.zeros(len(positions), 32))


def test_entries_past_the_context_of_a_table_are_not_read():
    case = Case("fp16", lengths=(20,))
    want = case.forward(case.attention("numba", case.pool()), case.everything())[0]
    case.tables[0] += [10**6, -1]
    assert torch.equal(case.forward(case.attention("numba", case.pool()), case.everything())[0], want)


def test_what_does_not_fit_together_is_refused_when_the_attention_is_made():
    fmt = resolve_kv_format("fp16")
    layout, tables = fmt.layout(1, 2, 16, 16), rope_tables(32, 16)
    spec = AttentionSpec(1, 4, 2, 16, 0.25, (0,))
    pool = torch.zeros(2, layout.block_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="unknown attention backend 'cuda'"):
        make_attention("cuda", spec, layout, fmt, pool, *tables, True)
    with pytest.raises(ValueError, match="the pool must be uint8"):
        make_attention("numba", spec, layout, fmt, pool[:, :-2], *tables, True)
    with pytest.raises(ValueError, match="stores fp16/fp16, the format is int8"):
        make_attention("numba", spec, layout, resolve_kv_format("int8"), pool, *tables, True)
    odd = fmt.layout(1, 2, 24, 16)
    odd_pool = torch.zeros(2, odd.block_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="divisible by 16, not 24"):
        make_attention("numba", AttentionSpec(1, 4, 2, 24, 0.25, (0,)), odd, fmt, odd_pool, *rope_tables(8, 24), True)
    with pytest.raises(ValueError, match="5 query heads do not divide over 2"):
        AttentionSpec(1, 5, 2, 16, 0.25, (0,))
