"""What loading asks of a file format: tensors under their Hugging Face names, one at a time."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from deepinfer.kernels.stored_rows import StoredRows
from deepinfer.kernels.stored_words import StoredWords
from deepinfer.stages.model.gguf_codes import Int8Groups
from deepinfer.stages.model.int4 import Int4Groups


class TensorHeader(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    """As the file calls it: F32, BF16, Q4_1, ... or what the method of a quantised folder is called."""
    nbytes: int
    group: int = 0
    """Columns that share a scale, where `read_int4` gives codes; 0 where it gives none."""
    wide: bool = False
    """Of codes: whether scales or minima need more than the bits of fp16."""
    order: int = 0
    """Of codes: 0 if their columns lie as the model has them, else a number that those in the same order share."""
    int8: bool = False
    """Whether `read_int8` gives codes."""


class WeightSource(Protocol):
    headers: dict[str, TensorHeader]
    """Every tensor of the checkpoint by its Hugging Face name; known before any weight is read."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor as floats: as stored, or in float32. May share memory with the file."""
        ...

    def rows(self, name: str) -> StoredRows | None:
        """Where the rows of a matrix of floats or of ggml's blocks lie, or None for any other tensor."""
        ...

    def words(self, name: str) -> StoredWords | None:
        """The 4-bit codes of a matrix where they lie, with its scales and minima, or None for any other tensor."""
        ...

    def read_int4(self, name: str) -> Int4Groups | None:
        """The codes as they are stored, or None for a tensor that is not in 4-bit groups."""
        ...

    def read_int8(self, name: str) -> Int8Groups | None:
        """The same for a tensor in 8-bit groups."""
        ...

    def report(self) -> dict[str, object]:
        """What `status` shows beside the types of the tensors: how codes are read, what is not used."""
        ...

    def close(self) -> None: ...
