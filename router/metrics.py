"""What the router counts. One registry, bounded labels, and each request counted once, where its token stream ends."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kv_transfer.choice import PREFERENCE
from kvferry_rpc.common_pb2 import ErrorCode, KVReceipt
from router.admission import Admission, RoomQueue
from router.policy import Health
from router.proof import Clause, HandoffRules
from router.receipts import LOCAL_TRANSPORT
from router.worker_registry import WorkerRegistry, WorkerView
from runtime.clock import Clock
from runtime.errors import KvferryError
from runtime.telemetry import LATENCY_BUCKETS_S, render_metrics

# Refused before any work was done for it.
_REJECTIONS = frozenset(
    {
        ErrorCode.INVALID_REQUEST,
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        ErrorCode.UNKNOWN_MODEL,
        ErrorCode.OVERLOADED,
        ErrorCode.UNAUTHENTICATED,
    }
)
_TRANSPORTS = frozenset({*PREFERENCE, LOCAL_TRANSPORT})
_MAX_WARNED = 1024
_OUTCOMES = ("ok", "cancelled", "rejected", "failed")
_DOOR_OUTCOMES = {ErrorCode.CANCELLED: "cancelled", ErrorCode.INTERNAL: "failed"}

_NO_RULES = HandoffRules()

_log = logging.getLogger(__name__)


class RequestMeter:
    """Measures one request. Made by `RouterMetrics.request`."""

    __slots__ = ("_last_token_at", "_metrics", "_now", "_started_at")

    def __init__(self, metrics: "RouterMetrics", clock: Clock) -> None:
        self._metrics = metrics
        self._now = clock.now
        self._started_at = clock.now()
        self._last_token_at: float | None = None

    def tokens(self, count: int) -> None:
        """`count` (1 or more) tokens came in one batch. The gap before a batch is shared out over its tokens."""
        now = self._now()
        if self._last_token_at is None:
            self._metrics.ttft.observe(now - self._started_at)
        else:
            gap = (now - self._last_token_at) / count
            for _ in range(count):
                self._metrics.itl.observe(gap)
        self._last_token_at = now
        self._metrics.tokens_generated.inc(count)

    def finished(self, receipt: KVReceipt) -> None:
        """The request has its answer."""
        self._metrics.e2e.observe(self._now() - self._started_at)
        self._metrics.prompt_tokens.inc(receipt.prompt_tokens)


class RouterMetrics:
    """All metrics of one router, in `registry`. Event-loop thread only, but for `render`."""

    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self.received = Counter("kvferry_requests_received", "Requests (each choice of n counts).", registry=registry)
        self.ended = Counter(
            "kvferry_requests_ended", "Requests that ended, by outcome; their sum is received less those in flight.",
            ["outcome"], registry=registry,
        )  # fmt: skip
        for outcome in _OUTCOMES:
            self.ended.labels(outcome)
        self.retries = Counter("kvferry_retries", "Attempts after a failed one.", registry=registry)
        self.ttft = _latency("kvferry_ttft_seconds", "Arrival to first token.", registry)
        self.itl = _latency("kvferry_itl_seconds", "Gap between two tokens of a request.", registry)
        self.e2e = _latency("kvferry_e2e_seconds", "Arrival to last token, finished requests only.", registry)
        self.prompt_tokens = Counter(
            "kvferry_prompt_tokens", "Tokens of prompts of finished requests.", registry=registry
        )
        self.tokens_generated = Counter("kvferry_tokens_generated", "Tokens given to callers.", registry=registry)
        self.handoffs = Counter(
            "kvferry_handoffs", "Attempts that placed a prompt's KV, by transport and outcome; `local` moved nothing.",
            ["transport", "outcome"], registry=registry,
        )  # fmt: skip
        self.degraded = Counter(
            "kvferry_handoffs_degraded", "Hand-offs over a worse transport than required, or than expected.",
            ["expected", "used"], registry=registry,
        )  # fmt: skip
        self._warned: set[tuple[str, ...]] = set()
        self.bytes_moved = Counter(
            "kvferry_handoff_bytes", "KV payload moved, as receipts say.", ["transport"], registry=registry
        )

        self.pulled_tokens = Counter(
            "kvferry_pulled_tokens", "Prompt tokens pulled from decode workers, not computed.", registry=registry
        )
        self.transfer = _by_transport("kvferry_handoff_transfer_seconds", "First byte sent to last written.", registry)
        self.exposed = _by_transport(
            "kvferry_handoff_exposed_seconds", "The part of a transfer after the first token was sampled.", registry
        )
        self.refusals = Counter(
            "kvferry_strict_refusals", "Requests that strict hand-off failed, by what was not proven.",
            ["clause"], registry=registry,
        )  # fmt: skip
        for clause in Clause:
            self.refusals.labels(clause.value)

    def watch(self, workers: WorkerRegistry, admission: Admission, room: RoomQueue) -> None:
        """Report these as gauges, read at each scrape. Call once."""
        in_flight = Gauge("kvferry_requests_in_flight", "Requests that hold a place.", registry=self._registry)
        in_flight.set_function(lambda: admission.in_flight)
        queued = Gauge(
            "kvferry_requests_queued", "Requests that wait for a place or for room.", registry=self._registry
        )
        queued.set_function(lambda: admission.queued + len(room))
        self._registry.register(_WorkerCollector(workers))

    @contextmanager
    def request(self) -> Iterator[RequestMeter]:
        """Count one request from here to the end of the block, which is its one terminal state."""
        self.received.inc()
        outcome = "cancelled"  # What ends the block with anything but success or an error: the caller went away.
        try:
            yield RequestMeter(self, self._clock)
            outcome = "ok"
        except KvferryError as error:
            outcome = _outcome(error)
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            self.ended.labels(outcome).inc()

    def refused_at_door(self, error: KvferryError) -> None:
        """A request ended before it reached the dispatcher: refused, left by its client (CANCELLED), or met by a defect
        (INTERNAL). However many choices it asked for, it counts as one."""
        self.received.inc()
        self.ended.labels(_DOOR_OUTCOMES.get(error.code, "rejected")).inc()

    def handoff_committed(self, receipt: KVReceipt, rules: HandoffRules = _NO_RULES) -> None:
        """An attempt placed its KV and finished."""
        transport = _transport_label(receipt.transport)
        self.handoffs.labels(transport, "committed").inc()
        self.bytes_moved.labels(transport).inc(receipt.bytes_sent)
        self.pulled_tokens.inc(receipt.pulled_tokens)
        if receipt.transport in ("", LOCAL_TRANSPORT):  # Nothing moved, or nobody said how.
            return
        if receipt.transfer_ms > 0:
            self.transfer.labels(transport).observe(receipt.transfer_ms / 1000)
            self.exposed.labels(transport).observe(receipt.exposed_transfer_ms / 1000)
        if wanted := rules.should_have_used(receipt.transport, receipt.expected_transport):
            self.degraded.labels(_transport_label(wanted), transport).inc()
            self._warn_degraded(receipt, wanted, "required" if rules.required_transports else "expected")

    def strict_refusal(self, clause: Clause) -> None:
        """Strict hand-off failed a request."""
        self.refusals.labels(clause.value).inc()

    def _warn_degraded(self, receipt: KVReceipt, wanted: str, reason: str) -> None:
        """Once for each pair of workers and of transports."""
        case = (receipt.prefill_worker, receipt.decode_worker, wanted, reason, receipt.transport)
        if case in self._warned:
            return
        if len(self._warned) >= _MAX_WARNED:
            self._warned.clear()
        self._warned.add(case)
        _log.warning("KV goes from %s to %s not over %s, as %s, but over %s; the sender's log says why", *case)

    def handoff_failed(self) -> None:
        """An attempt with a remote prefill failed; the transport is not known to the router then."""
        self.handoffs.labels("unknown", "failed").inc()

    def render(self) -> tuple[bytes, str]:
        """Body and content type of a `/metrics` answer."""
        return render_metrics(self._registry)


class _WorkerCollector(Collector):
    """Gauges of the attached workers. Their labels live and die with the workers."""

    def __init__(self, workers: WorkerRegistry) -> None:
        self._workers = workers

    def collect(self) -> Iterator[GaugeMetricFamily]:
        views = self._workers.views()
        counts = GaugeMetricFamily("kvferry_workers", "Attached workers.", labels=["role", "state"])
        for role in ("prefill", "decode"):
            for health in Health:
                matching = sum(view.role == role and view.health is health for view in views)
                counts.add_metric([role, health.value], matching)
        yield counts
        blocks = GaugeMetricFamily("kvferry_worker_blocks", "KV blocks of a worker.", labels=["worker", "state"])
        requests = GaugeMetricFamily(
            "kvferry_worker_requests_in_flight", "Requests of this router on a worker.", labels=["worker"]
        )
        refused = GaugeMetricFamily(
            "kvferry_worker_tickets_refused",
            "Uses of tickets that a worker has refused in its life.",
            labels=["worker"],
        )
        guesses = GaugeMetricFamily(
            "kvferry_worker_guessed_tokens",
            "Tokens that a worker has guessed ahead in its life, and those that were right.",
            labels=["worker", "outcome"],
        )
        for view in views:
            guesses.add_metric([view.worker_id, "drafted"], view.load.drafted_tokens)
            guesses.add_metric([view.worker_id, "accepted"], view.load.accepted_tokens)
            for state, value in _blocks(view).items():
                blocks.add_metric([view.worker_id, state], value)
            requests.add_metric([view.worker_id], view.requests_in_flight)
            refused.add_metric([view.worker_id], view.load.tickets_refused)
        yield blocks
        yield requests
        yield refused
        yield guesses


def _blocks(view: WorkerView) -> dict[str, int]:
    load = view.load
    return {
        "free": load.blocks_free,
        "cached": load.blocks_cached,
        "used": load.blocks_used,
        "quarantined": load.blocks_quarantined,
    }


def _transport_label(name: str) -> str:
    return name if name in _TRANSPORTS else "other"


def _outcome(error: KvferryError) -> str:
    if error.code == ErrorCode.CANCELLED:
        return "cancelled"
    return "rejected" if error.code in _REJECTIONS else "failed"


def _latency(name: str, help_text: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, help_text, buckets=LATENCY_BUCKETS_S, registry=registry)


def _by_transport(name: str, help_text: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, help_text, ["transport"], buckets=LATENCY_BUCKETS_S, registry=registry)
