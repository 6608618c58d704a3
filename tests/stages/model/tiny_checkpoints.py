"""Tiny random checkpoints of every family, made by transformers and saved the way the hub has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Random in every parameter, biases and norms too, so that a skipped one shows. Gemma's norms mean 1 + w."""
    config = AutoConfig.for_model(family, **{**SIZES, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if "norm" in name and not family.startswith("gemma") else 0.0
            parameter.copy_(around + 0.15 * torch.randn(parameter.shape, generator=generator))
    return model


def save(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "1GB") -> Path:
    """`shard` is the most bytes of one file, such as "60KB"."""
    model.to(dtype).save_pretrained(str(folder), max_shard_size=shard)
    return folder


def random_ids(count: int, seed: int = 0, vocab: int = 160) -> list[int]:
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
