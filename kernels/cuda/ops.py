"""The CUDA side of the device seam: our kernels for attention, quantised weights, norms and the activation; for dense
weights the library's matmul, or ours where rows must not depend on the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.attention import AttentionSpec
from deepinfer.kernels.columns import ReorderedLinear
from deepinfer.kernels.cuda.elementwise import CudaElementwise
from deepinfer.kernels.cuda.launcher import Backend
from deepinfer.kernels.cuda.linear import CudaTiledDenseLinear, CudaW4A16Linear, CudaW8A16Linear
from deepinfer.kernels.cuda.paged_attention import CudaAttention
from deepinfer.kernels.cuda.step_capture import CudaStepCapture
from deepinfer.kernels.graphs import Graph
from deepinfer.kernels.kv_formats import BlockLayout, KVFormat
from deepinfer.kernels.linear import Linear


class CudaDenseLinear:
    """fp32 or bf16 weights [M, K] through the device's matmul library. Its rows may depend on the row count."""

    def __init__(
        self, device: str, weight: Tensor, bias: Tensor | None, kind: str, out_dtype: torch.dtype | None = None
    ) -> None:
        self._weight = weight.to(device)
        self._bias = None if bias is None else bias.to(device)
        self._out_dtype = out_dtype
        self.kind = kind

    @property
    def weight_bytes(self) -> int:
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    @property
    def step_bytes(self) -> int:
        return self.weight_bytes

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self._weight, self._bias)
        return y if self._out_dtype is None else y.to(self._out_dtype)


class CudaOps(CudaElementwise):
    """See `kernels.ops.Ops`. `backend` runs the kernels: CuPy on a GPU, or the host shim in tests."""

    overlaps = True

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._backend = backend
        self.name = backend.name
        self.device = backend.device
        self.new_stream, self.synchronize = backend.new_stream, backend.synchronize
        self.capture: Callable[[Callable[[], None]], Graph] | None = backend.capture

    def check_compute(self, dtype: str, batch_invariant: bool) -> None:
        """The library's fp32 matmul does not promise rows that are the same in every batch."""
        if dtype == "fp32" and batch_invariant:
            raise ValueError("batch_invariant: fp32 weights have no batch-invariant matmul on this device; use bf16")

    def dense(
        self, weight: Tensor, bias: Tensor | None, batch_invariant: bool, out_dtype: torch.dtype | None = None
    ) -> Linear:
        """Raises ValueError for fp32 with `batch_invariant`: see `check_compute`."""
        if not batch_invariant:
            kind = "dense bf16" if weight.dtype == torch.bfloat16 else "dense fp32"
            return CudaDenseLinear(self.device, weight, bias, kind, out_dtype)
        self.check_compute("fp32" if weight.dtype == torch.float32 else "bf16", batch_invariant)
        return CudaTiledDenseLinear(self._backend, weight, bias, out_dtype)

    def w8a16(self, codes: Tensor, scales: Tensor, out_dtype: torch.dtype | None = None) -> Linear:
        return CudaW8A16Linear(self._backend, codes, scales, None, out_dtype)

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
        """`bf16_prefill` is not needed here: many rows are dequantised into a workspace."""
        return CudaW4A16Linear(self._backend, codes, scales, minima, bias, group_size, batch_invariant, out_dtype)

    packs_stored = False

    def stored(self, *weights: object) -> Linear:
        raise NotImplementedError("this device takes weights as tensors")

    def reordered(self, linear: Linear, order: Tensor) -> Linear:
        return ReorderedLinear(linear, order.to(self.device), lambda x, order: x.index_select(1, order))

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
    ) -> CudaAttention:
        """Decode is batch-invariant by construction; with `batch_invariant` prompts are computed as decode would."""
        if backend != "auto":
            raise ValueError(f"attention {backend!r} runs on the CPU only; on this device there is auto")
        return CudaAttention(
            self._backend, spec, layout, pool, cos.to(self.device), sin.to(self.device), batch_invariant
        )

    def step_programs(self, attention: CudaAttention, max_blocks: int) -> None:
        return None

    def embed(self, embedding: Callable[[Tensor], Tensor], token_ids: Tensor) -> Tensor:
        return embedding(token_ids)

    def step_capture(self, attention: CudaAttention, max_rows: int, max_context: int) -> CudaStepCapture:
        return CudaStepCapture(self._backend, attention, max_rows, max_context)
