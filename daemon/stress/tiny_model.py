"""A tiny random model, made in a moment: for runs that are about processes and streams, not about what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
MAX_CONTEXT = 512


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte and an end token: every text is representable, every character may be cut."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(["<eos>", *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_sizes() -> dict[str, Any]:
    return {
        "vocab_size": 264,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_CONTEXT,
        "eos_token_id": 0,
        "bos_token_id": None,
        "initializer_range": 0.5,
        "tie_word_embeddings": False,
    }


def save_tiny_llama(folder: Path, head_dim: int = 16) -> Path:
    torch.manual_seed(7)
    return save_whole(LlamaForCausalLM(LlamaConfig(**tiny_sizes(), head_dim=head_dim)), folder)


def save_whole(model: PreTrainedModel, folder: Path) -> Path:
    """A checkpoint with its tokenizer."""
    model.float().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
