"""Paged attention: what a call needs, and the choice of an implementation. The choice is made once, never per
call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.kernels.attention_batch import AttentionBatch
from deepinfer.kernels.kv_formats import BlockLayout, KVFormat

ATTENTION_BACKENDS = ("auto", "numba", "reference")

__all__ = ["ATTENTION_BACKENDS", "AttentionBatch", "AttentionSpec", "PagedAttention", "make_attention"]


@dataclass(frozen=True)
class AttentionSpec:
    """What attention needs to know of a model.

    `windows` has one entry per layer: 0 attends to the whole context, w > 0 to positions > position - w.
    `qk_norm` is None, or per layer (q_weight fp32 [head_dim], k_weight fp32 [head_dim]) of an RMS norm before
    RoPE.

    `key_bias` is None, or per layer None or b, fp32 [num_kv_heads * head_dim], contiguous. Where there is a b, the
    keys in `qkv` come without it: they are stored as RoPE(Wx), and RoPE(b, position) is added to each decoded key
    when it is read. RoPE is linear, so a query sees RoPE(Wx + b), but for what the format rounds off Wx alone.

    `soft_cap` > 0 makes cap * tanh(s / cap) of every scaled score s, before any is masked.

    `rope_tables` is None where all layers rotate by the same tables, or says per layer which of the stacked tables it
    takes; None: nothing is rotated there (NoPE).
    """

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    qk_norm: tuple[tuple[Tensor, Tensor], ...] | None = None
    key_bias: tuple[Tensor | None, ...] | None = None
    soft_cap: float = 0.0
    rope_tables: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_q_heads} query heads do not divide over {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, not {self.head_dim}")
        if len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows for {self.num_layers} layers")
        if self.qk_norm is not None and len(self.qk_norm) != self.num_layers:
            raise ValueError(f"{len(self.qk_norm)} q/k norms for {self.num_layers} layers")
        if self.key_bias is not None:
            self._check_key_bias(self.key_bias)
        if self.rope_tables is not None and len(self.rope_tables) != self.num_layers:
            raise ValueError(f"{len(self.rope_tables)} choices of RoPE tables for {self.num_layers} layers")

    def _check_key_bias(self, biases: tuple[Tensor | None, ...]) -> None:
        if self.qk_norm is not None:
            raise ValueError("a key bias cannot be added after a k norm, which is not linear")
        if len(biases) != self.num_layers:
            raise ValueError(f"{len(biases)} key biases for {self.num_layers} layers")
        width = self.num_kv_heads * self.head_dim
        for layer, bias in enumerate(biases):
            if bias is None:
                continue
            if self.rope_tables is not None and self.rope_tables[layer] is None:
                raise ValueError(f"layer {layer} does not rotate its keys: a bias cannot be added when they are read")
            if bias.shape != (width,) or bias.dtype != torch.float32 or not bias.is_contiguous():
                raise ValueError(
                    f"the key bias of layer {layer} must be contiguous fp32 [{width}], "
                    f"not {bias.dtype} {tuple(bias.shape)}"
                )

    def split_key_bias(self, layer: int) -> Tensor | None:
        """fp32 [num_kv_heads, head_dim] to add when keys of `layer` are read, or None."""
        bias = None if self.key_bias is None else self.key_bias[layer]
        return None if bias is None else bias.view(self.num_kv_heads, self.head_dim)

    def tables_of(self, layer: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
        """The RoPE tables [positions, head_dim / 2] of `layer` among `cos` and `sin`, which are stacked if there are
        several; None where nothing is rotated. Views."""
        if self.rope_tables is None:
            return cos, sin
        table = self.rope_tables[layer]
        if table is None:
            return None
        return (cos, sin) if cos.dim() == 2 else (cos[table], sin[table])


class PagedAttention(Protocol):
    """Normalises q and k, applies RoPE, stores K and V, and attends over the stored context."""

    name: str

    @property
    def kv_saturated_total(self) -> int:
        """Finite elements that were larger than the format holds and were clamped."""
        ...

    @property
    def kv_nonfinite_total(self) -> int:
        """NaN or infinite elements that were stored as 0."""
        ...

    def kv_counts(self) -> list[tuple[int, int]]:
        """(saturated, non-finite) elements of each layer: what the totals are the sums of."""
        ...

    def forward(self, layer: int, qkv: Tensor, batch: AttentionBatch, out: Tensor) -> None:
        """Attend the rows of `batch` in `layer`.

        Args:
            qkv: fp32 or bf16 [N, (Hq + 2 * Hkv) * D], contiguous rows.
            out: same dtype [N, Hq * D], written.

        All rows' K and V are stored before any row attends, so a row sees the *stored* values of its own
        chunk. Every row is reduced in an order that depends on its context alone.
        """
        ...


def make_attention(
    backend: str,
    spec: AttentionSpec,
    layout: BlockLayout,
    fmt: KVFormat,
    pool: Tensor,
    cos: Tensor,
    sin: Tensor,
    batch_invariant: bool,
) -> PagedAttention:
    """The attention of one pool.

    Args:
        backend: "numba" (fused, the CPU's "auto") or "reference" (plain torch, slow).
        pool: uint8 [rows, layout.row_bytes], contiguous.
        cos, sin: fp32 [max_positions, head_dim / 2], RoPE tables for the half-split form, or several of them stacked,
            as `spec.rope_tables` names them.
        batch_invariant: a row's output is bit-equal alone, in a batch and in any chunking. The numba path
            always is.

    Raises ValueError for an unknown backend, for shapes that do not fit together, and for shapes that the
    backend has no kernel for.
    """
    if backend not in ATTENTION_BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}: use one of {', '.join(ATTENTION_BACKENDS)}")
    _check_pool(spec, layout, fmt, pool)
    half = spec.head_dim // 2
    if cos.shape != sin.shape or cos.shape[-1] != half or cos.dtype != torch.float32:
        raise ValueError(f"RoPE tables must be fp32 [positions, {half}], not {cos.dtype} {tuple(cos.shape)}")
    tables = 1 + max((table for table in spec.rope_tables or () if table is not None), default=0)
    if cos.dim() != (2 if tables == 1 else 3) or (tables > 1 and len(cos) != tables):
        raise ValueError(f"the layers need {tables} RoPE tables [positions, {half}], not {tuple(cos.shape)}")
    if backend == "reference":
        from deepinfer.kernels.reference_attention import ReferenceAttention

        return ReferenceAttention(spec, layout, pool, cos, sin, batch_invariant)
    from deepinfer.kernels.cpu.paged_attention import NumbaAttention

    return NumbaAttention(spec, layout, pool, cos, sin)


def _check_pool(spec: AttentionSpec, layout: BlockLayout, fmt: KVFormat, pool: Tensor) -> None:
    model = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
    if model != (layout.num_layers, layout.num_kv_heads, layout.head_dim):
        raise ValueError(f"the pool's layout {layout} is not for layers, KV heads, head_dim = {model}")
    if (layout.k, layout.v) != (fmt.k, fmt.v):
        raise ValueError(f"the pool's layout stores {layout.k.name}/{layout.v.name}, the format is {fmt.name}")
    if pool.dtype != torch.uint8 or pool.dim() != 2 or pool.shape[1] != layout.row_bytes:
        want = f"uint8 [blocks, {layout.row_bytes}]"
        raise ValueError(f"the pool must be {want}, not {pool.dtype} {tuple(pool.shape)}")
    if not pool.is_contiguous():
        raise ValueError("the pool must be contiguous")
