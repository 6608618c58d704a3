"""Writes small GGUF files with the gguf package: a whole model, each matrix in a wanted type."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel

ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
INTERLEAVED = ("llama", "smollm3")
"""Whose files hold q and k for a RoPE of neighbouring pairs."""
HALF_BYTES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where the fp16 numbers of a block begin; random bytes there could be NaN."""


def gguf_name(name: str, architecture: str = "llama") -> str:
    """As the gguf package calls it in files of that architecture."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], 16)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def quantised(values: np.ndarray, type_name: str, seed: int = 0) -> np.ndarray:
    """The bytes of `values` [rows, columns]; for the types that gguf cannot quantise, random blocks
    instead.
    """
    kind = Type[type_name]
    if type_name not in HALF_BYTES:
        return gguf.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (values.size // block, size), dtype=np.uint8)
    for at in HALF_BYTES[type_name]:
        halves = random.uniform(1e-4, 3e-4, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(values.shape[0], -1)


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama files have them: the two halves of a head alternate."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def llama3_divisors(inverse_frequencies: np.ndarray, rope: dict[str, Any]) -> np.ndarray:
    """What converters write as rope_freqs.weight."""
    divisors = []
    for frequency in inverse_frequencies:
        turns = rope["original_max_position_embeddings"] / (2 * math.pi / frequency)
        if turns > rope["high_freq_factor"]:
            divisors.append(1.0)
        elif turns < rope["low_freq_factor"]:
            divisors.append(rope["factor"])
        else:
            span = rope["high_freq_factor"] - rope["low_freq_factor"]
            smooth = (turns - rope["low_freq_factor"]) / span
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, dtype=np.float32)


class GGUFModelFile:
    """Collects metadata and tensors of a transformers model; `write` puts them into a file, or into parts of
    `part_tensors` tensors each, and gives the first.
    """

    def __init__(
        self, path: Path, model: PreTrainedModel, architecture: str, type_name: str = "F32", part_tensors: int = 0
    ):
        config = model.config
        self.path = path
        self.writer = gguf.GGUFWriter(str(path), architecture, split_max_tensors=part_tensors)
        self.writer.add_context_length(config.max_position_embeddings)
        self.writer.add_embedding_length(config.hidden_size)
        self.writer.add_block_count(config.num_hidden_layers)
        self.writer.add_feed_forward_length(config.intermediate_size)
        self.writer.add_head_count(config.num_attention_heads)
        self.writer.add_head_count_kv(config.num_key_value_heads)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.writer.add_key_length(head_dim)
        self.writer.add_value_length(head_dim)
        self.writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        rope = config.rope_parameters
        self.writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
        self.writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
        self.writer.add_eos_token_id(2)
        self.tensors = dict(self._tensors(model, architecture, type_name))

    def write(self) -> Path:
        for name, (data, type_name) in self.tensors.items():
            self.writer.add_tensor(name, data, raw_dtype=Type[type_name])
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path if self.path.exists() else min(self.path.parent.glob(f"{self.path.stem}-*-of-*.gguf"))

    @staticmethod
    def _tensors(model: PreTrainedModel, architecture: str, type_name: str):
        config = model.config
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            values = parameter.detach().to(torch.float32).numpy()
            if architecture.startswith("gemma") and name.endswith("norm.weight"):
                values = 1 + values
            if architecture in INTERLEAVED and ".q_proj." in name:
                values = interleaved(values, config.num_attention_heads)
            if architecture in INTERLEAVED and ".k_proj." in name:
                values = interleaved(values, config.num_key_value_heads)
            if values.ndim == 1:
                yield gguf_name(name, architecture), (values, "F32")
            else:
                yield gguf_name(name, architecture), (quantised(values, type_name, seed), type_name)
