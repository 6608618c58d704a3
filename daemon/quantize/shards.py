"""Writes safetensors files whose tensors come one at a time: the header first, then each at its place in the file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from deepinfer.stages.model.folder_names import INDEX, SINGLE

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "I64": 8}
TORCH_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "I64": torch.int64,
}


class TensorPlan(NamedTuple):
    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Tensors = Mapping[str, TensorPlan]


class ShardedWriter:
    """A folder's weights: `units` are sets of tensors that stay in one file, in the order in which they are written.

    Args:
        limit: bytes of one file, unless a single unit is larger.
    """

    def __init__(self, folder: Path, units: Sequence[Tensors], limit: int):
        self._folder = folder
        self._shards = list(_shards(units, limit))
        count = len(self._shards)
        self.files = (
            [SINGLE] if count == 1 else [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
        )
        self._left = [set(shard) for shard in self._shards]
        self._at = -1
        self._open: _Shard | None = None

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(plan.nbytes for shard in self._shards for plan in shard.values())

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Each tensor once, unit after unit. Raises ValueError for one that is not what was planned."""
        if self._open is None or name not in self._shards[self._at]:
            self._next()
        if self._open is None or name not in self._left[self._at]:
            raise ValueError(f"tensor {name} is not planned here, or was written already")
        self._left[self._at].remove(name)
        self._open.write(name, tensor)

    def finish(self) -> None:
        """Writes the index, if there are several files. Raises ValueError if a tensor is missing."""
        self._close()
        missing = [name for left in self._left for name in left]
        if missing:
            raise ValueError(f"tensor {min(missing)} was planned and not written")
        if len(self.files) > 1:
            placed = {name: file for file, shard in zip(self.files, self._shards, strict=True) for name in shard}
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(placed.items()))}
            (self._folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")

    def close(self) -> None:
        """Of no use before `finish` but to close what is open."""
        self._close()

    def _next(self) -> None:
        self._close()
        self._at += 1
        if self._at < len(self._shards):
            self._open = _Shard(self._folder / self.files[self._at], self._shards[self._at])

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def _shards(units: Sequence[Tensors], limit: int) -> Iterator[dict[str, TensorPlan]]:
    shard: dict[str, TensorPlan] = {}
    for unit in units:
        if shard and _nbytes(shard) + _nbytes(unit) > limit:
            yield shard
            shard = {}
        shard |= unit
    yield shard


def _nbytes(tensors: Tensors) -> int:
    return sum(plan.nbytes for plan in tensors.values())


class _Shard:
    """One file. Wide items lie first, so that every tensor begins at a multiple of its item size."""

    def __init__(self, path: Path, tensors: Tensors):
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, tuple[int, TensorPlan]] = {}
        at = 0
        for name, plan in sorted(tensors.items(), key=lambda item: (-ITEM_BYTES[item[1].dtype], item[0])):
            header[name] = {"dtype": plan.dtype, "shape": plan.shape, "data_offsets": [at, at + plan.nbytes]}
            self._places[name] = at, plan
            at += plan.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._first = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._first + at)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        at, plan = self._places[name]
        if tensor.dtype != TORCH_DTYPES[plan.dtype] or tuple(tensor.shape) != plan.shape:
            raise ValueError(
                f"tensor {name} is {tensor.dtype} {tuple(tensor.shape)}, planned {plan.dtype} {plan.shape}"
            )
        self._file.seek(self._first + at)
        self._file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
