"""The tensors of a GGUF file under Hugging Face names, with the row order that a half-split RoPE expects."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np
import torch

from deepinfer.kernels.stored_rows import NotFiniteError, StoredRows, stored_rows
from deepinfer.kernels.stored_words import StoredWords
from deepinfer.stages.model import gguf_codes
from deepinfer.stages.model.config import EMBEDDING, HEAD, ModelConfig
from deepinfer.stages.model.errors import CheckpointError, UnsupportedModelError
from deepinfer.stages.model.families import FAMILIES
from deepinfer.stages.model.gguf_header import GGUFHeader, GGUFTensor
from deepinfer.stages.model.gguf_keys import ROPE_DIVISORS
from deepinfer.stages.model.int4 import Int4Groups
from deepinfer.stages.model.source import TensorHeader

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_TOP = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "output.weight": HEAD,
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PERMUTED = re.compile(r".*self_attn\.([qk])_proj\.(weight|bias)")


def hf_name(name: str, layer_tensors: Mapping[str, str]) -> str | None:
    """The Hugging Face name of a GGUF tensor, None when this engine has no use for it. `layer_tensors` are those of
    its family."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        return _TOP.get(name)
    part = layer_tensors.get(match[2])
    return part and f"model.layers.{match[1]}.{part}.{match[3]}"


def named_tensors(header: GGUFHeader, family: str) -> dict[str, GGUFTensor]:
    """Tensors by Hugging Face name. Raises for an unsupported type and for a tensor that nobody knows."""
    layer_tensors = FAMILIES[family].gguf_layer_tensors()
    named: dict[str, GGUFTensor] = {}
    for name, tensor in header.tensors.items():
        if name in ROPE_DIVISORS:
            continue
        target = hf_name(name, layer_tensors)
        if target is None:
            raise CheckpointError(f"{tensor.path}: stray tensor {name}: no parameter of this model has that name")
        if tensor.type_name not in SUPPORTED_TYPES:
            raise UnsupportedModelError(
                f"{tensor.path}: tensor {name} has type {tensor.type_name}; supported: {', '.join(SUPPORTED_TYPES)}"
            )
        named[target] = tensor
    return named


def read_rope_divisors(header: GGUFHeader) -> dict[str, tuple[float, ...]]:
    """By name of the tensor, of those of `ROPE_DIVISORS` that the file has."""
    return {name: _divisors(header.tensors[name], name) for name in ROPE_DIVISORS if name in header.tensors}


def _divisors(tensor: GGUFTensor, name: str) -> tuple[float, ...]:
    if tensor.type_name != "F32":
        raise UnsupportedModelError(f"{tensor.path}: tensor {name} has type {tensor.type_name}; supported: F32")
    values = np.fromfile(tensor.path, np.float32, tensor.nbytes // 4, offset=tensor.offset)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise CheckpointError(f"{tensor.path}: tensor {name} holds values that are not positive numbers")
    return tuple(float(value) for value in values)


class GGUFSource:
    """Reads from memory maps of all parts that live until `close` (copy on write: no file is ever changed)."""

    def __init__(self, tensors: dict[str, GGUFTensor], config: ModelConfig):
        self._tensors, self._config = tensors, config
        paths = {tensor.path for tensor in tensors.values()}
        self._bytes = {path: np.asarray(np.memmap(path, np.uint8, mode="c")) for path in paths}
        self.headers = {name: _header(tensor) for name, tensor in tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        if tensor.type_name in _PLAIN:
            values = torch.from_numpy(self._raw(tensor)).view(_PLAIN[tensor.type_name])
        else:
            values = self._decoded(name)
        order, values = self._row_order(name), values.reshape(tensor.shape)
        return values if order is None else values[torch.from_numpy(order)]

    def _decoded(self, name: str) -> torch.Tensor:
        try:
            return self._stored(name).dense(torch.float32)
        except NotFiniteError as error:
            raise CheckpointError(str(error)) from error

    def rows(self, name: str) -> StoredRows | None:
        if len(self._tensors[name].shape) != 2:
            return None
        order = self._row_order(name)
        return self._stored(name) if order is None else self._stored(name).permuted(order)

    def _stored(self, name: str) -> StoredRows:
        tensor = self._tensors[name]
        columns = tensor.shape[-1]
        rows = math.prod(tensor.shape) // columns
        memory = self._raw(tensor).reshape(rows, -1)
        return stored_rows(f"{tensor.path}: tensor {name}", tensor.type_name, memory, columns)

    def words(self, name: str) -> StoredWords | None:
        return None

    def read_int4(self, name: str) -> Int4Groups | None:
        tensor = self._tensors[name]
        reader = gguf_codes.READERS.get(tensor.type_name)
        if reader is None or len(tensor.shape) != 2:
            return None
        groups = reader(self._raw(tensor).reshape(tensor.shape[0], -1))
        rows = self._row_order(name)
        return groups if rows is None else groups.permuted(rows)

    def read_int8(self, name: str) -> gguf_codes.Int8Groups | None:
        tensor = self._tensors[name]
        if tensor.type_name != "Q8_0" or self._row_order(name) is not None:
            return None
        return gguf_codes.q8_0(self._raw(tensor).reshape(tensor.shape[0], -1))

    def report(self) -> dict[str, object]:
        parts = len({tensor.path for tensor in self._tensors.values()})
        return {"parts": parts} if parts > 1 else {}

    def close(self) -> None:
        self._bytes.clear()

    def _raw(self, tensor: GGUFTensor) -> np.ndarray:
        if not self._bytes:
            raise ValueError("the GGUF file is closed")
        return self._bytes[tensor.path][tensor.offset : tensor.offset + tensor.nbytes]

    def _row_order(self, name: str) -> np.ndarray | None:
        """Some families' files hold q and k for a RoPE of neighbouring pairs; ours rotates halves. None: as stored."""
        match = _PERMUTED.fullmatch(name)
        if match is None or not FAMILIES[self._config.family].interleaved_gguf:
            return None
        heads = self._config.num_q_heads if match[1] == "q" else self._config.num_kv_heads
        rows = np.arange(heads * self._config.head_dim)
        return rows.reshape(heads, self._config.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _header(tensor: GGUFTensor) -> TensorHeader:
    has_codes = len(tensor.shape) == 2 and tensor.type_name in gguf_codes.READERS
    group = gguf_codes.GROUP if has_codes else 0
    name = tensor.type_name
    return TensorHeader(tensor.shape, name, tensor.nbytes, group, wide=name == "Q4_K", int8=name == "Q8_0")
