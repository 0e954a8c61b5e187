"""What attached workers report, as metrics of the router: they have no port of their own for it."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry_rpc.internal_pb2 import LoadReport
from router.policy import Health
from router.workers.breaker import BreakerState
from router.workers.worker_registry import WorkerRegistry, WorkerView

_TOTALS = (
    ("kvferry_worker_steps", "Steps of a worker's engine in its life.", "steps"),
    ("kvferry_worker_preemptions", "Sequences that a worker has preempted in its life.", "preemptions"),
    ("kvferry_worker_prompt_tokens_computed", "Prompt tokens that a worker has computed.", "prompt_tokens_computed"),
    ("kvferry_worker_tokens_generated", "Tokens that a worker has sampled in its life.", "tokens_generated"),
    ("kvferry_worker_handoff_bytes", "KV payload that a worker has sent (prefill) or received.", "bytes_moved"),
)
"""Name, help, and field of a LoadReport."""


class WorkerCollector(Collector):
    """Read at each scrape. Labels live and die with the workers; a worker that comes back counts from zero."""

    def __init__(self, workers: WorkerRegistry) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        views = self._workers.views()
        yield _states(views)
        yield from _gauges(views)
        yield _breakers(views)
        for name, text, field in _TOTALS:
            total = CounterMetricFamily(name, text, labels=["worker"])
            for view in views:
                total.add_metric([view.worker_id], getattr(view.load, field))
            yield total
        handoffs = CounterMetricFamily(
            "kvferry_worker_handoffs",
            "Hand-offs of a worker in its life: delivered (prefill) or verified (decode), and failed.",
            labels=["worker", "outcome"],
        )
        for view in views:
            handoffs.add_metric([view.worker_id, "committed"], view.load.handoffs_committed)
            handoffs.add_metric([view.worker_id, "failed"], view.load.handoffs_failed)
        yield handoffs


def _states(views: list[WorkerView]) -> Metric:
    counts = GaugeMetricFamily("kvferry_workers", "Attached workers.", labels=["role", "state"])
    for role in ("prefill", "decode"):
        for health in Health:
            matching = sum(view.role == role and view.health is health for view in views)
            counts.add_metric([role, health.value], matching)
    return counts


def _gauges(views: list[WorkerView]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("kvferry_worker_blocks", "KV blocks of a worker.", labels=["worker", "state"])
    sequences = GaugeMetricFamily("kvferry_worker_sequences", "Sequences of a worker.", labels=["worker", "state"])
    requests = GaugeMetricFamily(
        "kvferry_worker_requests_in_flight", "Requests of this router on a worker.", labels=["worker"]
    )
    waiting = GaugeMetricFamily(
        "kvferry_worker_tokens_waiting", "Prompt tokens that a worker has still to compute.", labels=["worker"]
    )
    refused = GaugeMetricFamily(
        "kvferry_worker_tickets_refused", "Uses of tickets that a worker has refused in its life.", labels=["worker"]
    )
    guesses = GaugeMetricFamily(
        "kvferry_worker_guessed_tokens",
        "Tokens that a worker has guessed ahead in its life, and those that were right.",
        labels=["worker", "outcome"],
    )
    for view in views:
        for state, value in _blocks(view.load).items():
            blocks.add_metric([view.worker_id, state], value)
        for state, value in _sequences(view.load).items():
            sequences.add_metric([view.worker_id, state], value)
        requests.add_metric([view.worker_id], view.requests_in_flight)
        waiting.add_metric([view.worker_id], view.load.tokens_waiting)
        refused.add_metric([view.worker_id], view.load.tickets_refused)
        guesses.add_metric([view.worker_id, "drafted"], view.load.drafted_tokens)
        guesses.add_metric([view.worker_id, "accepted"], view.load.accepted_tokens)
    yield from (blocks, sequences, requests, waiting, refused, guesses)


def _breakers(views: list[WorkerView]) -> Metric:
    breakers = GaugeMetricFamily(
        "kvferry_worker_breaker", "1 for the state that the breaker of a worker is in.", labels=["worker", "state"]
    )
    for view in views:
        for state in BreakerState:
            breakers.add_metric([view.worker_id, state.value.replace(" ", "_")], view.breaker is state)
    return breakers


def _blocks(load: LoadReport) -> dict[str, int]:
    return {
        "free": load.blocks_free,
        "cached": load.blocks_cached,
        "used": load.blocks_used,
        "quarantined": load.blocks_quarantined,
    }


def _sequences(load: LoadReport) -> dict[str, int]:
    return {
        "running": load.sequences_running,
        "waiting": load.sequences_waiting,
        "receiving": load.sequences_receiving,
    }
