"""Turns one tensor of the source into the tensors of the result, some rows at a time, and measures what was lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.daemon.quantize.plan import Matrix, Plain
from deepinfer.daemon.quantize.rounding import SHRINKS, WHOLE, Codes, to_codes
from deepinfer.daemon.quantize.shards import TORCH_DTYPES
from deepinfer.daemon.quantize.words import words, zero_words
from deepinfer.daemon.quantize.workers import Workers
from deepinfer.stages.model.errors import CheckpointError

AT_ONCE = 1 << 17
"""Weights that a thread works on at a time: what is held beside source and result."""

Write = Callable[[str, Tensor], None]


class Scaling(NamedTuple):
    """What a tensor is multiplied with before it is stored; the tensors around it undo it. None: with 1."""

    rows: Tensor | None = None
    columns: Tensor | None = None
    """float32; of a vector there are rows only."""
    importance: Tensor | None = None
    """float32 [columns]: what a squared error in each column counts."""
    offset: float = 0.0
    """The tensor means itself plus this: that is what is multiplied."""

    def apply(self, weight: Tensor, rows: slice) -> Tensor:
        """float32, of these rows; memory of its own if anything changes."""
        if self.rows is not None:
            own = self.rows[rows]
            weight = (weight + self.offset) * (own if weight.dim() == 1 else own.unsqueeze(1)) - self.offset
        return weight if self.columns is None else weight * self.columns


class MatrixError(NamedTuple):
    name: str
    bits: int
    group: int
    relative_l2: float
    """|W - W'| / |W| over the whole matrix, W' as the result means it in place of W."""


def write_plain(plain: Plain, tensor: Tensor, scaling: Scaling, where: str, write: Write) -> None:
    _check_finite(tensor, plain.name, where)
    if scaling.rows is not None or scaling.columns is not None:
        tensor = scaling.apply(tensor.float(), slice(None))
    stored = tensor.to(TORCH_DTYPES[plain.dtype])
    if not bool(torch.isfinite(stored).all()):
        raise CheckpointError(f"{where}: tensor {plain.name} holds values that {plain.dtype} cannot hold")
    write(plain.name, stored)


def write_matrix(
    matrix: Matrix, tensor: Tensor, scaling: Scaling, clip: bool, where: str, write: Write, workers: Workers
) -> MatrixError:
    rows, columns = matrix.shape
    packed = torch.empty(rows, columns * matrix.bits // 32, dtype=torch.int32)
    scales = torch.empty(rows, columns // matrix.group, dtype=TORCH_DTYPES[matrix.scale_dtype])
    zeros = torch.empty(scales.shape, dtype=torch.uint8)

    def work(first: int) -> tuple[float, float]:
        """Of some rows: the squares of what was lost, and of what was there."""
        part = slice(first, first + step)
        weight = tensor[part].float()
        _check_finite(weight, matrix.source, where)
        codes = _coded(matrix, scaling.apply(weight, part), scaling.importance, clip)
        if not bool(torch.isfinite(codes.scales).all()):
            raise CheckpointError(f"{where}: tensor {matrix.source} needs scales that {matrix.scale_dtype} cannot hold")
        packed[part], scales[part], zeros[part] = words(codes.codes, matrix.bits), codes.scales, codes.zeros
        meant = codes.dense()
        if scaling.columns is not None:
            meant /= scaling.columns
        if scaling.rows is not None:
            meant /= scaling.rows[part].unsqueeze(1)
        wrong = float((meant - weight).square_().sum(dtype=torch.float64))
        return wrong, float(weight.square().sum(dtype=torch.float64))

    step = max(1, AT_ONCE // columns)
    wrong, total = (sum(part) for part in zip(*workers.map(work, range(0, rows, step)), strict=True))
    write(f"{matrix.prefix}.weight_packed", packed)
    write(f"{matrix.prefix}.weight_scale", scales)
    write(f"{matrix.prefix}.weight_shape", torch.tensor(matrix.shape))
    if not matrix.symmetric:
        write(f"{matrix.prefix}.weight_zero_point", zero_words(zeros, matrix.bits))
    return MatrixError(matrix.name, matrix.bits, matrix.group, (wrong / total) ** 0.5 if total else 0.0)


def _coded(matrix: Matrix, weight: Tensor, importance: Tensor | None, clip: bool) -> Codes:
    """Eight bits lose so little that there is nothing to search."""
    shrinks = SHRINKS if clip and matrix.bits == 4 else WHOLE
    dtype = TORCH_DTYPES[matrix.scale_dtype]
    return to_codes(weight, matrix.group, matrix.bits, matrix.symmetric, dtype, shrinks, importance)


def _check_finite(tensor: Tensor, name: str, where: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{where}: tensor {name} holds NaN or infinite values")
