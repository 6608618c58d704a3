"""Host memory for swapped requests: rows as long as a block of the pool, allocated in pieces at start."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from deepinfer.stages.memory.free_rows import FreeRows

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Copy:
    """`count` neighbouring pool rows from `block` on, and as many neighbouring arena rows from `row` on."""

    block: int
    row: int
    count: int

    def part(self, first: int, count: int) -> Copy:
        """`count` rows of it, after the first `first`."""
        return Copy(self.block + first, self.row + first, count)


class HostArena:
    """Owned by the offload stage. Rows are handed out to payloads and come back when the payload is dropped.

    The budget is a number of rows that was fixed at start, so use can never exceed it; a budget of 0 is legal and means
    that every swap is rejected. With `pin` the pieces are pinned, which a GPU copies faster, until the system refuses
    one: that one and those after it are pageable, the log says why, and `pinned` is false.
    """

    def __init__(self, budget_bytes: int, row_bytes: int, pin: bool = False) -> None:
        self.row_bytes = row_bytes
        self.budget_bytes = budget_bytes
        self.num_rows = max(0, budget_bytes) // row_bytes
        self.rows_per_piece = max(1, PIECE_BYTES // row_bytes)
        self.pinned = pin
        self._pieces = [
            self._piece(min(self.rows_per_piece, self.num_rows - first))
            for first in range(0, self.num_rows, self.rows_per_piece)
        ]
        self._free = FreeRows(self.num_rows, self.rows_per_piece)

    def _piece(self, rows: int) -> torch.Tensor:
        """uint8 [rows, row_bytes]."""
        if self.pinned:
            try:
                return torch.empty((rows, self.row_bytes), dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self.pinned = False
                logger.warning("host memory for swapped requests is not pinned: %s", error)
        return torch.empty((rows, self.row_bytes), dtype=torch.uint8)

    @property
    def free_rows(self) -> int:
        return self._free.count

    @property
    def used_bytes(self) -> int:
        return (self.num_rows - self._free.count) * self.row_bytes

    def take(self, count: int) -> list[int] | None:
        """`count` rows, ascending, or None when the budget does not hold them."""
        return self._free.take(count) if count <= self._free.count else None

    def give_back(self, rows: list[int]) -> None:
        self._free.give_back(rows)

    def plan(self, blocks: list[int], rows: list[int]) -> list[Copy]:
        """One copy per run of rows that are neighbours on both sides and lie in one piece."""
        copies: list[Copy] = []
        first_block = first_row = count = 0
        for block, row in zip(blocks, rows, strict=True):
            if block == first_block + count and row == first_row + count and row % self.rows_per_piece and count:
                count += 1
                continue
            if count:
                copies.append(Copy(first_block, first_row, count))
            first_block, first_row, count = block, row, 1
        return [*copies, Copy(first_block, first_row, count)] if count else copies

    def view(self, copy: Copy) -> torch.Tensor:
        """uint8 [copy.count, row_bytes] of the arena."""
        piece, first = divmod(copy.row, self.rows_per_piece)
        return self._pieces[piece][first : first + copy.count]
