"""Matmul forms. All are called y = linear(x) with x [N, K] and y [N, M] in the compute dtype."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_ROWS = 16
"""Up to this many rows torch's packed int4 matmul beats the bf16 one (SmolLM2 shapes, two cores)."""


class Linear(Protocol):
    """y = linear(x). `weight_bytes` is what it keeps in memory, `kind` names the kernel for status output."""

    kind: str

    @property
    def weight_bytes(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class DenseLinear:
    """weight bf16 or fp32 [M, K], bias [M] or None, both of the compute dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None, batch_invariant: bool) -> None:
        self._weight, self._bias = weight.contiguous(), bias
        self._batch_invariant = batch_invariant
        self.kind = "dense bf16" if weight.dtype == torch.bfloat16 else "dense fp32"

    @property
    def weight_bytes(self) -> int:
        return self._weight.nbytes + (self._bias.nbytes if self._bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class W4A16Linear:
    """Group-wise 4-bit weights w = scale * code + minimum, bf16 activations, through torch's packed int4
    matmul.

    Args:
        codes: uint8 [M, K], 0 .. 15. scales, minima: fp32 [M, K / group_size]. bias: bf16 [M] or None.
        batch_invariant: the packed kernel for every row count.
        bf16_copy: keep a dequantised bf16 copy, which is faster above `PACKED_ROWS` rows.
    """

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        minima: Tensor,
        bias: Tensor | None,
        group_size: int,
        batch_invariant: bool,
        bf16_copy: bool,
    ) -> None:
        zeros = minima + 8.0 * scales  # the packed kernel computes (code - 8) * scale + zero
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        self._scales_zeros = torch.stack((scales, zeros), dim=-1).bfloat16().transpose(0, 1).contiguous()
        self._bias, self._group_size = bias, group_size
        self._dense: Tensor | None = None
        if bf16_copy and not batch_invariant:
            grouped = codes.float().unflatten(1, (-1, group_size))
            dense = grouped * scales.unsqueeze(-1) + minima.unsqueeze(-1)
            self._dense = dense.flatten(1).bfloat16()
        self.kind = "w4a16 packed int4" + (" + bf16 copy" if self._dense is not None else "")

    @property
    def weight_bytes(self) -> int:
        parts = (self._packed, self._scales_zeros, self._bias, self._dense)
        return sum(part.nbytes for part in parts if part is not None)

    def __call__(self, x: Tensor) -> Tensor:
        if self._dense is not None and x.shape[0] > PACKED_ROWS:
            return F.linear(x, self._dense, self._bias)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._packed, self._group_size, self._scales_zeros)
        return y if self._bias is None else y + self._bias
