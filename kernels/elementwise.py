"""Norms and the gated activation: each row in fp32, in an order that does not depend on other rows.

Compiled kernels serve widths that are a multiple of 16; other widths (toy models) take the plain torch form.
All tensors must be contiguous.
"""

from __future__ import annotations

import numba
import torch
from torch import Tensor

from deepinfer.kernels.codecs import BF16, FP32
from deepinfer.kernels.cpu.output_norms import output_norm_units
from deepinfer.kernels.cpu.rows import argmax_unit, gated_unit, row_units
from deepinfer.kernels.cpu.soft_cap import CAP_PIECE, soft_cap_unit
from deepinfer.kernels.cpu.tasks import Task, bits, refuse_recording, run_tasks
from deepinfer.kernels.cpu.vec16 import LANES

_ACTIVATIONS = {torch.float32: FP32, torch.bfloat16: BF16}
PARALLEL_ELEMENTS = 1 << 16
"""From here on waking the other threads pays."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out = x / rms(x) * weight. x fp32 [N, H], weight fp32 [H], out fp32 or bf16 [N, H]."""
    _check(x, weight, out)
    rows, width = x.shape
    if _is_odd(width):
        out.copy_(reference_rms_norm(x, weight, eps))
        return
    addresses = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    _run(row_units(_ACTIVATIONS[out.dtype]).rms_norm, rows, (*addresses, bits(eps), width), x, weight, out)


