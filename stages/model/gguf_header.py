"""The header of a GGUF file: metadata and tensor table, in some 50 ms where `gguf.GGUFReader` needs 2 s for a
vocabulary of 49,152 (it makes four numpy arrays for every string).

Format: GGUF versions 2 and 3, little endian. Every length is checked against the file, so that a cut or
hostile file is an error that names the offset.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from deepinfer.stages.model.errors import CheckpointError, UnsupportedModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    type_id: int
    shape: tuple[int, ...]
    """As torch has it: rows first. (The file stores it reversed.)"""
    offset: int
    """Bytes from the start of the file."""
    nbytes: int
    path: Path
    """The file that holds it."""

    @property
    def type_name(self) -> str:
        return gguf.GGMLQuantizationType(self.type_id).name


@dataclass(frozen=True)
class GGUFHeader:
    metadata: dict[str, Any]
    """Arrays of numbers are `array`s; one of strings is its length alone, unless the reader was asked for its name."""
    tensors: dict[str, GGUFTensor]
    nbytes: int
    """Of metadata and tensor table, from the start of the file."""


class _Cursor:
    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.at = data, path, 0

    def broken(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what} at byte {self.at} of {len(self.data)}; the file is cut or damaged")

    def unpack(self, fmt: str) -> Any:
        size = struct.calcsize("<" + fmt)
        if self.at + size > len(self.data):
            raise self.broken("the header ends too early")
        values = struct.unpack_from("<" + fmt, self.data, self.at)
        self.at += size
        return values[0] if len(values) == 1 else values

    def raw_string(self) -> bytes:
        length = self.unpack("Q")
        if length > len(self.data) - self.at:
            raise self.broken(f"a string of {length} bytes")
        self.at += length
        return self.data[self.at - length : self.at]

    def string(self) -> str:
        return self.raw_string().decode("utf-8", errors="replace")

    def value(self, type_id: int, keep_strings: bool) -> Any:
        if type_id in _SCALARS:
            return self.unpack(_SCALARS[type_id])
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self._array(keep_strings)
        raise self.broken(f"metadata type {type_id}")

    def _array(self, keep_strings: bool) -> Any:
        type_id, count = self.unpack("I"), self.unpack("Q")
        if count > len(self.data) - self.at:
            raise self.broken(f"an array of {count} values")
        if type_id in _SCALARS:
            return self._numbers(_SCALARS[type_id], count)
        if type_id == _STRING and not keep_strings:
            self._skip_strings(count)
            return count
        if type_id == _ARRAY:
            raise self.broken("an array of arrays")
        return [self.value(type_id, keep_strings) for _ in range(count)]

    def _numbers(self, fmt: str, count: int) -> array:
        """As compact as in the file, however many there are."""
        values = array("B" if fmt == "?" else fmt)
        size = values.itemsize * count
        if size > len(self.data) - self.at:
            raise self.broken("the header ends too early")
        values.frombytes(self.data[self.at : self.at + size])
        self.at += size
        return values

    def _skip_strings(self, count: int) -> None:
        at, data, last = self.at, self.data, len(self.data) - 8
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > last:
                raise self.broken("a string array ends too early")
            at += 8 + length(data, at)[0]
        self.at = at


def read_header(path: Path, string_arrays: tuple[str, ...] = ()) -> GGUFHeader:
    """Metadata and tensor table of `path`; `string_arrays` names the string arrays that are wanted in full.

    Raises CheckpointError for a file that is no GGUF or is damaged, UnsupportedModelError for its version.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"{path} is no GGUF file: it does not start with the letters GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, path)
            cursor.at = 4
            return _read(cursor, string_arrays)


def _read(cursor: _Cursor, string_arrays: tuple[str, ...]) -> GGUFHeader:
    version = cursor.unpack("I")
    if version not in (2, 3):
        raise UnsupportedModelError(
            f"{cursor.path}: GGUF version {version} (or big endian); supported: 2 and 3, little"
        )
    tensor_count, key_count = cursor.unpack("QQ")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.unpack("I"), key in string_arrays)
    table = [_tensor_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise CheckpointError(f"{cursor.path}: general.alignment is {alignment!r}, expected a positive integer")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, type_id, offset in table:
        if name in tensors:
            raise CheckpointError(f"{cursor.path}: tensor {name} appears twice")
        tensors[name] = _placed(cursor, name, shape, type_id, start + offset)
    return GGUFHeader(metadata, tensors, cursor.at)


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dims = cursor.unpack("I")
    if not 1 <= dims <= _MAX_DIMS:
        raise cursor.broken(f"tensor {name} with {dims} dimensions")
    shape = tuple(cursor.unpack("Q") for _ in range(dims))[::-1]
    type_id, offset = cursor.unpack("I"), cursor.unpack("Q")
    return name, shape, type_id, offset


def _placed(cursor: _Cursor, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GGUFTensor:
    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_id)]
    except ValueError:
        raise UnsupportedModelError(f"{cursor.path}: tensor {name} has the unknown GGUF type {type_id}") from None
    if shape[-1] % block:
        raise CheckpointError(f"{cursor.path}: tensor {name}: row length {shape[-1]} is no multiple of {block}")
    elements = 1
    for extent in shape:
        elements *= extent
    nbytes = elements // block * size
    if offset + nbytes > len(cursor.data):
        raise CheckpointError(
            f"{cursor.path}: tensor {name} ends at byte {offset + nbytes} of {len(cursor.data)}; the file is cut"
        )
    return GGUFTensor(name, type_id, shape, offset, nbytes, cursor.path)
