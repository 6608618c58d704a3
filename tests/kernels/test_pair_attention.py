"""Paged attention in bf16 products: against a plain form that rounds at the same places, and its tiles code by code."""

import numba
import numpy as np
import pytest
import torch
from kernel_harness import Case, assert_bit_equal_in_any_chunking

from deepinfer.kernels.attention import AttentionBatch
from deepinfer.kernels.codecs import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, INT8
from deepinfer.kernels.cpu import amx, bf16_tiles, context, paged_attention
from deepinfer.kernels.cpu.paged_kernel import multiplies_pairs, rows_at_once
from deepinfer.kernels.reference_attention import ReferenceAttention
from deepinfer.stages.memory.sizes import READ_TOGETHER

pytestmark = pytest.mark.skipif(not bf16_tiles.available(), reason="this processor has no AVX512-BF16 and VBMI")


@pytest.fixture(autouse=True, params=[False, True], ids=["dot products", "matrix tiles"])
def by_tiles(request, monkeypatch):
    """By what an attention that is made in this test multiplies bf16."""
    if request.param and not amx.available():
        pytest.skip("this processor has no AMX for bf16")
    monkeypatch.setattr(amx, "available", lambda: request.param)
    return request.param


LENGTHS = (1, 15, 16, 17, 31, 32, 33, 64, 65, 100)


class Rounded(ReferenceAttention):
    """The reference with queries and softmax weights rounded to bf16, the weights against the maximum so far."""

    name = "rounding reference"

    def _attend(self, layer, q, batch, first, end):
        rows = [self._row(layer, q[row - first], batch, row) for row in range(first, end)]
        return torch.stack(rows)

    def _row(self, layer, q, batch, row):
        spec, window = self._spec, self._spec.windows[layer]
        end = int(batch.positions[row]) + 1
        start = max(0, end - window) if window else 0
        table = torch.from_numpy(batch.block_tables[0, batch.row_seq[row]]).long()
        # Gathered without scales: those of int8 come in where the kernel multiplies them.
        k, v = (self._gather(layer, side, table, start, end) for side in (0, 1))
        k_scale, v_scale = (self._scale_of(layer, side, table, start, end) for side in (0, 1))
        k, v = k / k_scale[:, :, None].clamp_min(1e-30), v / v_scale[:, :, None].clamp_min(1e-30)
        group = spec.num_q_heads // spec.num_kv_heads
        rounded = (q * spec.scale).bfloat16().float().unflatten(0, (spec.num_kv_heads, group))
        out, sums, top = torch.zeros_like(rounded), torch.zeros(rounded.shape[:2]), torch.full(rounded.shape[:2], -1e30)
        for tile in range(start - start % 32, end, 32):
            part = slice(max(tile, start) - start, min(tile + 32, end) - start)
            scores = torch.einsum("hgd,htd->hgt", rounded, k[:, part]) * k_scale[:, None, part]
            higher = torch.maximum(top, scores.amax(-1))
            decay, weights = (top - higher).exp(), (scores - higher[..., None]).exp()
            sums, top = sums * decay + weights.sum(-1), higher
            weights = (weights * v_scale[:, None, part]).bfloat16().float()
            out = out * decay[..., None] + torch.einsum("hgt,htd->hgd", weights, v[:, part])
        return (out / sums[..., None]).flatten()

    def _scale_of(self, layer, side, table, start, end):
        codec = (self._layout.k, self._layout.v)[side]
        if not codec.scaled:
            return torch.ones(self._spec.num_kv_heads, end - start)
        scales = self._scales(layer, side)[table].contiguous().view(torch.float16).squeeze(-1).float()
        return scales.permute(1, 0, 2).flatten(1)[:, start:end]


def pair_case(fmt, **options):
    return Case(fmt, **{"heads": (6, 2), "head_dim": 64, "lengths": LENGTHS, "dtype": torch.bfloat16, **options})


def run(case, attention):
    return torch.cat(case.forward(attention, case.everything()))


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0)


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        ("fp8_e4m3/fp8_e5m2", {}),
        ("fp8_e4m3/fp8_e5m2", {"block_size": 8, "heads": (7, 1)}),
        ("int8", {"block_size": 32, "window": 21}),
        ("int8", {"block_size": 8, "head_dim": 128, "qk_norm": True}),
        ("int8", {"heads": (2, 2), "window": 40}),
        ("bf16", {"block_size": 64}),
        ("fp8_e4m3", {"head_dim": 128}),
        ("fp8_e5m2", {"head_dim": 256, "lengths": (5, 50)}),
    ],
)
def test_it_agrees_with_the_reference_that_rounds_at_the_same_places(fmt, options):
    case = pair_case(fmt, **options)
    pools = case.pool(), case.pool()
    rounding = Rounded(case.spec, case.layout, pools[0], case.cos, case.sin, True)
    exact = case.attention("reference", case.pool())
    got = run(case, case.attention("numba", pools[1])).float()
    want = run(case, rounding).float()
    assert torch.equal(*pools)
    # A rounding of a query may fall the other way, where RoPE's last bit differs: two bits of the output at most.
    assert (got - want).abs().max() <= 2**-7 * want.abs().max()
    assert cosine(got, want) > 1 - 1e-8
    assert cosine(got, run(case, exact)) > 0.99999


