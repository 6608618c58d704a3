"""The residency policy against a simulated engine: seeded, long, with every event order that the stages can produce."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from deepinfer.stages.memory.entries import RUNNING, ResidencyConfig, State
from deepinfer.stages.memory.kind_tables import HOLE, Kind
from deepinfer.stages.memory.ledger import BlockLedger, LedgerError
from deepinfer.stages.memory.prefix import PrefixTree, chain_keys, root_key
from deepinfer.stages.memory.residency import Residency
from deepinfer.stages.memory.sizes import READ_TOGETHER, blocks_for

BLOCK = 4
NOTHING = -1


FULL, SLIDING = Kind(1), Kind(1, slides=True)


@dataclass
class Simulation:
    """Plays the stages: transfers finish after a random number of turns, and so do chunks where `slow_chunks` says so:
    then others step and move meanwhile, as on a device that computes prompts beside steps."""

    num_blocks: int
    seed: int = 0
    config: ResidencyConfig = field(default_factory=ResidencyConfig)
    host_blocks: int = 1_000_000
    slow: int = 3
    slow_chunks: int = 0
    copy_failures: float = 0.0
    sharing: bool = False
    """With a prefix tree; requests of one family have the same tokens as far as both go."""
    kinds: tuple[Kind, ...] = (FULL,)
    num_rows: int = 0
    """Of the pool, instead of `num_blocks` of all layers."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.slides = [kind.slides for kind in self.kinds for _ in range(kind.rows)]
        """By group of layers."""
        num_rows = self.num_rows or self.num_blocks * len(self.slides)
        self.ledger = BlockLedger(num_rows, PrefixTree() if self.sharing else None, self.kinds)
        self.tokens: dict[int, np.ndarray] = {}
        self.found_tokens = 0
        self.policy = Residency(self.ledger, BLOCK, self.config)
        self.wanted: dict[int, int] = {}
        self.produced: dict[int, int] = {}
        self.finished: dict[int, str] = {}
        self.transfers: list[tuple[int, str, int, list[int]]] = []
        self.memory = np.full((num_rows, BLOCK), NOTHING)
        """The tokens whose keys and values a row would hold."""
        self.payloads: dict[int, list[np.ndarray]] = {}
        self.chunks: list = []
        self.chunk_turns = 0
        self.chunk_tables: dict[int, list[list[int]]] = {}
        """As they were when the chunk was cut: whoever computes it knows no others."""
        self.content: dict[int, bytes] = {}
        self.swaps = 0
        self.refusals = self.recomputed = 0
        self.in_part = self.shared_copies = 0
        self.forked = False
        self.let_go = self.most_held = 0
        self.residencies: dict[int, int] = {}
        self.max_parks_seen = 0

    def keys(self, rid: int, length: int) -> list[bytes]:
        return chain_keys(root_key("test"), self.tokens[rid][:length], BLOCK)

    def submit(
        self, rid: int, prompt: int, new: int, priority: int = 0, family: int = 0, leader: int | None = None
    ) -> None:
        common = np.random.default_rng(family).integers(0, 9, 1000)
        self.tokens[rid] = np.concatenate([common[:prompt], np.full(new, 100 + rid)]).astype(np.int32)
        self.wanted[rid] = new
        self.produced[rid] = 0
        self.forked |= leader is not None
        self.policy.submit(rid, prompt, prompt + new - 1, priority, self.keys(rid, prompt), leader)

    def cancel(self, rid: int) -> None:
        state = self.policy.end(rid)
        if state is None:
            return
        self.finished[rid] = "cancelled"
        if state is State.SWAPPED:
            self._drop(rid)

    def _drop(self, rid: int) -> None:
        del self.payloads[rid]
        self.policy.payload_dropped()

    def turn(self) -> None:
        self._finish_transfers()
        self._finish_chunks()
        moves = self.policy.moves()
        if any(rid not in self.payloads for rid in moves.swap_out):
            parked = [entry for entry in self.policy.entries.values() if entry.state is State.SWAPPED]
            assert not parked, "no running request is moved for one that comes back"
        self._moves(moves)
        step = self.policy.step()
        for copy in step.copies:
            self.memory[copy.destination] = self.memory[copy.source]
        self.shared_copies += len(step.copies)
        self._moves(step.moves)
        for rid in step.rows:
            entry = self.policy.entries[rid]
            assert self.ledger.length(rid) * BLOCK >= entry.cached + 1
            self._check_visible(rid)
            self._store(rid, entry.cached, 1)
            self.policy.stepped(rid)
            self._register(rid)
            self._let_past(rid)
            self._produce(rid)
        if not self.chunks:
            self.chunks = self.policy.chunk()
            assert all(chunk.count > 0 for chunk in self.chunks), "somebody must produce the logits"
            self.chunk_tables = {chunk.rid: self.ledger.tables(chunk.rid) for chunk in self.chunks}
            self.chunk_turns = self.random.randint(0, self.slow_chunks) if self.slow_chunks else 0
        self.ledger.audit()
        assert self.policy._book.spare() >= 0, "what is reserved is there"

    def _moves(self, moves) -> None:
        for rid in (*moves.swap_out, *moves.recomputed):
            if rid not in self.payloads:
                self._note_departure(rid)
        self.recomputed += len(moves.recomputed)
        for rid in moves.recomputed:
            if rid in self.payloads:
                self._drop(rid)
        for rid in moves.swap_out:
            leaving = self.policy.entries[rid].leaving
            self.in_part += 0 < len(leaving) < len(self.policy._book.stored(self.policy.entries[rid]))
            self._begin_transfer("out", rid, leaving)
        for rid in moves.swap_in:
            self._note_return(rid)
            self._begin_transfer("in", rid, self.policy.entries[rid].away)
        for rid in moves.admitted:
            self._note_return(rid)
            self.found_tokens += self.policy.entries[rid].cached
        for rid in moves.exhausted:
            self.cancel(rid)
            self.finished[rid] = "kv_exhausted"

    def _begin_transfer(self, direction: str, rid: int, places: list[int]) -> None:
        tables, blocks = self.ledger.tables(rid), self.ledger.rows_at(rid, places)
        assert not any(table[place] == HOLE for table in tables for place in places)
        if direction == "in":
            assert not any(HOLE in table for table in tables)
            self.memory[blocks] = NOTHING
        self.transfers.append((self.random.randint(0, self.slow), direction, rid, blocks))

    def _store(self, rid: int, first: int, count: int, tables: list[list[int]] | None = None) -> None:
        for table in tables or self.ledger.tables(rid):
            for position in range(first, first + count):
                assert table[position // BLOCK] >= 0
                self.memory[table[position // BLOCK], position % BLOCK] = self.tokens[rid][position]

    def _check_memory(self, rid: int) -> None:
        """What a request has stored and may look at again is its own tokens, wherever it has been meanwhile."""
        entry = self.policy.entries[rid]
        for table, slides in zip(self.ledger.tables(rid), self.slides, strict=True):
            past = entry.past if slides else 0
            first, cached = past * BLOCK, entry.cached
            assert min(table[past : blocks_for(cached, BLOCK)], default=0) >= 0
            stored = self.memory[table[past:]].reshape(-1)[: cached - first]
            assert stored.tolist() == self.tokens[rid][first:cached].tolist()

    def _first_read(self, rid: int) -> int:
        """The first token that a kernel reads for the next one."""
        first = max(0, self.policy.entries[rid].cached - self.config.window + 1) if self.config.window else 0
        return first - first % READ_TOGETHER

    def _check_visible(self, rid: int) -> None:
        assert self.policy.entries[rid].past * BLOCK <= self._first_read(rid)
        self._check_memory(rid)

    def _let_past(self, rid: int) -> None:
        before = self.policy.entries[rid].past
        self.policy.let_past(rid)
        entry = self.policy.entries[rid]
        self.let_go += entry.past - before
        self.most_held = max(self.most_held, self.ledger.held(rid))
        assert entry.past == self._first_read(rid) // BLOCK, entry

    def _note_departure(self, rid: int) -> None:
        """Whoever had its turn in DECODE has produced something there."""
        entry = self.policy.entries[rid]
        if entry.state is State.WAITING or entry.state_before_swap is State.DECODE:
            assert self.produced[rid] > self.residencies[rid], entry

    def _note_return(self, rid: int) -> None:
        self.residencies[rid] = self.produced[rid]
        self.max_parks_seen = max(self.max_parks_seen, self.policy.entries[rid].parks)

    def _finish_transfers(self) -> None:
        pending, self.transfers = self.transfers, []
        for left, direction, rid, blocks in pending:
            if left > 0:
                self.transfers.append((left - 1, direction, rid, blocks))
            elif direction == "out":
                self._out_done(rid, blocks)
            else:
                self._in_done(rid, blocks)

    def _out_done(self, rid: int, blocks: list[int]) -> None:
        on_host = sum(len(rows) for rows in self.payloads.values())
        refused = on_host + len(blocks) > self.host_blocks or self.random.random() < self.copy_failures
        self.refusals += refused
        if not refused:
            self.swaps += 1
            self.payloads.setdefault(rid, []).extend(self.memory[blocks])
        alive = self.policy.swapped_out(rid, refused)
        if not alive and rid in self.payloads:
            self._drop(rid)

    def _in_done(self, rid: int, blocks: list[int]) -> None:
        failed = self.random.random() < self.copy_failures
        self.refusals += failed
        if not failed and blocks:
            self.memory[blocks] = self.payloads[rid]
        del self.payloads[rid]
        if self.policy.swapped_in(rid, failed) and not failed:
            self._check_memory(rid)
            entry = self.policy.entries[rid]
            for index in range(entry.registered):
                for row in self.ledger.rows_at(rid, [index]):
                    self.content[row] = entry.keys[index]

    def _finish_chunks(self) -> None:
        if self.chunk_turns:
            self.chunk_turns -= 1
            return
        chunks, self.chunks = self.chunks, []
        for chunk in chunks:
            self._store(chunk.rid, chunk.start, chunk.count, self.chunk_tables[chunk.rid])
            alive = self.policy.chunk_done(chunk.rid, chunk.count)
            if alive:
                self._register(chunk.rid)
            if alive and chunk.last:
                begun = self.policy.fork(chunk.rid)
                assert set(begun) <= set(chunk.forks)
                for rid in begun:
                    self._note_return(rid)
                for rid in (chunk.rid, *begun):
                    self._produce(rid)
            if alive and chunk.rid in self.policy.entries:
                self._let_past(chunk.rid)

    def _register(self, rid: int) -> None:
        """Every block of the table must hold this request's own tokens, whoever computed them."""
        entry = self.policy.entries[rid]
        entry.keys = self.keys(rid, entry.cached)
        for index in self.policy.unregistered(rid):
            for row in self.ledger.rows_at(rid, [index]):
                self.content[row] = entry.keys[index]
            self.policy.filled(rid, index)
        for index in range(entry.registered):
            if entry.parks == 0:
                assert {self.content[row] for row in self.ledger.rows_at(rid, [index])} <= {entry.keys[index]}

    def _produce(self, rid: int) -> None:
        self.produced[rid] += 1
        if self.produced[rid] == self.wanted[rid]:
            self._check_memory(rid)
            self.policy.end(rid)
            self.finished[rid] = "length"

    def run(self, turns: int) -> None:
        for _ in range(turns):
            if not self.policy.entries and not self.transfers:
                return
            before = self.work_done()
            for _ in range(self.slow + self.slow_chunks + 3):
                self.turn()
                if not self.policy.entries:
                    break
            assert self.work_done() != before, f"nothing moved: {self.policy.entries}"
        raise AssertionError(f"still running after {turns} rounds: {self.policy.entries}")

    def work_done(self) -> tuple:
        cached = sum(entry.cached for entry in self.policy.entries.values())
        moved = (self.swaps, self.refusals, self.recomputed, len(self.transfers), len(self.policy.entries))
        return (sum(self.produced.values()), len(self.finished), cached, *moved)


def turn_until(simulation: Simulation, condition) -> None:
    for _ in range(200):
        if condition():
            return
        simulation.turn()
    raise AssertionError("it never came to that")


def assert_all_returned(simulation: Simulation) -> None:
    assert simulation.ledger.available == simulation.ledger.num_rows
    assert simulation.payloads == {}
    assert simulation.policy.entries == {}


def test_the_reference_smoke_swaps_and_resumes_once_a_round():
    simulation = Simulation(num_blocks=3)
    for round_number in range(5):
        first, second = 2 * round_number, 2 * round_number + 1
        simulation.submit(first, prompt=5, new=8)
        turn_until(simulation, lambda first=first: simulation.produced[first] > 0)
        simulation.submit(second, prompt=5, new=8)
        simulation.run(200)
        assert simulation.swaps == round_number + 1
    assert list(simulation.finished.values()) == ["length"] * 10
    assert_all_returned(simulation)


POLICIES = [
    "swap",
    "recompute",
    "small host",
    "failing copies",
    "sharing",
    "sharing and recompute",
    "by block",
    "by block, small host",
    "by block, failing copies",
    "by block, sharing",
]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_with_all_its_tokens_in_pools_barely_larger_than_one(policy):
    """10,000 runs over all policies."""
    found = in_part = 0
    for seed in range(1000):
        simulation = run_seeded(policy, seed)
        found += simulation.found_tokens
        in_part += simulation.in_part
    assert (found > 0) == ("sharing" in policy)
    assert (in_part > 0) == ("by block" in policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_that_are_out_while_others_step_and_move_change_nothing_of_that(policy):
    for seed in range(60):
        run_seeded(policy, seed, slow_chunks=4)


def run_seeded(
    policy: str,
    seed: int,
    slow_chunks: int = 0,
    windows: tuple[int, ...] = (0,),
    forks: bool = False,
    kinds: tuple[Kind, ...] = (FULL,),
) -> Simulation:
    """To the end, where everyone must have what is theirs."""
    rng = random.Random(seed)
    blocks = rng.randint(4, 12) if windows == (0,) else rng.randint(8, 20)
    longest = int(blocks * BLOCK / 1.2)
    config = ResidencyConfig(
        swap="recompute" not in policy,
        offload_unit="block" if "by block" in policy else "request",
        prefill_chunk_tokens=rng.choice([3, 8, 64]),
        idle_chunks=rng.choice([1, 2]),
        quantum=rng.choice([1, 4]),
        max_parks=rng.choice([1, 3]),
        window=windows[seed % len(windows)],
    )
    simulation = Simulation(blocks, seed, config, slow_chunks=slow_chunks, sharing="sharing" in policy, kinds=kinds)
    if "small host" in policy:
        simulation.host_blocks = blocks // 2 * simulation.ledger.rows_per_block
    if "failing copies" in policy:
        simulation.copy_failures = 0.5
    for number in range(rng.randint(2, 6)):
        prompt, rid = rng.randint(1, longest - 2), 2 * number
        new, priority = rng.randint(1, longest - prompt), rng.choice([0, 0, 1])
        simulation.submit(rid, prompt, new, priority, number % 2)
        if forks:
            simulation.submit(rid + 1, prompt, new, priority, number % 2, leader=rid)
        for _ in range(rng.randint(0, 4)):
            simulation.turn()
    simulation.run(3000)
    assert set(simulation.finished.values()) == {"length"}, f"seed {seed}"
    assert simulation.produced == simulation.wanted
    assert simulation.max_parks_seen <= config.max_parks
    assert_all_returned(simulation)
    return simulation


def test_a_request_whose_swap_was_refused_is_asked_again_when_something_has_left_the_host():
    simulation = Simulation(8, config=ResidencyConfig(quantum=1), slow=0)
    for rid in range(2):
        simulation.submit(rid, prompt=5, new=6)
    turn_until(simulation, lambda: simulation.produced[0] > 0 and simulation.produced[1] > 0)
    policy, departures = simulation.policy, simulation.policy.departures
    first, second = policy.entries[0], policy.entries[1]
    departures.start_swap_out(first, policy.moves())
    policy.swapped_out(0)
    departures.start_swap_out(second, policy.moves())
    policy.swapped_out(1, refused=True)
    assert second.state is State.DECODE
    assert not departures._can_swap(second)
    assert 0 in policy.moves().swap_in or first.state is State.SWAPPING_IN
    policy.swapped_in(0)
    assert departures._can_swap(second)


def test_only_blocks_that_nobody_else_holds_count_as_what_a_request_could_give():
    ledger = BlockLedger(6)
    ledger.grow(1, 3)
    ledger.fork(1, 2, 1, 0)
    assert (ledger.exclusive_places(1), ledger.exclusive(1), ledger.exclusive(2)) == ({1: 1, 2: 1}, 2, 0)
    ledger.release(2)
    assert ledger.exclusive_places(1) == {0: 1, 1: 1, 2: 1}


MIXED = (Kind(2), Kind(3, slides=True))


@pytest.mark.parametrize("kinds", [(SLIDING,), (FULL, SLIDING), MIXED], ids=["sliding", "one of each", "two and three"])
@pytest.mark.parametrize("policy", POLICIES)
def test_windowed_requests_hold_only_what_they_can_still_see_and_lose_none_of_it(policy, kinds):
    """1,200 runs over all policies, half of them with chunks that are out while others step and move. Forks share their
    prompt and what is past of it."""
    let_go = in_part = swaps = found = 0
    for seed in range(120):
        windows = (1, 5, 16, 17, 30)
        slow, forks = 4 * (seed % 2), seed % 3 == 0
        simulation = run_seeded(policy, seed, slow_chunks=slow, windows=windows, forks=forks, kinds=kinds)
        let_go += simulation.let_go
        in_part += simulation.in_part
        swaps += simulation.swaps
        found += simulation.found_tokens
    assert let_go > 300
    assert (swaps > 0) == ("recompute" not in policy)
    assert (found > 0) == ("sharing" in policy)
    assert (in_part > 0) == ("by block" in policy)


def test_a_prefix_that_is_taken_without_what_its_window_sees_shows(monkeypatch):
    """The control: a newcomer that believes that windows see nothing of what is known."""
    match = BlockLedger.match
    monkeypatch.setattr(BlockLedger, "match", lambda self, keys, first_seen: match(self, keys, lambda blocks: blocks))
    with pytest.raises(AssertionError, match="-2 >= 0"):
        [run_seeded("sharing", seed, windows=(16, 17, 30), kinds=MIXED) for seed in range(120)]


def test_chunks_are_larger_only_while_nobody_decodes():
    config = ResidencyConfig(prefill_chunk_tokens=8, idle_chunks=2)
    simulation = Simulation(64, config=config)
    sizes, cut = [], simulation.policy.chunk

    def chunk():
        decodes = any(entry.state is State.DECODE for entry in simulation.policy.entries.values())
        chunks = cut()
        if chunks:
            sizes.append((decodes, sum(part.count for part in chunks)))
        return chunks

    simulation.policy.chunk = chunk
    simulation.submit(0, prompt=40, new=30)
    turn_until(simulation, lambda: simulation.produced[0] > 0)
    simulation.submit(1, prompt=21, new=2)
    simulation.run(300)
    assert sizes == [(False, 16), (False, 16), (False, 8), (True, 8), (True, 8), (True, 5)]
    assert_all_returned(simulation)


@pytest.mark.parametrize("kinds", [(SLIDING,), (FULL, SLIDING), MIXED])
def test_a_long_answer_never_holds_more_of_sliding_layers_than_the_window_and_a_step(kinds):
    window = 32
    config = ResidencyConfig(window=window, prefill_chunk_tokens=8)
    simulation = Simulation(64, config=config, kinds=kinds)
    simulation.submit(0, prompt=40, new=200)
    turn_until(simulation, lambda: simulation.produced[0] > 0)
    simulation.most_held = 0
    simulation.run(300)
    in_sight = (window + READ_TOGETHER) // BLOCK + 1
    everything = sum(60 * kind.rows for kind in kinds if not kind.slides)
    assert everything < simulation.most_held <= everything + sum(in_sight * kind.rows for kind in kinds if kind.slides)
    assert_all_returned(simulation)


def test_without_a_window_nothing_is_let_go_of():
    simulation = Simulation(64)
    simulation.submit(0, prompt=40, new=200)
    simulation.run(300)
    assert (simulation.let_go, simulation.most_held) == (0, 60)


@pytest.mark.parametrize("offload_unit", ["request", "block"])
def test_cancels_in_every_state_give_every_block_and_payload_back(offload_unit):
    seen: set[State] = set()
    config = ResidencyConfig(prefill_chunk_tokens=5, quantum=1, offload_unit=offload_unit)
    for seed in range(300):
        rng = random.Random(seed)
        simulation = Simulation(8, seed, config, sharing=seed % 2 == 1)
        for rid in range(8):
            simulation.submit(rid, rng.randint(1, 12), rng.randint(1, 14))
        for _ in range(60):
            simulation.turn()
            victim = rng.choice(list(simulation.wanted))
            if rng.random() < 0.2 and victim in simulation.policy.entries:
                seen.add(simulation.policy.entries[victim].state)
                simulation.cancel(victim)
                simulation.cancel(victim)
        simulation.run(2000)
        assert_all_returned(simulation)
    assert seen == set(State)


def test_without_swap_and_recompute_one_request_ends_exhausted_and_the_others_finish():
    simulation = Simulation(6, config=ResidencyConfig(swap=False, recompute=False))
    for rid in range(2):
        simulation.submit(rid, prompt=8, new=14)
    simulation.run(500)
    assert sorted(simulation.finished.values()) == ["kv_exhausted", "length"]
    assert simulation.finished[0] == "length", "the senior one is the one that stays"
    assert_all_returned(simulation)


@pytest.mark.parametrize("host_blocks", [0, 1, 3, 100])
def test_without_recompute_a_request_that_is_partly_on_a_full_host_never_blocks_the_others(host_blocks):
    ends: set[str] = set()
    for seed in range(150):
        rng = random.Random(seed)
        config = ResidencyConfig(offload_unit="block", recompute=False, quantum=1, max_parks=3)
        simulation = Simulation(8, seed, config, host_blocks, sharing=seed % 2 == 1)
        for rid in range(5):
            simulation.submit(rid, rng.randint(1, 16), rng.randint(1, 16), rng.choice([0, 0, 1]))
            simulation.turn()
        simulation.run(2000)
        ends |= set(simulation.finished.values())
        assert_all_returned(simulation)
    assert "length" in ends
    assert ("kv_exhausted" in ends) == (host_blocks < 100)


def test_only_as_many_blocks_go_as_are_needed_the_earliest_full_ones_first_and_all_come_back_together():
    """Four blocks of one request and a half-filled fifth fill the pool; then the other one needs two more."""
    config = ResidencyConfig(offload_unit="block", quantum=1, watermark_blocks=0)
    simulation = Simulation(7, config=config, slow=0)
    simulation.submit(0, prompt=7, new=8, priority=1)
    simulation.submit(1, prompt=17, new=3)
    turn_until(simulation, lambda: simulation.policy.entries[1].state is State.SWAPPING_OUT)
    parked = simulation.policy.entries[1]
    assert parked.leaving == [0]
    turn_until(simulation, lambda: parked.state is State.SWAPPED)
    table = simulation.ledger.tables(1)[0]
    assert parked.away == [0]
    assert table[0] == HOLE
    assert HOLE not in table[1:]
    turn_until(simulation, lambda: parked.state is State.SWAPPING_OUT)
    assert parked.leaving == [1], "the one that is parked already gives more before anyone else does"
    turn_until(simulation, lambda: parked.state is State.SWAPPING_IN)
    assert parked.away == [0, 1]
    assert parked.parks == 1
    simulation.run(100)
    assert list(simulation.finished.items()) == [(0, "length"), (1, "length")]
    assert_all_returned(simulation)


def test_nobody_is_admitted_past_a_parked_request():
    simulation = Simulation(4, config=ResidencyConfig(quantum=1), slow=0)
    simulation.submit(0, prompt=6, new=9)
    simulation.turn(), simulation.turn(), simulation.turn()
    simulation.submit(1, prompt=9, new=6)
    turn_until(simulation, lambda: simulation.policy.entries[0].state is State.SWAPPED)
    simulation.submit(2, prompt=1, new=2)
    waited = 0
    while simulation.policy.entries[0].state is State.SWAPPED:
        assert simulation.policy.entries[2].state is State.WAITING
        waited += 1
        assert waited < 200
        simulation.turn()
    assert waited > 1


def test_a_newcomer_of_lower_priority_pushes_nobody_out():
    simulation = Simulation(4, config=ResidencyConfig(quantum=1), slow=0)
    simulation.submit(0, prompt=6, new=9, priority=1)
    turn_until(simulation, lambda: simulation.produced[0] > 2)
    simulation.submit(1, prompt=9, new=6, priority=0)
    simulation.run(500)
    assert list(simulation.finished) == [0, 1]
    assert simulation.swaps == 0


def test_a_newcomer_of_higher_priority_does_push_out():
    """The control arm of the one above."""
    simulation = Simulation(4, config=ResidencyConfig(quantum=1), slow=0)
    simulation.submit(0, prompt=6, new=9, priority=0)
    turn_until(simulation, lambda: simulation.produced[0] > 2)
    simulation.submit(1, prompt=9, new=6, priority=1)
    simulation.run(500)
    assert list(simulation.finished) == [1, 0]
    assert simulation.swaps == 1


@pytest.mark.parametrize("watermark", [0, 2])
def test_a_parked_request_comes_back_only_when_the_watermark_stays_free_beside_others(watermark):
    """Two blocks are wanted; three are free while another request runs."""
    config = ResidencyConfig(quantum=1, watermark_blocks=watermark)
    simulation = Simulation(6, config=config, slow=0)
    simulation.submit(0, prompt=5, new=6)
    turn_until(simulation, lambda: simulation.produced[0] > 0)
    entry = simulation.policy.entries[0]
    moves = simulation.policy.moves()
    simulation.policy.departures.start_swap_out(entry, moves)
    simulation.policy.swapped_out(0)
    simulation.submit(1, prompt=9, new=2, priority=1)
    moves = simulation.policy.moves()
    assert moves.admitted == [1]
    assert (moves.swap_in == [0]) == (watermark == 0)


def test_a_newcomer_waits_when_the_host_has_no_room_and_no_work_is_thrown_away():
    simulation = Simulation(4, config=ResidencyConfig(quantum=1), host_blocks=0)
    simulation.submit(0, prompt=6, new=9)
    for _ in range(4):
        simulation.turn()
    simulation.submit(1, prompt=9, new=6)
    simulation.run(500)
    assert list(simulation.finished) == [0, 1]
    assert simulation.max_parks_seen == 0


def test_higher_priority_is_admitted_first_and_equals_keep_their_order():
    simulation = Simulation(4, config=ResidencyConfig(swap=False))
    for rid, priority in enumerate([0, 0, 0, 5]):
        simulation.submit(rid, prompt=10, new=5, priority=priority)
    simulation.run(500)
    assert list(simulation.finished) == [3, 0, 1, 2]


def test_a_request_that_could_never_fit_is_recognised():
    policy = Residency(BlockLedger(3), BLOCK, ResidencyConfig())
    assert policy.fits_alone(12)
    assert not policy.fits_alone(13)


def test_the_audit_sees_a_block_with_two_owners_and_one_with_none():
    ledger = BlockLedger(4)
    ledger.grow(1, 2)
    ledger.audit()
    tables = ledger.kinds[0]
    tables._tables[2] = tables.parts(1)
    with pytest.raises(LedgerError, match="owners"):
        ledger.audit()
    tables._tables.clear()
    with pytest.raises(LedgerError, match="owners"):
        ledger.audit()
    tables._references = [0] * 4
    with pytest.raises(LedgerError, match=r"rows \[0, 1\] have \[0, 0\] kinds of owners"):
        ledger.audit()


def test_release_is_idempotent_and_the_lowest_blocks_go_out_first():
    ledger = BlockLedger(6)
    assert ledger.grow(1, 2) == [0, 1]
    assert ledger.grow(2, 2) == [2, 3]
    assert ledger.release(1) == 2
    assert ledger.release(1) == 0
    assert ledger.grow(3, 3) == [0, 1, 4]
    with pytest.raises(LedgerError, match="2 blocks of 1"):
        ledger.grow(3, 5)


def test_resident_requests_are_at_most_max_running():
    simulation = Simulation(64, config=ResidencyConfig(max_running=2))
    for rid in range(6):
        simulation.submit(rid, prompt=3, new=4)
    while simulation.policy.entries:
        simulation.turn()
        assert sum(e.state in RUNNING for e in simulation.policy.entries.values()) <= 2
