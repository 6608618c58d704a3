"""Paged attention through the CUDA kernels, on whatever back end runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.attention import AttentionSpec
from deepinfer.kernels.attention_batch import AttentionBatch
from deepinfer.kernels.cuda.attention_rows import AttentionRows, make_rows
from deepinfer.kernels.cuda.decode_plan import (
    MAX_CONTEXT,
    MERGE_SHARED_BYTES,
    THREADS,
    DecodePlan,
    most_partitions,
    num_partitions,
)
from deepinfer.kernels.cuda.kernel_table import compiled
from deepinfer.kernels.cuda.launcher import Backend
from deepinfer.kernels.cuda.prefill_plan import PrefillPlan, prefill_partitions
from deepinfer.kernels.kv_formats import BlockLayout

_ACTIVATION_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_WARPS_PER_WRITE = 4


_Tables = list[tuple[Tensor, Tensor] | None]


class _Kernels:
    """The compiled kernels of one activation type, for rows that are attended one by one or in tiles."""

    def __init__(
        self, backend: Backend, plan: DecodePlan, kind: int, spec: AttentionSpec, tables: _Tables, tiles: bool
    ) -> None:
        rotations = {layer_tables is not None for layer_tables in tables}
        norm = spec.qk_norm is not None
        self.write = {turns: compiled(backend, plan.write_source(kind, norm, turns)) for turns in rotations}
        """By whether the layer's queries and keys are rotated."""
        self.merge = compiled(backend, plan.merge_source(kind, tiles))
        splits = {spec.split_key_bias(layer) is not None for layer in range(spec.num_layers)}
        shapes = {split: replace(plan, key_bias=split) for split in splits}
        self.attend = {split: self._attend(backend, shape, tiles) for split, shape in shapes.items()}
        """By whether the layer's keys lack their bias: the kernel and its shared memory."""

    @staticmethod
    def _attend(backend: Backend, shape: DecodePlan, tiles: bool) -> tuple[Any, int]:
        if tiles:
            plan = PrefillPlan(shape)
            return compiled(backend, plan.source()), plan.shared_bytes
        return compiled(backend, shape.decode_source()), shape.shared_bytes


