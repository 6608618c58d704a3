"""What the residency policy knows: its requests, the blocks that they hold, and what each of them would need."""

from __future__ import annotations

from deepinfer.stages.memory.entries import IN_TRANSFER, RUNNING, Entry, State
from deepinfer.stages.memory.ledger import NO_MATCH, BlockLedger, Match
from deepinfer.stages.memory.sizes import blocks_for, first_seen


class Book:
    """Owned by the policy, which changes it. Methods only look. What somebody needs or gives is counted in rows of the
    pool; a block of a context takes a row for each group of layers."""

    def __init__(self, ledger: BlockLedger, block_size: int, window: int, max_parks: int) -> None:
        self.ledger = ledger
        self.block_size = block_size
        self.entries: dict[int, Entry] = {}
        self.followers: dict[int, list[Entry]] = {}
        """Forks that wait for the prompt of this request."""
        self.claimant: int | None = None
        """The one for whom others are moving out: what they leave is its, not theirs."""
        self._window = window
        self._max_parks = max_parks

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
        return sum(len(forks) for rid, forks in self.followers.items() if self.ledger.held(rid))

    def leaving(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.ended or entry.state is State.SWAPPING_OUT]

    def nothing_runs(self) -> bool:
        return not self.in_state(*RUNNING, *IN_TRANSFER) and not any(entry.ended for entry in self.entries.values())

    # --- who needs what ---------------------------------------------------------------------------------------

    def first_seen(self, cached: int) -> int:
        """The first block that is read for the token after `cached` stored ones, or for any later one, by layers that
        slide."""
        return first_seen(cached, self._window, self.block_size)

    def wanted(self, entry: Entry) -> int:
        """Blocks that a request needs to come in: what it has stored or must store, and its next token.

        After `max_parks` preemptions it is everything it may ever need: from then on it never asks again.
        """
        if entry.parks >= self._max_parks:
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

    def cost(self, entry: Entry) -> int:
        """Available rows that bringing it in uses up: those that others hold already cost nothing."""
        known = self.known(entry)
        past = known.past if entry.state is State.WAITING else entry.past
        return self.ledger.rows_of(self.wanted(entry), past) - self.ledger.held(entry.rid) - self.ledger.saved(known)

    def needed(self, entry: Entry) -> int:
        """Blocks of a decoding request and its next token."""
        return blocks_for(entry.cached + 1, self.block_size)

    def growth(self, entry: Entry) -> int:
        """Rows that a decoding request lacks for its next token: those of a further block, or its own copies of the
        last one, where forks share that. (Full blocks are never written to.)"""
        place, length = entry.cached // self.block_size, self.ledger.length(entry.rid)
        if place < length:
            return self.ledger.shared_rows(entry.rid, place)
        return (place + 1 - length) * self.ledger.rows_per_block

    def growth_demand(self) -> int:
        return sum(self.growth(entry) for entry in self.in_state(State.DECODE))

    def stored(self, entry: Entry) -> range:
        """Places in its table of the blocks that hold something which will be looked at again."""
        return range(entry.past if self.ledger.all_slide else 0, blocks_for(entry.cached, self.block_size))

    def leaves_wholly(self, entry: Entry) -> bool:
        return len(entry.away) + len(entry.leaving) == len(self.stored(entry))

    def arriving(self) -> int:
        """What swaps under way will free."""
        return sum(
            self.ledger.exclusive(entry.rid)
            if entry.ended or self.leaves_wholly(entry)
            else len(self.ledger.rows_at(entry.rid, entry.leaving))
            for entry in self.leaving()
        )