def add_rms_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual += delta in place, then out = rms_norm(residual).

    residual fp32 [N, H], weight fp32 [H], delta and out of one dtype (fp32 or bf16) [N, H].
    """
    _check(residual, weight, out)
    if delta.shape != out.shape or delta.dtype != out.dtype or not delta.is_contiguous():
        raise ValueError(f"delta {delta.dtype} {tuple(delta.shape)} must be as out {out.dtype} {tuple(out.shape)}")
    rows, width = residual.shape
    if _is_odd(width):
        residual += delta
        out.copy_(reference_rms_norm(residual, weight, eps))
        return
    addresses = residual.data_ptr(), delta.data_ptr(), weight.data_ptr(), out.data_ptr()
    function = row_units(_ACTIVATIONS[out.dtype]).add_rms_norm
    _run(function, rows, (*addresses, bits(eps), width), residual, delta, weight, out)


def add_normed(
    residual: Tensor, delta: Tensor, delta_weight: Tensor, weight: Tensor | None, eps: float, out: Tensor
) -> None:
    """residual += rms_norm(delta) in place, then out = rms_norm(residual), or the residual where there is no weight.

    residual fp32 [N, H], weights fp32 [H], delta and out of one dtype (fp32 or bf16) [N, H].
    """
    for each in (delta_weight, weight):
        _check(residual, each, out)
    if delta.shape != out.shape or delta.dtype != out.dtype or not delta.is_contiguous():
        raise ValueError(f"delta {delta.dtype} {tuple(delta.shape)} must be as out {out.dtype} {tuple(out.shape)}")
    rows, width = residual.shape
    if _is_odd(width):
        residual += reference_rms_norm(delta.float(), delta_weight, eps)
        out.copy_(residual if weight is None else reference_rms_norm(residual, weight, eps))
        return
    addresses = residual.data_ptr(), delta.data_ptr(), delta_weight.data_ptr()
    arguments = (*addresses, 0 if weight is None else weight.data_ptr(), out.data_ptr(), bits(eps), width)
    function = output_norm_units(_ACTIVATIONS[out.dtype]).add_normed
    _run(function, rows, arguments, residual, delta, delta_weight, weight, out)


def projection_norm(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    """RMS norms in place of the first len(q_weight) columns and of the len(k_weight) after them; qkv fp32 or bf16
    [N, columns], weights fp32."""
    rows, stride = qkv.shape
    q_width, k_width = len(q_weight), len(k_weight)
    weights = (q_weight, k_weight)
    fits = qkv.is_contiguous() and q_width + k_width <= stride and qkv.dtype in _ACTIVATIONS
    if not fits or any(w.dtype != torch.float32 or not w.is_contiguous() for w in weights):
        raise ValueError(f"qkv {qkv.dtype} {tuple(qkv.shape)} does not fit norms of {q_width} and {k_width}")
    if _is_odd(q_width) or _is_odd(k_width):
        q, k, _ = qkv.split([q_width, k_width, stride - q_width - k_width], dim=1)
        q.copy_(reference_rms_norm(q.float(), q_weight, eps))
        k.copy_(reference_rms_norm(k.float(), k_weight, eps))
        return
    addresses = qkv.data_ptr(), q_weight.data_ptr(), k_weight.data_ptr()
    arguments = (*addresses, q_width, k_width, stride, bits(eps))
    _run(output_norm_units(_ACTIVATIONS[qkv.dtype]).norm_parts, 2 * rows, arguments, q_weight, k_weight, qkv)


def narrow(x: Tensor, out: Tensor) -> None:
    """out = x, for x fp32 [N, H] and out fp32 or bf16."""
    _check(x, None, out)
    rows, width = x.shape
    if _is_odd(width):
        out.copy_(x)
        return
    _run(output_norm_units(_ACTIVATIONS[out.dtype]).narrow, rows, (x.data_ptr(), out.data_ptr(), width), x, out)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """out = silu(gate) * up. gate_up fp32 or bf16 [N, 2 * I], the gate first; out of the same dtype [N,
    I]."""
    if _check_gate(gate_up, out):
        _run_gate(gated_unit(_ACTIVATIONS[out.dtype], False), gate_up, out)
    else:
        out.copy_(reference_silu_mul(gate_up))


def gelu_mul(gate_up: Tensor, out: Tensor) -> None:
    """out = gelu(gate) * up with the tanh form of gelu; as `silu_mul`."""
    if _check_gate(gate_up, out):
        _run_gate(gated_unit(_ACTIVATIONS[out.dtype], True), gate_up, out)
    else:
        out.copy_(reference_gelu_mul(gate_up))


def soft_cap(values: Tensor, cap: float) -> None:
    """cap * tanh(value / cap) in place, for contiguous fp32 values [N, W]."""
    if values.dtype != torch.float32 or values.dim() != 2 or not values.is_contiguous():
        raise ValueError(f"a soft cap needs contiguous fp32 rows, not {values.dtype} {tuple(values.shape)}")
    rows, width = values.shape
    workers = numba.get_num_threads() if values.numel() >= PARALLEL_ELEMENTS else 1
    task = Task(soft_cap_unit(), rows * -(-width // CAP_PIECE), (values.data_ptr(), width, bits(cap)))
    run_tasks([task], workers, values)


def _check_gate(gate_up: Tensor, out: Tensor) -> bool:
    """Whether the compiled kernels serve them."""
    rows, width = out.shape
    if gate_up.shape != (rows, 2 * width) or gate_up.dtype != out.dtype or not gate_up.is_contiguous():
        raise ValueError(f"gate_up {gate_up.dtype} {tuple(gate_up.shape)} does not fit out {tuple(out.shape)}")
    return not _is_odd(width)


def _run_gate(function: int, gate_up: Tensor, out: Tensor) -> None:
    rows, width = out.shape
    _run(function, rows, (gate_up.data_ptr(), out.data_ptr(), width), gate_up, out)


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The plain torch form: fp32 [N, H]."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def reference_silu_mul(gate_up: Tensor) -> Tensor:
    """The plain torch form: fp32 [N, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def reference_gelu_mul(gate_up: Tensor) -> Tensor:
    """The plain torch form: fp32 [N, I]. In fp64 between, because 1 + tanh(u) cancels where u is far below 0."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).float()


def reference_soft_cap(values: Tensor, cap: float) -> Tensor:
    """The plain torch form."""
    return cap * torch.tanh(values / cap)


def argmax(logits: Tensor, num_valid: int) -> Tensor:
    """int32 [R] of fp32 [R, vocab]: the lowest id among the highest of the first `num_valid`, -1 where one of them is
    not finite."""
    if logits.dtype != torch.float32 or not logits.is_contiguous() or not 0 < num_valid <= logits.shape[1]:
        raise ValueError(f"argmax needs contiguous fp32 logits, {num_valid} of them valid, not {logits.dtype}")
    ids = torch.empty(len(logits), dtype=torch.int32)
    arguments = (logits.data_ptr(), ids.data_ptr(), logits.shape[1], num_valid)
    workers = numba.get_num_threads() if logits.numel() >= PARALLEL_ELEMENTS else 1
    run_tasks([Task(argmax_unit(), len(logits), arguments)], workers, logits, ids)
    return ids


def _is_odd(width: int) -> bool:
    """Whether plain torch serves this width. It cannot be recorded."""
    if width % LANES == 0:
        return False
    refuse_recording(f"a row of {width} elements, which is no multiple of {LANES},")
    return True


def _run(function: int, rows: int, arguments: tuple[int, ...], *tensors: Tensor | None) -> None:
    """The last of `tensors`, all of which the kernel uses, says how much there is to do."""
    size = 0 if tensors[-1] is None else tensors[-1].numel()
    workers = numba.get_num_threads() if size >= PARALLEL_ELEMENTS else 1
    run_tasks([Task(function, rows, arguments)], workers, *tensors)


def _check(x: Tensor, weight: Tensor | None, out: Tensor) -> None:
    """Compiled code trusts addresses, so shapes are compared here."""
    if weight is None:
        weight = x[0] if len(x) else x.new_empty(x.shape[-1])
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or out.dtype not in _ACTIVATIONS:
        raise ValueError(f"need fp32 x and weight and fp32 or bf16 out, not {x.dtype}, {weight.dtype}, {out.dtype}")
    if x.shape != out.shape or weight.shape != x.shape[-1:]:
        raise ValueError(f"shapes {tuple(x.shape)}, {tuple(weight.shape)}, {tuple(out.shape)} do not fit")
    if not (x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()):
        raise ValueError("norms need contiguous tensors")
