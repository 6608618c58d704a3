"""Reads the tensors of a checkpoint one at a time: each exactly once, finite, in the compute dtype, with
progress.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from deepinfer.kernels.stored_rows import NotFiniteError, StoredRows, joined_rows, same_rows
from deepinfer.kernels.stored_words import StoredWords
from deepinfer.stages.model.checkpoint import Checkpoint
from deepinfer.stages.model.errors import CheckpointError
from deepinfer.stages.model.gguf_codes import Int8Groups
from deepinfer.stages.model.int4 import Int4Groups, joined

Progress = Callable[[str, int, int], None]
"""(what, bytes done, bytes in all)."""


def no_progress(what: str, done: int, total: int) -> None:
    return None


class WeightReader:
    """At most one tensor of the file is held beside what has been handed out. Whatever reads one raises NotFiniteError
    if it holds NaN or infinite values."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress):
        self.dtype = dtype
        self._path, self._source, self._progress = checkpoint.path, checkpoint.source, progress
        self._left = set(checkpoint.source.headers)
        self._done = 0
        self._total = sum(header.nbytes for header in checkpoint.source.headers.values())

    def has(self, name: str) -> bool:
        return name in self._left

    def vector(self, name: str) -> torch.Tensor:
        """float32 [size], memory of its own."""
        return self._dense(name).to(torch.float32, copy=True)

    def rows(self, names: Sequence[str]) -> StoredRows | None:
        """Where the rows of `names`, below one another, lie in files, or None, with nothing read, where one of them is
        put together of parts. Whoever reads them sees whether they are finite."""
        parts = [part for part in (self._source.rows(name) for name in names) if part is not None]
        if len(parts) < len(names):
            return None
        for name in names:
            self._taken(name)
        return joined_rows(parts)

    def words(self, names: Sequence[str]) -> StoredWords | None:
        """The 4-bit codes of `names`, below one another and in one order of columns, where they lie; or None, with
        nothing read, where one of them has none or they differ in groups."""
        found = [part for part in (self._source.words(name) for name in names) if part is not None]
        if len(found) < len(names) or len({part.group for part in found}) > 1:
            return None
        for name, stored in zip(names, found, strict=True):
            finite = all(np.isfinite(part.scales).all() and np.isfinite(part.minima).all() for part in stored.parts)
            self._check(name, finite)
        return found[0]._replace(parts=tuple(part for stored in found for part in stored.parts))

    def matrix(self, names: Sequence[str]) -> torch.Tensor:
        """The rows of `names` below one another, compute dtype [rows, columns], memory of its own."""
        rows = self.rows(names)
        if rows is not None:
            return rows.dense(self.dtype)
        if len(names) == 1:
            return self._dense(names[0]).to(self.dtype, copy=True)
        shapes = [self._source.headers[name].shape for name in names]
        out = torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=self.dtype)
        at = 0
        for name, shape in zip(names, shapes, strict=True):
            out[at : at + shape[0]] = self._dense(name)
            at += shape[0]
        return out

    def int4(self, names: Sequence[str]) -> Int4Groups:
        """The same for codes, scales and minima of tensors that are all in 4-bit groups."""
        parts = []
        for name in names:
            part = self._source.read_int4(name)
            if part is None:
                raise CheckpointError(f"{self._path}: tensor {name} is not in 4-bit groups")
            self._check(name, bool(np.isfinite(part.scales).all() and np.isfinite(part.minima).all()))
            parts.append(part)
        return joined(parts)

    def int8(self, name: str) -> Int8Groups | None:
        """Codes and scales, or None, with nothing read, for a tensor that is not in 8-bit groups."""
        groups = self._source.read_int8(name)
        if groups is not None:
            self._check(name, bool(np.isfinite(groups.scales).all()))
        return groups

    def same_as(self, name: str, other: str) -> bool:
        """Takes `name`: whether it equals `other` (a tied head that is stored as well as the embedding)."""
        a, b = self._source.rows(name), self._source.rows(other)
        self._taken(name)
        if a is None or b is None:
            return torch.equal(self._source.read(name).to(self.dtype), self._source.read(other).to(self.dtype))
        return same_rows(a, b, self.dtype)

    def finish(self) -> None:
        """Raises CheckpointError when the checkpoint holds a tensor that no parameter took."""
        if self._left:
            raise CheckpointError(f"{self._path}: tensor {min(self._left)} was assigned to no parameter")

    def _dense(self, name: str) -> torch.Tensor:
        tensor = self._source.read(name)
        self._check(name, _finite(tensor))
        return tensor

    def _check(self, name: str, finite: bool) -> None:
        if not finite:
            raise NotFiniteError(f"{self._path}: tensor {name}")
        self._taken(name)

    def _taken(self, name: str) -> None:
        self._left.remove(name)
        self._done += self._source.headers[name].nbytes
        self._progress("weights", self._done, self._total)


def _finite(tensor: torch.Tensor) -> bool:
    """One pass that makes nothing as large as the tensor, unlike `isfinite`: extremes of what holds a NaN are NaN."""
    return tensor.numel() == 0 or all(math.isfinite(float(extreme)) for extreme in torch.aminmax(tensor))
