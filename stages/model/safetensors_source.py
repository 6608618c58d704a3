"""The tensors of a Hugging Face folder: one file, or shards whose index is authoritative both ways."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from deepinfer.kernels.stored_rows import StoredRows, stored_rows
from deepinfer.kernels.stored_words import StoredWords
from deepinfer.stages.model.errors import CheckpointError, UnsupportedModelError
from deepinfer.stages.model.folder_names import INDEX, SINGLE
from deepinfer.stages.model.gguf_codes import Int8Groups
from deepinfer.stages.model.int4 import Int4Groups
from deepinfer.stages.model.json_fields import read_json
from deepinfer.stages.model.kv_scales import KVScales
from deepinfer.stages.model.source import TensorHeader

FLOAT_DTYPES = ("F32", "F16", "BF16")
INTEGER_DTYPES = ("I32", "I64", "I8")
"""Of the parts of quantised matrices."""
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "I64": 8, "I8": 1}
_DERIVED = re.compile(r".*rotary_emb\.inv_freq")
"""Buffers that old checkpoints carry and that the configuration determines anyway."""


class SafetensorsSource:
    """Maps every shard at once; raises before weights are read when index and shards disagree."""

    def __init__(self, folder: Path, dtypes: tuple[str, ...] = FLOAT_DTYPES):
        self._folder, self._dtypes = folder, dtypes
        shards, index = _shards(folder)
        self._files = {shard: _open(folder / shard) for shard in shards}
        self._kv_scales = KVScales()
        self._shard_of: dict[str, str] = {}
        self.headers: dict[str, TensorHeader] = {}
        for shard, file in self._files.items():
            for name in file.keys():  # noqa: SIM118 - a safe_open handle is no mapping
                self._add(folder / shard, shard, name, index)
        for name, shard in (index or {}).items():
            if name not in self._shard_of and not _DERIVED.fullmatch(name):
                raise CheckpointError(f"{folder / INDEX} places tensor {name} in {shard}, which does not hold it")
        self._kv_scales.log(folder)

    def _add(self, path: Path, shard: str, name: str, index: dict[str, str] | None) -> None:
        if _DERIVED.fullmatch(name):
            return
        if name in self._shard_of:
            raise CheckpointError(f"tensor {name} is both in {self._shard_of[name]} and in {path}")
        if index is not None and index.get(name) != shard:
            raise CheckpointError(f"{path}: stray tensor {name}: {INDEX} places it in {index.get(name, 'no shard')}")
        part = self._files[shard].get_slice(name)
        shape, dtype = tuple(part.get_shape()), part.get_dtype()
        if dtype not in self._dtypes:
            raise UnsupportedModelError(
                f"{path}: tensor {name} has dtype {dtype}; supported: {', '.join(self._dtypes)}"
            )
        self._shard_of[name] = shard
        if KVScales.is_one(name):
            self._kv_scales.add(path, name, self._files[shard].get_tensor(name))
            return
        self.headers[name] = TensorHeader(shape, dtype, torch.Size(shape).numel() * _ITEM_BYTES[dtype])

    def read(self, name: str) -> torch.Tensor:
        return self._files[self._shard_of[name]].get_tensor(name)

    def rows(self, name: str) -> StoredRows | None:
        header = self.headers[name]
        if len(header.shape) != 2 or header.dtype not in FLOAT_DTYPES:
            return None
        memory = self.read(name).contiguous().view(torch.uint8).numpy()
        where = f"{self._folder / self._shard_of[name]}: tensor {name}"
        return stored_rows(where, header.dtype, memory, header.shape[1])

    def words(self, name: str) -> StoredWords | None:
        return None

    def read_int4(self, name: str) -> Int4Groups | None:
        return None

    def read_int8(self, name: str) -> Int8Groups | None:
        return None

    def report(self) -> dict[str, object]:
        return self._kv_scales.report()

    def close(self) -> None:
        self._files.clear()


def _open(path: Path):
    if not path.exists():
        raise CheckpointError(f"shard {path.name}, named by {path.parent / INDEX}, does not exist")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _shards(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """File names, and tensor name -> shard from the index (None for a single file)."""
    present = {path.name for path in folder.glob("model*.safetensors")}
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(shard, str) for shard in index.values()):
            raise CheckpointError(f"{folder / INDEX}: weight_map must map tensor names to file names")
        shards = sorted(set(index.values()))
        outside = [shard for shard in shards if Path(shard).name != shard]
        if outside:
            raise CheckpointError(f"{folder / INDEX}: shard {outside[0]!r} is no file name inside the folder")
        stray = sorted(present - set(shards))
        if stray:
            raise CheckpointError(f"{folder}: stray shard {stray[0]}: {INDEX} does not name it")
        return shards, index
    if present == {SINGLE}:
        return [SINGLE], None
    if present:
        raise CheckpointError(f"{folder}: {', '.join(sorted(present))} without {INDEX}")
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise UnsupportedModelError(
            f"{folder} holds pickled weights only ({pickled[0]}), which are never loaded; supported: safetensors, GGUF"
        )
    raise CheckpointError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX}")
