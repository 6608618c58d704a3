"""What a format of Hugging Face folders is to the loader: which tensors make a matrix of codes, and how they unpack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from deepinfer.stages.model.errors import CheckpointError
from deepinfer.stages.model.int4_matrix import Int4Matrix, plain_groups
from deepinfer.stages.model.quantisation import PER_ROW, Scheme
from deepinfer.stages.model.safetensors_source import SafetensorsSource

FLOATS = ("F32", "F16", "BF16")


class Layout(NamedTuple):
    """What the headers and the small tensors of one matrix say."""

    rows: int
    columns: int
    group: int
    group_of: np.ndarray
    """int [columns], the group of each."""
    has_zeros: bool
    bits: int = 4


class Packing(Protocol):
    @property
    def type_name(self) -> str:
        """Of the matrices, in `status`, to which the bits are added."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """Endings of the tensors of one matrix; the first one makes it one."""
        ...

    def layout(self, prefix: str) -> Layout:
        """Raises CheckpointError for tensors that are missing, of a wrong dtype or do not fit one another."""
        ...

    def unpack(self, prefix: str, layout: Layout) -> Int4Matrix: ...

    def report(self) -> dict[str, object]:
        """For `status`."""
        ...


class Parts:
    """The tensors of the matrices of one folder, checked."""

    def __init__(self, source: SafetensorsSource, scheme: Scheme, where: str):
        self._source, self._scheme, self.where = source, scheme, where

    def has(self, name: str) -> bool:
        return name in self._source.headers

    def dtype(self, name: str) -> str:
        return self._source.headers[name].dtype

    def shape(self, name: str, dtypes: Sequence[str], dims: int = 2) -> tuple[int, ...]:
        """Of a tensor that must be there. No extent of it is 0."""
        header = self._source.headers.get(name)
        if header is None:
            raise CheckpointError(f"{self.where}: tensor {name} is missing")
        if header.dtype not in dtypes:
            raise CheckpointError(
                f"{self.where}: tensor {name} has dtype {header.dtype}, expected {' or '.join(dtypes)}"
            )
        if len(header.shape) != dims or 0 in header.shape:
            raise CheckpointError(
                f"{self.where}: tensor {name} has shape {list(header.shape)}, expected {dims} extents, none of them 0"
            )
        return header.shape

    def expect(self, name: str, dtypes: Sequence[str], *shape: int) -> None:
        found = self.shape(name, dtypes, len(shape))
        if found != shape:
            raise CheckpointError(f"{self.where}: tensor {name} has shape {list(found)}, expected {list(shape)}")

    def integers(self, name: str) -> np.ndarray:
        return self._source.read(name).numpy()

    def floats(self, name: str) -> np.ndarray:
        return self._source.read(name).float().numpy()

    def group(self, scales: str, groups: int, columns: int) -> int:
        """Columns that share a scale, of `groups` that the tensor `scales` has; one of the stated sizes."""
        for stated in sorted(self._scheme.groups):
            size = columns if stated == PER_ROW else min(stated, columns)
            if -(-columns // size) == groups:
                return size
        stated_sizes = ", ".join(str(size) for size in sorted(self._scheme.groups))
        raise CheckpointError(
            f"{self.where}: tensor {scales} has {groups} groups for {columns} columns; "
            f"that is not group_size {stated_sizes}, which quantization_config states"
        )

    def group_of(self, name: str, columns: int, group: int, groups: int) -> np.ndarray:
        """int [columns] from the tensor `name`; neighbours when it is not there or is -1 throughout (not set)."""
        if not self.has(name):
            return plain_groups(columns, group)
        self.expect(name, ("I32",), columns)
        found = self.integers(name)
        if (found == -1).all():
            return plain_groups(columns, group)
        if found.min() < 0 or found.max() >= groups:
            raise CheckpointError(
                f"{self.where}: tensor {name} names group {found.min() if found.min() < 0 else found.max()}, "
                f"expected 0 to {groups - 1}"
            )
        return found
