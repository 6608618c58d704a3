"""Matmul forms. All are called y = linear(x) with x [N, K] and y [N, M], both of the compute dtype."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.cpu.matmul import OUTPUT_BLOCK, matmul_kernel
from deepinfer.kernels.cpu.products import GROUP
from deepinfer.kernels.cpu.tasks import refuse_recording


def dequantise(codes: Tensor, scales: Tensor, minima: Tensor, group_size: int) -> Tensor:
    """scale * code + minimum, fp32 [M, K]."""
    grouped = codes.float().unflatten(1, (-1, group_size))
    return (grouped * scales.unsqueeze(-1) + minima.unsqueeze(-1)).flatten(1)


class Linear(Protocol):
    """y = linear(x). `weight_bytes` is what it keeps in memory, `step_bytes` what a decode step of few rows
    reads of that, `kind` names the kernels for status output."""

    kind: str

    @property
    def weight_bytes(self) -> int: ...

    @property
    def step_bytes(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...


@runtime_checkable
class RowTable(Protocol):
    """A linear form that gives rows of its weights back, so that a tied embedding needs no table of its own."""

    def rows(self, ids: Tensor) -> Tensor:
        """ids int [N], below M -> fp32 [N, K], memory of its own."""
        ...


class DenseLinear:
    """fp32 weights as they are, summed in fp32: y = x W^T + bias, whose rows are bit-equal for every row count.

    Args:
        weight: fp32 [M, K]. Kept padded with zeros to multiples of the kernel's blocks; not copied if it fits.
        bias: fp32 [M] or None.
    """

    kind = "dense fp32"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        if weight.dtype != torch.float32:
            raise ValueError(f"dense weights must be fp32, not {weight.dtype}")
        outputs, width = weight.shape
        if bias is not None and bias.shape != (outputs,):
            raise ValueError(f"bias {tuple(bias.shape)} does not fit weights {tuple(weight.shape)}")
        self._outputs, self._width = outputs, width
        below, right = -outputs % OUTPUT_BLOCK, -width % GROUP
        self._padded = F.pad(weight, (0, right, 0, below)).contiguous() if below or right else weight.contiguous()
        self._bias = torch.zeros(outputs + below)
        if bias is not None:
            self._bias[:outputs] = bias
        self._kernel = matmul_kernel()

    @property
    def weight_bytes(self) -> int:
        return self._padded.nbytes + self._bias.nbytes

    @property
    def step_bytes(self) -> int:
        return self.weight_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x fp32 [N, K] to fp32 [N, M]."""
        refuse_recording("the dense fp32 matmul")
        rows, width = x.shape
        if width != self._width or x.dtype != torch.float32:
            raise ValueError(f"x must be fp32 with {self._width} columns, not {x.dtype} with {width}")
        x = F.pad(x, (0, self._padded.shape[1] - width)).contiguous()
        y = torch.empty((rows, len(self._padded)))
        addresses = [part.data_ptr() for part in (x, self._padded, self._bias, y)]
        self._kernel(*addresses, rows, len(self._padded), self._padded.shape[1] // GROUP)
        return y if len(self._padded) == self._outputs else y[:, : self._outputs].contiguous()
