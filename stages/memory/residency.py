"""Who holds blocks, who waits, who moves out: the whole policy, over integers.

No torch, no zmq, no clock. The decode stage calls it once a turn in this order:

    moves()   resume what was parked, then admit newcomers, preempting for one if the rules allow
    step()    give every decoding request the block for its next token, making room if need be
    chunk()   cut the next prefill chunk

and reports back with chunk_done, fork, stepped, swapped_out, swapped_in and end.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.stages.memory.entries import (
    IN_TRANSFER,
    RUNNING,
    Chunk,
    Entry,
    Moves,
    OwnCopy,
    ResidencyConfig,
    State,
    Step,
)
from deepinfer.stages.memory.ledger import BlockLedger
from deepinfer.stages.memory.sizes import blocks_for


class Residency:
    """Owned by decode, with the ledger. Every decision that moves a block is made here."""

    def __init__(self, ledger: BlockLedger, block_size: int, config: ResidencyConfig) -> None:
        self.ledger = ledger
        self.block_size = block_size
        self.config = config
        self.entries: dict[int, Entry] = {}
        self.swap = config.swap
        """Whether victims move to the host. See `stop_swapping`."""
        self._followers: dict[int, list[Entry]] = {}
        """Forks that wait for the prompt of this request."""
        self._arrivals = 0
        self._turn = 0
        self._claimant: int | None = None
        """The newcomer for whom victims are moving out: what they leave is its, not theirs."""

    # --- requests come and go ---------------------------------------------------------------------------------

    def submit(
        self,
        rid: int,
        length: int,
        total: int,
        priority: int = 0,
        keys: Sequence[bytes] = (),
        leader: int | None = None,
    ) -> None:
        """`length` tokens are known; at most `total` will be stored. `fits_alone(total)` must hold. `keys` are those of
        the full blocks among the known tokens. `leader` has the same known tokens and has not begun: this one is its
        fork."""
        self._arrivals += 1
        entry = self.entries[rid] = Entry(
            rid=rid,
            arrival=self._arrivals,
            length=length,
            total=total,
            priority=priority,
            leader=leader,
            keys=list(keys),
        )
        if leader is not None:
            self._followers.setdefault(leader, []).append(entry)

    def fits_alone(self, total: int) -> bool:
        return blocks_for(total, self.block_size) <= self.ledger.num_blocks

    def stop_swapping(self) -> None:
        """From now on victims are computed again. What is on the host comes back as ever."""
        self.swap = False

    def end(self, rid: int) -> State | None:
        """The request has ended, whatever its state. Blocks come back now, or when the chunk or transfer that has
        them is over. Returns the state it was in (None if unknown): a SWAPPED one has a payload to drop."""
        entry = self.entries.get(rid)
        if entry is None or entry.ended:
            return None
        if self._claimant == rid:
            self._claimant = None
        if entry.locked:
            entry.ended = True
        else:
            self._forget(entry)
        return entry.state

    def _forget(self, entry: Entry) -> None:
        self.ledger.release(entry.rid)
        del self.entries[entry.rid]
        if entry.leader is not None:
            self._followers[entry.leader].remove(entry)
        for follower in self._followers.pop(entry.rid, []):
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
        outside = sorted(self._outside(), key=self._queue_order)
        if not outside:
            return moves
        residents = self._residents() + self._expected_forks()
        growth = self._growth_demand()
        for entry in outside:
            places = min(1 + len(self._followers.get(entry.rid, ())), self.config.max_running)
            if residents + places > self.config.max_running:
                break
            if self._cost(entry) <= self._room(entry, growth, residents):
                self._bring_in(entry, moves)
                residents += places
                continue
            self._make_room(entry, self._room(entry, growth, residents), moves)
            break
        return moves

    def step(self) -> Step:
        """Blocks for the next token of every decoding request, the most senior first."""
        rows: list[int] = []
        stalled: list[Entry] = []
        copies: list[OwnCopy] = []
        moves = Moves([], [], [], [], [])
        for entry in sorted(self._in_state(State.DECODE), key=lambda e: e.seniority):
            short = self._growth(entry)
            if short <= self.ledger.available:
                if self._shares_next(entry):
                    copies.append(OwnCopy(entry.rid, *self.ledger.unshare(entry.rid, entry.cached // self.block_size)))
                elif short > 0:
                    self.ledger.grow(entry.rid, short)
                rows.append(entry.rid)
                entry.last_active = self._turn
            else:
                stalled.append(entry)
        if stalled:
            self._relieve(stalled, bool(rows), moves)
        # A victim may have had its turn coming: what moves out must not be written to in this step.
        return Step([rid for rid in rows if self.entries[rid].state is State.DECODE], moves, copies)

    def chunk(self) -> list[Chunk]:
        """The next prefill chunk, several requests packed into at most `prefill_chunk_tokens`; they are busy until
        `chunk_done`."""
        budget = self.config.prefill_chunk_tokens
        chunks: list[Chunk] = []
        for entry in sorted(self._in_state(State.PREFILL), key=lambda e: e.seniority):
            if entry.busy or budget == 0:
                continue
            count = min(budget, entry.target - entry.cached)
            budget -= count
            entry.busy = True
            entry.last_active = self._turn
            last = entry.cached + count == entry.target
            chunks.append(Chunk(entry.rid, entry.cached, count, last, self._forks_to_sample(entry) if last else ()))
        return chunks

    def _forks_to_sample(self, leader: Entry) -> tuple[int, ...]:
        """Forks for which there is a place among those that run; the others will have to wait as everybody does."""
        places = max(0, self.config.max_running - self._residents())
        forks = self._followers.get(leader.rid, [])[:places]
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
        stored = self.ledger.blocks(rid)[: blocks_for(leader.cached, self.block_size)]
        begun = []
        for fork in self._followers.pop(rid, []):
            sampled = fork.busy
            if not self._dismiss(fork) or not sampled:
                continue
            self.ledger.share(fork.rid, stored)
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
            self._claimant = None
        else:
            if self._leaves_wholly(entry):
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
            self._recompute(entry)
        return True

    def payload_dropped(self) -> None:
        """The host has room again: whoever was refused may be asked once more."""
        for entry in self.entries.values():
            entry.swap_refused = False

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

    # --- the rules --------------------------------------------------------------------------------------------

    def _in_state(self, *states: State) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.state in states and not entry.ended]

    def _outside(self) -> list[Entry]:
        return [entry for entry in self._in_state(State.SWAPPED, State.WAITING) if entry.leader is None]

    def _residents(self) -> int:
        """Requests that hold blocks and are not parked."""
        return self.ledger.holders - sum(self.ledger.held(e.rid) > 0 for e in self._in_state(State.SWAPPED))

    def _expected_forks(self) -> int:
        """They will hold blocks as soon as a prompt that is being computed is stored."""
        return sum(len(forks) for rid, forks in self._followers.items() if self.ledger.held(rid))

    def _queue_order(self, entry: Entry) -> tuple[bool, int, bool, int]:
        """The claimant, then by priority; parked ones before newcomers; then by arrival."""
        return (entry.rid != self._claimant, -entry.priority, entry.parks == 0, entry.arrival)

    def _blocks_wanted(self, entry: Entry) -> int:
        """What a request needs to come in: what it has stored or must store, and its next token.

        After `max_parks` preemptions it is everything it may ever need: from then on it never asks again.
        """
        if entry.parks >= self.config.max_parks:
            return blocks_for(entry.total, self.block_size)
        stored = entry.length if entry.state is State.WAITING else max(entry.cached, entry.target)
        return blocks_for(min(stored + 1, entry.total), self.block_size)

    def _known_blocks(self, entry: Entry) -> list[int]:
        """Filled blocks that a request which has nothing stored can begin with. At least one token is left to compute:
        somebody must produce the logits. (A swapped one comes back with blocks of its own.)"""
        if entry.state is not State.WAITING or self.ledger.tree is None:
            return []
        return self.ledger.tree.match(entry.keys[: (entry.length - 1) // self.block_size])

    def _cost(self, entry: Entry) -> int:
        """Available blocks that bringing it in uses up: blocks that others hold already cost nothing."""
        known = self._known_blocks(entry)
        return self._blocks_wanted(entry) - self.ledger.held(entry.rid) - len(known) + self.ledger.idle_among(known)

    def _room(self, entry: Entry, growth: int, residents: int) -> int:
        """Free blocks, less what running requests need for their next token, less the watermark for parked ones."""
        room = self.ledger.available - growth
        return room - self.config.watermark_blocks if entry.parks and residents else room

    def _growth_demand(self) -> int:
        return sum(self._growth(entry) for entry in self._in_state(State.DECODE))

    def _growth(self, entry: Entry) -> int:
        """Blocks that a decoding request lacks for its next token: a further one, or its own copy of the last one."""
        if self._shares_next(entry):
            return 1
        return max(0, blocks_for(entry.cached + 1, self.block_size) - self.ledger.held(entry.rid))

    def _shares_next(self, entry: Entry) -> bool:
        """Whether forks share the block that its next token belongs in. Full blocks are never written to."""
        return self.ledger.is_shared(entry.rid, entry.cached // self.block_size)

    def _bring_in(self, entry: Entry, moves: Moves) -> None:
        known = self._known_blocks(entry)
        self.ledger.share(entry.rid, known)
        self.ledger.refill(entry.rid)
        self.ledger.grow(entry.rid, self._blocks_wanted(entry) - self.ledger.held(entry.rid))
        entry.yielded = 0
        entry.last_active = self._turn
        if self._claimant == entry.rid:
            self._claimant = None
        if entry.state is State.SWAPPED:
            entry.state = State.SWAPPING_IN
            moves.swap_in.append(entry.rid)
        else:
            entry.state = State.PREFILL
            entry.target = entry.length
            entry.registered = len(known)
            entry.cached = len(known) * self.block_size
            moves.admitted.append(entry.rid)

    def _may_preempt(self, entry: Entry) -> bool:
        """Only a newcomer may push others out, only while nobody is parked, and only into the host: work that is done
        is never thrown away for it."""
        if entry.parks or not self.swap:
            return False
        return not any(e.parks for e in self._outside()) and not any(e.away for e in self._in_state(State.SWAPPING_OUT))

    def _can_swap(self, victim: Entry) -> bool:
        return self.swap and not victim.swap_refused

    def _make_room(self, entry: Entry, room: int, moves: Moves) -> None:
        """For the first one in the queue: of what parked requests still hold, and for a newcomer also by pushing others
        out. Only if that is enough."""
        short = self._cost(entry) - room - self._arriving_blocks()
        if short <= 0:
            return
        leftovers = self._leftovers(entry)
        victims = leftovers + (self._victims(entry) if self._may_preempt(entry) else [])
        able = [victim for victim in victims if self._can_swap(victim)]
        if sum(self.ledger.exclusive(victim.rid) for victim in able) >= short:
            self._claimant = entry.rid
            for victim in able:
                if short > 0:
                    short -= self._start_swap_out(victim, moves, short)
        elif leftovers and self._nothing_runs():
            self._clear(leftovers[0], moves)

    def _leftovers(self, wanting: Entry) -> list[Entry]:
        """Parked requests that still hold blocks. The one that will come back last is asked first."""
        parked = [e for e in self._in_state(State.SWAPPED) if e is not wanting and self.ledger.held(e.rid)]
        return sorted(parked, key=self._queue_order, reverse=True)

    def _clear(self, parked: Entry, moves: Moves, short: int | None = None) -> None:
        """What a parked request still holds is needed: it moves out, or it is computed again."""
        if self._can_swap(parked):
            self._start_swap_out(parked, moves, short)
        elif self.config.recompute:
            self._recompute(parked)
            moves.recomputed.append(parked.rid)
        else:
            moves.exhausted.append(parked.rid)

    def _nothing_runs(self) -> bool:
        return not self._in_state(*RUNNING, *IN_TRANSFER) and not any(entry.ended for entry in self.entries.values())

    def _arriving_blocks(self) -> int:
        """Blocks that swaps under way will free."""
        return sum(
            self.ledger.exclusive(entry.rid) if entry.ended or self._leaves_wholly(entry) else len(entry.leaving)
            for entry in self._leaving()
        )

    def _leaving(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.ended or entry.state is State.SWAPPING_OUT]

    def _victims(self, wanting: Entry, forced: bool = False) -> list[Entry]:
        """Who may be moved out for `wanting`, the best victim first: the lowest priority, then as `config.victims`
        says, then the youngest.

        `forced` sets the quantum aside: nothing else can move.
        """
        victims = [
            entry
            for entry in self._in_state(*RUNNING)
            if entry.rid != wanting.rid
            and not entry.busy
            and self.ledger.held(entry.rid)
            and entry.parks < self.config.max_parks
            and entry.priority <= wanting.priority
            and (forced or entry.yielded >= self.config.quantum)
        ]
        rank = {"lru": lambda e: e.last_active, "smallest": lambda e: self.ledger.held(e.rid), "youngest": lambda e: 0}
        order = rank[self.config.victims]
        return sorted(victims, key=lambda e: (e.priority, order(e), -e.arrival))

    def _relieve(self, stalled: list[Entry], others_run: bool, moves: Moves) -> None:
        """Find blocks for requests that cannot take their next token, for the most senior one first."""
        senior = stalled[0]
        if self._leaving():  # Even one that shares all its blocks: then the others have them for themselves.
            return
        short = sum(self._growth(entry) for entry in stalled) - self.ledger.available
        nothing_moves = not others_run and not self._in_state(State.PREFILL, State.SWAPPING_IN)
        leftovers = self._leftovers(senior)
        if leftovers and (self._can_swap(leftovers[0]) or self.config.recompute or nothing_moves):
            self._clear(leftovers[0], moves, short)
            return
        victims = self._victims(senior)
        if not victims and nothing_moves:
            victims = self._victims(senior, forced=True)
        swappable = [victim for victim in victims if self._can_swap(victim)]
        if swappable:
            victim = swappable[0]
            self._start_swap_out(victim, moves, short - self._growth(victim) if victim in stalled else short)
        elif victims and self.config.recompute:
            victims[0].parks += 1
            self._recompute(victims[0])
            moves.recomputed.append(victims[0].rid)
        elif nothing_moves:
            moves.exhausted.append(stalled[-1].rid)

    def _start_swap_out(self, victim: Entry, moves: Moves, short: int | None = None) -> int:
        """Move out what frees `short` blocks, or everything. Returns how many that frees."""
        freed = self._choose_leaving(victim, short)
        if victim.state is not State.SWAPPED:
            victim.state_before_swap = victim.state
        victim.state = State.SWAPPING_OUT
        moves.swap_out.append(victim.rid)
        return freed

    def _choose_leaving(self, victim: Entry, short: int | None) -> int:
        """The earliest full blocks that no other request holds; everything when they are too few, and when a prompt is
        not computed yet: what it has not filled would only lie there."""
        held = self.ledger.exclusive_indices(victim.rid)
        cold = [index for index in held if index < victim.cached // self.block_size]
        in_part = self.config.offload_unit == "block" and victim.cached >= victim.target
        if in_part and short is not None and short <= len(cold) and short < len(held):
            victim.leaving = cold[:short]
            return short
        away = set(victim.away)
        victim.leaving = [i for i in range(blocks_for(victim.cached, self.block_size)) if i not in away]
        return len(held)

    def _leaves_wholly(self, entry: Entry) -> bool:
        return len(entry.away) + len(entry.leaving) == blocks_for(entry.cached, self.block_size)

    def _recompute(self, entry: Entry) -> None:
        self.ledger.release(entry.rid)
        entry.swap_refused = False
        entry.away = []
        entry.state = State.WAITING
        entry.cached = entry.target = 0
