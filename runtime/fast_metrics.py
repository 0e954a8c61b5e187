"""A counter and a histogram for what happens at every token: prometheus_client's take a lock, and the histogram walks
through its buckets, which at a thousand tokens a second is a sixth of a router's work.

One thread writes; any thread may collect.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


class FastCounter(Collector):
    """As `prometheus_client.Counter` without labels."""

    def __init__(self, name: str, help_text: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._help = help_text
        self._value = 0
        registry.register(self)

    def inc(self, count: int) -> None:
        """Count so many more, 0 or more."""
        self._value += count

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._help, self._value)


class FastHistogram(Collector):
    """As `prometheus_client.Histogram` without labels."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        """`bounds` ascend and do not end in infinity."""
        self._name = name
        self._help = help_text
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """`count` observations of the same value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        buckets, below = [], 0
        for label, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            below += count
            buckets.append((label, below))
        yield HistogramMetricFamily(self._name, self._help, buckets, self._sum)
