"""Models: from a name to a checkpoint, to weights in memory, to logits and tokens.

Names are looked up on first use, so that the front process, which needs the tokenizer alone, never imports
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deepinfer.stages.model.errors import (
    CheckpointError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from deepinfer.stages.model.checkpoint import Checkpoint, open_checkpoint
    from deepinfer.stages.model.config import ModelConfig
    from deepinfer.stages.model.executor import Executor, ForwardBatch
    from deepinfer.stages.model.loading import load_model
    from deepinfer.stages.model.model import Model
    from deepinfer.stages.model.registry import resolve_model
    from deepinfer.stages.model.tokenizer import Tokenizer, load_tokenizer

_HOMES = {
    "Checkpoint": "checkpoint",
    "open_checkpoint": "checkpoint",
    "ModelConfig": "config",
    "Executor": "executor",
    "ForwardBatch": "executor",
    "load_model": "loading",
    "Model": "model",
    "resolve_model": "registry",
    "Tokenizer": "tokenizer",
    "load_tokenizer": "tokenizer",
}

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Executor",
    "ForwardBatch",
    "Model",
    "ModelConfig",
    "ModelError",
    "ModelNotFoundError",
    "Tokenizer",
    "UnsupportedModelError",
    "load_model",
    "load_tokenizer",
    "open_checkpoint",
    "resolve_model",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
