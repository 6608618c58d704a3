"""GGUF blocks to fp32, against the `gguf` package."""

import gguf
import numpy as np
import pytest

from deepinfer.kernels.cpu import dequantise, repack

HALVES = {"Q8_0": [0], "Q5_K": [0, 2], "Q6_K": [208]}
"""Where the fp16 numbers of a block begin."""
SIZES = {"Q8_0": 34, "Q5_K": 176, "Q6_K": 210}


@pytest.mark.parametrize("worth_waking", [0, 1 << 40])
@pytest.mark.parametrize("type_name", dequantise.TYPES)
def test_any_bytes_become_the_very_numbers_that_the_package_makes_of_them(type_name, worth_waking, monkeypatch):
    monkeypatch.setattr(repack, "_WORTH_WAKING", worth_waking)
    random, size = np.random.default_rng(7), SIZES[type_name]
    blocks = random.integers(0, 256, (13 * 17, size), np.uint8)
    for at in HALVES[type_name]:
        numbers = random.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    raw = blocks.reshape(13, -1)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[type_name])
    np.testing.assert_array_equal(dequantise.dequantise_blocks(type_name, raw), expected, strict=True)


@pytest.mark.parametrize(
    "raw", [np.zeros((2, 209), np.uint8), np.zeros((2, 210), np.int8), np.zeros((4, 210), np.uint8)[:, ::2]]
)
def test_rows_that_are_no_whole_blocks_are_refused(raw):
    with pytest.raises(ValueError, match="are no blocks of 210"):
        dequantise.dequantise_blocks("Q6_K", raw)