@pytest.mark.parametrize(("fmt", "window"), [("int8", 0), ("fp8_e4m3/fp8_e5m2", 37), ("bf16", 0)])
def test_rows_are_bit_equal_alone_and_in_any_chunking(fmt, window):
    case = pair_case(fmt, lengths=(49, 33, 100), window=window)
    assert_bit_equal_in_any_chunking(case)


@pytest.mark.parametrize(
    ("fmt", "window", "heads"),
    [("int8", 0, (6, 2)), ("fp8_e4m3", 700, (6, 2)), ("bf16", 0, (2, 1)), ("bf16", 513, (4, 4))],
)
def test_contexts_that_threads_share_give_the_same_bits_as_those_of_one_thread(monkeypatch, fmt, window, heads):
    """Decode steps of one row and of rows with short and long contexts, on both sides of the ends of segments."""
    monkeypatch.setattr(paged_attention, "_UNITS_OF_WORKER", 100)
    lengths = (2100, 40, 1025)
    case = pair_case(fmt, heads=heads, lengths=lengths, window=window)
    attention = case.attention("numba", case.pool())
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
        with monkeypatch.context() as patched:
            patched.setattr(paged_attention, "_SPLIT_FROM", 10**6)
            assert all(torch.equal(*rows) for rows in zip(case.forward(attention, pieces), split, strict=True))
    assert split_into == [8, 0, 4, 0, 0, 0, 4, 0, 4, 0]


def test_only_long_contexts_of_few_rows_are_shared_by_threads():
    case = pair_case("int8", heads=(6, 2), lengths=(2100, 2100))
    attention = case.attention("numba", case.pool())
    threads = numba.get_num_threads()

    def segments(rows, position):
        return attention.segments(AttentionBatch([position] * rows, range(rows), [[0]] * rows, range(rows + 1)))

    assert [segments(1, at) for at in (0, 1023, 1024, 1535, 2047, 2048, 2099)] == [0, 0, 4, 4, 4, 8, 8]
    assert segments(2 * threads - 1, 2099) == 8
    assert segments(2 * threads, 2099) == 0
    assert attention.segments(AttentionBatch([2098, 2099], [0, 0], [[0]], [0, 2])) == 0


@pytest.mark.parametrize(("fmt", "window"), [("int8", 0), ("fp8_e4m3/fp8_e5m2", 600)])
def test_rows_over_several_segments_agree_with_exact_attention(fmt, window):
    case = pair_case(fmt, lengths=(1300,), window=window)
    got = run(case, case.attention("numba", case.pool()))
    assert cosine(got, run(case, case.attention("reference", case.pool()))) > 0.99999


@pytest.mark.parametrize(("fmt", "poison"), [("fp8_e4m3/fp8_e5m2", 0x7F), ("bf16", 0xFF), ("int8", 0x7E)])
@pytest.mark.parametrize("window", [0, 9])
def test_nan_in_every_unused_slot_and_in_scratch_memory_changes_no_bit(fmt, poison, window):
    case = pair_case(fmt, lengths=(1, 9, 31, 49), window=window)
    clean = run(case, case.attention("numba", case.pool()))
    poisoned = case.attention("numba", case.pool(poison))
    rows, starts = torch.cat(case.qkv), np.cumsum([0, *case.lengths])
    positions = np.concatenate([np.arange(length) for length in case.lengths])
    batch = AttentionBatch(positions, np.repeat(np.arange(4), case.lengths), case.tables, starts)
    got = torch.empty_like(clean)
    assert torch.isfinite(clean).all()
    for _ in range(2):
        poisoned.forward(1, rows, batch, got)
        assert torch.equal(got, clean)
        batch.workspace.scratch.fill(np.nan)
        batch.workspace.queries.fill(np.nan)


