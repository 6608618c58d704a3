"""Rows of weight matrices as they lie in files, and what is made of them in one pass, without a copy between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np
import torch

from deepinfer.kernels.cpu import file_rows
from deepinfer.kernels.cpu.activation_forms import CHUNK
from deepinfer.kernels.cpu.file_types import FILE_TYPES, NUMBER_OF
from deepinfer.kernels.cpu.repack import run_task
from deepinfer.kernels.cpu.tasks import Task

_SHARE = 1 << 14
"""Weights that a thread takes before it looks for more."""
_ROWS_AT_ONCE = 4096


class NotFiniteError(ValueError):
    """`where`, which says file and tensor, holds NaN or infinite values."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where} holds NaN or infinite values")


class StoredTensor(NamedTuple):
    where: str
    """File and name."""
    type_name: str
    memory: np.ndarray
    """uint8 [rows, bytes], contiguous: what the addresses of its rows point into."""


class StoredRows(NamedTuple):
    """A matrix [rows, columns] whose rows lie in files, each where and as it likes."""

    addresses: np.ndarray
    """int64 [rows]."""
    types: np.ndarray
    """uint8 [rows]: numbers of `file_types.FILE_TYPES`."""
    columns: int
    tensors: tuple[StoredTensor, ...]
    """Keep the memory of the rows, and name them."""
    bits: int = 16
    """Of the codes that kernels multiply: 4 for rows of Q4 types, 8 for Q8_0, 16 (bf16) for any."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.addresses), self.columns

    @property
    def group(self) -> int:
        """Columns that share a scale, in what is packed."""
        return CHUNK

    @property
    def type_names(self) -> set[str]:
        return {tensor.type_name for tensor in self.tensors}

    def permuted(self, rows: np.ndarray) -> StoredRows:
        return self._replace(addresses=self.addresses[rows], types=self.types[rows])

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """fp32, or those rounded to bf16; memory of its own. Raises NotFiniteError."""
        out, strange = self._dense(dtype)
        if strange:
            raise self.not_finite(dtype)
        return out

    def arguments(self) -> tuple[int, int, int, int]:
        """As the units of `file_rows` take them."""
        return self.addresses.ctypes.data, self.types.ctypes.data, *self.shape

    def not_finite(self, dtype: torch.dtype) -> NotFiniteError:
        """What to raise when a value that is not finite in `dtype` was seen: names the first such tensor."""
        rows = np.arange(len(self.addresses))
        while len(rows) > 1:
            first, second = np.array_split(rows, 2)
            rows = first if self.permuted(first)._dense(dtype)[1] else second
        address = int(self.addresses[rows[0]])
        owner = next(t for t in self.tensors if 0 <= address - t.memory.ctypes.data < t.memory.nbytes)
        return NotFiniteError(owner.where)

    def _dense(self, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
        """And whether there is a value that is not finite."""
        out, share = torch.empty(self.shape, dtype=dtype), max(1, _SHARE // self.columns)
        faults, room = np.zeros(1, np.int64), np.empty(numba.get_num_threads() * file_rows.ROOM, np.uint8)
        addresses = (out.data_ptr(), room.ctypes.data, faults.ctypes.data)
        unit = file_rows.plain_rows_unit(int(dtype == torch.bfloat16))
        run_task(Task(unit, -(-len(self.addresses) // share), (*self.arguments(), *addresses, share)), out.numel())
        return out, bool(faults[0])


def stored_rows(where: str, type_name: str, memory: np.ndarray, columns: int) -> StoredRows:
    """All rows of one tensor.

    where: its file and name. memory: uint8 [rows, bytes], contiguous. Raises ValueError where they do not fit.
    """
    kind = FILE_TYPES[NUMBER_OF[type_name]]
    rows, size = memory.shape
    fits = size * kind.weights == columns * kind.size and (columns % kind.weights == 0 or kind.is_plain)
    if memory.dtype != np.uint8 or not memory.flags.c_contiguous or not fits:
        raise ValueError(f"rows of {size} bytes of {memory.dtype} are not {columns} weights of {type_name}")
    addresses = memory.ctypes.data + size * np.arange(rows, dtype=np.int64)
    return StoredRows(
        addresses, np.full(rows, NUMBER_OF[type_name], np.uint8), columns, (StoredTensor(where, type_name, memory),)
    )


def joined_rows(parts: Sequence[StoredRows]) -> StoredRows:
    """The rows of `parts` below one another."""
    addresses, types = (np.concatenate([part[field] for part in parts]) for field in range(2))
    return StoredRows(addresses, types, parts[0].columns, tuple(tensor for part in parts for tensor in part.tensors))


def same_rows(a: StoredRows, b: StoredRows, dtype: torch.dtype) -> bool:
    """Whether both hold the same numbers in `dtype`. A few rows at a time."""
    if a.shape != b.shape:
        return False
    pieces = np.array_split(np.arange(len(a.addresses)), -(-len(a.addresses) // _ROWS_AT_ONCE))
    return all(torch.equal(a.permuted(rows).dense(dtype), b.permuted(rows).dense(dtype)) for rows in pieces)
