"""The compiled matmul behind `linear`: its weights, padded to what the kernel takes, and the call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.cpu.matmul import OUTPUT_BLOCK, matmul_kernel
from deepinfer.kernels.cpu.products import GROUP, W_INT8
from deepinfer.kernels.cpu.tasks import refuse_recording

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
"""By kind of weights."""


class RowMatmul:
    """y = x W^T + bias, summed in fp32 in an order that depends on K alone.

    Args:
        kind: a kind of weights of `cpu.products`. weight: [M, K] contiguous, of that kind's dtype.
        scales: fp32 [M, K / 32] for int8, else None. bias: [M] or None.
    """

    def __init__(self, kind: int, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> None:
        outputs, width = weight.shape
        if (kind == W_INT8) != (scales is not None):
            raise ValueError("int8 weights have scales, others do not")
        if scales is not None and (width % GROUP or scales.shape != (outputs, width // GROUP)):
            raise ValueError(f"scales {tuple(scales.shape)} do not fit int8 weights {tuple(weight.shape)}")
        if weight.dtype != WEIGHT_DTYPES[kind]:
            raise ValueError(f"weights of this kind must be {WEIGHT_DTYPES[kind]}, not {weight.dtype}")
        if bias is not None and bias.shape != (outputs,):
            raise ValueError(f"bias {tuple(bias.shape)} does not fit weights {tuple(weight.shape)}")
        self._outputs, self._width = outputs, width
        below, right = -outputs % OUTPUT_BLOCK, -width % GROUP
        self._padded = F.pad(weight, (0, right, 0, below)).contiguous() if below or right else weight.contiguous()
        self._scales: Tensor | None = None
        if scales is not None:
            self._padded = _in_blocks(self._padded.unflatten(1, (-1, GROUP))).view(outputs + below, width)
            self._scales = _in_blocks(F.pad(scales.float(), (0, 0, 0, below)))
        self._bias = torch.zeros(outputs + below)
        if bias is not None:
            self._bias[:outputs] = bias
        self._kernel = matmul_kernel(kind)

    @property
    def weight(self) -> Tensor:
        """fp32 or bf16 [M, K], without the padding. Not for int8, whose rows lie in blocks."""
        return self._padded[: self._outputs, : self._width]

    @property
    def weight_bytes(self) -> int:
        return sum(part.nbytes for part in (self._padded, self._scales, self._bias) if part is not None)

    def __call__(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        """x fp32 or bf16 [N, K] to [N, M] of `out_dtype`."""
        refuse_recording("the row matmul")
        rows, width = x.shape
        if width != self._width:
            raise ValueError(f"x has {width} columns, the weights {self._width}")
        right = self._padded.shape[1] - width
        activations = F.pad(x, (0, right)).float() if right else x.float().contiguous()
        y = torch.empty((rows, len(self._padded)))
        self._kernel(
            activations.data_ptr(),
            self._padded.data_ptr(),
            0 if self._scales is None else self._scales.data_ptr(),
            self._bias.data_ptr(),
            y.data_ptr(),
            rows,
            len(self._padded),
            self._padded.shape[1] // GROUP,
        )
        if len(self._padded) != self._outputs:
            y = y[:, : self._outputs].contiguous()
        return y.to(out_dtype)


def _in_blocks(rows: Tensor) -> Tensor:
    """[M, G, ...] to [M / 16, G, 16, ...]."""
    return rows.unflatten(0, (-1, OUTPUT_BLOCK)).transpose(1, 2).contiguous()
