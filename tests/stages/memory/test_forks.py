"""Requests that fork: one prompt, its blocks shared until somebody writes, in the simulation of `test_residency`."""

from __future__ import annotations

import random

import pytest
from test_residency import BLOCK, Simulation, assert_all_returned

from deepinfer.stages.memory.entries import ResidencyConfig, State
from deepinfer.stages.memory.ledger import BlockLedger, LedgerError


def submit_group(simulation: Simulation, first: int, count: int, prompt: int, new: int, **fields: int) -> range:
    """`count` forks of one prompt, with the ids from `first` on."""
    for rid in range(first, first + count):
        leader = None if rid == first else first
        simulation.submit(rid, prompt, new, leader=leader, **fields)
    return range(first, first + count)


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 8, 11])
def test_forks_hold_the_blocks_of_one_prompt_and_copy_the_last_one_when_they_write(sharing, prompt):
    simulation = Simulation(32, sharing=sharing)
    group = submit_group(simulation, 0, 3, prompt, 6)
    simulation.turn()
    simulation._finish_chunks()
    assert [simulation.produced[rid] for rid in group] == [1, 1, 1]
    blocks = -(-prompt // BLOCK)
    assert simulation.ledger.used <= blocks + 1, "the leader has one for its next token"
    assert len({tuple(simulation.ledger.tables(rid)[0][:blocks]) for rid in group}) == 1
    simulation.turn()
    assert simulation.shared_copies == (0 if prompt % BLOCK == 0 else 2), "the last of three writes in place"
    assert len({simulation.ledger.tables(rid)[0][prompt // BLOCK] for rid in group}) == 3
    simulation.run(100)
    assert set(simulation.finished.values()) == {"length"}
    assert_all_returned(simulation)


def test_the_prompt_of_forks_is_computed_once():
    simulation = Simulation(32)
    group = submit_group(simulation, 0, 4, 10, 3)
    computed = 0
    while not all(simulation.produced[rid] for rid in group):
        simulation.turn()
        computed += sum(chunk.count for chunk in simulation.chunks)
    assert computed == 10


def run_forks(seed: int, policy: str) -> Simulation:
    rng = random.Random(seed)
    blocks = rng.randint(4, 12)
    longest = int(blocks * BLOCK / 1.2)
    config = ResidencyConfig(
        max_running=rng.choice([2, 3, 64]),
        swap="recompute" not in policy,
        prefill_chunk_tokens=rng.choice([3, 8, 64]),
        quantum=rng.choice([1, 4]),
        max_parks=rng.choice([1, 3]),
        offload_unit="block" if "in part" in policy else "request",
    )
    simulation = Simulation(blocks, seed, config, sharing="sharing" in policy)
    if policy == "small host":
        simulation.host_blocks = blocks // 2
    if policy == "failing copies":
        simulation.copy_failures = 0.5
    first = 0
    for _ in range(rng.randint(1, 4)):
        prompt = rng.randint(1, longest - 2)
        new = rng.randint(1, longest - prompt)
        group = submit_group(simulation, first, rng.randint(1, 4), prompt, new, family=first % 2)
        first = group.stop
        for _ in range(rng.randint(0, 5)):
            simulation.turn()
            if "cancel" in policy and rng.random() < 0.3:
                simulation.cancel(rng.choice(list(simulation.wanted)))
    simulation.run(4000)
    return simulation


def run_many(count: int, policy: str) -> list[Simulation]:
    return [run_forks(seed, policy) for seed in range(count)]


@pytest.mark.parametrize(
    "policy",
    [
        "swap",
        "recompute",
        "small host",
        "failing copies",
        "sharing",
        "sharing in part and cancels",
        "in part",
        "cancels",
    ],
)
def test_forks_in_pools_barely_larger_than_one_request_all_end_with_all_their_tokens(policy):
    simulations = run_many(150, policy)
    for seed, simulation in enumerate(simulations):
        for rid, reason in simulation.finished.items():
            assert reason in ("length", "cancelled"), f"seed {seed}"
            assert reason == "cancelled" or simulation.produced[rid] == simulation.wanted[rid]
        assert set(simulation.finished) == set(simulation.wanted)
        assert_all_returned(simulation)
    assert sum(simulation.shared_copies for simulation in simulations) > 0


def test_without_the_copy_forks_write_over_one_another(monkeypatch):
    """The control arm: what the simulation would see."""
    monkeypatch.setattr(BlockLedger, "shared_rows", lambda self, rid, place: 0)
    with pytest.raises(AssertionError, match="At index"):
        run_many(300, "swap")


@pytest.mark.parametrize("when", ["waiting", "its chunk is out"])
def test_forks_whose_leader_ends_before_they_begin_go_on_by_themselves(when):
    simulation = Simulation(32, config=ResidencyConfig(prefill_chunk_tokens=64))
    submit_group(simulation, 0, 3, 10, 3)
    if when == "its chunk is out":
        simulation.turn()
        assert simulation.policy.entries[1].busy
        simulation.cancel(2)
    simulation.cancel(0)
    simulation.run(100)
    assert simulation.finished == {0: "cancelled", 1: "length", 2: "cancelled" if "chunk" in when else "length"}
    assert_all_returned(simulation)


def test_a_fork_that_ends_before_it_begins_is_forgotten():
    simulation = Simulation(32)
    submit_group(simulation, 0, 3, 10, 3)
    simulation.cancel(1)
    simulation.run(100)
    assert simulation.finished == {1: "cancelled", 0: "length", 2: "length"}
    assert_all_returned(simulation)


def test_forks_that_find_no_place_among_the_running_ones_wait_as_everybody_does():
    simulation = Simulation(64, config=ResidencyConfig(max_running=3))
    submit_group(simulation, 0, 5, 6, 4)
    while simulation.policy.entries:
        simulation.turn()
        assert simulation.ledger.holders <= 3
    assert set(simulation.finished.values()) == {"length"}


def test_a_group_is_admitted_only_where_there_are_places_for_all_of_it():
    simulation = Simulation(64, config=ResidencyConfig(max_running=4, prefill_chunk_tokens=2))
    simulation.submit(0, 3, 8)
    simulation.submit(1, 3, 8)
    submit_group(simulation, 2, 3, 6, 4)
    for _ in range(3):
        simulation.turn()
    assert simulation.produced[0] > 0
    assert simulation.policy.entries[2].state is State.WAITING
    simulation.run(100)
    assert set(simulation.finished.values()) == {"length"}


def test_a_shared_block_stays_while_another_holds_it():
    ledger = BlockLedger(4)
    ledger.grow(1, 2)
    ledger.fork(1, 2, 2, 0)
    assert ledger.shared_rows(1, 1) == 1
    assert ledger.shared_rows(1, 2) == 0, "there is none"
    assert ledger.exclusive(1) == 0
    assert ledger.unshare(2, 1) == [(1, 2)]
    assert ledger.shared_rows(1, 1) == 0
    ledger.audit()
    assert ledger.release(1) == 2
    assert ledger.tables(2)[0] == [0, 2]
    assert ledger.free == 2
    ledger.audit()
    ledger.grow(3, 2)
    ledger.fork(2, 4, 2, 0)
    with pytest.raises(LedgerError, match="1 blocks of 0"):
        ledger.unshare(4, 0)
    ledger.audit()
