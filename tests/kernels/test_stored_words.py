"""Words of 4-bit codes, packed where they lie, against records made of the codes that their definition says."""

import numpy as np
import pytest
import torch
from test_stored_rows import packed, records_of, threads  # noqa: F401 - a fixture

from deepinfer.kernels import packing
from deepinfer.kernels.cpu.records import P_BF16, P_INT4, P_INT8
from deepinfer.kernels.cpu.word_rows import BLOCKS_OF_UNIT, COLUMNS, EIGHT_ROWS, ROWS
from deepinfer.kernels.stored_words import CodeWords, StoredWords, WordsPart

MANY_ROWS = 16 * (BLOCKS_OF_UNIT + 1)


def words_of(codes, layout):
    """int32 words, nibble by nibble. codes: int [rows, columns]."""
    codes = codes.astype(np.uint64)
    along = codes.T if layout == EIGHT_ROWS else codes
    nibbles = (0, 2, 4, 6, 1, 3, 5, 7) if layout == EIGHT_ROWS else range(8)
    words = sum(along[:, at::8] << np.uint64(4 * place) for place, at in enumerate(nibbles))
    words = words.astype(np.uint32).view(np.int32)
    return np.ascontiguousarray(words.T if layout == COLUMNS else words)


def part_of(layout, rows, columns, group, seed=0, is_half=True):
    """A part, and its codes, scales and minima as tensors."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, (rows, columns))
    factors = [random.standard_normal((rows, columns // group)).astype(np.float32) for _ in range(2)]
    if is_half:
        factors = [factor.astype(np.float16).astype(np.float32) for factor in factors]
    part = WordsPart(CodeWords(words_of(codes, layout), layout), *factors)
    return part, [torch.from_numpy(codes.astype(np.uint8)), *map(torch.from_numpy, factors)]


@pytest.mark.parametrize("is_half", [True, False])
@pytest.mark.parametrize("layout", [ROWS, COLUMNS, EIGHT_ROWS])
def test_words_of_every_layout_are_packed_as_their_codes_would_be(layout, is_half):
    for rows, columns, group in [(16, 32, 32), (48, 192, 64), (MANY_ROWS, 384, 128)]:
        part, (codes, *factors) = part_of(layout, rows, columns, group, is_half=is_half)
        stored = StoredWords((part,), group)
        records, wide = packed(stored, P_INT4)
        assert stored.shape == (rows, columns)
        assert wide == (not is_half)
        assert torch.equal(records, records_of(P_INT4, codes, factors, wide, group))


def test_parts_lie_below_one_another():
    made = [part_of(layout, rows, 128, 64, rows) for layout, rows in ((COLUMNS, 32), (ROWS, MANY_ROWS), (COLUMNS, 16))]
    codes, *factors = (torch.cat(parts) for parts in zip(*(tensors for _, tensors in made), strict=True))
    records, _ = packed(StoredWords(tuple(part for part, _ in made), 64), P_INT4)
    assert torch.equal(records, records_of(P_INT4, codes, factors, group=64))


def test_columns_in_another_order_are_packed_in_that_order():
    order = np.random.default_rng(1).permutation(256).astype(np.int32)
    part, (codes, *factors) = part_of(COLUMNS, MANY_ROWS, 256, 64)
    records, _ = packed(StoredWords((part,), 64, order), P_INT4)
    assert torch.equal(records, records_of(P_INT4, codes[:, torch.from_numpy(order)], factors, group=64))


@pytest.mark.parametrize("kind", [P_BF16, P_INT8])
def test_words_have_codes_of_four_bits_alone(kind):
    part, _ = part_of(ROWS, 16, 32, 32)
    with pytest.raises(ValueError, match=f"have none for kind {kind}"):
        packing.pack_stored(StoredWords((part,), 32), kind, print)
