"""Who holds which block of the KV pool. Pure integers: no tensor is seen here."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from deepinfer.stages.memory.prefix import PrefixTree

HOLE, PAST = -1, -2
"""In a table: this block is on the host; this one is not needed any more, because every layer's window has left it."""


class LedgerError(RuntimeError):
    """The books do not add up: a bug, never a user's mistake."""


class BlockLedger:
    """Hands out block ids and takes them back. Owned by the decode stage; no other thread calls it.

    A block is free, or held by one or more requests, or idle: filled, known to the prefix tree, held by nobody, and
    evicted when it is needed. The lowest free ids go out first, so that the blocks of one request tend to be neighbours
    and a swap needs few copies. `release` is the only way back, whatever ended the residency, and doing it twice is
    harmless.
    """

    def __init__(self, num_blocks: int, tree: PrefixTree | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a pool needs at least one block")
        self.num_blocks = num_blocks
        self.tree = tree
        """None: nothing is shared."""
        self._free = list(range(num_blocks))
        self._held: dict[int, list[int]] = {}
        self._holes: dict[int, int] = {}
        """How many of them a table has, if any."""
        self._past: dict[int, int] = {}
        """The same for places that are past."""
        self._references = [0] * num_blocks

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def idle(self) -> int:
        return 0 if self.tree is None else self.tree.num_idle

    @property
    def available(self) -> int:
        """Blocks that can be handed out: free ones and idle ones."""
        return len(self._free) + self.idle

    @property
    def used(self) -> int:
        return self.num_blocks - self.available

    def past(self, rid: int) -> int:
        """Places at the beginning of its table that nobody will look at again."""
        return self._past.get(rid, 0)

    def covered(self, rid: int) -> int:
        """Places of its table that need no block: it has one, or will not look there again."""
        return self.held(rid) + self.past(rid)

    @property
    def holders(self) -> int:
        """Requests that hold blocks."""
        return len(self._held)

    def held(self, rid: int) -> int:
        return len(self._held.get(rid, ())) - self._holes.get(rid, 0) - self.past(rid)

    def exclusive(self, rid: int) -> int:
        """Blocks that become available when `rid` lets go of them: those that no other request holds."""
        return len(self.exclusive_indices(rid))

    def exclusive_indices(self, rid: int) -> list[int]:
        """Their places in the table of `rid`, ascending."""
        table = self._held.get(rid, ())
        return [index for index, block in enumerate(table) if block >= 0 and self._references[block] == 1]

    def blocks(self, rid: int) -> list[int]:
        """The block table of a request, in context order, with a HOLE for every block that was lifted out of it, and
        PAST for those that it let go of because they are past. A copy: the ledger's own list never leaves it."""
        return list(self._held.get(rid, ()))

    def block(self, rid: int, index: int) -> int:
        return self._held[rid][index]

    def grow(self, rid: int, count: int) -> list[int]:
        """Append `count` blocks to the table of `rid` and return the new ones; idle blocks are evicted for them.

        Raises LedgerError when fewer are available: the policy asks before it allocates.
        """
        new = self._allocate(rid, count)
        self._held.setdefault(rid, []).extend(new)
        return new

    def lift(self, rid: int, indices: Sequence[int]) -> None:
        """Let go of these blocks of a table, and leave holes. The prefix tree forgets them and what follows them:
        whoever holds a block of the tree must hold all before it."""
        table = self._held[rid]
        for index in indices:
            block = table[index]
            if self.tree is not None and block in self.tree:
                for idle in self.tree.forget(block):
                    heapq.heappush(self._free, idle)
            table[index] = HOLE
            self._let_go(block)
        self._holes[rid] = self._holes.get(rid, 0) + len(indices)

    def refill(self, rid: int) -> None:
        """A new block for every hole. Raises LedgerError when fewer are available."""
        new = iter(self._allocate(rid, self._holes.pop(rid, 0)))
        table = self._held.get(rid, [])
        table[:] = [next(new) if block == HOLE else block for block in table]

    def let_past(self, rid: int, until: int) -> int:
        """Nobody will look at places before `until` of the table again: let go of their blocks, up to the first one
        that others hold too. The tree forgets them and what follows them. Returns how many blocks that were."""
        table, first = self._held[rid], self.past(rid)
        place = first
        while place < min(until, len(table)) and self._references[table[place]] == 1:
            self.lift(rid, [place])
            table[place] = PAST
            place += 1
        if place > first:
            self._holes[rid] -= place - first
            self._past[rid] = place
        return place - first

    def begin_past(self, rid: int, count: int) -> None:
        """An empty table begins with `count` places that are past."""
        if count:
            self._held[rid] = [PAST] * count
            self._past[rid] = count

    def _allocate(self, rid: int, count: int) -> list[int]:
        if count > self.available:
            raise LedgerError(f"request {rid} was given {count} blocks of {self.available} available ones")
        while len(self._free) < count and self.tree is not None:
            heapq.heappush(self._free, self.tree.evict())
        new = [heapq.heappop(self._free) for _ in range(count)]
        for block in new:
            self._references[block] = 1
        return new

    def share(self, rid: int, blocks: Sequence[int]) -> None:
        """Begin the table of `rid` with blocks that the tree knows."""
        table = self._held.setdefault(rid, [])
        for block in blocks:
            self._take(block)
            table.append(block)

    def is_shared(self, rid: int, index: int) -> bool:
        """Whether others hold block `index` of `rid` too; False where the table ends before it."""
        table = self._held.get(rid, ())
        return index < len(table) and self._references[table[index]] > 1

    def unshare(self, rid: int, index: int) -> tuple[int, int]:
        """Put a new block in the place of a shared one. Returns (shared, new): the bytes are to be copied before
        anybody writes to either. Raises LedgerError when no block is available."""
        (new,) = self.grow(rid, 1)
        table = self._held[rid]
        table.pop()
        shared, table[index] = table[index], new
        self._let_go(shared)
        return shared, new

    def idle_among(self, blocks: Sequence[int]) -> int:
        """How many of these nobody holds: sharing them makes them unavailable."""
        return sum(self._references[block] == 0 for block in blocks)

    def filled(self, rid: int, index: int, key: bytes) -> bool:
        """Block `index` of `rid` is full, and `key` says of what. True when its table changed: an equal block was there
        first, the request uses that one from now on, and its own is free."""
        if self.tree is None:
            return False
        table = self._held[rid]
        own = table[index]
        shared = self.tree.insert(key, table[index - 1] if index else None, own)
        if shared == own:
            return False
        self._take(shared)
        table[index] = shared
        self._let_go(own)
        return True

    def release(self, rid: int) -> int:
        """Let go of every block of `rid`. Idempotent; returns how many there were."""
        blocks = [block for block in self._held.pop(rid, []) if block >= 0]
        self._holes.pop(rid, None)
        self._past.pop(rid, None)
        # The end of a chain goes first, so that it is the first to be evicted.
        for block in reversed(blocks):
            self._let_go(block)
        return len(blocks)

    def _take(self, block: int) -> None:
        if self._references[block] == 0 and self.tree is not None:
            self.tree.hold(block)
        self._references[block] += 1

    def _let_go(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        if self.tree is not None and block in self.tree:
            self.tree.let_go(block)
        else:
            heapq.heappush(self._free, block)

    def audit(self) -> None:
        """Raise LedgerError unless every block is free, or held as often as its references say, or idle in the tree."""
        holders = np.zeros(self.num_blocks, dtype=np.int64)
        for blocks in self._held.values():
            for block in blocks:
                if block >= 0:
                    holders[block] += 1
        free = np.zeros(self.num_blocks, dtype=np.int64)
        for block in self._free:
            free[block] += 1
        known = np.zeros(self.num_blocks, dtype=bool)
        known[self.tree.blocks() if self.tree is not None else []] = True
        idle = known & (holders == 0)
        owners = (holders > 0).astype(np.int64) + free + idle
        wrong = np.flatnonzero((owners != 1) | (holders != np.array(self._references)))
        if wrong.size:
            raise LedgerError(f"blocks {wrong[:8].tolist()} have {owners[wrong[:8]].tolist()} kinds of owners, not one")
        if int(idle.sum()) != self.idle:
            raise LedgerError(f"{int(idle.sum())} blocks are idle, the tree counts {self.idle}")
