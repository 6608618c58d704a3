"""The rows of one forward pass, as attention sees them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from deepinfer.kernels.kv_formats import BlockLayout


class AttentionBatch:
    """The rows of one forward pass and where their contexts lie. One object serves all layers of the pass.

    Args (numpy arrays or CPU tensors; kept as contiguous int32 numpy arrays):
        positions: [N], position of each row's token; row i attends to positions[i] + 1 tokens.
        row_seq: [N], the row of `block_tables` that holds row i's context.
        block_tables: [groups, S, max_blocks], or [S, max_blocks] of the only group: rows of the pool in the order of
            the context, for each group of layers of the layout. Entries past the context are not read.
        seq_starts: [S + 1], rows of sequence s are seq_starts[s] .. seq_starts[s + 1], positions ascending by
            one.

    """

    def __init__(
        self, positions: ArrayLike, row_seq: ArrayLike, block_tables: ArrayLike, seq_starts: ArrayLike
    ) -> None:
        self.positions = np.ascontiguousarray(positions, dtype=np.int32)
        self.row_seq = np.ascontiguousarray(row_seq, dtype=np.int32)
        self.block_tables = np.ascontiguousarray(block_tables, dtype=np.int32)
        self.seq_starts = np.ascontiguousarray(seq_starts, dtype=np.int32)
        num_rows = len(self.positions)
        if self.block_tables.ndim == 2:
            self.block_tables = self.block_tables[None]
        if self.row_seq.shape != (num_rows,) or self.block_tables.ndim != 3:
            raise ValueError(f"row_seq {self.row_seq.shape} and block_tables {self.block_tables.shape} do not fit")
        if len(self.seq_starts) != self.num_seqs + 1 or self.seq_starts[-1] != num_rows:
            raise ValueError(f"seq_starts {self.seq_starts.tolist()} do not span {num_rows} rows")
        self._nonfinite_rows = np.zeros(num_rows, dtype=np.bool_)
        self.device_flags: Tensor | None = None
        """uint8 [N], where another device keeps `nonfinite_rows`."""
        self.segments: int | None = None
        """Into how many contexts are split between threads, where a step is recorded for other positions than these.
        None: whatever suits the positions."""
        self.workspace: Any = None
        """Kept by the attention that the batch is passed to, for the layers that follow."""

    @property
    def nonfinite_rows(self) -> np.ndarray:
        """bool [N]: which rows had NaN or infinite keys or values in any layer: these were stored as 0, and the request
        must end. To be read after the pass; waits for the device."""
        if self.device_flags is not None:
            self._nonfinite_rows |= self.device_flags.cpu().numpy().astype(np.bool_)
        return self._nonfinite_rows

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    @property
    def num_seqs(self) -> int:
        return self.block_tables.shape[1]

    @property
    def table_width(self) -> int:
        """Blocks of a context that the tables have entries for."""
        return self.block_tables.shape[2]

    def row_tiles(self, max_rows: int) -> np.ndarray:
        """int32 [T, 2]: first and last + 1 row of each piece of at most `max_rows` rows of one sequence."""
        starts = self.seq_starts.tolist()
        pieces = [
            (first, min(first + max_rows, end))
            for start, end in itertools.pairwise(starts)
            for first in range(start, end, max_rows)
        ]
        return np.array(pieces, dtype=np.int32).reshape(-1, 2)

    def check(self, layout: BlockLayout, num_rows: int, max_positions: int) -> None:
        """Raise ValueError if a row would read or write outside its block tables, the pool, or the RoPE
        tables.

        Compiled kernels trust the addresses that they compute from these numbers.
        """
        counts = np.diff(self.seq_starts)
        if (counts < 0).any() or not np.array_equal(self.row_seq, np.repeat(np.arange(len(counts)), counts)):
            raise ValueError(f"row_seq {self.row_seq.tolist()} is not what seq_starts {self.seq_starts.tolist()} say")
        if len(self.block_tables) != layout.num_groups:
            given = len(self.block_tables)
            raise ValueError(f"{given} groups of block tables for {layout.num_groups} groups of layers")
        if self.num_rows == 0:
            return
        limit = min(max_positions, self.table_width * layout.block_size)
        low, high = int(self.positions.min()), int(self.positions.max())
        if low < 0 or high >= limit:
            raise ValueError(f"positions {low} .. {high} are outside 0 .. {limit - 1}")
        used = np.zeros(len(counts), dtype=np.int32)
        np.maximum.at(used, self.row_seq, self.positions // layout.block_size + 1)
        ids = self.block_tables[:, np.arange(self.table_width) < used[:, None]]
        if int(ids.min()) < 0 or int(ids.max()) >= num_rows:
            raise ValueError(f"block ids {ids.min()} .. {ids.max()} are outside the pool's 0 .. {num_rows - 1}")
