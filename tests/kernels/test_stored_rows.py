"""Rows of files, dense and packed, against the `gguf` package and against records made of dense weights."""

import numpy as np
import pytest
import torch
from file_blocks import HALVES, PLAIN, by_the_package, random_rows

from deepinfer.kernels import packing
from deepinfer.kernels.cpu import repack
from deepinfer.kernels.cpu.activation_forms import CHUNK
from deepinfer.kernels.cpu.file_types import FILE_TYPES
from deepinfer.kernels.cpu.records import P_BF16, P_INT4, P_INT8, record_bytes
from deepinfer.kernels.stored_rows import NotFiniteError, joined_rows, same_rows, stored_rows

TYPES = [kind.name for kind in FILE_TYPES]
Q4 = ["Q4_0", "Q4_1", "Q4_K"]
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(params=["one thread", "all threads"], autouse=True)
def threads(request, monkeypatch):
    for module in (repack, packing):
        monkeypatch.setattr(module, "WORTH_WAKING", 0 if request.param == "all threads" else 1 << 40)


def stored(type_name, rows, columns, seed=0, where="a.gguf: tensor w"):
    raw = random_rows(type_name, rows, columns, seed)
    return stored_rows(where, type_name, raw, columns), torch.from_numpy(by_the_package(type_name, raw))


def packed(rows, kind):
    taken = []
    packing.pack_stored(rows, kind, lambda records, wide: taken.append((records, wide)))
    return taken[0]


def records_of(kind, codes, factors=(), wide=False, group=CHUNK):
    """What `repack` makes of dense weights; it has tests of its own."""
    blocks, groups = -(-codes.shape[0] // 16), -(-codes.shape[1] // group)
    records = torch.empty((blocks, groups, record_bytes(kind, group, wide)), dtype=torch.uint8)
    codes, factors = codes.contiguous(), [factor.contiguous() for factor in factors]
    addresses = [factor.data_ptr() for factor in factors]
    repack.pack_records(kind, group, wide, codes.data_ptr(), addresses, records.data_ptr(), *codes.shape)
    return records


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("type_name", TYPES)
def test_any_bytes_become_the_very_numbers_that_the_package_makes_of_them(type_name):
    for shape in [(37, 512), (16, 768), *([(5, 45), (3, 1)] if type_name in PLAIN else [])]:
        rows, expected = stored(type_name, *shape)
        assert same_bits(rows.dense(FP32), expected)
        assert same_bits(rows.dense(BF16), expected.bfloat16())


@pytest.mark.parametrize("type_name", TYPES)
def test_any_type_is_packed_as_its_dense_weights_would_be(type_name):
    for shape in [(37, 512), (16, 768), *([(5, 45), (33, 1)] if type_name in PLAIN else [])]:
        rows, expected = stored(type_name, *shape)
        records, wide = packed(rows, P_BF16)
        assert torch.equal(records, records_of(P_BF16, expected.bfloat16()))
        assert not wide


def test_rows_of_several_types_in_any_order_are_dense_and_packed_like_one_matrix():
    parts = [stored(name, 11, 256, seed) for seed, name in enumerate(TYPES)]
    order = np.random.default_rng(1).permutation(11 * len(TYPES))
    rows = joined_rows([part for part, _ in parts]).permuted(order)
    expected = torch.cat([values for _, values in parts])[torch.from_numpy(order)]
    assert same_bits(rows.dense(FP32), expected)
    assert torch.equal(packed(rows, P_BF16)[0], records_of(P_BF16, expected.bfloat16()))


def four_bit_parts(type_name, raw):
    """Codes, scales and minima by the definition of the format."""
    if type_name == "Q4_K":
        blocks = raw.reshape(-1, 144)
        six = blocks[:, 4:16].reshape(-1, 3, 4)
        scales = np.concatenate([six[:, 0] & 63, six[:, 2] & 15 | six[:, 0] >> 6 << 4], 1).astype(np.float32)
        minima = np.concatenate([six[:, 1] & 63, six[:, 2] >> 4 | six[:, 1] >> 6 << 4], 1).astype(np.float32)
        d, least = (blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32) for at in (0, 2))
        pairs = blocks[:, 16:].reshape(-1, 4, 1, 32)
        codes = np.concatenate([pairs & 15, pairs >> 4], axis=2)
        factors = d * scales, -(least * minima)
    else:
        first = 4 if type_name == "Q4_1" else 2
        blocks = raw.reshape(-1, first + 16)
        numbers = blocks[:, :first].copy().view(np.float16).astype(np.float32)
        codes = np.concatenate([blocks[:, first:] & 15, blocks[:, first:] >> 4], axis=1)
        factors = numbers[:, 0], numbers[:, 1] if first == 4 else -8 * numbers[:, 0]
    return [torch.from_numpy(part.reshape(len(raw), -1)) for part in (codes, *factors)]