class CudaAttention:
    """See `PagedAttention`.

    Args:
        pool, cos, sin: on the back end's device.
        batch_invariant: every row is reduced as decode does it. Otherwise neighbouring rows of a sequence are attended
            in tiles, by another kernel and in another order, which does not depend on the batch or the chunk either.

    Raises ValueError for shapes and codecs that no kernel exists for, CompileError with the compiler's log.
    """

    def __init__(
        self,
        backend: Backend,
        spec: AttentionSpec,
        layout: BlockLayout,
        pool: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch_invariant: bool,
    ) -> None:
        group = spec.num_q_heads // spec.num_kv_heads
        self.plan = DecodePlan(layout.k, layout.v, spec.head_dim, group, layout.block_size, soft_cap=spec.soft_cap > 0)
        self._prefill = None if batch_invariant else PrefillPlan(self.plan)
        prompts = "row by row" if self._prefill is None else self._prefill.source().name
        self.name = f"{self.plan.decode_source().name}, prompts {prompts} ({backend.name})"
        self.spec, self._backend, self._layout = spec, backend, layout
        self._pool, self._positions = pool, cos.shape[-2]
        self._tables: _Tables = [spec.tables_of(layer, cos, sin) for layer in range(spec.num_layers)]
        """cos and sin of each layer, None where nothing is rotated."""
        self._no_table = cos, sin
        self._counters = torch.zeros(spec.num_layers, 2, dtype=torch.int32, device=backend.device)
        self._norms = [
            tuple(weight.to(backend.device, torch.float32).contiguous() for weight in pair)
            for pair in spec.qk_norm or [(cos.flatten()[:1], cos.flatten()[:1])] * spec.num_layers
        ]
        biases = [spec.split_key_bias(layer) for layer in range(spec.num_layers)]
        self._key_biases = [None if bias is None else bias.to(backend.device) for bias in biases]
        self._kernels: dict[tuple[torch.dtype, bool], _Kernels] = {}

    @property
    def kv_saturated_total(self) -> int:
        return int(self._counters[:, 0].sum())

    @property
    def kv_nonfinite_total(self) -> int:
        return int(self._counters[:, 1].sum())

    def kv_counts(self) -> list[tuple[int, int]]:
        """See `PagedAttention.kv_counts`. Waits for the device."""
        return [(saturated, nonfinite) for saturated, nonfinite in self._counters.tolist()]

    def forward(self, layer: int, qkv: Tensor, batch: AttentionBatch, out: Tensor) -> None:
        """See `PagedAttention.forward`; fp16 activations too. `qkv` and `out` are on the back end's device.

        A batch that comes without device buffers gets them here; one that has them can be captured in a graph.
        """
        self._check_rows(qkv, batch, out)
        if batch.num_rows == 0:
            return
        if batch.workspace is None:
            batch.workspace = self._prepare(batch)
            batch.device_flags = batch.workspace.nonfinite_rows
        workspace: AttentionRows = batch.workspace
        kernels = self._kernels_for(qkv.dtype, workspace.tiles is not None)
        self._write(kernels.write[self._tables[layer] is not None], layer, qkv, workspace)
        self._attend(kernels, layer, out, workspace)

    def check(self, batch: AttentionBatch) -> None:
        """Raises ValueError if a row would read or write outside its block table, the pool, or the RoPE tables."""
        batch.check(self._layout, len(self._pool), min(self._positions, MAX_CONTEXT))

    @property
    def num_groups(self) -> int:
        """Block tables that a sequence has."""
        return self._layout.num_groups

    def blocks_of(self, context: int) -> int:
        """Blocks that hold `context` tokens."""
        return -(-context // self._layout.block_size)

    def widest_partitions(self, context: int) -> dict[int, int]:
        """By window, the most partitions that any context of up to `context` tokens is cut into."""
        return {window: most_partitions(min(context, window or context)) for window in set(self.spec.windows)}

    def _check_rows(self, qkv: Tensor, batch: AttentionBatch, out: Tensor) -> None:
        spec, rows = self.spec, batch.num_rows
        want = (
            (rows, (spec.num_q_heads + 2 * spec.num_kv_heads) * spec.head_dim),
            (rows, spec.num_q_heads * spec.head_dim),
        )
        if (qkv.shape, out.shape) != want or qkv.dtype != out.dtype:
            got = f"{qkv.dtype} {tuple(qkv.shape)} and {out.dtype} {tuple(out.shape)}"
            raise ValueError(f"qkv and out must be of one type and {want[0]} and {want[1]}, not {got}")

    def _prepare(self, batch: AttentionBatch) -> AttentionRows:
        device = self._backend.device
        self.check(batch)
        prefill = self._prefill if self._prefill is not None and self._prefill.pays(batch) else None
        context = batch.positions.astype(np.int64) + 1
        if prefill is None:
            partitions = {
                window: int(num_partitions(np.minimum(context, window) if window else context).max())
                for window in set(self.spec.windows)
            }
        else:
            partitions = dict.fromkeys(self.spec.windows, int(prefill_partitions(batch.positions).max()))
        return make_rows(
            self.spec,
            torch.from_numpy(batch.positions).to(device),
            torch.from_numpy(batch.row_seq).to(device),
            torch.from_numpy(batch.block_tables).to(device),
            torch.zeros(batch.num_rows, dtype=torch.uint8, device=device),
            partitions,
            None if prefill is None else torch.from_numpy(prefill.tiles(batch)).to(device),
        )

    def _kernels_for(self, dtype: torch.dtype, tiles: bool) -> _Kernels:
        if (dtype, tiles) not in self._kernels:
            if dtype not in _ACTIVATION_KINDS:
                raise ValueError(f"activations of {dtype}: CUDA kernels take fp32, bf16 and fp16")
            kind = _ACTIVATION_KINDS[dtype]
            self._kernels[dtype, tiles] = _Kernels(self._backend, self.plan, kind, self.spec, self._tables, tiles)
        return self._kernels[dtype, tiles]

    def _write(self, kernel: Any, layer: int, qkv: Tensor, workspace: AttentionRows) -> None:
        spec = self.spec
        heads = spec.num_q_heads + 2 * spec.num_kv_heads
        self._backend.launch(
            kernel,
            (-(-heads // _WARPS_PER_WRITE), len(workspace.positions), 1),
            32 * _WARPS_PER_WRITE,
            0,
            self._pool,
            workspace.queries,
            self._counters[layer],
            workspace.nonfinite_rows,
            qkv,
            *(self._tables[layer] or self._no_table),
            *self._norms[layer],
            *self._places(layer, workspace),
            spec.num_q_heads,
            spec.num_kv_heads,
            float(spec.rms_norm_eps),
        )

    def _attend(self, kernels: _Kernels, layer: int, out: Tensor, workspace: AttentionRows) -> None:
        spec, window, rows = self.spec, self.spec.windows[layer], len(workspace.positions)
        partitions = workspace.max_partitions[window]
        partials = workspace.partial_sums, workspace.partial_softmax
        bias = self._key_biases[layer]
        kernel, shared_bytes = kernels.attend[bias is not None]
        tiles = workspace.tiles
        self._backend.launch(
            kernel,
            (partitions, spec.num_kv_heads, rows if tiles is None else len(tiles)),
            THREADS,
            shared_bytes,
            *partials,
            workspace.queries,
            self._pool,
            *(() if tiles is None else (tiles,)),
            *self._places(layer, workspace),
            window,
            float(spec.scale),
            self._no_table[0] if bias is None else bias,
            *(self._tables[layer] or self._no_table),
            float(spec.soft_cap),
        )
        self._backend.launch(
            kernels.merge,
            (spec.num_q_heads, rows, 1),
            THREADS,
            MERGE_SHARED_BYTES,
            out,
            *partials,
            workspace.positions,
            window,
            partitions,
        )

    def _places(self, layer: int, workspace: AttentionRows) -> tuple[Tensor | int, ...]:
        """Where the rows' blocks are and where `layer` lies in a block: the kernels' common parameters."""
        offsets = self._layout.layer_offsets(layer)
        table = workspace.block_tables[self._layout.group_of(layer)]
        rows = workspace.positions, workspace.row_seq
        return table, *rows, table.shape[1], self._layout.row_bytes, *offsets
