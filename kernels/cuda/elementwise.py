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


def norm_source(
    add: bool, dtype: torch.dtype, width: int, norm_delta: bool = False, norm_out: bool = True
) -> KernelSource:
    """The norm of rows of `width`; `dtype` is that of delta and out."""
    switches = ("ADD", int(add)), ("NORM_DELTA", int(norm_delta)), ("NORM_OUT", int(norm_out))
    macros = (*switches, ("ACTIVATION", _KINDS[dtype]), ("FOURS", -(-width // _FOURS)))
    name = "dp_add_normed" if norm_delta else "dp_add_rms_norm" if add else "dp_rms_norm"
    return KernelSource("rms_norm.cu", name, macros)


def projection_norm_source(dtype: torch.dtype) -> KernelSource:
    return KernelSource("projection_norm.cu", "dp_projection_norm", (("ACTIVATION", _KINDS[dtype]),))


def silu_source(dtype: torch.dtype, gelu: bool = False) -> KernelSource:
    macros = ("ACTIVATION", _KINDS[dtype]), ("GELU", int(gelu))
    return KernelSource("silu_mul.cu", "dp_gelu_mul" if gelu else "dp_silu_mul", macros)


def soft_cap_source() -> KernelSource:
    return KernelSource("soft_cap.cu", "dp_soft_cap")


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

    def add_normed(
        self, residual: Tensor, delta: Tensor, delta_weight: Tensor, weight: Tensor | None, eps: float, out: Tensor
    ) -> None:
        """residual += rms_norm(delta) in place, then out = rms_norm(residual), or the residual if there is no weight.

        residual fp32 [N, H], weights fp32 [H], delta and out of one dtype (fp32, bf16 or fp16) [N, H].
        """
        if delta.shape != out.shape or delta.dtype != out.dtype:
            raise ValueError(f"delta {delta.dtype} {tuple(delta.shape)} must be as out {out.dtype} {tuple(out.shape)}")
        self._norm(True, residual, delta, weight, eps, out, delta_weight)

    def projection_norm(self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
        """RMS norms in place of the first len(q_weight) columns and of the len(k_weight) after them; qkv fp32, bf16 or
        fp16 [N, columns], weights fp32."""
        rows, stride = qkv.shape
        q_width, k_width = len(q_weight), len(k_weight)
        if q_width + k_width > stride or q_width % 4 or k_width % 4 or stride % 4 or qkv.dtype not in _KINDS:
            raise ValueError(
                f"qkv {qkv.dtype} {tuple(qkv.shape)} does not fit norms of {q_width} and {k_width}; widths must be "
                "multiples of 4"
            )
        if rows:
            kernel, shared_bytes = compiled(self._backend, projection_norm_source(qkv.dtype)), _THREADS // 32 * 4
            widths = q_width, k_width, stride
            self._backend.launch(
                kernel, (2, rows, 1), _THREADS, shared_bytes, qkv, q_weight, k_weight, *widths, float(eps)
            )

    def narrow(self, x: Tensor, out: Tensor) -> None:
        """out = x."""
        out.copy_(x)

    def soft_cap(self, values: Tensor, cap: float) -> None:
        """cap * tanh(value / cap) in place, for fp32 values."""
        count = values.numel()
        if values.dtype != torch.float32 or count >= 2**31:
            raise ValueError(f"a soft cap needs less than 2^31 fp32 values, not {count} of {values.dtype}")
        if count:
            kernel = compiled(self._backend, soft_cap_source())
            self._backend.launch(kernel, (-(-count // _FOURS), 1, 1), _THREADS, 0, values, count, float(cap))

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out = silu(gate) * up. gate_up fp32, bf16 or fp16 [N, 2 * I], the gate first; out of that dtype [N, I]."""
        self._gate(gate_up, out, gelu=False)

    def gelu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out = gelu(gate) * up with the tanh form of gelu; as `silu_mul`."""
        self._gate(gate_up, out, gelu=True)

    def _gate(self, gate_up: Tensor, out: Tensor, gelu: bool) -> None:
        rows, width = out.shape
        if gate_up.shape != (rows, 2 * width) or gate_up.dtype != out.dtype or out.dtype not in _KINDS or width % 4:
            raise ValueError(
                f"gate_up {gate_up.dtype} {tuple(gate_up.shape)} does not fit out {out.dtype} {tuple(out.shape)}; "
                "widths must be multiples of 4"
            )
        if rows:
            kernel = compiled(self._backend, silu_source(out.dtype, gelu))
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

    def _norm(
        self,
        add: bool,
        residual: Tensor,
        delta: Tensor,
        weight: Tensor | None,
        eps: float,
        out: Tensor,
        delta_weight: Tensor | None = None,
    ) -> None:
        some = next(each for each in (weight, delta_weight) if each is not None)
        for each in (weight, delta_weight):
            _check_norm(residual, some if each is None else each, out)
        rows, width = residual.shape
        if rows:
            source = norm_source(add, out.dtype, width, delta_weight is not None, weight is not None)
            weights = [some if each is None else each for each in (weight, delta_weight)]
            kernel, shared_bytes = compiled(self._backend, source), _THREADS // 32 * 4
            self._backend.launch(
                kernel, (rows, 1, 1), _THREADS, shared_bytes, out, residual, delta, *weights, width, float(eps)
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
