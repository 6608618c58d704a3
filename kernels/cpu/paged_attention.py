"""The fused paged attention of the CPU."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.attention import AttentionBatch, AttentionSpec
from deepinfer.kernels.codecs import BF16, FP32
from deepinfer.kernels.cpu.paged_kernel import NONFINITE, SATURATED, paged_attention_kernel
from deepinfer.kernels.cpu.plan import layer_plan
from deepinfer.kernels.cpu.tiles import TILE
from deepinfer.kernels.cpu.vec16 import LANES
from deepinfer.kernels.kv_formats import BlockLayout

BLOCK_SIZES = (8, 16, 32, 64, 128)
_STATE_FLOATS = 4096
_ACTIVATIONS = {torch.float32: FP32, torch.bfloat16: BF16}


class NumbaAttention:
    """See `PagedAttention`. Reads the stored bytes; a row's bits depend on its query and its context alone.

    Raises ValueError for a head_dim that is no multiple of 16 and for block sizes outside `BLOCK_SIZES`.
    """

    name = "numba fused paged"

    def __init__(self, spec: AttentionSpec, layout: BlockLayout, pool: Tensor, cos: Tensor, sin: Tensor) -> None:
        if spec.head_dim % LANES:
            raise ValueError(f"the numba attention needs a head_dim divisible by {LANES}, not {spec.head_dim}")
        if layout.block_size not in BLOCK_SIZES:
            raise ValueError(f"the numba attention has block sizes {BLOCK_SIZES}, not {layout.block_size}")
        self._spec, self._layout, self._pool = spec, layout, pool
        self._cos, self._sin = cos.contiguous(), sin.contiguous()
        self._plans = [
            layer_plan(layer, spec, layout, pool, self._cos, self._sin) for layer in range(spec.num_layers)
        ]
        heads_at_once = spec.num_q_heads // spec.num_kv_heads
        self._tile_rows = max(1, min(16, _STATE_FLOATS // (heads_at_once * spec.head_dim)))
        states = self._tile_rows * heads_at_once * (spec.head_dim + 2 * LANES)
        self._scratch_floats = 2 * TILE * spec.head_dim + 2 * LANES + states
        self._counters = np.zeros(3, dtype=np.int64)
        self._scale, self._eps = np.float32(spec.scale), np.float32(spec.rms_norm_eps)
        self.kv_saturated_total = 0
        self.kv_nonfinite_total = 0

    def forward(self, layer: int, qkv: Tensor, batch: AttentionBatch, out: Tensor) -> None:
        """See `PagedAttention.forward`."""
        workers = numba.get_num_threads()
        tiles = batch.row_tiles(self._tile_rows)
        queries = np.empty((batch.num_rows, (self._spec.num_q_heads + 1) * self._spec.head_dim), np.float32)
        scratch = np.empty((workers, self._scratch_floats), np.float32)
        counters = np.zeros(3, np.int64)
        kernel = paged_attention_kernel(
            self._layout.k, self._layout.v, _ACTIVATIONS[qkv.dtype], self._spec.head_dim
        )
        kernel(
            self._plans[layer], batch.positions, batch.row_seq, batch.block_tables, tiles, batch.nonfinite_rows,
            counters, qkv.data_ptr(), out.data_ptr(), queries.ctypes.data, scratch.ctypes.data,
            4 * self._scratch_floats, workers, self._scale, self._eps,
        )  # fmt: skip
        self.kv_saturated_total += int(counters[SATURATED])
        self.kv_nonfinite_total += int(counters[NONFINITE])
