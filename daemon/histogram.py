"""A histogram of what happens for every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenHistogram(Collector):
    """One thread observes, any may collect. The library's own takes two locks for every value and looks through its
    buckets one by one."""

    def __init__(self, name: str, help: str, buckets: Sequence[float]) -> None:
        """`buckets`: upper bounds, ascending; what is above the last one is counted too."""
        self._name, self._help, self._bounds = name, help, list(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        totals = list(zip(names, accumulate(self._counts.copy()), strict=True))
        yield HistogramMetricFamily(self._name, self._help, buckets=totals, sum_value=self._sum)
