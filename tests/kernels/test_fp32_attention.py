"""Paged attention in fp32 products: rows that share a tile, contexts that threads share, and tiles code by code."""

from dataclasses import replace

import numba
import numpy as np
import pytest
import torch
from kernel_harness import Case, assert_bit_equal_in_any_chunking

from deepinfer.kernels.attention import AttentionBatch
from deepinfer.kernels.codecs import BF16, CODECS, FP8_E4M3, FP8_E5M2, FP16, FP32, INT8
from deepinfer.kernels.cpu import paged_attention, tiles
from deepinfer.kernels.cpu.attend import MANY_ROWS, read_as
from deepinfer.kernels.cpu.fp32_rows import fp32_weight
from deepinfer.kernels.cpu.vec16 import load_f32, splat, store_f32


def run(case, attention):
    return torch.cat(case.forward(attention, case.everything()))


@pytest.mark.parametrize(
    ("fmt", "heads", "head_dim"),
    [
        ("int8", (1, 1), 48),
        ("fp8_e4m3", (4, 2), 80),
        ("bf16", (4, 1), 64),
        ("fp16", (10, 2), 16),
        ("int8/fp8_e5m2", (17, 1), 32),
    ],
)
def test_rows_are_bit_equal_however_many_of_them_are_multiplied_together(fmt, heads, head_dim):
    """Groups that leave one, two and four rows over, or that are expanded first; head_dims with and without a rest."""
    case = Case(fmt, heads=heads, head_dim=head_dim, lengths=(65, 34))
    assert_bit_equal_in_any_chunking(case)
    exact = run(case, case.attention("reference", case.pool()))
    assert torch.allclose(run(case, case.attention("numba", case.pool())), exact, atol=3e-6, rtol=1e-5)


def biased(case):
    width = case.spec.num_kv_heads * case.spec.head_dim
    bias = 5 * torch.randn(width, generator=torch.Generator().manual_seed(9))
    case.spec = replace(case.spec, key_bias=(bias, bias))
    return case


@pytest.mark.parametrize(
    ("fmt", "window", "heads", "options"),
    [
        ("fp16", 0, (6, 2), {}),
        ("int8", 700, (3, 1), {"key_bias": True}),
        ("fp8_e4m3", 513, (2, 2), {"soft_cap": 3.0}),
    ],
)
def test_contexts_that_threads_share_give_the_same_bits_as_those_of_one_thread(
    monkeypatch, fmt, window, heads, options
):
    """Decode steps of one row and of rows with short and long contexts, on both sides of the ends of segments."""
    monkeypatch.setattr(paged_attention, "_UNITS_OF_WORKER", 100)
    case = Case(fmt, heads=heads, lengths=(2100, 40, 1025), window=window)
    case.spec = replace(case.spec, soft_cap=options.get("soft_cap", 0.0))
    if "key_bias" in options:
        biased(case)
    pool = case.pool()
    attention, reference = case.attention("numba", pool), case.attention("reference", pool)
    whole, plain, split_into = case.forward(attention, case.everything()), attention.segments, []

    def segments(batch):
        split_into.append(plain(batch))
        return split_into[-1]

    monkeypatch.setattr(attention, "segments", segments)
    for steps in ([(0, 2099)], [(0, 1024), (1, 39)], [(2, 1023)], [(2, 1024), (1, 0), (0, 2047)], [(0, 1536)]):
        pieces = [(seq, at, at + 1) for seq, at in steps]
        split = case.forward(attention, pieces)
        for (seq, at), row in zip(steps, split, strict=True):
            assert torch.equal(row[0], whole[seq][at])
        assert torch.allclose(torch.cat(split), torch.cat(case.forward(reference, pieces)), atol=2e-5, rtol=1e-5)
        with monkeypatch.context() as patched:
            patched.setattr(paged_attention, "_SPLIT_FROM", 10**6)
            assert all(torch.equal(*rows) for rows in zip(case.forward(attention, pieces), split, strict=True))
    assert split_into == [8, 0, 4, 0, 0, 0, 4, 0, 4, 0]


