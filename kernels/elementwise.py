"""Norms and the gated activation: each row is computed in fp32, in an order that does not depend on other rows."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out = x / rms(x) * weight. x fp32 [N, H], weight fp32 [H], out fp32 or bf16 [N, H]."""
    out.copy_(x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight)


def add_rms_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual += delta in place, then out = rms_norm(residual). residual fp32 [N, H]; delta, out fp32 or bf16."""
    residual += delta
    rms_norm(residual, weight, eps, out)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """out = silu(gate) * up in fp32. gate_up fp32 or bf16 [N, 2 * I] (gate first), out same dtype [N, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)
