"""Who holds which rows of the KV pool. Pure integers: no tensor is seen here."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from deepinfer.stages.memory.kind_tables import Kind, KindTables
from deepinfer.stages.memory.prefix import PrefixTree


class LedgerError(RuntimeError):
    """The books do not add up: a bug, never a user's mistake."""


class Match(NamedTuple):
    """What the prefix trees know of a context."""

    blocks: int
    """Of its beginning."""
    past: int
    """So many of them lie before what a window sees at their end."""
    parts: tuple[list[int], ...]
    """By kind, in context order; of those that slide without what is past."""


NO_MATCH = Match(0, 0, ())


class BlockLedger:
    """Hands out rows and takes them back. Owned by the decode stage; no other thread calls it.

    A row is free, or part of what one or more requests hold, or idle: filled, known to a prefix tree, held by nobody,
    and evicted when it is needed. Every kind of layers has tables of its own; all take their rows from here, and a
    context has the same places in all of them. The lowest free rows go out first, so that those of one request tend to
    be neighbours and a swap needs few copies. `release` is the only way back, whatever ended the residency, and doing
    it twice is harmless.
    """

    def __init__(self, num_rows: int, tree: PrefixTree | None = None, kinds: Sequence[Kind] = (Kind(),)) -> None:
        """`tree`: of the first kind; the others get their own. None: nothing is shared."""
        if num_rows < 1:
            raise ValueError(f"num_rows is {num_rows}; a pool needs at least one row")
        self.num_rows = num_rows
        self.tree = tree
        self._free = list(range(num_rows))
        trees = [tree, *(None if tree is None else PrefixTree(tree.clock) for _ in kinds[1:])]
        self.kinds = [KindTables(kind, num_rows, self._free, own) for kind, own in zip(kinds, trees, strict=True)]
        self.rows_per_block = sum(kind.rows for kind in kinds)
        self.sliding = next((tables for tables in self.kinds if tables.kind.slides), None)
        """The tables of layers that slide, of which there is one kind at most."""
        self.all_slide = all(kind.slides for kind in kinds)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def idle(self) -> int:
        return sum(tables.idle_rows for tables in self.kinds)

    @property
    def available(self) -> int:
        """Rows that can be handed out: free ones and idle ones."""
        return len(self._free) + self.idle

    @property
    def used(self) -> int:
        return self.num_rows - self.available

    @property
    def holders(self) -> int:
        """Requests that have a table."""
        return self.kinds[0].holders

    def holds(self, rid: int) -> bool:
        """Whether it has tables, though there may be nothing in them yet."""
        return self.kinds[0].has(rid)

    def length(self, rid: int) -> int:
        """Places that all its tables have, whatever is there. Those of layers that slide end earlier while a prompt is
        computed."""
        length = self.kinds[0].length(rid)
        return length if self.sliding is None else min(length, self.sliding.length(rid))

    def missing(self, rid: int, length: int) -> int:
        """Rows that `grow` would take."""
        return sum(tables.kind.rows * max(0, length - tables.length(rid)) for tables in self.kinds)

    def held(self, rid: int) -> int:
        return sum(tables.held_rows(rid) for tables in self.kinds)

    def exclusive(self, rid: int) -> int:
        """Rows that become available when `rid` lets go of them: those that no other request holds."""
        return sum(tables.exclusive_rows(rid) for tables in self.kinds)

    def exclusive_places(self, rid: int) -> dict[int, int]:
        """Places of which it shares nothing, ascending, and how many rows it has there."""
        by_kind = [(tables.kind.rows, tables.exclusive(rid)) for tables in self.kinds]
        places = {}
        for place in range(self.length(rid)):
            if not any(exclusive[place] is False for _, exclusive in by_kind):
                rows = sum(rows for rows, exclusive in by_kind if exclusive[place])
                if rows:
                    places[place] = rows
        return places

    def rows_of(self, blocks: int, sliding: range) -> int:
        """Rows of so many blocks of a context, and in layers that slide those of the places `sliding` only."""
        return sum(tables.kind.rows * (len(sliding) if tables.kind.slides else blocks) for tables in self.kinds)

    def tables(self, rid: int) -> list[list[int]]:
        """For each group of layers the rows of a request in context order, with HOLE for what was lifted out of it, and
        PAST for what it let go of because it is past; as long as `length`. Copies."""
        length = self.length(rid)
        return [table[:length] for tables in self.kinds for table in tables.row_tables(rid)]

    def rows_at(self, rid: int, places: Sequence[int]) -> list[int]:
        """All rows that it has in these places, place after place."""
        by_kind = [(tables, tables.parts(rid)) for tables in self.kinds]
        return [row for place in places for tables, parts in by_kind for row in tables.rows_of(parts[place])]

    # --- tables grow and shrink -------------------------------------------------------------------------------

    def begin(self, rid: int, past: int, known: Match = NO_MATCH) -> None:
        """Empty tables begin with places that are past, where windows slide, and with what the trees know."""
        for tables, parts in zip(self.kinds, known.parts or [()] * len(self.kinds), strict=True):
            tables.begin(rid, past, parts)

    def fork(self, rid: int, fork: int, places: int, past: int) -> None:
        """The tables of `fork` begin with the first places of those of `rid`, of which `past` are past."""
        for tables in self.kinds:
            tables.begin(fork, past, tables.parts(rid)[past if tables.kind.slides else 0 : places])

    def grow(self, rid: int, length: int, sliding: int | None = None) -> list[int]:
        """Make the tables of `rid` so many places long, if they are shorter, and those of layers that slide `sliding`
        places where that is given. Returns the new rows. Idle ones are evicted for them.

        Raises LedgerError when fewer are available: the policy asks before it allocates.
        """
        new: list[int] = []
        for tables in self.kinds:
            places = length if sliding is None or not tables.kind.slides else sliding
            rows = self._allocate(rid, tables.kind.rows * max(0, places - tables.length(rid)))
            tables.extend(rid, rows)
            new += rows
        return new

    def lift(self, rid: int, places: Sequence[int]) -> None:
        """Let go of what is in these places, and leave holes. See `KindTables.lift`."""
        for tables in self.kinds:
            tables.lift(rid, places)

    def refill(self, rid: int) -> None:
        """New rows for every hole. Raises LedgerError when fewer are available."""
        for tables in self.kinds:
            tables.refill(rid, self._allocate(rid, tables.kind.rows * tables.holes(rid)))

    def let_past(self, rid: int, until: int) -> None:
        """The windows of `rid` have left the places before `until`: it lets go of what sliding layers have there."""
        for tables in self.kinds:
            if tables.kind.slides:
                tables.let_past(rid, until)

    def _allocate(self, rid: int, count: int) -> list[int]:
        if count > self.available:
            raise LedgerError(f"request {rid} was given {count} blocks of {self.available} available ones")
        while len(self._free) < count:
            self._evict()
        return [heapq.heappop(self._free) for _ in range(count)]

    def _evict(self) -> None:
        """What was used least recently, of all kinds."""
        ages = {tables.tree.oldest(): tables for tables in self.kinds if tables.tree is not None}
        ages[min(age for age in ages if age is not None)].evict()

    def shared_rows(self, rid: int, place: int) -> int:
        """Rows that `rid` has there and others hold too; none where the tables end before it."""
        rows = 0
        for tables in self.kinds:
            if tables.is_shared(rid, place):
                rows += tables.kind.rows
        return rows

    def unshare(self, rid: int, place: int) -> list[tuple[int, int]]:
        """Put new rows in the place of shared ones. Returns (shared, new): the bytes are to be copied before anybody
        writes to either. Raises LedgerError when too few are available."""
        pairs = []
        for tables in self.kinds:
            if tables.is_shared(rid, place):
                pairs += tables.replace(rid, place, self._allocate(rid, tables.kind.rows))
        return pairs

    def release(self, rid: int) -> int:
        """Let go of everything that `rid` has. Idempotent; returns how many rows there were."""
        return sum(tables.release(rid) for tables in self.kinds)

    # --- prefixes ---------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes], first_seen: Callable[[int], int]) -> Match:
        """The longest known beginning of a context with these keys.

        Layers that keep everything must know all its blocks; those that slide only what their window sees at its end,
        which begins with block `first_seen(blocks)`.
        """
        trees = [(tables.kind.slides, tables.tree) for tables in self.kinds if tables.tree is not None]
        if not trees:
            return NO_MATCH
        most = min((len(tree.match(keys)) for slides, tree in trees if not slides), default=len(keys))
        sliding = [tree for slides, tree in trees if slides]
        blocks, past = (0, 0) if sliding else (most, 0)
        gap = 0  # what slides is known from here on
        for count, key in enumerate(keys[:most] if sliding else (), 1):
            if any(not tree.knows(key) for tree in sliding):
                gap = count
            if gap <= first_seen(count):
                blocks, past = count, first_seen(count)
        parts = (tree.known(keys[past if slides else 0 : blocks]) for slides, tree in trees)
        return Match(blocks, past, tuple(parts))

    def saved(self, known: Match) -> int:
        """Rows that need not become unavailable when somebody begins with these, because others hold them."""
        return sum(tables.saved_among(parts) for tables, parts in zip(self.kinds, known.parts, strict=False))

    def idle_sliding(self, known: Match) -> int:
        """Parts of layers that slide among these which nobody holds."""
        by_kind = zip(self.kinds, known.parts, strict=False)
        return sum(tables.idle_among(parts) for tables, parts in by_kind if tables.kind.slides)

    def filled(self, rid: int, place: int, key: bytes) -> bool:
        """What `rid` has in this place is full, and `key` says of what. True when its tables changed: equal rows were
        there first, the request uses those from now on, and its own are free."""
        changed = False
        for tables in self.kinds:
            changed |= tables.filled(rid, place, key)
            if not tables.is_known(rid, place):
                break  # A chain that is not continued here cannot be found: what slides need not be known either.
        return changed

    def audit(self) -> None:
        """Raise LedgerError unless every row is free, or held as often as its references say, or idle in a tree."""
        owners = Counter(self._free)
        for tables in self.kinds:
            try:
                owners.update(tables.audit())
            except ValueError as error:
                raise LedgerError(str(error)) from error
        wrong = [row for row in range(self.num_rows) if owners[row] != 1]
        if wrong or len(owners) != self.num_rows:
            raise LedgerError(f"rows {wrong[:8]} have {[owners[row] for row in wrong[:8]]} kinds of owners, not one")