@pytest.mark.parametrize("type_name", Q4)
def test_four_bit_codes_are_packed_with_their_scales_and_minima(type_name):
    raw = random_rows(type_name, 37, 512)
    codes, *factors = four_bit_parts(type_name, raw)
    records, wide = packed(stored_rows("w", type_name, raw, 512), P_INT4)
    assert wide == (type_name == "Q4_K")
    assert torch.equal(records, records_of(P_INT4, codes, factors, wide))


def test_a_minimum_that_fp16_does_not_hold_makes_the_scales_and_minima_of_its_matrix_fp32():
    raw = random_rows("Q4_0", 40, 64)
    for scale, expected in ((8188, False), (8192, True)):
        raw[21, 18:20] = np.array([scale], np.float16).view(np.uint8)
        codes, *factors = four_bit_parts("Q4_0", raw)
        records, wide = packed(stored_rows("w", "Q4_0", raw, 64), P_INT4)
        assert wide == expected
        assert torch.equal(records, records_of(P_INT4, codes, factors, wide))


def test_eight_bit_codes_are_packed_with_their_scales():
    raw = random_rows("Q8_0", 37, 96)
    blocks = torch.from_numpy(raw.reshape(37, 3, 34))
    codes, scales = (
        blocks[..., 2:].reshape(37, 96).view(torch.int8),
        blocks[..., :2].view(torch.float16)[..., 0].float(),
    )
    records, wide = packed(stored_rows("w", "Q8_0", raw, 96), P_INT8)
    assert torch.equal(records, records_of(P_INT8, codes, [scales]))
    assert not wide


def ways(type_name):
    """What reads rows of that type."""
    yield lambda rows: rows.dense(FP32)
    yield lambda rows: rows.dense(BF16)
    yield lambda rows: packed(rows, P_BF16)
    if type_name in Q4:
        yield lambda rows: packed(rows, P_INT4)
    if type_name == "Q8_0":
        yield lambda rows: packed(rows, P_INT8)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("type_name", TYPES)
def test_a_number_that_is_not_finite_is_refused_with_its_file_and_tensor(type_name, value):
    others, _ = stored(type_name, 16, 512, where="a.gguf: tensor first")
    for at in HALVES.get(type_name, (0,)):
        raw = random_rows(type_name, 40, 512, seed=3)
        if type_name in PLAIN:
            bits = np.float32(value).view(np.uint32)
            number = np.uint16(bits >> 16) if type_name == "BF16" else PLAIN[type_name](value)
        else:
            number = np.float16(value)
        bad = raw.copy()
        bad[37, -block_bytes(type_name) :][at : at + number.nbytes] = np.frombuffer(number.tobytes(), np.uint8)
        for read in ways(type_name):
            read(joined_rows([others, stored_rows("b.gguf: tensor second", type_name, raw, 512)]))
            rows = joined_rows([others, stored_rows("b.gguf: tensor second", type_name, bad, 512), others])
            with pytest.raises(NotFiniteError, match=r"^b\.gguf: tensor second holds NaN or infinite values$"):
                read(rows)


def test_a_number_that_bf16_does_not_hold_is_refused_where_it_would_become_infinite():
    values = np.full((16, 45), 3.4e38, np.float32)
    for columns in (45, 32):
        part = np.ascontiguousarray(values[:, :columns])
        rows = stored_rows("a.gguf: tensor w", "F32", part.view(np.uint8), columns)
        assert torch.equal(rows.dense(FP32), torch.from_numpy(part))
        for read in (lambda rows: rows.dense(BF16), lambda rows: packed(rows, P_BF16)):
            with pytest.raises(NotFiniteError):
                read(rows)


