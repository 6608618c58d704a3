"""Norms, the gated activation and the greedy choice through the CUDA kernels, on whatever back end runs them.

The functions of `kernels.elementwise` as methods. All tensors are contiguous and on the back end's device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.cuda.kernel_table import compiled
from deepinfer.kernels.cuda.launcher import Backend
from deepinfer.kernels.cuda.source import KernelSource

MAX_NORM_WIDTH = 16384
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_THREADS, _ARGMAX_THREADS = 256, 1024
_FOURS = 4 * _THREADS


def norm_source(add: bool, dtype: torch.dtype, width: int) -> KernelSource:
    """The norm of rows of `width`; `dtype` is that of delta and out."""
    macros = ("ADD", int(add)), ("ACTIVATION", _KINDS[dtype]), ("FOURS", -(-width // _FOURS))
    return KernelSource("rms_norm.cu", "dp_add_rms_norm" if add else "dp_rms_norm", macros)


def silu_source(dtype: torch.dtype) -> KernelSource:
    return KernelSource("silu_mul.cu", "dp_silu_mul", (("ACTIVATION", _KINDS[dtype]),))


def argmax_source() -> KernelSource:
    return KernelSource("argmax.cu", "dp_argmax")


class CudaElementwise:
    """Raises ValueError for shapes and dtypes that no kernel exists for."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """out = x / rms(x) * weight. x fp32 [N, H], weight fp32 [H], out fp32, bf16 or fp16 [N, H]."""
        self._norm(False, x, out, weight, eps, out)

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """residual += delta in place, then out = rms_norm(residual).

        residual fp32 [N, H], weight fp32 [H], delta and out of one dtype (fp32, bf16 or fp16) [N, H].
        """
        if delta.shape != out.shape or delta.dtype != out.dtype:
            raise ValueError(f"delta {delta.dtype} {tuple(delta.shape)} must be as out {out.dtype} {tuple(out.shape)}")
        self._norm(True, residual, delta, weight, eps, out)

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out = silu(gate) * up. gate_up fp32, bf16 or fp16 [N, 2 * I], the gate first; out of that dtype [N, I]."""
        rows, width = out.shape
        if gate_up.shape != (rows, 2 * width) or gate_up.dtype != out.dtype or out.dtype not in _KINDS or width % 4:
            raise ValueError(
                f"gate_up {gate_up.dtype} {tuple(gate_up.shape)} does not fit out {out.dtype} {tuple(out.shape)}; "
                "widths must be multiples of 4"
            )
        if rows:
            kernel = compiled(self._backend, silu_source(out.dtype))
            self._backend.launch(kernel, (-(-width // _FOURS), rows, 1), _THREADS, 0, out, gate_up, width)

    def argmax(self, logits: Tensor, num_valid: int) -> Tensor:
        """int32 [R]: the lowest id among the highest of the first `num_valid` logits of each row of fp32 [R, vocab];
        -1 where one of them is NaN or +inf, or all are -inf."""
        if logits.dtype != torch.float32 or logits.dim() != 2 or not 0 < num_valid <= logits.shape[1]:
            raise ValueError(
                f"logits {logits.dtype} {tuple(logits.shape)} with {num_valid} valid: need fp32 [R, vocab]"
            )
        ids = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        if len(logits):
            kernel, shared_bytes = compiled(self._backend, argmax_source()), _ARGMAX_THREADS // 32 * 8
            self._backend.launch(
                kernel, (len(logits), 1, 1), _ARGMAX_THREADS, shared_bytes, ids, logits, logits.shape[1], num_valid
            )
        return ids

    def _norm(self, add: bool, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        _check_norm(residual, weight, out)
        rows, width = residual.shape
        if rows:
            kernel, shared_bytes = compiled(self._backend, norm_source(add, out.dtype, width)), _THREADS // 32 * 4
            self._backend.launch(
                kernel, (rows, 1, 1), _THREADS, shared_bytes, out, residual, delta, weight, width, float(eps)
            )


def _check_norm(x: Tensor, weight: Tensor, out: Tensor) -> None:
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or out.dtype not in _KINDS:
        raise ValueError(
            f"need fp32 x and weight and fp32, bf16 or fp16 out, not {x.dtype}, {weight.dtype}, {out.dtype}"
        )
    if x.shape != out.shape or weight.shape != x.shape[-1:]:
        raise ValueError(f"shapes {tuple(x.shape)}, {tuple(weight.shape)}, {tuple(out.shape)} do not fit")
    if x.shape[1] % 4 or x.shape[1] > MAX_NORM_WIDTH:
        raise ValueError(f"rows of {x.shape[1]}: the norm takes multiples of 4 up to {MAX_NORM_WIDTH}")
