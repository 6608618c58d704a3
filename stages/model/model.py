"""A loaded model: layers of linear forms and norms. Immutable, shared by every thread that runs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from deepinfer.kernels.attention import AttentionSpec
from deepinfer.kernels.linear import Linear
from deepinfer.kernels.ops import Ops
from deepinfer.stages.model.config import ModelConfig
from deepinfer.stages.model.embedding import Embedding
from deepinfer.stages.model.key_bias import KeyBias, describe
from deepinfer.stages.model.rope import stacked_tables

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Layer:
    input_norm: torch.Tensor | None
    """float32 [hidden], like every norm but `qk_norm`."""
    qkv: Linear
    o: Linear
    mlp_norm: torch.Tensor | None
    gate_up: Linear
    down: Linear
    qk_norm: tuple[torch.Tensor, torch.Tensor] | None
    """For q and for k: float32 [head_dim], or [q_size] and [kv_size] for a norm of the whole projection."""
    key_bias: KeyBias | None
    """Where it is split, `qkv` does not add it. None without a key bias, with a k norm, and where keys are not
    rotated."""
    attention_out_norm: torch.Tensor | None = None
    """Of what `o` gives, before it is added to the residual stream."""
    mlp_out_norm: torch.Tensor | None = None
    """The same of `down`."""

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        return self.qkv, self.o, self.gate_up, self.down


@dataclass(frozen=True)
class Model:
    config: ModelConfig
    compute_dtype: str
    """Either "fp32" or "bf16"."""
    embedding: Embedding
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor
    head: Linear
    """To float32 logits."""
    head_is_embedding: bool
    key_bias_mode: str
    ops: Ops
    """Where it lies and what runs it."""
    checkpoint: Mapping[str, object] = field(default_factory=dict)
    """What `Checkpoint.describe` said of its files."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.compute_dtype]

    @property
    def weight_bytes(self) -> int:
        """Of linear forms and embedding; a tied head counts once."""
        shared = self.embedding.table_bytes if self.head_is_embedding else 0
        total = self.embedding.nbytes + self.head.weight_bytes - shared
        return total + sum(linear.weight_bytes for layer in self.layers for linear in layer.linears)

    @property
    def file_bytes(self) -> int:
        """Of the tensors that it was made of."""
        return int(str(self.checkpoint["file_bytes"]))

    @property
    def step_weight_bytes(self) -> int:
        """What a decode step of few rows reads of the weights: the least that memory bandwidth allows."""
        return self.head.step_bytes + sum(linear.step_bytes for layer in self.layers for linear in layer.linears)

    def describe(self) -> dict[str, object]:
        kinds = Counter(linear.kind for layer in self.layers for linear in layer.linears)
        return {
            **self.config.describe(),
            "checkpoint": dict(self.checkpoint),
            "compute_dtype": self.compute_dtype,
            "weight_bytes": self.weight_bytes,
            "step_weight_bytes": self.step_weight_bytes,
            "linears": dict(kinds.most_common()),
            "embedding": self.embedding.kind,
            "head": self.head.kind,
            "kv_key_bias": describe(self.key_bias_mode, self.config, [layer.key_bias for layer in self.layers]),
        }

    def attention_spec(self) -> AttentionSpec:
        config = self.config
        by_head = config.qk_norm == "head"
        qk_norm = [layer.qk_norm for layer in self.layers if by_head and layer.qk_norm is not None]
        biases = [layer.key_bias for layer in self.layers]
        key_bias = tuple(bias.values if bias is not None and bias.split else None for bias in biases)
        return AttentionSpec(
            num_layers=config.num_layers,
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.score_scale,
            windows=config.windows,
            rms_norm_eps=config.rms_norm_eps,
            qk_norm=tuple(qk_norm) or None,
            key_bias=key_bias if any(bias is not None for bias in key_bias) else None,
            soft_cap=config.attention_soft_cap,
            rope_tables=self._rope_tables_of_layers(),
        )

    def _rope_tables_of_layers(self) -> tuple[int | None, ...] | None:
        config = self.config
        if not config.layer_ropes:
            return None
        place = {rope: index for index, rope in enumerate(config.distinct_ropes)}
        return tuple(None if rope is None else place[rope] for rope in config.layer_ropes)

    def rope_tables(self, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [max_positions, head_dim / 2]; stacked where layers differ, see `AttentionSpec`."""
        return stacked_tables(self.config.distinct_ropes, self.config.head_dim, max_positions)
