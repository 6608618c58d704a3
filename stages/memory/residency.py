"""Who holds blocks, who waits, who moves out: the whole policy, over integers.

No torch, no zmq, no clock. The decode stage calls it once a turn in this order:

    moves()   resume what was parked, then admit newcomers, preempting for one if the rules allow
    step()    give every decoding request the block for its next token, making room if need be
    chunk()   cut the next prefill chunk

and reports back with chunk_done, fork, stepped, swapped_out, swapped_in and end.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.stages.memory.book import Book
from deepinfer.stages.memory.departures import Departures
from deepinfer.stages.memory.entries import RUNNING, Chunk, Entry, Moves, OwnCopy, ResidencyConfig, State, Step
from deepinfer.stages.memory.layer_groups import rows_alone
from deepinfer.stages.memory.ledger import BlockLedger
from deepinfer.stages.memory.sizes import blocks_for


class Residency:
    """Owned by decode, with the ledger. Every decision that moves a block is made here, or for it by `departures`."""

    def __init__(self, ledger: BlockLedger, block_size: int, config: ResidencyConfig) -> None:
        self.ledger = ledger
        self.block_size = block_size
        self.config = config
        self._book = Book(ledger, block_size, config)
        self.entries = self._book.entries
        self.departures = Departures(self._book, config)
        self._arrivals = 0
        self._turn = 0

    # --- requests come and go ---------------------------------------------------------------------------------

    def submit(
        self,
        rid: int,
        length: int,
        total: int,
        priority: int = 0,
        keys: Sequence[bytes] = (),
        leader: int | None = None,
        turn: int = 0,
    ) -> None:
        """`length` tokens are known; at most `total` will be stored. `fits_alone(total)` must hold. `keys` are those of
        the full blocks among the known tokens. `leader` has the same known tokens and has not begun: this one is its
        fork. `turn`: among newcomers of equal priority, lower ones come first."""
        self._arrivals += 1
        entry = self.entries[rid] = Entry(
            rid=rid,
            arrival=self._arrivals,
            length=length,
            total=total,
            priority=priority,
            turn=turn,
            leader=leader,
            keys=list(keys),
        )
        if leader is not None:
            self._book.followers.setdefault(leader, []).append(entry)

    def fits_alone(self, total: int) -> bool:
        kinds, config = [tables.kind for tables in self.ledger.kinds], self.config
        return rows_alone(kinds, config.window, total, self.block_size, config.largest_chunk) <= self.ledger.num_rows

    def stop_swapping(self) -> None:
        """From now on victims are computed again. What is on the host comes back as ever."""
        self.departures.swap = False

    def end(self, rid: int) -> State | None:
        """The request has ended, whatever its state. Blocks come back now, or when the chunk or transfer that has
        them is over. Returns the state it was in (None if unknown): a SWAPPED one has a payload to drop."""
        entry = self.entries.get(rid)
        if entry is None or entry.ended:
            return None
        if self._book.claimant == rid:
            self._book.claimant = None
        if entry.locked:
            entry.ended = True
        else:
            self._forget(entry)
        return entry.state

    def _forget(self, entry: Entry) -> None:
        self.ledger.release(entry.rid)
        del self.entries[entry.rid]
        if entry.leader is not None:
            self._book.followers[entry.leader].remove(entry)
        for follower in self._book.followers.pop(entry.rid, []):
            self._dismiss(follower)

    def _dismiss(self, follower: Entry) -> bool:
        """A fork has nothing more to wait for: unless it has ended, it is a request like any other from now on."""
        follower.leader = None
        follower.busy = False
        if follower.ended:
            self._forget(follower)
        return not follower.ended

    # --- one turn ---------------------------------------------------------------------------------------------

    def moves(self) -> Moves:
        """Resume first, then admit. Stops at the first one that does not fit, so nobody overtakes it for ever."""
        self._turn += 1
        moves = Moves([], [], [], [], [])
        outside = sorted(self._book.outside(), key=self._book.queue_order)
        if not outside:
            return moves
        residents = self._book.residents() + self._book.expected_forks()
        growth = self._book.growth_demand()
        for entry in outside:
            places = min(1 + len(self._book.followers.get(entry.rid, ())), self.config.max_running)
            if residents + places > self.config.max_running:
                break
            if self._book.cost(entry) <= self._room(entry, growth, residents):
                self._bring_in(entry, moves)
                residents += places
                continue
            self.departures.make_room(entry, self._room(entry, growth, residents), moves)
            break
        return moves

    def step(self) -> Step:
        """Blocks for the next token of every decoding request, the most senior first."""
        rows: list[int] = []
        stalled: list[Entry] = []
        copies: list[OwnCopy] = []
        moves = Moves([], [], [], [], [])
        for entry in sorted(self._book.in_state(State.DECODE), key=lambda e: e.seniority):
            growth = self._book.growth(entry)
            if not growth or growth - self._book.reserved(entry) <= self._book.spare():
                if growth:
                    pairs = self.ledger.unshare(entry.rid, entry.cached // self.block_size)
                    copies += [OwnCopy(entry.rid, *pair) for pair in pairs]
                    self.ledger.grow(entry.rid, self._book.needed(entry))
                rows.append(entry.rid)
                entry.last_active = self._turn
            else:
                stalled.append(entry)
        if stalled:
            self.departures.relieve(stalled, bool(rows), moves)
        # A victim may have had its turn coming: what moves out must not be written to in this step.
        return Step([rid for rid in rows if self.entries[rid].state is State.DECODE], moves, copies)

    def chunk(self) -> list[Chunk]:
        """The next prefill chunk, several requests packed into at most `prefill_chunk_tokens`, while nobody decodes
        `idle_chunks` times as many; they are busy until `chunk_done`."""
        chunks_at_once = 1 if self._book.in_state(State.DECODE) else self.config.idle_chunks
        budget = self.config.prefill_chunk_tokens * chunks_at_once
        chunks: list[Chunk] = []
        for entry in sorted(self._book.in_state(State.PREFILL), key=lambda e: e.seniority):
            if entry.busy or budget == 0:
                continue
            count = min(budget, entry.target - entry.cached)
            budget -= count
            entry.busy = True
            entry.last_active = self._turn
            last = entry.cached + count == entry.target
            if self.config.window:  # What it was promised when it came in. With the last chunk goes the next token.
                stored = min(entry.cached + count + last, entry.total)
                self.ledger.grow(entry.rid, blocks_for(stored, self.block_size))
            chunks.append(Chunk(entry.rid, entry.cached, count, last, self._forks_to_sample(entry) if last else ()))
        return chunks

    def _forks_to_sample(self, leader: Entry) -> tuple[int, ...]:
        """Forks for which there is a place among those that run; the others will have to wait as everybody does. A
        request that stays for good has none, where windows slide: they would hold what it must get room for when it
        lets go of it."""
        if self.config.window and self._book.stays(leader):
            return ()
        places = max(0, self.config.max_running - self._book.residents())
        forks = self._book.followers.get(leader.rid, [])[:places]
        for fork in forks:
            fork.busy = True
        return tuple(fork.rid for fork in forks)

    # --- what happened ----------------------------------------------------------------------------------------

    def chunk_done(self, rid: int, count: int) -> bool:
        """False when the request ended meanwhile: its result is void."""
        entry = self.entries[rid]
        entry.busy = False
        if entry.ended:
            self._forget(entry)
            return False
        entry.cached += count
        if entry.cached == entry.target:
            entry.state = State.DECODE
            self._yield(entry)
        return True

    def fork(self, rid: int) -> list[int]:
        """The prompt of `rid` is complete, its filled blocks are registered, and first tokens were sampled from it. Its
        forks go on from the same blocks. Returns those for which that is so; others have ended or wait as newcomers."""
        leader = self.entries[rid]
        stored = blocks_for(leader.cached, self.block_size)
        begun = []
        for fork in self._book.followers.pop(rid, []):
            sampled = fork.busy
            if not self._dismiss(fork) or not sampled:
                continue
            self.ledger.fork(rid, fork.rid, stored, leader.past)
            fork.past = leader.past
            fork.state = State.DECODE
            fork.cached = fork.target = leader.cached
            fork.registered = leader.registered
            fork.last_active = self._turn
            self._yield(fork)
            begun.append(fork.rid)
        return begun

    def stepped(self, rid: int) -> None:
        entry = self.entries[rid]
        entry.cached += 1
        self._yield(entry)

    def _yield(self, entry: Entry) -> None:
        entry.length += 1
        entry.yielded += 1

    def swapped_out(self, rid: int, refused: bool = False) -> bool:
        """The copy is safe on the host (only now the blocks are freed), or it was refused (no room, or the copy failed)
        and the request goes on.

        False when the request ended meanwhile; then a payload that was made is to be dropped.
        """
        entry = self.entries[rid]
        if entry.ended:
            self._forget(entry)
            return False
        if refused:
            entry.state = State.SWAPPED if entry.away else entry.state_before_swap
            entry.swap_refused = True
            self._book.claimant = None
        else:
            if self._book.leaves_wholly(entry):
                self.ledger.release(rid)
            else:
                self.ledger.lift(rid, entry.leaving)
            entry.state = State.SWAPPED
            entry.parks += not entry.away
            entry.away += entry.leaving
        entry.leaving = []
        return True

    def swapped_in(self, rid: int, failed: bool = False) -> bool:
        """The payload has arrived in its new blocks, or was lost and must be computed again.

        False when the request ended meanwhile.
        """
        entry = self.entries[rid]
        self.payload_dropped()
        if entry.ended:
            self._forget(entry)
            return False
        entry.state = entry.state_before_swap
        entry.away = []
        if failed:
            self.departures.recompute(entry)
        return True

    def payload_dropped(self) -> None:
        """The host has room again: whoever was refused may be asked once more."""
        for entry in self.entries.values():
            entry.swap_refused = False

    def let_past(self, rid: int) -> None:
        """After a step or a chunk, when the trees were told of what it filled: let go of what sliding layers have where
        the next token's windows do not reach, nor those of any later one."""
        if not self.config.window:
            return
        entry = self.entries.get(rid)
        if entry is None or entry.locked or entry.state not in RUNNING:
            return
        entry.past = self._book.first_seen(entry.cached)
        self.ledger.let_past(rid, entry.past)

    def moving(self, rids: Sequence[int]) -> tuple[int, int]:
        """Rows of the pool that these requests hold for what they have stored, and how many tokens that are."""
        entries = [self.entries[rid] for rid in rids]
        rows = sum(len(self.ledger.rows_at(entry.rid, self._book.stored(entry))) for entry in entries)
        return rows, sum(entry.cached for entry in entries)

    def unregistered(self, rid: int) -> range:
        """Full blocks that the tree has not been told of yet."""
        entry = self.entries[rid]
        if self.ledger.tree is None:
            return range(0)
        return range(entry.registered, entry.cached // self.block_size)

    def filled(self, rid: int, index: int) -> bool:
        """Block `index` is full and `entry.keys[index]` is known. True when its place in the table was taken by an
        equal block that was there first. Not while a kernel uses the table."""
        entry = self.entries[rid]
        entry.registered = index + 1
        return self.ledger.filled(rid, index, entry.keys[index])

    # --- coming in --------------------------------------------------------------------------------------------

    def _room(self, entry: Entry, growth: int, residents: int) -> int:
        """Free rows that are not reserved, less what running requests need for their next token, less the watermark for
        parked ones."""
        room, watermark = self._book.spare() - growth, self.config.watermark_blocks * self.ledger.rows_per_block
        return room - watermark if entry.parks and residents else room

    def _bring_in(self, entry: Entry, moves: Moves) -> None:
        known = self._book.known(entry)
        begun = self._book.begun(entry, known)
        entry.past = begun.start
        if not self.ledger.holds(entry.rid):
            self.ledger.begin(entry.rid, entry.past, known)
        self.ledger.refill(entry.rid)
        self.ledger.grow(entry.rid, self._book.wanted(entry), begun.stop)
        entry.yielded = 0
        entry.last_active = self._turn
        if self._book.claimant == entry.rid:
            self._book.claimant = None
        if entry.state is State.SWAPPED:
            entry.state = State.SWAPPING_IN
            moves.swap_in.append(entry.rid)
        else:
            entry.state = State.PREFILL
            entry.target = entry.length
            entry.registered = known.blocks
            entry.cached = known.blocks * self.block_size
            moves.admitted.append(entry.rid)
