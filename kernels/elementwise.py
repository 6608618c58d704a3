"""Norms and the gated activation: each row in fp32, in an order that does not depend on other rows.

Compiled kernels serve widths that are a multiple of 16; other widths (toy models) take the plain torch form.
All tensors must be contiguous.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.codecs import BF16, FP32
from deepinfer.kernels.cpu.rows import RowKernels, row_kernels
from deepinfer.kernels.cpu.vec16 import LANES

_ACTIVATIONS = {torch.float32: FP32, torch.bfloat16: BF16}
PARALLEL_ELEMENTS = 1 << 16


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out = x / rms(x) * weight. x fp32 [N, H], weight fp32 [H], out fp32 or bf16 [N, H]."""
    _check(x, weight, out)
    rows, width = x.shape
    if width % LANES:
        out.copy_(reference_rms_norm(x, weight, eps))
        return
    _kernels(out).rms_norm(x.data_ptr(), weight.data_ptr(), np.float32(eps), out.data_ptr(), rows, width)


def add_rms_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual += delta in place, then out = rms_norm(residual).

    residual fp32 [N, H], weight fp32 [H], delta and out of one dtype (fp32 or bf16) [N, H].
    """
    _check(residual, weight, out)
    if delta.shape != out.shape or delta.dtype != out.dtype or not delta.is_contiguous():
        raise ValueError(f"delta {delta.dtype} {tuple(delta.shape)} must be as out {out.dtype} {tuple(out.shape)}")
    rows, width = residual.shape
    if width % LANES:
        residual += delta
        out.copy_(reference_rms_norm(residual, weight, eps))
        return
    _kernels(out).add_rms_norm(
        residual.data_ptr(), delta.data_ptr(), weight.data_ptr(), np.float32(eps), out.data_ptr(), rows, width
    )


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """out = silu(gate) * up. gate_up fp32 or bf16 [N, 2 * I], the gate first; out of the same dtype [N,
    I]."""
    rows, width = out.shape
    if gate_up.shape != (rows, 2 * width) or gate_up.dtype != out.dtype or not gate_up.is_contiguous():
        raise ValueError(f"gate_up {gate_up.dtype} {tuple(gate_up.shape)} does not fit out {tuple(out.shape)}")
    if width % LANES:
        out.copy_(reference_silu_mul(gate_up))
        return
    _kernels(out).silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width)


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The plain torch form: fp32 [N, H]."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def reference_silu_mul(gate_up: Tensor) -> Tensor:
    """The plain torch form: fp32 [N, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _kernels(out: Tensor) -> RowKernels:
    return row_kernels(_ACTIVATIONS[out.dtype], out.numel() >= PARALLEL_ELEMENTS)


def _check(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Compiled code trusts addresses, so shapes are compared here."""
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or out.dtype not in _ACTIVATIONS:
        raise ValueError(f"need fp32 x and weight and fp32 or bf16 out, not {x.dtype}, {weight.dtype}, {out.dtype}")
    if x.shape != out.shape or weight.shape != x.shape[-1:]:
        raise ValueError(f"shapes {tuple(x.shape)}, {tuple(weight.shape)}, {tuple(out.shape)} do not fit")
    if not (x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()):
        raise ValueError("norms need contiguous tensors")
