"""Prompts of which sliding layers hold a window and a chunk at a time, in pools that hold no more, in the simulation of
`test_residency`."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from test_residency import BLOCK, FULL, MIXED, POLICIES, SLIDING, Simulation, assert_all_returned

from deepinfer.stages.memory import book
from deepinfer.stages.memory.book import Book
from deepinfer.stages.memory.entries import Entry, ResidencyConfig, State
from deepinfer.stages.memory.kind_tables import Kind, KindTables
from deepinfer.stages.memory.layer_groups import LayerGroups, rows_alone
from deepinfer.stages.memory.ledger import LedgerError
from deepinfer.stages.memory.residency import Residency
from deepinfer.stages.memory.sizes import blocks_for, first_seen, most_seen

KINDS = [(SLIDING,), (FULL, SLIDING), MIXED]
IDS = ["sliding", "one of each", "two and three"]


def run_long(policy: str, seed: int, kinds: tuple[Kind, ...], cancels: bool = False) -> Simulation:
    """Prompts, of which some need the whole pool, and answers, to the end. Half of them with chunks that are out while
    others step and move, a third with forks."""
    rng = random.Random(seed)
    config = ResidencyConfig(
        swap="recompute" not in policy,
        offload_unit="block" if "by block" in policy else "request",
        prefill_chunk_tokens=rng.choice([3, 8, 20]),
        idle_chunks=rng.choice([1, 2]),
        quantum=rng.choice([1, 4]),
        max_parks=rng.choice([1, 3]),
        max_running=rng.choice([3, 64]),
        window=rng.choice([1, 5, 16, 17, 30]),
    )
    longest = rng.randint(100, 260)
    rows = rows_alone(kinds, config.window, longest, BLOCK, config.largest_chunk) + rng.randint(0, 8)
    sharing, slow = "sharing" in policy, 4 * (seed % 2)
    simulation = Simulation(0, seed, config, slow_chunks=slow, sharing=sharing, kinds=kinds, num_rows=rows)
    simulation.host_blocks = rows // 2 if "small host" in policy else simulation.host_blocks
    simulation.copy_failures = 0.5 if "failing copies" in policy else 0.0
    if "forced" in policy:
        move_prompts(simulation, lambda entry: rng.random() < 0.2)
    for number in range(rng.randint(2, 6)):
        total = rng.choice([longest, rng.randint(2, longest)])
        new, priority = rng.randint(1, min(total, 60)), rng.choice([0, 0, 1])
        forks = rng.randint(1, 2) if seed % 3 == 0 else 0
        for rid in range(4 * number, 4 * number + 1 + forks):
            leader = None if rid == 4 * number else 4 * number
            simulation.submit(rid, total + 1 - new, new, priority, number % 2, leader)
        for _ in range(rng.randint(0, 12)):
            simulation.turn()
            if cancels and rng.random() < 0.1:
                simulation.cancel(rng.choice(list(simulation.wanted)))
    simulation.run(6000)
    assert simulation.max_parks_seen <= config.max_parks
    assert_all_returned(simulation)
    return simulation


def move_prompts(simulation: Simulation, when: Callable[[Entry], bool]) -> None:
    """Some leave in the middle of their prompt, at moments that the policy would not choose."""
    policy, step = simulation.policy, simulation.policy.step
    begun: dict[int, int] = {}

    def steps():
        made = step()
        for entry in policy.entries.values():
            if entry.state is not State.PREFILL:
                begun.pop(entry.rid, None)
                continue
            further = entry.cached > begun.setdefault(entry.rid, entry.cached)
            if further and not entry.locked and entry.parks < policy.config.max_parks and when(entry):
                policy.departures.start_swap_out(entry, made.moves)
        return made

    policy.step = steps


@pytest.mark.parametrize("kinds", KINDS, ids=IDS)
@pytest.mark.parametrize("policy", [*POLICIES, "forced, sharing", "forced, failing copies"])
def test_prompts_that_only_fit_because_windows_slide_over_them_all_end_with_all_their_tokens(policy, kinds):
    """576 runs over all policies."""
    beyond = stayed = in_part = found = 0
    for seed in range(16):
        simulation = run_long(policy, seed, kinds)
        assert set(simulation.finished.values()) == {"length"}, f"seed {seed}"
        assert simulation.produced == simulation.wanted
        longest = max(blocks_for(len(tokens) - 1, BLOCK) for tokens in simulation.tokens.values())
        beyond += longest * len(simulation.slides) > simulation.ledger.num_rows
        stayed += simulation.max_parks_seen == simulation.config.max_parks
        in_part += simulation.in_part
        found += simulation.found_tokens
    assert beyond > 10
    assert stayed > 0
    assert (in_part > 0) == ("by block" in policy)
    assert (found > 0) == ("sharing" in policy)


@pytest.mark.parametrize("kinds", KINDS, ids=IDS)
def test_cancels_at_any_moment_give_back_what_was_reserved(kinds):
    ends: set[str] = set()
    for seed in range(30):
        simulation = run_long("sharing" if seed % 2 else "swap", seed, kinds, cancels=True)
        ends |= set(simulation.finished.values())
    assert ends == {"length", "cancelled"}


@pytest.mark.parametrize("kinds", KINDS, ids=IDS)
@pytest.mark.parametrize("sharing", [False, True])
def test_the_longest_request_runs_in_a_pool_of_exactly_what_it_needs_and_is_found_there_again(kinds, sharing):
    """The second time from the prefix tree, in which only what the window sees at its end is left of sliding layers."""
    config = ResidencyConfig(prefill_chunk_tokens=8, idle_chunks=2, window=16)
    rows = rows_alone(kinds, 16, 240, BLOCK, 16)
    assert rows < 60 * sum(kind.rows for kind in kinds) * 0.8
    simulation = Simulation(0, config=config, sharing=sharing, kinds=kinds, num_rows=rows)
    assert simulation.policy.fits_alone(240)
    assert simulation.policy.fits_alone(241) == (kinds == (SLIDING,)), "where all slide any length will do"
    most, chunk = 0, simulation.policy.chunk

    def chunks():
        nonlocal most
        made = chunk()
        most = max(most, simulation.ledger.used)
        return made

    simulation.policy.chunk = chunks
    for rid, new in enumerate((1, 1, 21)):
        simulation.submit(rid, prompt=241 - new, new=new)
        simulation.run(300)
        assert_all_returned(simulation)
    assert simulation.finished == {0: "length", 1: "length", 2: "length"}
    assert rows - 4 * kinds[-1].rows <= most <= rows, "chunks end where windows are read from"
    assert (simulation.found_tokens >= 236) == sharing


@pytest.mark.parametrize("window", [1, 2, 16, 31, 32, 33, 100])
@pytest.mark.parametrize("block_size", [4, 16, 32, 64])
@pytest.mark.parametrize("ahead", [1, 7, 64, 65])
def test_the_most_that_is_seen_is_what_a_walk_over_a_long_context_sees(window, block_size, ahead):
    walk = [blocks_for(at + ahead, block_size) - first_seen(at, window, block_size) for at in range(600)]
    assert most_seen(ahead, window, block_size) == max(walk)


@pytest.mark.parametrize("kinds", KINDS, ids=IDS)
@pytest.mark.parametrize("window", [1, 40])
def test_the_longest_request_of_a_pool_is_the_longest_that_fits(kinds, window):
    groups = LayerGroups((), kinds, window, 0)
    for rows in range(1, 400):
        tokens = groups.tokens_alone(rows, 1000, 16, 64)
        assert tokens == 0 or groups.rows_alone(tokens, 16, 64) <= rows
        assert tokens == 1000 or groups.rows_alone(tokens + 1, 16, 64) > rows


# --- the controls -------------------------------------------------------------------------------------------------


def run_all(policy: str = "swap") -> None:
    for kinds in KINDS:
        for seed in range(60):
            run_long(policy, seed, kinds)


def test_without_reservations_somebody_finds_no_room_in_the_middle_of_a_prompt(monkeypatch):
    monkeypatch.setattr(Book, "_in_front", lambda self, entry, places, own: 0)
    with pytest.raises(LedgerError, match="was given"):
        run_all()


def test_a_request_that_waits_for_room_for_its_whole_prompt_is_seen_to_stall(monkeypatch):
    monkeypatch.setattr(book, "most_seen", lambda ahead, window, block_size: 1000)
    with pytest.raises(AssertionError, match="nothing moved"):
        run_all()


def test_what_slides_is_not_to_be_had_for_nothing_from_its_only_holder(monkeypatch):
    def saved_among(self, parts):
        return self.kind.rows * sum(self._references[part] > 0 for part in parts)

    monkeypatch.setattr(KindTables, "saved_among", saved_among)
    with pytest.raises(AssertionError, match="what is reserved is there"):
        run_all("sharing")


def exchanging(filled):
    """`KindTables.filled`, when layers that slide did as others do."""

    def exchanged(self, rid, place, key):
        changed = filled(self, rid, place, key)
        own = self._tables[rid][place]
        shared = self.tree.insert(key, None, own) if self.tree is not None and self.kind.slides else own
        if shared != own:
            self._take(shared)
            self._tables[rid][place] = shared
            self._let_go(own)
        return changed or shared != own

    return exchanged


@pytest.mark.parametrize("exchange", [False, True])
def test_what_slides_is_not_exchanged_for_an_equal_part_of_another(monkeypatch, exchange):
    """Two that stay for good and say the same, in a pool for both: room for a part that both hold comes back once."""
    monkeypatch.setattr(Book, "stays", lambda self, entry: True)
    if exchange:
        monkeypatch.setattr(KindTables, "filled", exchanging(KindTables.filled))
    config = ResidencyConfig(prefill_chunk_tokens=20, window=60)
    rows = 2 * rows_alone((SLIDING,), 60, 299, BLOCK, 20)
    simulation = Simulation(0, config=config, sharing=True, kinds=(SLIDING,), num_rows=rows)
    for rid in range(2):
        simulation.submit(rid, prompt=200, new=100)
    if exchange:
        with pytest.raises(AssertionError, match="what is reserved is there"):
            simulation.run(300)
        return
    simulation.run(300)
    assert simulation.finished == {0: "length", 1: "length"}


@pytest.mark.parametrize("forked", [False, True])
def test_a_request_that_stays_for_good_has_no_forks(monkeypatch, forked):
    """They would hold what it must get room for when it lets go of it. It left in the middle of its prompt."""
    config = ResidencyConfig(prefill_chunk_tokens=8, window=16, max_parks=1)
    rows = rows_alone(MIXED, 16, 259, BLOCK, 8)
    simulation = Simulation(0, config=config, kinds=MIXED, num_rows=rows)
    move_prompts(simulation, lambda entry: entry.rid == 0)
    if forked:
        monkeypatch.setattr(Residency, "_forks_to_sample", lambda self, leader: tuple(fork_ids(self, leader)))
    for rid in range(3):
        simulation.submit(rid, prompt=160, new=100, leader=None if rid == 0 else 0)
    if forked:
        with pytest.raises(AssertionError, match="what is reserved is there"):
            simulation.run(300)
        return
    simulation.run(300)
    assert simulation.max_parks_seen == 1
    assert set(simulation.finished.values()) == {"length"}


def fork_ids(policy: Residency, leader: Entry) -> list[int]:
    forks = policy._book.followers.get(leader.rid, [])
    for fork in forks:
        fork.busy = True
    return [fork.rid for fork in forks]
