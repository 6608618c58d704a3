"""Matmuls whose weights have their columns in another order than the inputs come in (GPTQ's act-order)."""

from __future__ import annotations

from collections.abc import Callable

import numba
import torch
from torch import Tensor

from deepinfer.kernels.cpu.columns import take_unit
from deepinfer.kernels.cpu.tasks import Task, recorder, run_tasks
from deepinfer.kernels.elementwise import PARALLEL_ELEMENTS
from deepinfer.kernels.linear import Linear


class ReorderedLinear:
    """y = inner(x[:, order]). Nothing is rounded, so rows are as equal as those of `inner`.

    Args:
        order: int32 [K], on the device: column k of the weights of `inner` belongs to input order[k].
        take: (x, order) -> x[:, order], on that device.
    """

    def __init__(self, inner: Linear, order: Tensor, take: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._inner, self._order, self._take = inner, order, take
        self.kind = f"{inner.kind}, act-order"

    @property
    def weight_bytes(self) -> int:
        return self._inner.weight_bytes + self._order.nbytes

    @property
    def step_bytes(self) -> int:
        return self._inner.step_bytes + self._order.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._inner(self._take(x, self._order))


def take_columns(x: Tensor, order: Tensor) -> Tensor:
    """x[:, order] on the CPU; x bf16 [N, K] contiguous, order int32 [K]."""
    rows, width = x.shape
    if x.dtype != torch.bfloat16 or not x.is_contiguous() or order.shape != (width,) or order.dtype != torch.int32:
        raise ValueError(f"x {x.dtype} {tuple(x.shape)} does not fit an order {order.dtype} {tuple(order.shape)}")
    out = torch.empty_like(x)
    task = Task(take_unit(), rows, (x.data_ptr(), order.data_ptr(), out.data_ptr(), width))
    is_small = recorder() is None and x.numel() < PARALLEL_ELEMENTS
    run_tasks([task], 1 if is_small else numba.get_num_threads(), x, order, out)
    return out
