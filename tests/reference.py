"""The same model in transformers: what greedy decoding and logits ought to be. Float32, one thread pool with torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from deepinfer.daemon.bench.peers.adapter_transformers import load_model

__all__ = ["greedy_ids", "load_reference", "teacher_forced_logits"]


def load_reference(path: Path) -> PreTrainedModel:
    return load_model(path, torch.float32)


@torch.inference_mode()
def greedy_ids(model: PreTrainedModel, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """What `generate` adds to one prompt of token ids; it stops at an end token, which is included."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, use_cache=True
    )
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def teacher_forced_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """float32 [len(ids), vocab] of one dense forward."""
    return model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
