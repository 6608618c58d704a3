"""The device seam: everything that a model needs of the machine it runs on, chosen once when it is loaded.

`CpuOps` is here; `kernels.cuda.ops.CudaOps` drives the CUDA kernels. Above this nobody asks which of the two it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from deepinfer.kernels import elementwise
from deepinfer.kernels.attention import AttentionSpec, PagedAttention, make_attention
from deepinfer.kernels.columns import ReorderedLinear, take_columns
from deepinfer.kernels.cpu.paged_attention import NumbaAttention
from deepinfer.kernels.cpu.records import P_BF16, P_INT4, P_INT8
from deepinfer.kernels.cpu.step_programs import StepPrograms
from deepinfer.kernels.cpu.tasks import recorder
from deepinfer.kernels.graphs import Graph, StepCapture
from deepinfer.kernels.kv_formats import BlockLayout, KVFormat
from deepinfer.kernels.linear import DenseLinear, Linear
from deepinfer.kernels.packed_linear import PackedLinear
from deepinfer.kernels.packing import Stored
from deepinfer.kernels.streams import AtOnce, Stream


class Ops(Protocol):
    """Tensors go in and come out on `device`. The linear forms are those of `kernels.linear`."""

    name: str
    """As `status` shows it: "cpu", "cuda: <card>" or "host-emulation"."""
    device: str
    """As torch names it."""
    overlaps: bool
    """Whether it does the work of several streams side by side."""

    capture: Callable[[Callable[[], None]], Graph] | None
    """See `kernels.cuda.launcher.Backend.capture`. None without graphs."""

    @property
    def argmax(self) -> Callable[[Tensor, int], Tensor] | None:
        """Of fp32 logits [R, vocab] and a number of valid ones: int32 [R], the lowest id among the highest valid ones;
        -1 where one of them is NaN or +inf, or all are -inf, and where it is up to the host: perhaps where one is -inf.
        """
        ...

    def new_stream(self, name: str) -> Stream: ...

    def synchronize(self) -> None:
        """Wait until everything that was started is done."""
        ...

    def check_compute(self, dtype: str, batch_invariant: bool) -> None:
        """Raises ValueError, which says what works, if there are no matmuls in `dtype` ("fp32", "bf16")."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...

    def add_normed(
        self, residual: Tensor, delta: Tensor, delta_weight: Tensor, weight: Tensor | None, eps: float, out: Tensor
    ) -> None: ...

    def projection_norm(self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None: ...

    def narrow(self, x: Tensor, out: Tensor) -> None: ...

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None: ...

    def gelu_mul(self, gate_up: Tensor, out: Tensor) -> None: ...

    def soft_cap(self, values: Tensor, cap: float) -> None: ...

    def dense(
        self, weight: Tensor, bias: Tensor | None, batch_invariant: bool, out_dtype: torch.dtype | None = None
    ) -> Linear: ...

    def w8a16(self, codes: Tensor, scales: Tensor, out_dtype: torch.dtype | None = None) -> Linear:
        """codes int8 [M, K], scales fp32 [M, K / 32]."""
        ...

    def w4a16(
        self,
        codes: Tensor,
        scales: Tensor,
        minima: Tensor,
        bias: Tensor | None,
        group_size: int,
        batch_invariant: bool,
        bf16_prefill: bool,
        out_dtype: torch.dtype | None = None,
    ) -> Linear:
        """`bf16_prefill`: many rows meet weights rounded to bf16, unless `batch_invariant`."""
        ...

    @property
    def packs_stored(self) -> bool:
        """Whether there is `stored`, for bf16 compute."""
        ...

    def stored(
        self,
        weights: Stored,
        bias: Tensor | None,
        batch_invariant: bool,
        bf16_prefill: bool,
        out_dtype: torch.dtype | None = None,
    ) -> Linear:
        """Of weights as files hold them: as `dense`, `w8a16` or `w4a16` by their `bits`. It may not be called before
        `packing.gathered` has ended."""
        ...

    def reordered(self, linear: Linear, order: Tensor) -> Linear:
        """A form whose input k is input order[k] of what it gets; order int32 [K]."""
        ...

    def attention(
        self,
        backend: str,
        spec: AttentionSpec,
        layout: BlockLayout,
        fmt: KVFormat,
        pool: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch_invariant: bool,
    ) -> PagedAttention:
        """`backend` is the user's wish, "auto" by default. Raises ValueError for one that this device does not have."""
        ...

    def step_capture(self, attention: Any, max_rows: int, max_context: int) -> StepCapture | None:
        """Graphs of decode steps of up to `max_rows` rows and `max_context` tokens that attend with `attention`, which
        `attention` made. None without graphs."""
        ...

    def step_programs(self, attention: Any, max_blocks: int) -> StepPrograms | None:
        """Recorded decode steps over contexts of at most `max_blocks` blocks. None where there is no such thing."""
        ...

    def embed(self, embedding: Callable[[Tensor], Tensor], token_ids: Tensor) -> Tensor:
        """embedding(token_ids), fp32 [N, hidden]."""
        ...


class CpuOps:
    """torch and numba; see `kernels.elementwise`, `kernels.linear` and `kernels.attention`. Weights that meet bf16
    activations are packed for the processor's products (`kernels.packed_linear`).

    `int8_activations`: what meets 4-bit weights is rounded to 8 bits.
    """

    name = device = "cpu"
    overlaps = False
    argmax = staticmethod(elementwise.argmax)
    capture: Callable[[Callable[[], None]], Graph] | None = None
    new_stream = staticmethod(AtOnce)

    rms_norm = staticmethod(elementwise.rms_norm)
    add_rms_norm = staticmethod(elementwise.add_rms_norm)
    add_normed = staticmethod(elementwise.add_normed)
    projection_norm = staticmethod(elementwise.projection_norm)
    narrow = staticmethod(elementwise.narrow)
    silu_mul = staticmethod(elementwise.silu_mul)
    gelu_mul = staticmethod(elementwise.gelu_mul)
    soft_cap = staticmethod(elementwise.soft_cap)
    attention = staticmethod(make_attention)

    def __init__(self, int8_activations: bool = False) -> None:
        self._int8_activations = int8_activations

    def synchronize(self) -> None:
        """A call has done its work when it returns."""

    def check_compute(self, dtype: str, batch_invariant: bool) -> None:
        """Everything works."""

    def dense(
        self, weight: Tensor, bias: Tensor | None, batch_invariant: bool, out_dtype: torch.dtype | None = None
    ) -> Linear:
        if weight.dtype == torch.bfloat16:
            return PackedLinear(P_BF16, weight, bias=bias, out_dtype=out_dtype or torch.bfloat16)
        return DenseLinear(weight, bias)

    def w8a16(self, codes: Tensor, scales: Tensor, out_dtype: torch.dtype | None = None) -> Linear:
        return PackedLinear(P_INT8, codes, scales, out_dtype=out_dtype or torch.bfloat16)

    def w4a16(
        self,
        codes: Tensor,
        scales: Tensor,
        minima: Tensor,
        bias: Tensor | None,
        group_size: int,
        batch_invariant: bool,
        bf16_prefill: bool,
        out_dtype: torch.dtype | None = None,
    ) -> Linear:
        out = out_dtype or torch.bfloat16
        rounded = bf16_prefill and not batch_invariant and not self._int8_activations
        return PackedLinear(
            P_INT4, codes, scales, minima, bias, group_size, out, rounded, int8_activations=self._int8_activations
        )

    packs_stored = True

    def stored(
        self,
        weights: Stored,
        bias: Tensor | None,
        batch_invariant: bool,
        bf16_prefill: bool,
        out_dtype: torch.dtype | None = None,
    ) -> Linear:
        kind = {4: P_INT4, 8: P_INT8, 16: P_BF16}[weights.bits]
        int8 = kind == P_INT4 and self._int8_activations
        rounded = kind == P_INT4 and bf16_prefill and not batch_invariant and not int8
        return PackedLinear(
            kind, weights, bias=bias, out_dtype=out_dtype or torch.bfloat16, rounded=rounded, int8_activations=int8
        )

    def reordered(self, linear: Linear, order: Tensor) -> Linear:
        return ReorderedLinear(linear, order, take_columns)

    def step_capture(self, attention: Any, max_rows: int, max_context: int) -> StepCapture | None:
        return None

    def step_programs(self, attention: Any, max_blocks: int) -> StepPrograms | None:
        if not isinstance(attention, NumbaAttention):
            return None
        return StepPrograms(attention.check, attention.segments, attention.num_groups, max_blocks)

    def embed(self, embedding: Callable[[Tensor], Tensor], token_ids: Tensor) -> Tensor:
        taker = recorder()
        before = 0 if taker is None else taker.taken
        rows = embedding(token_ids)
        if taker is not None and taker.taken == before:
            taker.call(lambda: rows.copy_(embedding(token_ids)))
        return rows
