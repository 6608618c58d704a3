"""The choice between swapping a request and computing it again."""

from __future__ import annotations

import logging

import pytest

from deepinfer.stages.memory.entries import ResidencyConfig, State
from deepinfer.stages.memory.kind_tables import Kind
from deepinfer.stages.memory.ledger import BlockLedger
from deepinfer.stages.memory.residency import Residency
from deepinfer.stages.messages import CopyMeasured
from deepinfer.stages.preemption import Preemption

FAST = CopyMeasured(bytes=8_000_000, out_seconds=0.002, in_seconds=0.001)


def auto() -> Preemption:
    """With FAST copies, of a victim that holds one row for 16 tokens a token takes 1 us out and 0.5 us in."""
    return Preemption("auto", can_swap=True, row_bytes=64_000)


@pytest.mark.parametrize(("seconds", "chosen"), [(1.4, "recompute"), (1.6, "swap")])
def test_auto_takes_what_costs_a_token_less_and_says_what_it_saw(seconds, chosen, caplog):
    choice = auto()
    choice.measured(FAST)
    assert choice.as_dict()["chosen"] is None
    with caplog.at_level(logging.INFO):
        choice.decide(tokens=1_000_000, seconds=seconds, rows=2, stored=32)
    said = choice.as_dict()
    assert said["chosen"] == choice.chosen == chosen
    assert said["swap_s_per_token"] == pytest.approx(1.5e-6)
    assert said["recompute_s_per_token"] == pytest.approx(seconds / 1e6)
    assert said["copy_out_bytes_per_s"] == pytest.approx(4e9)
    assert said["copy_in_bytes_per_s"] == pytest.approx(8e9)
    assert said["prefill_tokens_per_s"] == pytest.approx(1e6 / seconds)
    assert f"{chosen} chosen" in caplog.text
    assert "1.5 us" in caplog.text


@pytest.mark.parametrize(("rows", "chosen"), [(24, "recompute"), (16, "swap")])
def test_a_token_costs_what_the_victim_still_holds_for_it(rows, chosen):
    """Of a context of 64 tokens in rows of a sixth of a block; sliding layers let go of some."""
    choice = Preemption("auto", can_swap=True, row_bytes=64_000 // 6)
    choice.measured(FAST)
    choice.decide(tokens=1_000_000, seconds=1.2, rows=rows, stored=64)
    assert choice.chosen == chosen
    assert choice.as_dict()["swap_s_per_token"] == pytest.approx(1.5e-6 * rows / 24, rel=0.001)


def test_auto_decides_once_and_not_before_both_sides_are_measured():
    choice = auto()
    choice.decide(1000, 1.0, 1, 16)
    assert choice.chosen is None
    choice.measured(FAST)
    choice.decide(0, 0.0, 1, 16)
    assert choice.chosen is None
    choice.decide(1000, 1.0, 0, 0)
    assert choice.chosen is None, "a victim that has stored nothing says nothing of a token"
    choice.decide(1000, 1.0, 1, 16)
    assert choice.chosen == "swap"
    choice.decide(1000, 1e-9, 1, 16)
    assert choice.chosen == "swap"


def test_auto_computes_again_where_copies_fail():
    choice = auto()
    choice.measured(CopyMeasured(error="no such device"))
    choice.decide(1000, 1.0, 1, 16)
    assert choice.chosen == "recompute"
    assert "no such device" in choice.as_dict()["reason"]


@pytest.mark.parametrize(
    ("mode", "with_host", "without"),
    [
        ("swap", "swap", "recompute"),
        ("recompute", "recompute", "recompute"),
        ("auto", None, "recompute"),
        ("swap-only", "swap", "none"),
    ],
)
def test_what_is_asked_for_is_what_happens_unless_there_is_no_host_memory(mode, with_host, without):
    assert Preemption(mode, True, 64_000).chosen == with_host
    assert Preemption(mode, False, 64_000).chosen == without


def test_what_moves_of_a_context_is_all_of_layers_that_see_everything_and_what_windows_see_of_the_others():
    kinds = Kind(1), Kind(5, slides=True)
    policy = Residency(BlockLedger(600, kinds=kinds), 16, ResidencyConfig(window=64, prefill_chunk_tokens=32))
    policy.submit(7, length=640, total=800)
    policy.moves()
    while policy.entries[7].state is State.PREFILL:
        (chunk,) = policy.chunk()
        policy.chunk_done(7, chunk.count)
        policy.let_past(7)
    assert policy.moving([7]) == (40 + 5 * 4, 640)
