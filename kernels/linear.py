"""Matmul forms. All are called y = linear(x) with x [N, K] and y [N, M], both of the compute dtype."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.cpu.products import W_BF16, W_FP32, W_INT8
from deepinfer.kernels.cpu.tasks import refuse_recording
from deepinfer.kernels.row_matmul import RowMatmul

PACKED_ROWS = 16
"""Up to this many rows torch's packed int4 matmul beats the bf16 one (SmolLM2 shapes, two cores)."""
FEW_ROWS = 4
"""Up to this many rows the compiled row matmul beats torch's bf16 one."""


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
    """Weights as they are.

    Args:
        weight: bf16 or fp32 [M, K]. bias: [M] of the same dtype, or None.
        batch_invariant: rows are bit-equal for every row count and place in the batch. fp32 always is; bf16
            is where one kernel serves all row counts, otherwise many rows take torch's bf16 matmul.
        out_dtype: dtype of y if it is not that of x (fp32 logits from a bf16 head).
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, batch_invariant: bool, out_dtype: torch.dtype | None = None
    ) -> None:
        if weight.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dense weights must be fp32 or bf16, not {weight.dtype}")
        is_bf16 = weight.dtype == torch.bfloat16
        self._rows = RowMatmul(W_BF16 if is_bf16 else W_FP32, weight, None, bias)
        self._bias, self._out_dtype = bias, out_dtype
        self._row_limit = FEW_ROWS if is_bf16 and not batch_invariant else None
        self.kind = "dense bf16" if is_bf16 else "dense fp32"

    @property
    def weight_bytes(self) -> int:
        return self._rows.weight_bytes

    @property
    def step_bytes(self) -> int:
        return self.weight_bytes

    def __call__(self, x: Tensor) -> Tensor:
        refuse_recording(f"the {self.kind} matmul")
        out_dtype = self._out_dtype or x.dtype
        if self._row_limit is None or len(x) <= self._row_limit:
            return self._rows(x, out_dtype)
        return F.linear(x, self._rows.weight, self._bias).to(out_dtype)


class W8A16Linear:
    """Group-wise int8 weights w = scale * code (GGUF's Q8_0), summed in fp32. Rows are bit-equal for every
    row count.

    Args:
        codes: int8 [M, K]. scales: fp32 [M, K / 32]. bias: [M] or None.
        out_dtype: dtype of y if it is not that of x.
    """

    kind = "w8a16"

    def __init__(
        self, codes: Tensor, scales: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> None:
        self._rows = RowMatmul(W_INT8, codes, scales, bias)
        self._out_dtype = out_dtype

    @property
    def weight_bytes(self) -> int:
        return self._rows.weight_bytes

    @property
    def step_bytes(self) -> int:
        return self.weight_bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._rows(x, self._out_dtype or x.dtype)


class W4A16Linear:
    """Group-wise 4-bit weights w = scale * code + minimum, bf16 activations, through torch's packed int4
    matmul.

    The kernel keeps scale and minimum in bf16. That moves the weights of SmolLM2's Q4_1 file by 0.20 %
    (relative RMS, measured), beside the 8 % (a quantisation step / sqrt(12)) that four bits cost in the first
    place.

    Args:
        codes: uint8 [M, K], 0 .. 15. scales, minima: fp32 [M, K / group_size]. bias: bf16 [M] or None.
        group_size: 32, 64, 128 or 256.
        batch_invariant: the packed kernel for every row count; its rows are bit-equal.
        bf16_prefill: keep a dequantised bf16 copy, which is faster above `PACKED_ROWS` rows.
        out_dtype: dtype of y if it is not that of x; the kernel rounds to bf16 all the same.
    """

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        minima: Tensor,
        bias: Tensor | None,
        group_size: int,
        batch_invariant: bool,
        bf16_prefill: bool,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        _check_w4(codes, scales, minima, group_size)
        zeros = minima + 8.0 * scales  # the packed kernel computes (code - 8) * scale + zero
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        pairs = torch.stack((scales, zeros), dim=-1).bfloat16()
        self._scales_zeros = pairs.transpose(0, 1).contiguous()
        self._bias, self._group_size, self._out_dtype = bias, group_size, out_dtype
        self._dense: Tensor | None = None
        if bf16_prefill and not batch_invariant:
            self._dense = dequantise(codes, scales, minima, group_size).bfloat16()
        self.kind = "w4a16 packed int4" + (" + bf16 copy" if self._dense is not None else "")

    @property
    def weight_bytes(self) -> int:
        return self.step_bytes + (self._dense.nbytes if self._dense is not None else 0)

    @property
    def step_bytes(self) -> int:
        parts = (self._packed, self._scales_zeros, self._bias)
        return sum(part.nbytes for part in parts if part is not None)

    def __call__(self, x: Tensor) -> Tensor:
        refuse_recording(f"the {self.kind} matmul")
        out_dtype = self._out_dtype or x.dtype
        if self._dense is not None and len(x) > PACKED_ROWS:
            return F.linear(x, self._dense, self._bias).to(out_dtype)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._packed, self._group_size, self._scales_zeros)
        return (y if self._bias is None else y + self._bias).to(out_dtype)


def _check_w4(codes: Tensor, scales: Tensor, minima: Tensor, group_size: int) -> None:
    rows, width = codes.shape
    if group_size not in (32, 64, 128, 256) or width % group_size:
        raise ValueError(f"group_size must be 32, 64, 128 or 256 and divide {width}, not {group_size}")
    if rows % 16:
        raise ValueError(f"the packed int4 matmul needs a number of outputs divisible by 16, not {rows}")
    if scales.shape != (rows, width // group_size) or minima.shape != scales.shape:
        want = (rows, width // group_size)
        raise ValueError(f"scales {tuple(scales.shape)} and minima {tuple(minima.shape)} must be {want}")
