"""Weights in the order of kernels, against the same order made by plain tensor operations."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from deepinfer.kernels.cpu import repack
from deepinfer.kernels.cpu.activation_forms import CHUNK
from deepinfer.kernels.cpu.records import BLOCK, P_BF16, P_INT4, P_INT8, record_bytes

DTYPES = {P_INT4: torch.uint8, P_INT8: torch.int8, P_BF16: torch.bfloat16}
NUM_FACTORS = {P_INT4: 2, P_INT8: 1, P_BF16: 0}


@pytest.fixture(params=["one thread", "all threads"], autouse=True)
def threads(request, monkeypatch):
    monkeypatch.setattr(repack, "WORTH_WAKING", 0 if request.param == "all threads" else 1 << 40)


def reference_records(kind, group, wide, codes, factors):
    right, below = -codes.shape[1] % group, -codes.shape[0] % BLOCK
    codes = F.pad(codes, (0, right, 0, below))
    groups = codes.shape[1] // group
    pairs = codes.unflatten(0, (-1, BLOCK)).unflatten(2, (groups, -1, 2)).permute(0, 2, 3, 1, 4)
    if NUM_FACTORS[kind] == 2:
        four = pairs.unflatten(2, (-1, 4)).int()  # [M / 16, groups, vectors, pair, 16, 2]
        words = sum(four[:, :, :, pair] << 4 * pair for pair in range(4))
        parts = [torch.stack((words & 0xFF, words >> 8), dim=-1).to(torch.uint8)]
    else:
        parts = [pairs.contiguous().view(torch.uint8)]
    for factor in factors:
        lanes = F.pad(factor, (0, 0, 0, below)).unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous()
        parts.append((lanes if wide else lanes.half()).view(torch.uint8))
    return torch.cat([part.flatten(2) for part in parts], dim=2)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("kind", "rows", "width", "group"),
    [
        (P_INT4, 16, 32, 32),
        (P_INT4, 80, 384, 128),
        (P_INT4, 1, 64, 64),
        (P_INT4, 33, 256, 32),
        (P_INT8, 16, 32, 32),
        (P_INT8, 47, 96, 32),
        (P_BF16, 32, 64, CHUNK),
        (P_BF16, 5, 33, CHUNK),
        (P_BF16, 19, 1, CHUNK),
        (P_BF16, 16, 62, CHUNK),
    ],
)
def test_records_are_the_bytes_that_tensor_operations_make_of_the_same_weights(kind, rows, width, group, wide):
    torch.manual_seed(rows * width)
    low, high = (-128, 128) if kind == P_INT8 else (0, 16)
    codes = torch.randint(low, high, (rows, width)).to(DTYPES[kind])
    factors = [torch.randn(rows, width // group) for _ in range(NUM_FACTORS[kind])]
    expected = reference_records(kind, group, wide, codes, factors)
    records = torch.full((*expected.shape[:2], record_bytes(kind, group, wide)), 0xAA, dtype=torch.uint8)
    addresses = [factor.data_ptr() for factor in factors]
    repack.pack_records(kind, group, wide, codes.data_ptr(), addresses, records.data_ptr(), rows, width)
    assert torch.equal(records, expected)


@pytest.mark.parametrize(("size", "halves", "run"), [(16, 2, 16), (128, 1, 32), (8, 0, 8)])
def test_blocks_come_apart_into_numbers_and_codes_lower_nibbles_first_in_every_run(size, halves, run):
    raw = np.random.default_rng(size).integers(0, 256, (1001, size + 6), np.uint8)
    numbers = np.random.default_rng(size).standard_normal((1001, 3)).astype(np.float16)
    raw[:, :6] = numbers.view(np.uint8)
    pairs = raw[:, 6:].reshape(len(raw), -1, 1, run)
    expected = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(len(raw), -1)
    codes, found = repack.split_blocks(raw, halves, 6, run)
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(found, numbers[:, :halves].T.astype(np.float32))


@pytest.mark.parametrize(
    "blocks", [np.zeros((2, 20), np.uint8), np.zeros((2, 16), np.int8), np.zeros((2, 32), np.uint8)[:, ::2]]
)
def test_bytes_that_are_no_whole_runs_or_do_not_lie_side_by_side_are_refused(blocks):
    with pytest.raises(ValueError, match="do not hold runs of 16"):
        repack.split_blocks(blocks, 1, 0, 16)


@pytest.mark.parametrize("count", [1, 16, 100_003])
def test_one_number_that_fp16_does_not_hold_is_found_wherever_it_is(count):
    numbers = torch.randn(count).half().float()
    assert repack.fit_half(numbers.data_ptr(), count)
    for value in (1.0001, 70000.0, 1e-9):
        for place in {0, count // 2, count - 1}:
            changed = numbers.clone()
            changed[place] = value
            assert not repack.fit_half(changed.data_ptr(), count)
