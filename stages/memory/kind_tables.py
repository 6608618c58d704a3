"""The tables of the layers of one kind: those that keep all of a context, or those that keep what their window sees."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from deepinfer.stages.memory.prefix import PrefixTree

HOLE, PAST = -1, -2
"""In a table: what was here is on the host; it is not needed any more, because the window has left it."""


class Kind(NamedTuple):
    """Layers of a model that keep the same of a context."""

    rows: int = 1
    """Of the pool, in which they lie for the tokens of one block."""
    slides: bool = False
    """They have a window: what it has left is let go of."""


class KindTables:
    """Owned by the ledger, which hands out the rows. `rows` of them are a part, named by its first one: what the layers
    of this kind store of the tokens of one block. Whoever needs a part holds it; one that nobody holds is free, or
    idle if the prefix tree knows it.
    """

    def __init__(self, kind: Kind, num_rows: int, free: list[int], tree: PrefixTree | None) -> None:
        self.kind = kind
        self.tree = tree
        """None: nothing is shared. Where windows slide its nodes have no parents: any of them may be evicted."""
        self._free = free
        """The heap of free rows, which all kinds share."""
        self._tables: dict[int, list[int]] = {}
        self._holes: dict[int, int] = {}
        """How many of them a table has, if any."""
        self._past: dict[int, int] = {}
        """The same for places that are past."""
        self._references = [0] * num_rows
        """By the first row of a part."""
        self._further: dict[int, Sequence[int]] = {}
        """The rows of a part after its first one, if there are any."""

    @property
    def holders(self) -> int:
        return len(self._tables)

    @property
    def idle_rows(self) -> int:
        return 0 if self.tree is None else self.kind.rows * self.tree.num_idle

    def rows_of(self, part: int) -> list[int]:
        """None of a place that is empty."""
        return [part, *self._further.get(part, ())] if part >= 0 else []

    def has(self, rid: int) -> bool:
        return rid in self._tables

    def length(self, rid: int) -> int:
        """Places of its table."""
        return len(self._tables.get(rid, ()))

    def held_rows(self, rid: int) -> int:
        return self.kind.rows * (self.length(rid) - self._holes.get(rid, 0) - self._past.get(rid, 0))

    def parts(self, rid: int) -> list[int]:
        """Its table, in context order. A copy."""
        return list(self._tables.get(rid, ()))

    def row_tables(self, rid: int) -> list[list[int]]:
        """`rows` tables of a row each; HOLE and PAST where there is none."""
        table = self._tables.get(rid, [])
        if self.kind.rows == 1:
            return [list(table)]
        empty = {HOLE: [HOLE] * self.kind.rows, PAST: [PAST] * self.kind.rows}
        rows = [self.rows_of(part) if part >= 0 else empty[part] for part in table]
        return [[row[number] for row in rows] for number in range(self.kind.rows)]

    def exclusive(self, rid: int) -> list[bool | None]:
        """Of each place of its table, whether only it holds the part there; None where it has none."""
        references = self._references
        return [references[part] == 1 if part >= 0 else None for part in self._tables.get(rid, ())]

    def exclusive_rows(self, rid: int) -> int:
        """What becomes available when it lets go of everything."""
        return self.kind.rows * self.exclusive(rid).count(True)

    def exclusive_in_sight(self, rid: int) -> int:
        """Parts that only it holds. (It looks at none that are past.)"""
        references = self._references
        table = self._tables.get(rid, [])
        return sum(part >= 0 and references[part] == 1 for part in table[self._past.get(rid, 0) :])

    def shared_in_sight(self, rid: int) -> int:
        """Parts that others hold too."""
        references = self._references
        table = self._tables.get(rid, [])
        return sum(part >= 0 and references[part] > 1 for part in table[self._past.get(rid, 0) :])

    def is_shared(self, rid: int, place: int) -> bool:
        """False where the table ends before it."""
        table = self._tables.get(rid, ())
        return place < len(table) and self._references[table[place]] > 1

    # --- tables grow and shrink -------------------------------------------------------------------------------

    def begin(self, rid: int, past: int, parts: Iterable[int]) -> None:
        """A table of `past` places that are past, if windows slide, and of parts that others hold or the tree knows."""
        table = self._tables.setdefault(rid, [])
        if self.kind.slides and past:
            table.extend([PAST] * past)
            self._past[rid] = past
        for part in parts:
            self._take(part)
            table.append(part)

    def extend(self, rid: int, rows: Sequence[int]) -> None:
        self._tables.setdefault(rid, []).extend(self._made(rows))

    def holes(self, rid: int) -> int:
        return self._holes.get(rid, 0)

    def refill(self, rid: int, rows: Sequence[int]) -> None:
        """A part for every hole."""
        if self._holes.pop(rid, 0):
            made = iter(self._made(rows))
            table = self._tables[rid]
            table[:] = [next(made) if part == HOLE else part for part in table]

    def replace(self, rid: int, place: int, rows: Sequence[int]) -> list[tuple[int, int]]:
        """A part of its own in the place of a shared one: (shared, own) rows."""
        (own,) = self._made(rows)
        shared = self._tables[rid][place]
        self._tables[rid][place] = own
        pairs = list(zip(self.rows_of(shared), self.rows_of(own), strict=True))
        self._let_go(shared)
        return pairs

    def lift(self, rid: int, places: Iterable[int]) -> None:
        """Let go of what is there, and leave holes. The prefix tree forgets it and what follows it: whoever holds a
        part of the tree must hold all before it."""
        table = self._tables[rid]
        for place in places:
            part = table[place]
            if part < 0:
                continue
            if self.tree is not None and part in self.tree:
                for idle in self.tree.forget(part):
                    self._give_back(idle)
            table[place] = HOLE
            self._holes[rid] = self._holes.get(rid, 0) + 1
            self._let_go(part)

    def let_past(self, rid: int, until: int) -> None:
        """The request will not look at places before `until` again: it lets go of them."""
        table, first = self._tables[rid], self._past.get(rid, 0)
        for place in range(first, until):
            part = table[place]
            table[place] = PAST
            self._let_go(part)
        if until > first:
            self._past[rid] = until

    def release(self, rid: int) -> int:
        """Let go of everything. Idempotent; returns how many rows that were."""
        parts = [part for part in self._tables.pop(rid, []) if part >= 0]
        self._holes.pop(rid, None)
        self._past.pop(rid, None)
        # The end of a chain goes first, so that it is the first to be evicted.
        for part in reversed(parts):
            self._let_go(part)
        return self.kind.rows * len(parts)

    # --- the prefix tree --------------------------------------------------------------------------------------

    def saved_among(self, parts: Iterable[int]) -> int:
        """Rows of those that cost nothing to whoever begins with them, because somebody holds them. What slides must
        have two holders: a single one would not make room any more by letting go of it."""
        least = 2 if self.kind.slides else 1
        return self.kind.rows * sum(self._references[part] >= least for part in parts)

    def idle_among(self, parts: Iterable[int]) -> int:
        """How many of them nobody holds."""
        return sum(self._references[part] == 0 for part in parts)

    def filled(self, rid: int, place: int, key: bytes) -> bool:
        """See `BlockLedger.filled`."""
        if self.tree is None:
            return False
        table = self._tables[rid]
        own = table[place]
        before = None if self.kind.slides or place == 0 else table[place - 1]
        shared = self.tree.insert(key, before, own)
        if shared == own or self.kind.slides:
            return False  # What slides is let go of soon, and then each must get room for what it let go of.
        self._take(shared)
        table[place] = shared
        self._let_go(own)
        return True

    def is_known(self, rid: int, place: int) -> bool:
        return self.tree is not None and self._tables[rid][place] in self.tree

    def evict(self) -> None:
        """The least recently used idle part becomes free."""
        if self.tree is not None:
            self._give_back(self.tree.evict())

    # --- references -------------------------------------------------------------------------------------------

    def _made(self, rows: Sequence[int]) -> list[int]:
        """Parts of these rows, held once."""
        width = self.kind.rows
        parts = list(rows[::width])
        for number, part in enumerate(parts):
            self._references[part] = 1
            if width > 1:
                self._further[part] = rows[number * width + 1 : (number + 1) * width]
        return parts

    def _take(self, part: int) -> None:
        if self._references[part] == 0 and self.tree is not None:
            self.tree.hold(part)
        self._references[part] += 1

    def _let_go(self, part: int) -> None:
        self._references[part] -= 1
        if self._references[part]:
            return
        if self.tree is not None and part in self.tree:
            self.tree.let_go(part)
        else:
            self._give_back(part)

    def _give_back(self, part: int) -> None:
        for row in self.rows_of(part):
            heapq.heappush(self._free, row)
        self._further.pop(part, None)

    def audit(self) -> list[int]:
        """The rows of all parts that are held or idle. Raises ValueError if a part is not held as often as it is said
        to be, or if idle ones are counted wrongly."""
        holders: dict[int, int] = {}
        for table in self._tables.values():
            for part in table:
                if part >= 0:
                    holders[part] = holders.get(part, 0) + 1
        said = {part: count for part, count in enumerate(self._references) if count}
        if holders != said:
            wrong = sorted(part for part in {*holders, *said} if holders.get(part) != said.get(part))
            raise ValueError(f"blocks {wrong[:8]} do not have as many owners as they are said to have")
        idle = set(() if self.tree is None else self.tree.blocks()) - holders.keys()
        if self.kind.rows * len(idle) != self.idle_rows:
            raise ValueError(f"{len(idle)} parts are idle, the tree counts {self.idle_rows // self.kind.rows}")
        return [row for part in (*holders, *idle) for row in self.rows_of(part)]
