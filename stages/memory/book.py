"""What the residency policy knows: its requests, the blocks that they hold, and what each of them would need."""

from __future__ import annotations

from deepinfer.stages.memory.entries import IN_TRANSFER, RUNNING, Entry, ResidencyConfig, State
from deepinfer.stages.memory.ledger import NO_MATCH, BlockLedger, Match
from deepinfer.stages.memory.sizes import blocks_for, first_seen, most_seen


class Book:
    """Owned by the policy, which changes it. Methods only look. What somebody needs or gives is counted in rows of the
    pool; a block of a context takes a row for each group of layers.

    Layers that slide are given blocks of a prompt chunk by chunk, and let go of those behind. So that they always get
    the next ones, as many rows as they may still come to hold stay available for them: they are reserved.
    """

    def __init__(self, ledger: BlockLedger, block_size: int, config: ResidencyConfig) -> None:
        self.ledger = ledger
        self.block_size = block_size
        self.entries: dict[int, Entry] = {}
        self.followers: dict[int, list[Entry]] = {}
        """Forks that wait for the prompt of this request."""
        self.claimant: int | None = None
        """The one for whom others are moving out: what they leave is its, not theirs."""
        self._window = config.window
        self._max_parks = config.max_parks
        self._chunk = config.largest_chunk

    # --- who is where -----------------------------------------------------------------------------------------

    def in_state(self, *states: State) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.state in states and not entry.ended]

    def outside(self) -> list[Entry]:
        """Those that want to come in."""
        return [entry for entry in self.in_state(State.SWAPPED, State.WAITING) if entry.leader is None]

    def queue_order(self, entry: Entry) -> tuple[bool, int, bool, int, int]:
        """The claimant, then by priority; parked ones before newcomers, which go by their turns; then by arrival."""
        turn = 0 if entry.parks else entry.turn
        return (entry.rid != self.claimant, -entry.priority, entry.parks == 0, turn, entry.arrival)

    def residents(self) -> int:
        """Requests that hold blocks and are not parked."""
        return self.ledger.holders - sum(self.ledger.held(e.rid) > 0 for e in self.in_state(State.SWAPPED))

    def expected_forks(self) -> int:
        """They will hold blocks as soon as a prompt that is being computed is stored."""
        return sum(len(forks) for rid, forks in self.followers.items() if self.ledger.holds(rid))

    def leaving(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.ended or entry.state is State.SWAPPING_OUT]

    def nothing_runs(self) -> bool:
        return not self.in_state(*RUNNING, *IN_TRANSFER) and not any(entry.ended for entry in self.entries.values())

    # --- who needs what ---------------------------------------------------------------------------------------

    def first_seen(self, cached: int) -> int:
        """The first block that is read for the token after `cached` stored ones, or for any later one, by layers that
        slide."""
        return first_seen(cached, self._window, self.block_size)

    def stays(self, entry: Entry) -> bool:
        """It was preempted so often that it comes back for good."""
        return entry.parks >= self._max_parks

    def wanted(self, entry: Entry) -> int:
        """Blocks that a request needs to come in: what it has stored or must store, and its next token.

        Once it stays for good it is everything it may ever need: from then on it never asks again.
        """
        if self.stays(entry):
            return blocks_for(entry.total, self.block_size)
        stored = entry.length if entry.state is State.WAITING else max(entry.cached, entry.target)
        return blocks_for(min(stored + 1, entry.total), self.block_size)

    def known(self, entry: Entry) -> Match:
        """What a request which has nothing stored can begin with. At least one token is left to compute: somebody must
        produce the logits. (A swapped one comes back with blocks of its own.)"""
        if entry.state is not State.WAITING or self.ledger.tree is None:
            return NO_MATCH
        keys = entry.keys[: (entry.length - 1) // self.block_size]
        return self.ledger.match(keys, lambda blocks: self.first_seen(blocks * self.block_size))

    def begun(self, entry: Entry, known: Match) -> range:
        """Places that layers which slide have when it comes in: in the middle of a prompt those that are stored."""
        if entry.state is State.WAITING:
            return range(known.past, known.blocks)
        places = self.needed(entry) if entry.phase is State.DECODE else blocks_for(entry.cached, self.block_size)
        return range(entry.past, places)

    def cost(self, entry: Entry) -> int:
        """Available rows that bringing it in uses up or reserves: those that others hold already cost nothing."""
        known = self.known(entry)
        begun = self.begun(entry, known)
        rows = self.ledger.rows_of(self.wanted(entry), begun) - self.ledger.held(entry.rid) - self.ledger.saved(known)
        if self.ledger.sliding is None:
            return rows
        if entry.state is State.WAITING:
            own = self.ledger.idle_sliding(known)
        else:
            own = len(begun) - self.ledger.sliding.shared_in_sight(entry.rid)
        return rows + self._in_front(entry, begun.stop, own)

    # --- what is reserved -------------------------------------------------------------------------------------

    def reserved(self, entry: Entry) -> int:
        """Rows that stay available for layers of it that slide: for the rest of its prompt, and if it stays for good,
        of its answer."""
        sliding = self.ledger.sliding
        if sliding is None or entry.ended or entry.state in (State.WAITING, State.SWAPPED):
            return 0
        if entry.state is State.SWAPPING_OUT and entry.phase is State.DECODE:
            return 0  # If it goes on after all, it grows as others do.
        return self._in_front(entry, sliding.length(entry.rid), sliding.exclusive_in_sight(entry.rid))

    def _in_front(self, entry: Entry, places: int, own: int) -> int:
        """Rows that it may still take for layers which slide when these have so many places, and only it holds `own`
        parts there. It gets room for every part of its own that it lets go of, and none for what others hold too. So it
        never holds more of its own than the most that it sees at once."""
        sliding = self.ledger.sliding
        if sliding is None or not (entry.phase is not State.DECODE or self.stays(entry)):
            return 0
        ahead = 1 if entry.phase is State.DECODE else self._chunk + 1
        most = most_seen(ahead, self._window, self.block_size)
        return sliding.kind.rows * max(0, min(self.wanted(entry) - places, most - own))

    def spare(self) -> int:
        """Available rows that are reserved for nobody."""
        if self.ledger.sliding is None:
            return self.ledger.available
        return self.ledger.available - sum(self.reserved(entry) for entry in self.entries.values())

    def lacks(self, entry: Entry) -> int:
        """Rows that a decoding request lacks for its next token, beyond those that are reserved for it."""
        growth = self.growth(entry)
        return max(0, growth - self.reserved(entry)) if growth else 0

    def gives(self, entry: Entry) -> int:
        """Rows that others can have when it has left."""
        return self.ledger.exclusive(entry.rid) + self.reserved(entry)

    # --- who grows and who leaves -----------------------------------------------------------------------------

    def needed(self, entry: Entry) -> int:
        """Blocks of a decoding request and its next token."""
        return blocks_for(entry.cached + 1, self.block_size)

    def growth(self, entry: Entry) -> int:
        """Rows that a decoding request lacks for its next token: those of a further block, or its own copies of the
        last one, where forks share that. (Full blocks are never written to.)"""
        place = entry.cached // self.block_size
        if place < self.ledger.length(entry.rid):
            return self.ledger.shared_rows(entry.rid, place)
        return self.ledger.missing(entry.rid, place + 1)

    def growth_demand(self) -> int:
        return sum(self.lacks(entry) for entry in self.in_state(State.DECODE))

    def stored(self, entry: Entry) -> range:
        """Places in its table of the blocks that hold something which will be looked at again."""
        return range(entry.past if self.ledger.all_slide else 0, blocks_for(entry.cached, self.block_size))

    def leaves_wholly(self, entry: Entry) -> bool:
        return len(entry.away) + len(entry.leaving) == len(self.stored(entry))

    def arriving(self) -> int:
        """What swaps under way will free."""
        return sum(
            self.gives(entry)
            if entry.ended or self.leaves_wholly(entry)
            else len(self.ledger.rows_at(entry.rid, entry.leaving))
            for entry in self.leaving()
        )