@pytest.mark.parametrize("first", range(32, 64, 5))
def test_blocks_that_a_window_has_left_may_hold_anything(first):
    """Those that the policy lets go of, whatever other request wrote there; one block later is read."""
    window, length = 20, first + 20
    case = pair_case("fp8_e4m3/fp8_e5m2", lengths=(length,), window=window)
    pool = case.pool()
    attention = case.attention("numba", pool)
    case.forward(attention, [(0, 0, length - 1)])
    want = case.forward(attention, [(0, length - 1, length)])[0]
    let_past = first // READ_TOGETHER * READ_TOGETHER // 16
    pool[case.tables[0][:let_past]] = 0x7F
    assert torch.equal(case.forward(attention, [(0, length - 1, length)])[0], want)
    pool[case.tables[0][let_past]] = 0x7F
    assert torch.isnan(case.forward(attention, [(0, length - 1, length)])[0]).any()


def test_the_policy_keeps_whole_tiles():
    assert READ_TOGETHER % context.TILE == 0
    assert READ_TOGETHER % bf16_tiles.TILE == 0


def test_a_nan_query_gives_nan_and_touches_no_other_row():
    case = pair_case("int8", lengths=(40,))
    clean = run(case, case.attention("numba", case.pool()))
    case.qkv[0][20, :64] = torch.nan
    got = run(case, case.attention("numba", case.pool()))
    assert torch.isnan(got[20, :64]).all()
    got[20, :64] = clean[20, :64]
    assert torch.equal(got, clean)


def test_huge_scores_do_not_overflow():
    case = pair_case("bf16", lengths=(40,))
    case.qkv[0] *= 1e4
    assert torch.isfinite(run(case, case.attention("numba", case.pool()))).all()


@pytest.mark.parametrize("codec", [INT8, FP8_E4M3, FP8_E5M2, BF16], ids=lambda codec: codec.name)
def test_tiles_hold_every_code_exactly(codec):
    """16 tokens of 64 elements: all 256 codes of 8 bits (of int8 those that encoders give) four times over."""
    rng = np.random.default_rng(1)
    if codec.itemsize == 1:
        codes = np.arange(1024).astype(np.uint8)
        codes[codes == 0x80] = 0 if codec is INT8 else 0x80
    else:
        codes = rng.integers(0, 65536, 1024).astype(np.uint16).view(np.uint8)
    stored = torch.from_numpy(rng.permutation(codes.reshape(1024, -1)).reshape(16, -1))
    ones = torch.ones(16, dtype=torch.float16) if codec.scaled else None
    expected = codec.decode(stored, ones).bfloat16().view(torch.int16).numpy()
    number = codec.number
    keys, values = np.zeros((32, 2, 16, 2), np.int16), np.zeros((16, 64, 2), np.int16)

    @numba.njit
    def decode(source, keys, values):
        bf16_tiles.key_pairs(number, 64, source, keys)
        bf16_tiles.value_pairs(number, 64, source, values)

    for half in (0, 1):
        decode(stored.numpy().ctypes.data, keys[:, half:].ctypes.data, values[8 * half :].ctypes.data)
        got = keys[:, half].transpose(1, 0, 2).reshape(16, 64)
        assert_same_numbers(got, expected)
        assert_same_numbers(values[8 * half : 8 * half + 8].transpose(0, 2, 1).reshape(16, 64), expected)


def assert_same_numbers(got, expected):
    got, expected = (torch.from_numpy(np.ascontiguousarray(bits)).view(torch.bfloat16) for bits in (got, expected))
    assert torch.equal(torch.isnan(got), torch.isnan(expected))
    number = ~torch.isnan(expected)
    assert torch.equal(got[number], expected[number])
    assert torch.equal(torch.signbit(got[number]), torch.signbit(expected[number]))


def test_status_says_by_what_products_are_made(by_tiles):
    case = pair_case("int8", lengths=(40,))
    assert ("by AMX" in case.attention("numba", case.pool()).name) == by_tiles


def test_only_what_bf16_holds_exactly_is_multiplied_as_bf16():
    assert multiplies_pairs(INT8, FP8_E5M2, BF16, 64, False, 0.0)
    assert not multiplies_pairs(FP16, INT8, BF16, 64, False, 0.0)
    assert not multiplies_pairs(INT8, FP32, BF16, 64, False, 0.0)
    assert not multiplies_pairs(INT8, INT8, FP32, 64, False, 0.0)
    assert not multiplies_pairs(INT8, INT8, BF16, 80, False, 0.0)
    assert not multiplies_pairs(INT8, INT8, BF16, 64, True, 0.0)
    assert not multiplies_pairs(INT8, INT8, BF16, 64, False, 30.0)


def test_as_many_rows_are_multiplied_together_as_registers_hold_and_few_twice():
    assert [rows_at_once(rows) for rows in range(1, 17)] == [1, 2, 3, 4, 5, 6, 7, 4, 3, 5, 6, 6, 7, 7, 5, 4]
