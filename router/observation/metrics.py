"""What the router counts. One registry, bounded labels, and each request counted once, where its token stream ends."""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kv_transfer.choice import PREFERENCE
from kvferry_rpc.common_pb2 import ErrorCode, KVReceipt
from router.admission.admission import Admission
from router.admission.shedding import ShedReason
from router.admission.slo import NO_CLASS, SLO_NAMES, SloClass
from router.dispatch.proof import Clause, HandoffRules
from router.dispatch.receipts import LOCAL_TRANSPORT, PROOFS, proof_of
from router.observation.latency_metrics import LatencyMetrics, RequestMeter
from router.observation.tenant_metrics import TenantMetrics
from router.observation.worker_metrics import WorkerCollector
from router.workers.worker_registry import WorkerRegistry
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
_SLO_OUTCOMES = ("met", "missed_ttft", "missed_tpot", "no_answer", "cancelled")
_DOOR_OUTCOMES = {ErrorCode.CANCELLED: "cancelled", ErrorCode.INTERNAL: "failed"}

_NO_RULES = HandoffRules()

_log = logging.getLogger(__name__)


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
        self._ended = {outcome: self.ended.labels(outcome) for outcome in _OUTCOMES}
        self.sheds = Counter(
            "kvferry_requests_shed", "Requests refused for want of capacity, by why and by class.",
            ["reason", "slo"], registry=registry,
        )  # fmt: skip
        self.slo = Counter(
            "kvferry_slo_requests", "Requests of a class, by what became of its targets; goodput is those that met.",
            ["slo", "outcome"], registry=registry,
        )  # fmt: skip
        for name in SLO_NAMES:
            for outcome in _SLO_OUTCOMES:
                self.slo.labels(name, outcome)
        self.slo_met = self.slo_missed = 0  # The same over all classes; cancelled requests count nowhere.
        self.retries = Counter("kvferry_retries", "Attempts after a failed one.", registry=registry)
        self.migrations = Counter(
            "kvferry_migrations", "Answers that were to leave a decode worker that drains, by what became of them.",
            ["outcome"], registry=registry,
        )  # fmt: skip
        for outcome in ("moved", "stayed", "failed"):
            self.migrations.labels(outcome)
        self._latency = LatencyMetrics(registry)
        self._tenants = TenantMetrics(registry)
        self.receipts = Counter(
            "kvferry_receipts", "Receipts of finished requests, by what they prove.", ["proof"], registry=registry
        )
        self._receipts = {proof: self.receipts.labels(proof) for proof in PROOFS}
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

    def watch(self, workers: WorkerRegistry, admission: Admission) -> None:
        """Report these as gauges, read at each scrape. Call once."""
        in_flight = Gauge("kvferry_requests_in_flight", "Requests that hold a place.", registry=self._registry)
        in_flight.set_function(lambda: admission.in_flight)
        queued = Gauge(
            "kvferry_requests_queued", "Requests that wait for a place or for room.", registry=self._registry
        )
        queued.set_function(lambda: admission.queued + admission.resuming)
        tokens = Gauge(
            "kvferry_queue_tokens", "Tokens, prompts and expected answers, of those that wait for a place.",
            registry=self._registry,
        )  # fmt: skip
        tokens.set_function(lambda: admission.queued_tokens)
        depth = Gauge("kvferry_queue_depth", "Requests that wait for a place.", ["slo"], registry=self._registry)
        for name in (*SLO_NAMES, NO_CLASS):
            depth.labels(name).set_function(functools.partial(_depth, admission, name))
        self._registry.register(WorkerCollector(workers))

    @contextmanager
    def request(self, slo: SloClass | None = None, tenant: str = "") -> Iterator[RequestMeter]:
        """Count one request from here to the end of the block, which is its one terminal state. `slo`: its class."""
        self.received.inc()
        meter = RequestMeter(self._latency, self._clock, slo)
        outcome = "cancelled"  # What ends the block with anything but success or an error: the caller went away.
        try:
            yield meter
            outcome = "ok"
        except KvferryError as error:
            outcome = _outcome(error)
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            self._ended[outcome].inc()
            self._tenants.ended(tenant, outcome, meter)
            if slo is not None:
                self._count_slo(slo, meter.slo_outcome or ("cancelled" if outcome == "cancelled" else "no_answer"))

    def _count_slo(self, slo: SloClass, outcome: str) -> None:
        self.slo.labels(slo.name, outcome).inc()
        self.slo_met += outcome == "met"
        self.slo_missed += outcome not in ("met", "cancelled")

    def shed(self, reason: ShedReason, slo_name: str) -> None:
        """A request was refused for want of capacity."""
        self.sheds.labels(reason.value, slo_name).inc()

    def refused_at_door(self, error: KvferryError) -> None:
        """A request ended before it reached the dispatcher: refused, left by its client (CANCELLED), or met by a defect
        (INTERNAL). However many choices it asked for, it counts as one."""
        self.received.inc()
        self.ended.labels(_DOOR_OUTCOMES.get(error.code, "rejected")).inc()

    def handoff_committed(self, receipt: KVReceipt, rules: HandoffRules = _NO_RULES) -> None:
        """An attempt placed its KV and finished."""
        transport = _transport_label(receipt.transport)
        self._receipts[proof_of(receipt)].inc()
        self.handoffs.labels(transport, "committed").inc()
        self.bytes_moved.labels(transport).inc(receipt.bytes_sent)
        self.pulled_tokens.inc(receipt.pulled_tokens)
        for migration in receipt.migrations:
            self.bytes_moved.labels(_transport_label(migration.transport)).inc(migration.bytes_sent)
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


def _depth(admission: Admission, slo_name: str) -> float:
    return admission.depths()[slo_name]


def _transport_label(name: str) -> str:
    return name if name in _TRANSPORTS else "other"


def _outcome(error: KvferryError) -> str:
    if error.code == ErrorCode.CANCELLED:
        return "cancelled"
    return "rejected" if error.code in _REJECTIONS else "failed"


def _by_transport(name: str, help_text: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, help_text, ["transport"], buckets=LATENCY_BUCKETS_S, registry=registry)
