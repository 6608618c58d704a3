"""Who gives up blocks when they are short, which of them, and whether they move to the host or are computed again."""

from __future__ import annotations

from deepinfer.stages.memory.book import Book
from deepinfer.stages.memory.entries import RUNNING, Entry, Moves, ResidencyConfig, State


class Departures:
    """Owned by the policy. Changes the states of those that leave; the blocks themselves are released when the offload
    stage has answered."""

    def __init__(self, book: Book, config: ResidencyConfig) -> None:
        self._book = book
        self._ledger = book.ledger
        self._config = config
        self.swap = config.swap
        """Whether victims move to the host. When it is switched off, what is there comes back as ever."""

    def _may_preempt(self, entry: Entry) -> bool:
        """Only a newcomer may push others out, only while nobody is parked, and only into the host: work that is done
        is never thrown away for it."""
        if entry.parks or not self.swap:
            return False
        going = self._book.in_state(State.SWAPPING_OUT)
        return not any(e.parks for e in self._book.outside()) and not any(e.away for e in going)

    def _can_swap(self, victim: Entry) -> bool:
        return self.swap and not victim.swap_refused

    def make_room(self, entry: Entry, room: int, moves: Moves) -> None:
        """For the first one in the queue: of what parked requests still hold, and for a newcomer also by pushing others
        out. Only if that is enough."""
        short = self._book.cost(entry) - room - self._book.arriving()
        if short <= 0:
            return
        leftovers = self._leftovers(entry)
        victims = leftovers + (self._victims(entry) if self._may_preempt(entry) else [])
        able = [victim for victim in victims if self._can_swap(victim)]
        if sum(self._book.gives(victim) for victim in able) >= short:
            self._book.claimant = entry.rid
            for victim in able:
                if short > 0:
                    short -= self.start_swap_out(victim, moves, short)
        elif leftovers and self._book.nothing_runs():
            self._clear(leftovers[0], moves)

    def _leftovers(self, wanting: Entry) -> list[Entry]:
        """Parked requests that still hold blocks. The one that will come back last is asked first."""
        parked = [e for e in self._book.in_state(State.SWAPPED) if e is not wanting and self._ledger.holds(e.rid)]
        return sorted(parked, key=self._book.queue_order, reverse=True)

    def _clear(self, parked: Entry, moves: Moves, short: int | None = None) -> None:
        """What a parked request still holds is needed: it moves out, or it is computed again."""
        if self._can_swap(parked):
            self.start_swap_out(parked, moves, short)
        elif self._config.recompute:
            self.recompute(parked)
            moves.recomputed.append(parked.rid)
        else:
            moves.exhausted.append(parked.rid)

    def _victims(self, wanting: Entry, forced: bool = False) -> list[Entry]:
        """Who may be moved out for `wanting`, the best victim first: the lowest priority, then as `config.victims`
        says, then the youngest.

        `forced` sets the quantum aside: nothing else can move.
        """
        victims = [
            entry
            for entry in self._book.in_state(*RUNNING)
            if entry.rid != wanting.rid
            and not entry.busy
            and self._ledger.holds(entry.rid)
            and not self._book.stays(entry)
            and entry.priority <= wanting.priority
            and (forced or entry.yielded >= self._config.quantum)
        ]
        rank = {"lru": lambda e: e.last_active, "smallest": lambda e: self._ledger.held(e.rid), "youngest": lambda e: 0}
        order = rank[self._config.victims]
        return sorted(victims, key=lambda e: (e.priority, order(e), -e.arrival))

    def relieve(self, stalled: list[Entry], others_run: bool, moves: Moves) -> None:
        """Find blocks for requests that cannot take their next token, for the most senior one first."""
        senior = stalled[0]
        if self._book.leaving():  # Even one that shares all its blocks: then the others have them for themselves.
            return
        short = sum(self._book.lacks(entry) for entry in stalled) - self._book.spare()
        nothing_moves = not others_run and not self._book.in_state(State.PREFILL, State.SWAPPING_IN)
        leftovers = self._leftovers(senior)
        if leftovers and (self._can_swap(leftovers[0]) or self._config.recompute or nothing_moves):
            self._clear(leftovers[0], moves, short)
            return
        victims = self._victims(senior)
        if not victims and nothing_moves:
            victims = self._victims(senior, forced=True)
        swappable = [victim for victim in victims if self._can_swap(victim)]
        if swappable:
            victim = swappable[0]
            self.start_swap_out(victim, moves, short - self._book.lacks(victim) if victim in stalled else short)
        elif victims and self._config.recompute:
            victims[0].parks += 1
            self.recompute(victims[0])
            moves.recomputed.append(victims[0].rid)
        elif nothing_moves:
            moves.exhausted.append(stalled[-1].rid)

    def start_swap_out(self, victim: Entry, moves: Moves, short: int | None = None) -> int:
        """Move out what frees `short` rows, or everything. Returns how many that frees."""
        freed = self.choose_leaving(victim, short)
        if victim.state is not State.SWAPPED:
            victim.state_before_swap = victim.state
        victim.state = State.SWAPPING_OUT
        moves.swap_out.append(victim.rid)
        return freed

    def choose_leaving(self, victim: Entry, short: int | None) -> int:
        """The earliest full blocks that no other request holds; everything when they are too few, and when a prompt is
        not computed yet: what it has not filled would only lie there."""
        held, freed = self._book.gives(victim), 0
        if self._config.offload_unit == "block" and victim.cached >= victim.target and short is not None:
            for place, rows in self._ledger.exclusive_places(victim.rid).items():
                if freed >= short or place >= victim.cached // self._book.block_size:
                    break
                victim.leaving.append(place)
                freed += rows
            if short <= freed < held:
                return freed
        away = set(victim.away)
        victim.leaving = [place for place in self._book.stored(victim) if place not in away]
        return held

    def recompute(self, entry: Entry) -> None:
        self._ledger.release(entry.rid)
        entry.swap_refused = False
        entry.away = []
        entry.state = State.WAITING
        entry.cached = entry.target = entry.past = 0
