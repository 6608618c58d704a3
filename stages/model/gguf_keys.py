"""Typed access to the metadata of a GGUF file; errors name file and key."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from typing import Any

from deepinfer.stages.model.config import MAX_INTEGER
from deepinfer.stages.model.errors import CheckpointError, UnsupportedModelError
from deepinfer.stages.model.json_fields import positive_number

ROPE_FREQUENCIES = "rope_freqs.weight"
ROPE_SHORT, ROPE_LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_DIVISORS = ROPE_FREQUENCIES, ROPE_SHORT, ROPE_LONG
"""Tensors that are no parameters: the RoPE frequencies are divided by them."""


class GGUFKeys:
    """The keys of one architecture, and the names of the file's tensors: biases and q/k norms show by them."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, where: str, tensors: Collection[str] = ()):
        self.metadata, self.prefix, self.where, self.tensors = metadata, architecture, where, tensors

    def get(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.prefix}.{name}", default)

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(name, default)
        if isinstance(value, array) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, array):
            raise UnsupportedModelError(f"{self.where}: {self.prefix}.{name} differs from layer to layer")
        if not isinstance(value, int) or not least <= value < MAX_INTEGER:
            raise CheckpointError(
                f"{self.where}: {self.prefix}.{name} is {value!r}, "
                f"expected an integer of at least {least} and below {MAX_INTEGER}"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        return positive_number(self.get(name, default), f"{self.prefix}.{name}", self.where)
