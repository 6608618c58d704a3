"""A stand-in for models whose keys have large biases: any model with a constant added to a few channels of its keys.

The channels are those that RoPE turns least, of every KV head in the first and the last layer. What attention makes of
the constant is then nearly the same for every token, so the model stays what it is, while the formats see the constant
in every key that is stored with it.
"""

from __future__ import annotations

import dataclasses

import torch

from deepinfer.daemon.setting import ConfigError
from deepinfer.kernels.stored_rows import StoredRows
from deepinfer.kernels.stored_words import StoredWords
from deepinfer.stages.model.checkpoint import Checkpoint
from deepinfer.stages.model.config import ModelConfig, parameter_shapes
from deepinfer.stages.model.gguf_codes import Int8Groups
from deepinfer.stages.model.int4 import Int4Groups
from deepinfer.stages.model.source import TensorHeader, WeightSource


def with_key_offset(checkpoint: Checkpoint, size: float) -> Checkpoint:
    """Raises ConfigError for a model whose keys cannot take a constant, or have one."""
    config = checkpoint.config
    own = {
        "have biases of their own": config.qkv_bias,
        "are normalised behind their projections": bool(config.qk_norm),
        "come out of one matrix": config.fused_projections,
    }
    for what, is_so in own.items():
        if is_so:
            raise ConfigError(
                f"key_offset is {size:g}; queries and keys of this {config.family} {what}: it must be 0", "key_offset"
            )
    config = dataclasses.replace(config, qkv_bias=True)
    return dataclasses.replace(checkpoint, config=config, source=_OffsetSource(checkpoint.source, config, size))


def offset_channels(head_dim: int) -> tuple[int, int, int]:
    """Of a head: both of the pair that turns least, and one of the next."""
    half = head_dim // 2
    return half - 1, head_dim - 1, half - 2


class _OffsetSource:
    """A source with biases beside its own tensors: zeros, but in the chosen channels of the keys."""

    def __init__(self, source: WeightSource, config: ModelConfig, size: float) -> None:
        self._source = source
        shapes = parameter_shapes(config)
        names = shapes.keys() - source.headers.keys()
        self._biases = {name: torch.zeros(shapes[name]) for name in names if name.endswith("_proj.bias")}
        for layer in {0, config.num_layers - 1}:
            keys = self._biases[f"model.layers.{layer}.self_attn.k_proj.bias"].view(-1, config.head_dim)
            for number, channel in enumerate(offset_channels(config.head_dim)):
                keys[:, channel] = -size if number % 2 else size
        added = {name: TensorHeader(tuple(bias.shape), "F32", bias.nbytes) for name, bias in self._biases.items()}
        self.headers = {**source.headers, **added}

    def read(self, name: str) -> torch.Tensor:
        return self._biases[name] if name in self._biases else self._source.read(name)

    def rows(self, name: str) -> StoredRows | None:
        return None if name in self._biases else self._source.rows(name)

    def words(self, name: str) -> StoredWords | None:
        return None if name in self._biases else self._source.words(name)

    def read_int4(self, name: str) -> Int4Groups | None:
        return None if name in self._biases else self._source.read_int4(name)

    def read_int8(self, name: str) -> Int8Groups | None:
        return None if name in self._biases else self._source.read_int8(name)

    def report(self) -> dict[str, object]:
        return self._source.report()

    def close(self) -> None:
        self._source.close()
