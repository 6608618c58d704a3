"""What a bench says of its own rounds: medians, spreads, and when another run may say something else."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from deepinfer.daemon.bench.rounds import NOISY, RISK, Spread, noise, ratio_of, spread_of


@pytest.mark.parametrize("count", [1, 2, 5, 6, 8, 9, 12, 20, 31])
def test_low_to_high_are_the_innermost_order_statistics_that_keep_the_risk(count):
    values = np.random.default_rng(count).permutation(count).astype(float).tolist()
    spread = spread_of(values)
    assert spread.median == statistics.median(values)
    assert (spread.min, spread.max) == (0, count - 1)
    cut = int(spread.low)
    assert spread.high == count - 1 - cut

    def risk(outside: int) -> float:
        """That the true median lies below the value at `outside` or above its mirror image."""
        return 2 * sum(math.comb(count, k) for k in range(outside + 1)) / 2**count

    assert cut == 0 or risk(cut) <= RISK
    assert risk(cut + 1) > RISK


def test_the_interval_holds_the_median_of_a_skewed_distribution_as_often_as_it_says():
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        spread = spread_of(random.exponential(size=12).tolist())
        hits += spread.low <= math.log(2) <= spread.high
    assert hits / 2000 >= 1 - RISK - 0.015


def test_a_ratio_is_that_of_the_rounds_not_of_the_medians():
    """A minute in which everything takes twice as long changes nothing."""
    samples = {"a": [2.0, 1.0, 4.0], "b": [1.0, 0.5, 2.0]}
    assert ratio_of(samples, "a", "b") == Spread(2.0, 2.0, 2.0, 2.0, 2.0)


def test_a_run_says_when_it_is_too_noisy_and_what_is_worst():
    calm = Spread(1.0, 0.9, 1.1, 1.0 - NOISY / 2.1, 1.0 + NOISY / 2.1)
    assert noise({"calm": calm}, 9) is None
    wild = Spread(2.0, 1.0, 3.0, 1.5, 2.5)
    said = noise({"calm": calm, "wild": wild}, 9)
    assert said is not None
    assert said.startswith("too noisy: wild lies between 1.5 and 2.5 over 9 rounds, 50% apart")


def test_one_round_is_no_proof_of_calm():
    assert "--rounds" in (noise({"a": spread_of([1.0])}, 1) or "")
    assert noise({}, 1) is None
