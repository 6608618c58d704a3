"""Rows of random bytes in the types of GGUF files, and what the `gguf` package makes of them."""

from __future__ import annotations

import gguf
import numpy as np

_WITH_MINIMUM = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "Q6_K": (208,), **dict.fromkeys(_WITH_MINIMUM, (0, 2))}
"""Where the fp16 numbers of a block begin."""
PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def block(type_name: str) -> tuple[int, int]:
    """Weights and bytes."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]


def random_rows(type_name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """uint8 [rows, bytes]: any bits, but numbers that are finite."""
    random = np.random.default_rng(seed)
    if type_name in PLAIN:
        values = random.standard_normal((rows, columns)).astype(np.float32)
        if type_name == "BF16":
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(PLAIN[type_name]).view(np.uint8)
    weights, size = block(type_name)
    blocks = random.integers(0, 256, (rows * columns // weights, size), np.uint8)
    for at in HALVES[type_name]:
        numbers = random.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def by_the_package(type_name: str, raw: np.ndarray) -> np.ndarray:
    """fp32 [rows, columns]."""
    return gguf.dequantize(raw, gguf.GGMLQuantizationType[type_name]).astype(np.float32)
