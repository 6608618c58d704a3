"""What the residency policy knows: its requests, the blocks that they hold, and what each of them would need."""

from __future__ import annotations

from deepinfer.stages.memory.entries import IN_TRANSFER, RUNNING, Entry, State
from deepinfer.stages.memory.ledger import BlockLedger
from deepinfer.stages.memory.sizes import blocks_for


class Book:
    """Owned by the policy, which changes it. Methods only look, and count blocks unless they say otherwise."""

    def __init__(self, ledger: BlockLedger, block_size: int, max_parks: int) -> None:
        self.ledger = ledger
        self.block_size = block_size
        self.entries: dict[int, Entry] = {}
        self.followers: dict[int, list[Entry]] = {}
        """Forks that wait for the prompt of this request."""
        self.claimant: int | None = None
        """The one for whom others are moving out: what they leave is its, not theirs."""
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

    def wanted(self, entry: Entry) -> int:
        """What a request needs to come in: what it has stored or must store, and its next token.

        After `max_parks` preemptions it is everything it may ever need: from then on it never asks again.
        """
        if entry.parks >= self._max_parks:
            return blocks_for(entry.total, self.block_size)
        stored = entry.length if entry.state is State.WAITING else max(entry.cached, entry.target)
        return blocks_for(min(stored + 1, entry.total), self.block_size)

    def known(self, entry: Entry) -> list[int]:
        """Filled blocks that a request which has nothing stored can begin with. At least one token is left to compute:
        somebody must produce the logits. (A swapped one comes back with blocks of its own.)"""
        if entry.state is not State.WAITING or self.ledger.tree is None:
            return []
        return self.ledger.tree.match(entry.keys[: (entry.length - 1) // self.block_size])

    def cost(self, entry: Entry) -> int:
        """Available blocks that bringing it in uses up: blocks that others hold already cost nothing."""
        known = self.known(entry)
        has = entry.past + self.ledger.held(entry.rid)
        return self.wanted(entry) - has - len(known) + self.ledger.idle_among(known)

    def growth(self, entry: Entry) -> int:
        """Blocks that a decoding request lacks for its next token: a further one, or its own copy of the last one."""
        if self.shares_next(entry):
            return 1
        return max(0, blocks_for(entry.cached + 1, self.block_size) - self.ledger.covered(entry.rid))

    def growth_demand(self) -> int:
        return sum(self.growth(entry) for entry in self.in_state(State.DECODE))

    def shares_next(self, entry: Entry) -> bool:
        """Whether forks share the block that its next token belongs in. Full blocks are never written to."""
        return self.ledger.is_shared(entry.rid, entry.cached // self.block_size)

    def stored(self, entry: Entry) -> range:
        """Places in its table of the blocks that hold something which will be looked at again."""
        return range(entry.past, blocks_for(entry.cached, self.block_size))

    def leaves_wholly(self, entry: Entry) -> bool:
        return len(entry.away) + len(entry.leaving) == len(self.stored(entry))

    def arriving(self) -> int:
        """What swaps under way will free."""
        return sum(
            self.ledger.exclusive(entry.rid) if entry.ended or self.leaves_wholly(entry) else len(entry.leaving)
            for entry in self.leaving()
        )
