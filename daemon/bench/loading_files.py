"""GGUF files of random weights in the shapes of real models: for how long loading takes, codes do not matter."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
TYPES = ("F32", "F16", "BF16", *BLOCK_TYPES)
_WITH_MINIMUM = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
_HALVES = {"Q6_K": (208,), **dict.fromkeys(_WITH_MINIMUM, (0, 2))}
"""Where the fp16 numbers of a block begin; of other types with the block."""


class Shape(NamedTuple):
    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


SMOLLM2 = Shape("SmolLM2 135M", 576, 1536, 30, 9, 3, 64, 49152)
WIDER = Shape("SmolLM2 135M, 768 wide", 768, 1536, 30, 12, 4, 64, 49152)
"""Blocks of 256 do not fit rows of 576."""
LAYER_OF_3B = Shape("a layer of a 3B model", 3072, 8192, 1, 24, 8, 128, 1024)


def fitting(shape: Shape, type_name: str) -> Shape:
    """The shape, or one like it, whose rows are whole blocks."""
    weights = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][0]
    return WIDER if shape == SMOLLM2 and shape.hidden % weights else shape


def write_random_model(path: Path, shape: Shape, type_name: str) -> None:
    """A llama with all matrices in one type and a tied head."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list([f"t{number}" for number in range(shape.vocab)])
    writer.add_eos_token_id(2)
    for name, rows, columns in _matrices(shape):
        data = random_matrix(random, type_name, rows, columns)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[type_name])
    norms = [f"blk.{layer}.{part}_norm.weight" for layer in range(shape.layers) for part in ("attn", "ffn")]
    for name in ("output_norm.weight", *norms):
        writer.add_tensor(name, np.ones(shape.hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _matrices(shape: Shape) -> list[tuple[str, int, int]]:
    hidden, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found = [("token_embd.weight", shape.vocab, hidden)]
    for layer in range(shape.layers):
        parts = [
            ("attn_q", q, hidden),
            ("attn_k", kv, hidden),
            ("attn_v", kv, hidden),
            ("attn_output", hidden, q),
            ("ffn_gate", shape.inner, hidden),
            ("ffn_up", shape.inner, hidden),
            ("ffn_down", hidden, shape.inner),
        ]
        found += [(f"blk.{layer}.{part}.weight", rows, columns) for part, rows, columns in parts]
    return found


def random_matrix(random: np.random.Generator, type_name: str, rows: int, columns: int) -> np.ndarray:
    """Small floats, or blocks of random bits with small scales, as the gguf package writes them."""
    if type_name not in BLOCK_TYPES:
        values = random.standard_normal((rows, columns), np.float32) * np.float32(0.02)
        if type_name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype({"F32": np.float32, "F16": np.float16}[type_name])
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    blocks = random.integers(0, 256, (rows * columns // weights, size), np.uint8)
    for at in _HALVES.get(type_name, (0,)):
        numbers = random.uniform(1e-4, 3e-4, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)
