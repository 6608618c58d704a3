"""The parts of a draw: uniform numbers, the distribution they give, and the searches that avoid a sort."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.stages.messages import SamplingParams
from deepinfer.stages.model.sampling_draw import BLOCK, draw, invert_cdf, largest, nucleus, uniform

CHI_SQUARE_15_AT_1_IN_1000 = 37.70


def chi_square(counts, probabilities) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def philox4x64(counter: int, key: int) -> int:
    """First word of Philox4x64-10 as Salmon et al. (2011) define it; `counter` and `key` below 2**64."""
    mask, words, keys = 2**64 - 1, [counter, 0, 0, 0], [key, 0]
    for _ in range(10):
        left, right = words[0] * 0xD2E7470EE14C6C93, words[2] * 0xCA5A826395121157
        words = [
            (right >> 64) ^ words[1] ^ keys[0],
            right & mask,
            (left >> 64) ^ words[3] ^ keys[1],
            left & mask,
        ]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & mask, (keys[1] + 0xBB67AE8584CAA73B) & mask]
    return words[0]


def test_uniform_numbers_are_those_of_philox_at_the_counter_after_the_index():
    assert philox4x64(0, 0) == 0x16554D9ECA36314C, "the known answer of the Random123 distribution"
    for seed in (0, 1, 1234, 2**63 + 5, 2**64 - 1):
        for index in (0, 1, 77, 100_000):
            assert uniform(seed, index) == (philox4x64(index + 1, seed) >> 11) * 2.0**-53
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)


@pytest.mark.parametrize("by", ["index", "seed"])
def test_uniform_numbers_are_even_and_neighbours_do_not_know_one_another(by):
    numbers = np.array([uniform(9, i) if by == "index" else uniform(i, 9) for i in range(20_000)])
    assert len(np.unique(numbers)) == len(numbers)
    assert 0.0 <= numbers.min() < numbers.max() < 1.0
    cells = (numbers * 16).astype(int)
    assert chi_square(np.bincount(cells, minlength=16), np.full(16, 1 / 16)) < CHI_SQUARE_15_AT_1_IN_1000
    pairs = (cells[:-1:2] // 4) * 4 + cells[1::2] // 4
    assert chi_square(np.bincount(pairs, minlength=16), np.full(16, 1 / 16)) < CHI_SQUARE_15_AT_1_IN_1000


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_twenty_thousand_draws_follow_the_softmax(temperature):
    logits = np.random.default_rng(1).normal(0, 1.0, 16).astype(np.float32)
    probabilities = np.exp(logits.astype(np.float64) / temperature)
    probabilities /= probabilities.sum()
    params = SamplingParams(temperature=temperature)
    tokens = [draw(logits, logits.max(), params, uniform(42, index)) for index in range(20_000)]
    counts = np.bincount(tokens, minlength=16)
    assert chi_square(counts, probabilities) < CHI_SQUARE_15_AT_1_IN_1000
    assert chi_square(counts, np.roll(probabilities, 1)) > 10 * CHI_SQUARE_15_AT_1_IN_1000


def test_draws_below_top_p_follow_the_renormalised_nucleus():
    logits = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15])).astype(np.float32)
    params = SamplingParams(temperature=1.0, top_p=0.8)
    tokens = [draw(logits, logits.max(), params, uniform(3, index)) for index in range(8_000)]
    counts = np.bincount(tokens, minlength=5)
    assert counts[0] == counts[2] == 0
    assert chi_square(counts[[1, 3, 4]], np.array([0.4, 0.3, 0.15]) / 0.85) < 13.82


def sizes_and_shapes():
    rng = np.random.default_rng(8)
    for n in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5000, 20_000):
        yield rng.normal(0, 3, n)
        yield np.round(rng.normal(0, 1, n))
        yield np.zeros(n)
        yield rng.normal(0, 40, n)
        yield np.where(np.arange(n) % 3 == 0, 0.0, -np.inf)


def test_largest_is_the_start_of_a_full_stable_sort():
    for values in sizes_and_shapes():
        order = np.argsort(-values, kind="stable")
        for k in (1, 2, 7, 50, 200, 3000, len(values)):
            assert np.array_equal(largest(values, k), np.sort(order[:k])), (len(values), k)


def test_nucleus_is_the_start_of_a_full_stable_sort():
    wide = 0
    for values in sizes_and_shapes():
        weights = np.exp(values - values.max())
        order = np.argsort(-weights, kind="stable")
        before = np.concatenate(([0.0], weights[order].cumsum()[:-1]))
        for top_p in (1e-12, 0.01, 0.3, 0.9, 0.999, 1 - 2**-40, 1 - 2**-53):
            kept = nucleus(weights, top_p)
            expected = np.sort(order[before < top_p * weights.sum()])
            if top_p <= 1 - 2**-40:
                assert np.array_equal(kept, expected), (len(values), top_p)
            assert weights[kept].sum() >= top_p * weights.sum() * (1 - 1e-12)
            wide += len(kept) > 4096
    assert wide >= 10


@pytest.mark.parametrize("n", [1, 5, BLOCK, 3 * BLOCK + 1, 20_000])
def test_inverting_the_cdf_finds_the_entry_that_holds_the_target(n):
    rng = np.random.default_rng(n)
    weights = rng.random(n) ** 8
    weights[rng.random(n) < 0.3] = 0.0
    weights[n // 2] = 1.0
    cumulative = weights.cumsum()
    for u in (0.0, *rng.random(500), 1 - 2**-53):
        position = invert_cdf(weights, u)
        assert weights[position] > 0.0
        assert cumulative[position] >= u * cumulative[-1] * (1 - 1e-12)
        assert cumulative[position] - weights[position] <= u * cumulative[-1] * (1 + 1e-12)


@pytest.mark.parametrize("lead", [0, 3, BLOCK, 2 * BLOCK + 5])
def test_a_target_on_a_step_of_the_cdf_belongs_to_the_next_entry_with_weight(lead):
    weights = np.zeros(5 * BLOCK)
    weights[[lead, lead + 2, lead + 2 * BLOCK, lead + 2 * BLOCK + 1]] = 1.0
    found = [invert_cdf(weights, u) - lead for u in (0.0, 0.2, 0.25, 0.5, 0.75, 1 - 2**-53)]
    assert found == [0, 0, 2, 2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + 1]


def test_inverting_the_cdf_stays_inside_when_the_running_sum_falls_short_of_the_total():
    rng, short = np.random.default_rng(0), 0
    for _ in range(200):
        weights = rng.random(BLOCK)
        weights[100:] = 0.0
        short += weights.cumsum()[-1] < np.add.reduceat(weights, [0])[0]
        assert weights[invert_cdf(weights, 1 - 2**-53)] > 0.0
    assert short > 10
