"""Tiny random models with a tokenizer and a chat template: whole checkpoints that load in no time.

Random weights serve exactness tests only: what it says means nothing, but it says the same thing every time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from deepinfer.daemon.stress.tiny_model import (
    CHAT_TEMPLATE,
    MAX_CONTEXT,
    byte_tokenizer,
    save_tiny_llama,
    save_whole,
    tiny_sizes,
)

__all__ = ["CHAT_TEMPLATE", "MAX_CONTEXT", "byte_tokenizer", "save_tiny_family", "save_tiny_llama", "save_tiny_qwen2"]


def save_tiny_qwen2(folder: Path, key_biases: Mapping[int, float]) -> Path:
    """`key_biases`: key channel of the first layer to its bias; the others have none."""
    torch.manual_seed(7)
    model = Qwen2ForCausalLM(Qwen2Config(**tiny_sizes()))
    with torch.no_grad():
        for channel, bias in key_biases.items():
            model.model.layers[0].self_attn.k_proj.bias[channel] = bias
    return save_whole(model, folder)


def save_tiny_family(folder: Path, family: str, **overrides: Any) -> Path:
    """`overrides`: fields of its configuration."""
    torch.manual_seed(7)
    fields = {**tiny_sizes(), "head_dim": 16, "pad_token_id": None, **overrides}
    return save_whole(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields)), folder)
