"""GGUF blocks as codes, scales and minima of groups of 32 (w = scale * code + minimum), not quantised again.

Layouts from the ggml format: a block of 32 is (d, [m], 16 bytes); byte j holds element j in its low and
element j + 16 in its high nibble. A Q4_K block of 256 is (d, dmin, 12 bytes of 6-bit scales and minima, 128
bytes): 32 bytes hold one sub-block of 32 in their low and the next in their high nibbles.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deepinfer.kernels.cpu.repack import split_blocks
from deepinfer.stages.model.int4 import Int4Groups

GROUP = 32


def q4_0(raw: np.ndarray) -> Int4Groups:
    """raw uint8 [rows, bytes]: blocks of 18, w = d * (q - 8)."""
    codes, (scales,) = _split(raw, 18, 1, 2, 16)
    return Int4Groups(codes, scales, scales * np.float32(-8))


def q4_1(raw: np.ndarray) -> Int4Groups:
    """raw uint8 [rows, bytes]: blocks of 20, w = d * q + m."""
    codes, (scales, minima) = _split(raw, 20, 2, 4, 16)
    return Int4Groups(codes, scales, minima)


def q4_k(raw: np.ndarray) -> Int4Groups:
    """raw uint8 [rows, bytes]: blocks of 144, w = d * scale * q - dmin * minimum."""
    rows = raw.shape[0]
    blocks = raw.reshape(rows, -1, 144)
    low, high, both = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([low & 0x3F, (both & 0x0F) | ((low >> 2) & 0x30)], axis=-1)
    minima = np.concatenate([high & 0x3F, (both >> 4) | ((high >> 2) & 0x30)], axis=-1)
    codes, (of_scales, of_minima) = _split(raw, 144, 2, 16, 32)
    scale = of_scales[..., None] * scales.astype(np.float32)
    minimum = of_minima[..., None] * minima.astype(np.float32)
    return Int4Groups(codes, scale.reshape(rows, -1), -minimum.reshape(rows, -1))


class Int8Groups(NamedTuple):
    codes: np.ndarray
    """int8 [rows, columns]."""
    scales: np.ndarray
    """float16, or float32 where a file has others, [rows, columns / 32]."""


def q8_0(raw: np.ndarray) -> Int8Groups:
    """raw uint8 [rows, bytes]: blocks of 34, w = d * q."""
    blocks = raw.reshape(raw.shape[0], -1, 34)
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(raw.shape[0], -1)
    return Int8Groups(codes, raw.view(np.float16).reshape(raw.shape[0], -1, 17)[..., 0].copy())


READERS = {"Q4_0": q4_0, "Q4_1": q4_1, "Q4_K": q4_k}


def _split(raw: np.ndarray, block: int, halves: int, first: int, run: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Of blocks of so many bytes: codes uint8 [rows, columns] and numbers fp32 [rows, blocks], see `split_blocks`."""
    codes, numbers = split_blocks(raw.reshape(-1, block), halves, first, run)
    return codes.reshape(len(raw), -1), [number.reshape(len(raw), -1) for number in numbers]
