"""Who holds which block of the KV pool. Pure integers: no tensor is seen here."""

from __future__ import annotations

import heapq

import numpy as np


class LedgerError(RuntimeError):
    """The books do not add up: a bug, never a user's mistake."""


class BlockLedger:
    """Hands out block ids and takes them back. Owned by the decode stage; no other thread calls it.

    The lowest free ids go out first, so that the blocks of one request tend to be neighbours and a swap needs few
    copies. `release` is the only way back to the free list, whatever ended the residency, and doing it twice is
    harmless.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a pool needs at least one block")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._held: dict[int, list[int]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def holders(self) -> int:
        """Requests that hold blocks."""
        return len(self._held)

    def held(self, rid: int) -> int:
        return len(self._held.get(rid, ()))

    def blocks(self, rid: int) -> list[int]:
        """The block table of a request, in context order. A copy: the ledger's own list never leaves it."""
        return list(self._held.get(rid, ()))

    def grow(self, rid: int, count: int) -> list[int]:
        """Append `count` blocks to the table of `rid` and return the new ones.

        Raises LedgerError when fewer are free: the policy asks before it allocates.
        """
        if count > len(self._free):
            raise LedgerError(f"request {rid} was given {count} blocks of {len(self._free)} free ones")
        new = [heapq.heappop(self._free) for _ in range(count)]
        self._held.setdefault(rid, []).extend(new)
        return new

    def release(self, rid: int) -> int:
        """Give back every block of `rid`. Idempotent; returns how many came back."""
        blocks = self._held.pop(rid, [])
        for block in blocks:
            heapq.heappush(self._free, block)
        return len(blocks)

    def audit(self) -> None:
        """Raise LedgerError unless every block has exactly one owner: the free list or one request."""
        owners = np.zeros(self.num_blocks, dtype=np.int64)
        for blocks in (self._free, *self._held.values()):
            for block in blocks:
                owners[block] += 1
        wrong = np.flatnonzero(owners != 1)
        if wrong.size:
            raise LedgerError(f"blocks {wrong[:8].tolist()} have {owners[wrong[:8]].tolist()} owners instead of one")