def test_nan_in_what_a_shared_context_does_not_reach_changes_no_bit(monkeypatch):
    monkeypatch.setattr(paged_attention, "_UNITS_OF_WORKER", 100)
    case = Case("fp16", lengths=(1041,))
    outs = []
    for fill in (0, 0x7E):
        attention = case.attention("numba", case.pool(fill))
        case.forward(attention, [(0, 0, 1040)])
        outs.append(case.forward(attention, [(0, 1040, 1041)])[0])
    assert torch.isfinite(outs[0]).all()
    assert torch.equal(*outs)


def test_only_long_contexts_of_few_rows_are_shared_by_threads():
    case = Case("fp16", heads=(6, 2), lengths=(2100, 2100))
    attention = case.attention("numba", case.pool())
    threads = numba.get_num_threads()

    def segments(rows, position):
        return attention.segments(AttentionBatch([position] * rows, range(rows), [[0]] * rows, range(rows + 1)))

    assert [segments(1, at) for at in (0, 1023, 1024, 2047, 2048)] == [0, 0, 4, 4, 8]
    assert segments(2 * threads - 1, 2099) == 8
    assert segments(2 * threads, 2099) == 0


def test_what_fp8_is_read_as_holds_its_codes_and_prompts_expand_what_is_slow_to_convert():
    assert [read_as(codec.number, 0, 7) for codec in (FP32, FP16, BF16, INT8)] == [
        codec.number for codec in (FP32, FP16, BF16, INT8)
    ]
    assert {read_as(codec.number, 0, rows) for codec in (FP8_E4M3, FP8_E5M2) for rows in (1, MANY_ROWS)} == {
        FP16.number
    }
    assert {read_as(codec.number, 0, MANY_ROWS) for codec in (INT8, BF16)} == {FP32.number}
    assert {read_as(codec.number, 1, 1) for codec in CODECS} == {FP32.number}


@pytest.mark.parametrize("target", [FP32, FP16], ids=lambda codec: codec.name)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_expanded_rows_hold_every_code_exactly(codec, target):
    """All 256 codes of 8 bits, or random ones; but for the factor that scores and weights make up for."""
    if target is FP16 and codec not in (FP8_E4M3, FP8_E5M2):
        pytest.skip("only FP8 is expanded to fp16")
    rng = np.random.default_rng(1)
    codes = np.arange(256).astype(np.uint8) if codec.itemsize == 1 else rng.integers(0, 256, 256 * codec.itemsize)
    stored = torch.from_numpy(codes.astype(np.uint8).reshape(1, -1))
    expected = codec.decode(stored, torch.ones(1, dtype=torch.float16) if codec.scaled else None).float().flatten()
    number, to = codec.number, target.number
    out = np.zeros(256, np.float32 if target is FP32 else np.float16)

    @numba.njit
    def expand(source, target):
        tiles.expand_rows(number, to, 256, source, target)

    expand(stored.numpy().ctypes.data, out.ctypes.data)
    got = torch.from_numpy(out).float() * tiles.CODE_FACTORS[number]
    number = ~torch.isnan(expected)
    assert torch.equal(got[number], expected[number])
    assert torch.equal(torch.signbit(got[number]), torch.signbit(expected[number]))
    assert number.sum() >= 240


def test_softmax_weights_are_those_of_exp_and_nothing_far_below():
    @numba.njit
    def weigh(scores, out, count, top):
        for at in range(0, 4 * count, 64):
            store_f32(out + at, fp32_weight(load_f32(scores + at), splat(np.float32(top))))

    scores = np.linspace(-87, 3, 4096, dtype=np.float32)
    scores[:8] = (3.0, -np.inf, np.nan, -85.5, -1e30, 3.0, -84.0, -100.0)
    out = np.empty_like(scores)
    weigh(scores.ctypes.data, out.ctypes.data, len(scores), 3.0)
    assert out[0] == 1.0
    assert np.isnan(out[2])
    assert (out[[1, 3, 4, 7]] == 0).all()
    exact = np.exp((scores - np.float32(3.0)).astype(np.float64))
    assert (np.abs(out[8:] / exact[8:] - 1)[scores[8:] > -83] < 3e-7).all()
