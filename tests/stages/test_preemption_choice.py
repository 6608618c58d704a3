"""The choice between swapping a request and computing it again."""

from __future__ import annotations

import logging

import pytest

from deepinfer.stages.messages import CopyMeasured
from deepinfer.stages.preemption import Preemption

FAST = CopyMeasured(bytes=8_000_000, out_seconds=0.002, in_seconds=0.001)


def auto() -> Preemption:
    """Blocks of 16 tokens and 64,000 bytes: with FAST copies, a token takes 1 us out and 0.5 us in."""
    return Preemption("auto", can_swap=True, block_bytes=64_000, block_size=16)


@pytest.mark.parametrize(("seconds", "chosen"), [(1.4, "recompute"), (1.6, "swap")])
def test_auto_takes_what_costs_a_token_less_and_says_what_it_saw(seconds, chosen, caplog):
    choice = auto()
    choice.measured(FAST)
    assert choice.as_dict()["chosen"] is None
    with caplog.at_level(logging.INFO):
        choice.decide(tokens=1_000_000, seconds=seconds)
    said = choice.as_dict()
    assert said["chosen"] == choice.chosen == chosen
    assert said["swap_s_per_token"] == pytest.approx(1.5e-6)
    assert said["recompute_s_per_token"] == pytest.approx(seconds / 1e6)
    assert said["copy_out_bytes_per_s"] == pytest.approx(4e9)
    assert said["copy_in_bytes_per_s"] == pytest.approx(8e9)
    assert said["prefill_tokens_per_s"] == pytest.approx(1e6 / seconds)
    assert f"{chosen} chosen" in caplog.text
    assert "1.5 us" in caplog.text


def test_auto_decides_once_and_not_before_both_sides_are_measured():
    choice = auto()
    choice.decide(1000, 1.0)
    assert choice.chosen is None
    choice.measured(FAST)
    choice.decide(0, 0.0)
    assert choice.chosen is None
    choice.decide(1000, 1.0)
    assert choice.chosen == "swap"
    choice.decide(1000, 1e-9)
    assert choice.chosen == "swap"


def test_auto_computes_again_where_copies_fail():
    choice = auto()
    choice.measured(CopyMeasured(error="no such device"))
    choice.decide(1000, 1.0)
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
    assert Preemption(mode, True, 64_000, 16).chosen == with_host
    assert Preemption(mode, False, 64_000, 16).chosen == without