def test_subnormal_floats_keep_their_bits():
    values = (np.float32(1e-39) * np.arange(1, 16 * 64 + 1, dtype=np.float32)).reshape(16, 64)
    rows = stored_rows("w", "F32", values.view(np.uint8), 64)
    assert same_bits(rows.dense(BF16), torch.from_numpy(values).bfloat16())
    assert torch.equal(packed(rows, P_BF16)[0], records_of(P_BF16, torch.from_numpy(values).bfloat16()))


def block_bytes(type_name):
    sizes = {kind.name: kind.size // kind.weights if kind.is_plain else kind.size for kind in FILE_TYPES}
    return sizes[type_name]


@pytest.mark.parametrize("type_name", TYPES)
def test_rows_of_any_bits_at_all_are_refused_exactly_if_the_package_finds_no_number_in_them(type_name):
    random = np.random.default_rng(5)
    raw = random.integers(0, 256, (400, block_bytes(type_name) * (1 if type_name in HALVES else 64)), np.uint8)
    refused = 0
    with np.errstate(all="ignore"):
        expected = by_the_package(type_name, raw)
    for row, values in zip(raw, expected, strict=True):
        rows = stored_rows("w", type_name, row[None].copy(), len(values))
        if np.isfinite(values).all():
            assert same_bits(rows.dense(FP32)[0], torch.from_numpy(values))
            assert torch.equal(packed(rows, P_BF16)[0], records_of(P_BF16, torch.from_numpy(values[None]).bfloat16()))
            continue
        refused += 1
        for read in ways(type_name):
            with pytest.raises(NotFiniteError):
                read(rows)
    assert refused


def test_what_is_gathered_is_packed_at_the_end_or_when_there_is_enough_of_it(monkeypatch):
    parts = [stored(name, 32, 512, seed) for seed, name in enumerate(TYPES)]
    for most in (1 << 30, 100_000):
        monkeypatch.setattr(packing, "_BATCH_BYTES", most)
        taken = [[] for _ in parts]
        with packing.gathered():
            for number, (rows, _) in enumerate(parts):
                packing.pack_stored(rows, P_BF16, lambda *made, number=number, taken=taken: taken[number].append(made))
                assert bool(taken[0]) == (most == 100_000 and number >= 3)
        for [(records, _)], (_, values) in zip(taken, parts, strict=True):
            assert torch.equal(records, records_of(P_BF16, values.bfloat16()))


def test_what_waited_is_dropped_with_an_error_and_nothing_waits_after_it():
    rows, values = stored("Q8_0", 16, 64)
    taken = []

    def fail():
        with packing.gathered():
            packing.pack_stored(rows, P_BF16, lambda *records: taken.append(records))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not taken
    assert torch.equal(packed(rows, P_BF16)[0], records_of(P_BF16, values.bfloat16()))


def test_rows_are_the_same_if_their_numbers_are_whatever_types_they_have(monkeypatch):
    monkeypatch.setattr("deepinfer.kernels.stored_rows._ROWS_AT_ONCE", 5)
    rows, values = stored("BF16", 17, 64)
    other = stored_rows("w", "F32", values.numpy().view(np.uint8), 64)
    assert same_rows(rows, other, FP32)
    assert not same_rows(rows, other.permuted(np.arange(16)), FP32)
    values[16, 63] += 1
    assert not same_rows(rows, other, FP32)


@pytest.mark.parametrize(
    "raw", [np.zeros((2, 209), np.uint8), np.zeros((2, 210), np.int8), np.zeros((4, 210), np.uint8)[::2]]
)
def test_bytes_that_are_no_such_rows_are_refused(raw):
    with pytest.raises(ValueError, match="are not 256 weights of Q6_K"):
        stored_rows("w", "Q6_K", raw, 256)
    with pytest.raises(ValueError, match="are not 16 weights of Q8_0"):
        stored_rows("w", "Q8_0", np.zeros((2, 17), np.uint8), 16)
