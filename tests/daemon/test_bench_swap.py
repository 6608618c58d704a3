"""`bench swap` against a real daemon with a tiny model: it does what it says. Nothing here is about speed."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from deepinfer.daemon.bench.goals import Goal
from deepinfer.daemon.bench.load import Seen
from deepinfer.daemon.bench.swap_config import SwapBench
from deepinfer.daemon.bench.swap_counters import SWAP_COUNTERS, Way, seconds_of_a_move
from deepinfer.daemon.bench.swap_experiments import _gaps_during
from deepinfer.daemon.cli import main
from deepinfer.daemon.setting import ConfigError


def test_the_command_swaps_once_a_pair_and_reports_copies_pauses_and_goals(tiny_path, tmp_path):
    output = tmp_path / "swap.json"
    small = ["--num-blocks", "28", "--pair-tokens", "192", "--rounds", "1", "--iterations", "2", "--threads", "1"]
    result = CliRunner().invoke(
        main, ["bench", "swap", "--model", str(tiny_path), *small, "--output", str(output)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    report = json.loads(output.read_text())
    forced, beside, over = report["forced"], report["beside"], report["oversubscribed"]
    assert forced["swaps"] == forced["moved"]["requests"] == forced["stayed"]["requests"] == 2
    assert forced["out"]["copies_per_swap"] == forced["in"]["copies_per_swap"] == 1
    assert forced["out"]["bytes_per_swap"] == forced["in"]["bytes_per_swap"]
    assert forced["swaps"] * forced["out"]["bytes_per_swap"] % report["engine"]["block_bytes"] == 0
    assert forced["plain_copy"]["samples"] == 2
    assert forced["moved"]["longest_gap_ms"] > forced["stayed"]["longest_gap_ms"]
    assert beside["steps_measured"]["alone"] > 0
    assert over["swaps"] >= 1
    assert over["moved"]["requests"] >= 1
    assert set(report["versions"]) >= {"torch", "pyzmq"}
    assert len(report["goals"]) == 6
    assert result.output.count("at most") == 5
    assert result.output.count("at least") == 1


def test_steps_during_a_copy_are_the_last_one_before_the_client_hears_of_it_and_those_that_end_while_it_is_under_way():
    staying = Seen(tokens=[0.0, 1.0, 3.0, 3.0, 4.0])
    moves = [(3.5, "preempted"), (0.5, "preempted"), (1.0, "resumed"), (9.0, "resumed")]
    assert list(_gaps_during([staying], moves, {"preempted": 0.0, "resumed": 0.0})) == [2.0, 1.0]
    assert list(_gaps_during([staying], moves, {"preempted": 2.5, "resumed": 0.0})) == [1.0, 2.0, 1.0]


def test_the_seconds_of_a_move_are_those_between_two_looks():
    before = {"requests_swapped_total": 2, "cpu_offload_seconds": 1.0}
    before |= {"requests_resumed_total": 2, "cpu_reload_seconds": 5.0}
    after = {**before, "requests_swapped_total": 4, "cpu_offload_seconds": 1.5}
    assert seconds_of_a_move(before, after) == {"preempted": 0.25, "resumed": 0.0}


def test_one_swap_that_the_system_put_aside_does_not_count_for_all():
    way, counters = Way("in"), dict.fromkeys(SWAP_COUNTERS["in"], 0.0)
    for seconds in (0.001, 0.002, 1.0):
        after = {key: counters[key] + more for key, more in zip(SWAP_COUNTERS["in"], (8.0, 1, seconds), strict=True)}
        way.note(counters, after)
        counters = after
    report = way.report(plain=8000.0)
    assert report["bytes_per_s"] == pytest.approx(4000.0)
    assert report["times_a_plain_copy"] == pytest.approx(2.0)
    assert (report["bytes_per_swap"], report["copies_per_swap"]) == (8.0, 1.0)
    assert report["most_ms"] == pytest.approx(1000.0)


def test_a_goal_is_met_at_its_limit_and_not_judged_without_a_value():
    assert Goal("at most", 1.5, 1.5).met is True
    assert Goal("over", 1.51, 1.5).met is False
    assert Goal("at least", 0.79, 0.8, "at least").met is False
    assert Goal("at least", 0.8, 0.8, "at least").met is True
    assert Goal("nothing", None, 1.0).met is None


@pytest.mark.parametrize("num_blocks", [16, 20, 32, 60, 100])
def test_the_two_that_swap_beside_others_never_fit_side_by_side(num_blocks):
    """Whatever those that stay have not grown into yet."""
    bench = SwapBench(num_blocks=num_blocks)
    bench.check()
    held = 2 * -(-(bench.staying_blocks * 16 // 2 + 1) // 16)
    assert bench.beside_blocks <= num_blocks - held < 2 * bench.beside_blocks
    assert bench.beside_blocks + 2 * bench.staying_blocks < num_blocks


@pytest.mark.parametrize(("settings", "name"), [({"num_blocks": 18}, "num_blocks"), ({"pair_tokens": 999}, "pair")])
def test_sizes_that_cannot_work_are_refused_by_name(settings, name):
    with pytest.raises(ConfigError, match=name):
        SwapBench(**settings).check()
