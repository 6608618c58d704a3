"""The histogram of token gaps says what the library's own would."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from deepinfer.daemon.histogram import TokenHistogram
from deepinfer.daemon.metrics import GAP_BUCKETS


def test_it_is_told_as_the_librarys_own_for_values_within_on_and_above_its_bounds():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    light = TokenHistogram("gap_seconds", "Between two.", GAP_BUCKETS)
    ours.register(light)
    usual = Histogram("gap_seconds", "Between two.", buckets=GAP_BUCKETS, registry=theirs)
    assert generate_latest(ours) == generate_latest(theirs)
    rng = random.Random(3)
    values = [*GAP_BUCKETS, 0.0, 1e9, *(10 ** rng.uniform(-5, 3) for _ in range(2000))]
    for value in values:
        light.observe(value)
        usual.observe(value)
    assert generate_latest(ours) == generate_latest(theirs)
