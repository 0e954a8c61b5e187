from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from runtime.fast_metrics import FastCounter, FastHistogram

BOUNDS = (0.001, 0.0025, 0.01, 1.0, 2.5)
VALUES = st.sampled_from((0.0, 0.001, 0.0011, 0.01, 0.5, 1.0, 2.5, 3.0)) | st.floats(0, 10)


def lines(registry: CollectorRegistry) -> list[str]:
    """What a scrape shows, but for when each metric was made."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(VALUES, st.integers(1, 3)), max_size=20))
def test_a_scrape_shows_what_the_library_itself_would_show(seen: list[tuple[float, int]]) -> None:
    fast, plain = CollectorRegistry(), CollectorRegistry()
    counter = FastCounter("tokens", "Help.", fast)
    histogram = FastHistogram("gap_seconds", "Help.", BOUNDS, fast)
    plain_counter = Counter("tokens", "Help.", registry=plain)
    plain_histogram = Histogram("gap_seconds", "Help.", buckets=BOUNDS, registry=plain)
    for value, count in seen:
        # In eighths, so that sums are exact in whatever order they are made.
        value = int(value * 8) / 8
        counter.inc(count)
        histogram.observe(value, count)
        plain_counter.inc(count)
        for _ in range(count):
            plain_histogram.observe(value)
    assert lines(fast) == lines(plain)
