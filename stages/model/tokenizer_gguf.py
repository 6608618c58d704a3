"""A GGUF file's tokenizer, converted by transformers once and kept as tokenizer.json in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
import transformers

from deepinfer.stages.model.config_gguf import eos_token_ids
from deepinfer.stages.model.errors import CheckpointError
from deepinfer.stages.model.gguf_header import GGUFHeader, read_header
from deepinfer.stages.model.tokenizer import TokenizerFacts
from deepinfer.stages.model.wheel_model import cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNUSED = 5
"""Token type of the padding entries that converters append to a vocabulary."""


def load(path: Path) -> tuple[PreTrainedTokenizerBase, TokenizerFacts]:
    header = read_header(path)
    if "tokenizer.ggml.tokens" not in header.metadata:
        raise CheckpointError(f"{path} holds no tokenizer (no tokenizer.ggml.tokens)")
    folder = cache_dir() / "tokenizers" / _key(path, header)
    if not folder.is_dir():
        _convert(path, folder)
    from transformers import PreTrainedTokenizerFast

    inner = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    return inner, TokenizerFacts(eos_token_ids(header.metadata), {}, _valid_ids(header))


def _key(path: Path, header: GGUFHeader) -> str:
    """Of all header bytes and the converting libraries: a moved file keeps it, a changed one does not."""
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(header.nbytes))
    digest.update(f"{transformers.__version__} {tokenizers.__version__}".encode())
    return digest.hexdigest()[:32]


def _convert(path: Path, folder: Path) -> None:
    """Atomic: two processes may convert at once, the first rename wins."""
    from transformers import AutoTokenizer

    try:
        inner = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise CheckpointError(f"{path}: transformers cannot convert its tokenizer: {error}") from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    inner.save_pretrained(str(scratch))
    try:
        os.rename(scratch, folder)
    except OSError:
        shutil.rmtree(scratch)
        if not folder.is_dir():
            raise


def _valid_ids(header: GGUFHeader) -> int | None:
    types = header.metadata.get("tokenizer.ggml.token_type")
    if not types:
        return None
    last = len(types)
    while last and types[last - 1] == _UNUSED:
        last -= 1
    return last
