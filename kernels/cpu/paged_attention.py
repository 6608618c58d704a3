"""The fused paged attention of the CPU."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.attention import AttentionBatch, AttentionSpec
from deepinfer.kernels.codecs import BF16, FP32
from deepinfer.kernels.cpu import amx, attend, attend_pairs
from deepinfer.kernels.cpu.context import SEGMENT
from deepinfer.kernels.cpu.paged_kernel import NONFINITE, SATURATED, AttentionUnits, attention_units, multiplies_pairs
from deepinfer.kernels.cpu.plan import layer_plan
from deepinfer.kernels.cpu.tasks import Task, bits, recorder, run_tasks
from deepinfer.kernels.cpu.vec16 import LANES
from deepinfer.kernels.encoder_counts import EncoderCounts
from deepinfer.kernels.kv_formats import BlockLayout

BLOCK_SIZES = (8, 16, 32, 64, 128)
PARALLEL_SCORES = 2048
"""Products of a query and a key in a layer, from which on waking the other threads pays (about 15 us of
work)."""
_SPLIT_FROM, _UNITS_OF_WORKER = 2 * SEGMENT, 4
"""Contexts of so many tokens are split between threads where rows times KV heads are fewer than so many units each."""
_STATE_FLOATS = 4096
_ACTIVATIONS = {torch.float32: FP32, torch.bfloat16: BF16}


class _Workspace(NamedTuple):
    """What the layers of one forward pass share. `owner` is the attention that made it."""

    owner: NumbaAttention
    workers: int
    tiles: np.ndarray
    each_alone: bool
    queries: np.ndarray
    scratch: np.ndarray
    counters: np.ndarray
    """int64 [layers, 2]."""
    segments: int
    """Into how many contexts are split; 0: they are not."""
    states: np.ndarray
    rows: tuple[int, int]
    """POSITIONS and ROW_SEQ."""
    tables: tuple[int, ...]
    """TABLES of each group of layers."""
    arguments: tuple[int, ...]
    """Those that follow TABLES and do not change from layer to layer."""


def _aligned(rows: int, floats: int) -> np.ndarray:
    """fp32 [rows, floats], each row at a multiple of 64 bytes if `floats` is one of 16."""
    memory = np.empty(rows * floats + LANES, np.float32)
    skip = -memory.ctypes.data % (4 * LANES) // 4
    return memory[skip : skip + rows * floats].reshape(rows, floats)


class NumbaAttention(EncoderCounts):
    """See `PagedAttention`. Reads the stored bytes; a row's bits depend on its query and its context alone.

    Raises ValueError for a head_dim that is no multiple of 16 and for block sizes outside `BLOCK_SIZES`.
    """

    def __init__(self, spec: AttentionSpec, layout: BlockLayout, pool: Tensor, cos: Tensor, sin: Tensor) -> None:
        if spec.head_dim % LANES:
            raise ValueError(f"the numba attention needs a head_dim divisible by {LANES}, not {spec.head_dim}")
        if layout.block_size not in BLOCK_SIZES:
            raise ValueError(f"the numba attention has block sizes {BLOCK_SIZES}, not {layout.block_size}")
        super().__init__(spec.num_layers)
        self._spec, self._layout, self._pool = spec, layout, pool
        self._cos, self._sin = cos.contiguous(), sin.contiguous()
        self._plans = [layer_plan(layer, spec, layout, pool, self._cos, self._sin) for layer in range(spec.num_layers)]
        heads_at_once = spec.num_q_heads // spec.num_kv_heads
        self._tile_rows = max(1, min(16, _STATE_FLOATS // (heads_at_once * spec.head_dim)))
        rows = self._tile_rows * heads_at_once
        scratch = max(kind.scratch_bytes(spec.head_dim, rows) for kind in (attend, attend_pairs))
        self._scratch_floats = -(-scratch // (4 * LANES)) * LANES
        self._scale, self._eps = bits(spec.scale), bits(spec.rms_norm_eps)
        self._biased = tuple(spec.split_key_bias(layer) is not None for layer in range(spec.num_layers))
        pairs = sum(
            multiplies_pairs(layout.k, layout.v, BF16, spec.head_dim, biased, spec.soft_cap) for biased in self._biased
        )
        self._by_tiles = amx.available()
        by = " by AMX" if self._by_tiles else ""
        where = "" if pairs == spec.num_layers else f" in {pairs} of {spec.num_layers} layers"
        self.name = "numba fused paged" + (f", bf16 products{by} for bf16 activations{where}" if pairs else "")

    def forward(self, layer: int, qkv: Tensor, batch: AttentionBatch, out: Tensor) -> None:
        """See `PagedAttention.forward`."""
        work = batch.workspace
        if work is None or work.owner is not self:
            work = batch.workspace = self._prepare(batch)
        self._check_activations(qkv, out, batch.num_rows)
        units = self._units_of(layer, qkv.dtype)
        arguments = (
            *(self._plans[layer].ctypes.data, *work.rows, work.tables[self._layout.group_of(layer)], *work.arguments),
            *(batch.nonfinite_rows.ctypes.data, work.counters.ctypes.data + 16 * layer, qkv.data_ptr(), out.data_ptr()),
            *(work.queries.ctypes.data, work.scratch.ctypes.data, work.scratch.strides[0], self._scale, self._eps),
            work.states.ctypes.data,
        )
        attends = len(work.tiles) * self._spec.num_kv_heads
        if work.segments:
            parts = attends * work.segments
            tasks = [
                *(Task(units.write, batch.num_rows, arguments), Task(units.segment, parts, arguments)),
                Task(units.fold, attends, arguments),
            ]
        elif work.each_alone:
            tasks = [Task(units.decode, attends, arguments)]
        else:
            tasks = [Task(units.write, batch.num_rows, arguments), Task(units.attend, attends, arguments)]
        run_tasks(tasks, work.workers, batch, work, qkv, out)
        taker = recorder()
        if taker is None:
            self._note_counts(work)
        elif layer == self._spec.num_layers - 1:
            taker.afterwards(lambda: self._note_counts(work))

    def _note_counts(self, work: _Workspace) -> None:
        if work.counters.any():
            for layer in np.flatnonzero(work.counters.any(axis=1)):
                self.count(int(layer), int(work.counters[layer, SATURATED]), int(work.counters[layer, NONFINITE]))
            work.counters.fill(0)

    def _units_of(self, layer: int, dtype: torch.dtype) -> AttentionUnits:
        return attention_units(
            *(self._layout.k, self._layout.v, _ACTIVATIONS[dtype], self._spec.head_dim, self._biased[layer]),
            *(self._spec.soft_cap, self._spec.num_q_heads // self._spec.num_kv_heads, self._by_tiles),
        )

    def _prepare(self, batch: AttentionBatch) -> _Workspace:
        """Check a batch once and give it the memory that its layers share."""
        self.check(batch)
        row_floats = (self._spec.num_q_heads + self._spec.num_kv_heads) * self._spec.head_dim
        scores = int((batch.positions + 1).sum()) * self._spec.num_q_heads
        workers = numba.get_num_threads() if scores >= PARALLEL_SCORES or recorder() is not None else 1
        tiles = batch.row_tiles(self._tile_rows)
        segments = self.segments(batch) if batch.segments is None else batch.segments
        state_floats = attend_pairs.state_bytes(self._spec.head_dim) // 4
        states = _aligned(1 + batch.num_rows * self._spec.num_q_heads * segments, state_floats)
        states.view(np.int64)[0, 0] = segments
        return _Workspace(
            owner=self,
            workers=workers,
            tiles=tiles,
            each_alone=batch.num_seqs == batch.num_rows,
            queries=np.empty((batch.num_rows, row_floats), np.float32),
            scratch=_aligned(workers, self._scratch_floats),
            counters=np.zeros((self._spec.num_layers, 2), np.int64),
            segments=segments,
            states=states,
            rows=(batch.positions.ctypes.data, batch.row_seq.ctypes.data),
            tables=tuple(table.ctypes.data for table in batch.block_tables),
            arguments=(batch.table_width, tiles.ctypes.data),
        )

    def segments(self, batch: AttentionBatch) -> int:
        """Into how many segments the contexts of a decode step are split between threads: a power of two that is enough
        for the longest one; 0 where there are rows and heads enough for all threads, or contexts are short."""
        rows, longest = batch.num_rows, int(batch.positions.max(initial=0))
        few = rows * self._spec.num_kv_heads < _UNITS_OF_WORKER * numba.get_num_threads()
        if not few or longest < _SPLIT_FROM or batch.num_seqs != rows:
            return 0
        return 1 << (longest // SEGMENT).bit_length()

    @property
    def num_groups(self) -> int:
        """Block tables that a sequence has."""
        return self._layout.num_groups

    def check(self, batch: AttentionBatch) -> None:
        """Raises ValueError if a row would read or write where it must not."""
        batch.check(self._layout, len(self._pool), self._cos.shape[-2])

    def _check_activations(self, qkv: Tensor, out: Tensor, rows: int) -> None:
        spec = self._spec
        q_width, kv_width = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        if qkv.shape != (rows, q_width + 2 * kv_width) or out.shape != (rows, q_width):
            raise ValueError(f"qkv {tuple(qkv.shape)} and out {tuple(out.shape)} do not fit {rows} rows of {spec}")
        if qkv.dtype not in _ACTIVATIONS or out.dtype != qkv.dtype:
            raise ValueError(f"qkv and out must both be fp32 or bf16, not {qkv.dtype} and {out.dtype}")
        if not (qkv.is_contiguous() and out.is_contiguous()):
            raise ValueError("qkv and out must be contiguous")
