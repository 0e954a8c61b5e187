"""What the router counts, and that it adds up."""

import asyncio
import logging

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvferry_rpc.common_pb2 import ErrorCode, KVReceipt
from kvferry_rpc.internal_pb2 import LoadReport, Role
from router.admission.shedding import ShedReason
from router.admission.slo import BATCH, INTERACTIVE
from router.dispatch.proof import Clause, HandoffRules
from router.observation import tenant_metrics
from router.observation.metrics import RouterMetrics
from router.workers.breaker import MAX_FAILURES
from router.workers.worker_registry import WorkerRegistry
from runtime.clock import ManualClock
from runtime.errors import KvferryError
from tests.support.admission_desk import Desk, settle
from tests.support.fake_workers import registration


class Setup:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.prometheus = CollectorRegistry()
        self.metrics = RouterMetrics(self.prometheus, self.clock)

    def value(self, name: str, **labels: str) -> float | None:
        return self.prometheus.get_sample_value(name, labels)

    def end_with(self, problem: BaseException | None) -> None:
        with self.metrics.request():
            if problem is not None:
                raise problem


@pytest.mark.parametrize(
    ("problem", "outcome"),
    [
        (None, "ok"),
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
        (KvferryError(ErrorCode.CANCELLED, ""), "cancelled"),
        (KvferryError(ErrorCode.OVERLOADED, ""), "rejected"),
        (KvferryError(ErrorCode.INVALID_REQUEST, ""), "rejected"),
        (KvferryError(ErrorCode.UNAVAILABLE, ""), "failed"),
        (KvferryError(ErrorCode.DEADLINE_EXCEEDED, ""), "failed"),
        (KvferryError(ErrorCode.HANDOFF_FAILED, ""), "failed"),
        (KvferryError(ErrorCode.INTERNAL, ""), "failed"),
        (RuntimeError(), "failed"),
    ],
)
def test_every_request_has_one_outcome(problem: BaseException | None, outcome: str) -> None:
    # H102
    setup = Setup()
    if problem is None:
        setup.end_with(None)
    else:
        with pytest.raises(type(problem)):
            setup.end_with(problem)
    outcomes = {name: setup.value("kvferry_requests_ended_total", outcome=name) for name in _OUTCOMES}
    assert outcomes == {name: float(name == outcome) for name in _OUTCOMES}
    assert setup.value("kvferry_requests_received_total") == 1


_OUTCOMES = ("ok", "cancelled", "rejected", "failed")


def test_a_refusal_at_the_door_is_received_and_rejected() -> None:
    setup = Setup()
    for code in (ErrorCode.INVALID_REQUEST, ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED):
        setup.metrics.refused_at_door(KvferryError(code, ""))
    assert setup.value("kvferry_requests_received_total") == 3
    assert setup.value("kvferry_requests_ended_total", outcome="rejected") == 3


@pytest.mark.parametrize(("code", "outcome"), [(ErrorCode.CANCELLED, "cancelled"), (ErrorCode.INTERNAL, "failed")])
def test_a_request_that_was_left_or_met_a_defect_at_the_door_is_not_called_rejected(
    code: "ErrorCode.ValueType", outcome: str
) -> None:
    setup = Setup()
    setup.metrics.refused_at_door(KvferryError(code, ""))
    assert setup.value("kvferry_requests_received_total") == 1
    assert setup.value("kvferry_requests_ended_total", outcome=outcome) == 1


def test_times_are_those_of_the_tokens() -> None:
    setup = Setup()
    with setup.metrics.request() as meter:
        setup.clock.advance(0.5)
        meter.tokens(1)
        setup.clock.advance(0.4)
        meter.tokens(4)
        setup.clock.advance(0.1)
        meter.finished(KVReceipt(prompt_tokens=40), 16)
    assert (
        setup.value("kvferry_time_to_first_token_seconds_count"),
        setup.value("kvferry_time_to_first_token_seconds_sum"),
    ) == (1, 0.5)
    assert setup.value("kvferry_inter_token_latency_seconds_count") == 4
    assert setup.value("kvferry_inter_token_latency_seconds_sum") == pytest.approx(0.4)
    assert setup.value("kvferry_e2e_request_latency_seconds_sum") == pytest.approx(1.0)
    assert setup.value("kvferry_tokens_generated_total") == 5
    assert setup.value("kvferry_prompt_tokens_total") == 40
    assert setup.value("kvferry_prompt_tokens_cached_total") == 16


def test_a_second_token_in_the_first_batch_has_its_time_and_a_single_token_no_mean() -> None:
    setup = Setup()
    for count in (2, 1):
        with setup.metrics.request() as meter:
            setup.clock.advance(0.5)
            meter.tokens(count)
            meter.finished(KVReceipt(), 0)
    assert setup.value("kvferry_time_to_second_token_seconds_count") == 1
    assert setup.value("kvferry_time_to_second_token_seconds_sum") == 0.5
    assert setup.value("kvferry_request_time_per_output_token_seconds_count") == 1


def test_times_of_the_workers_are_those_of_the_receipts() -> None:
    setup = Setup()
    with setup.metrics.request() as meter:
        meter.finished(KVReceipt(queue_ms=10.0, prefill_ms=200.0, decode_ms=3000.0), 0)
    names = ("queue", "prefill", "decode")
    sums = [setup.value(f"kvferry_request_{name}_time_seconds_sum") for name in names]
    assert sums == [pytest.approx(0.01), pytest.approx(0.2), pytest.approx(3.0)]


@pytest.mark.parametrize(
    ("receipt", "proof"),
    [
        (KVReceipt(transport="tcp", checksum_verified=True), "proved"),
        (KVReceipt(transport="tcp", checksum_verified=True, tokens_recomputed=16), "recomputed"),
        (KVReceipt(transport="local"), "local"),
        (KVReceipt(transport="tcp"), "unproved"),
        (KVReceipt(), "unproved"),
    ],
)
def test_receipts_are_counted_by_what_they_prove(receipt: KVReceipt, proof: str) -> None:
    setup = Setup()
    setup.metrics.handoff_committed(receipt)
    for name in ("proved", "recomputed", "local", "unproved"):
        assert setup.value("kvferry_receipts_total", proof=name) == (name == proof)


def test_tenants_have_their_own_counts_and_no_more_labels_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_metrics, "MAX_TENANTS", 2)
    setup = Setup()
    for tenant in ("red", "blue", "red", "green", "grey", ""):
        with setup.metrics.request(tenant=tenant) as meter:
            meter.tokens(3)
            meter.finished(KVReceipt(prompt_tokens=7), 0)
    counts = [
        setup.value("kvferry_tenant_requests_total", tenant=name, outcome="ok")
        for name in ("red", "blue", "_others", "green", "")
    ]
    assert counts == [2, 1, 2, None, None]
    assert setup.value("kvferry_tenant_tokens_total", tenant="red", kind="prompt") == 14
    assert setup.value("kvferry_tenant_tokens_total", tenant="red", kind="generated") == 6


def test_transports_are_a_bounded_set_of_labels() -> None:
    setup = Setup()
    setup.metrics.handoff_committed(KVReceipt(transport="shm", bytes_sent=100))
    setup.metrics.handoff_committed(KVReceipt(transport="shm", bytes_sent=100))
    for number in range(20):
        setup.metrics.handoff_committed(KVReceipt(transport=f"made up {number}"))
    assert setup.value("kvferry_handoffs_total", transport="shm", outcome="committed") == 2
    assert setup.value("kvferry_handoff_bytes_total", transport="shm") == 200
    assert setup.value("kvferry_handoffs_total", transport="other", outcome="committed") == 20


def _moved(used: str, expected: str, *, prefill: str = "prefill-0") -> KVReceipt:
    return KVReceipt(transport=used, expected_transport=expected, prefill_worker=prefill, decode_worker="decode-0")


def test_a_slower_transport_than_expected_is_counted_each_time_and_warned_of_once_a_pair(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup = Setup()
    for _ in range(3):
        setup.metrics.handoff_committed(_moved("tcp", "nixl"))
    setup.metrics.handoff_committed(_moved("tcp", "nixl", prefill="prefill-1"))
    setup.metrics.handoff_committed(_moved("tcp", "made up"))
    assert setup.value("kvferry_handoffs_degraded_total", expected="nixl", used="tcp") == 4
    assert setup.value("kvferry_handoffs_degraded_total", expected="other", used="tcp") == 1
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 3
    assert "from prefill-0 to decode-0 not over nixl, as expected, but over tcp" in warnings[0]
    assert "prefill-1" in warnings[1]


def test_what_was_expected_or_better_is_no_degradation(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup()
    for used, expected in (("tcp", "tcp"), ("shm", "tcp"), ("local", ""), ("tcp", "")):
        setup.metrics.handoff_committed(_moved(used, expected))
    assert b"kvferry_handoffs_degraded_total{" not in setup.metrics.render()[0]
    assert not caplog.records


def test_what_was_required_is_missed_by_everything_else(caplog: pytest.LogCaptureFixture) -> None:
    setup, rules = Setup(), HandoffRules(required_transports=("nixl", "ucx"))
    for used, expected in (("tcp", "tcp"), ("shm", "tcp"), ("nixl", "shm"), ("local", ""), ("", "")):
        setup.metrics.handoff_committed(_moved(used, expected), rules)
    assert setup.value("kvferry_handoffs_degraded_total", expected="nixl", used="tcp") == 1
    assert setup.value("kvferry_handoffs_degraded_total", expected="nixl", used="shm") == 1
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "from prefill-0 to decode-0 not over nixl, as required, but over tcp" in warnings[0]


def test_times_and_pulled_tokens_of_hand_offs_come_from_their_receipts() -> None:
    setup = Setup()
    setup.metrics.handoff_committed(
        KVReceipt(transport="shm", transfer_ms=20.0, exposed_transfer_ms=5.0, pulled_tokens=48)
    )
    setup.metrics.handoff_committed(KVReceipt(transport="shm", transfer_ms=40.0))
    for transport in ("local", ""):
        setup.metrics.handoff_committed(KVReceipt(transport=transport))
    assert setup.value("kvferry_handoff_transfer_seconds_count", transport="shm") == 2
    assert setup.value("kvferry_handoff_transfer_seconds_sum", transport="shm") == pytest.approx(0.06)
    assert setup.value("kvferry_handoff_exposed_seconds_sum", transport="shm") == pytest.approx(0.005)
    assert setup.value("kvferry_handoff_transfer_seconds_count", transport="local") is None
    assert setup.value("kvferry_pulled_tokens_total") == 48


def test_strict_refusals_are_counted_by_clause_and_all_clauses_are_there_from_the_start() -> None:
    setup = Setup()
    setup.metrics.strict_refusal(Clause.TRANSPORT)
    for clause in Clause:
        counted = setup.value("kvferry_strict_refusals_total", clause=clause.value)
        assert counted == float(clause is Clause.TRANSPORT)


def test_workers_are_shown_with_their_blocks_and_vanish_when_they_leave() -> None:
    setup, registry = Setup(), WorkerRegistry(ManualClock())
    setup.metrics.watch(registry, Desk().admission)
    worker = registry.attach(registration("decode-0", Role.DECODE), lambda: None)
    load = LoadReport(blocks_free=1, blocks_cached=2, blocks_used=3, blocks_quarantined=4, tickets_refused=5)
    load.drafted_tokens, load.accepted_tokens = 7, 6
    registry.report(worker, load)
    load.sequences_running, load.sequences_waiting, load.sequences_receiving, load.tokens_waiting = 2, 3, 4, 99
    load.steps, load.preemptions, load.prompt_tokens_computed, load.tokens_generated = 11, 12, 13, 14
    load.handoffs_committed, load.handoffs_failed, load.bytes_moved = 15, 16, 17
    with registry.lease("decode-0", 0):
        assert setup.value("kvferry_worker_requests_in_flight", worker="decode-0") == 1
    for state, count in {"free": 1, "cached": 2, "used": 3, "quarantined": 4}.items():
        assert setup.value("kvferry_worker_blocks", worker="decode-0", state=state) == count
    assert setup.value("kvferry_worker_tickets_refused", worker="decode-0") == 5
    assert setup.value("kvferry_worker_guessed_tokens", worker="decode-0", outcome="drafted") == 7
    assert setup.value("kvferry_worker_guessed_tokens", worker="decode-0", outcome="accepted") == 6
    assert setup.value("kvferry_workers", role="decode", state="ready") == 1
    assert setup.value("kvferry_workers", role="prefill", state="ready") == 0
    for state, count in {"running": 2, "waiting": 3, "receiving": 4}.items():
        assert setup.value("kvferry_worker_sequences", worker="decode-0", state=state) == count
    assert setup.value("kvferry_worker_tokens_waiting", worker="decode-0") == 99
    totals = ("steps", "preemptions", "prompt_tokens_computed", "tokens_generated", "handoff_bytes")
    counted = [setup.value(f"kvferry_worker_{name}_total", worker="decode-0") for name in totals]
    assert counted == [11, 12, 13, 14, 17]
    for outcome, count in {"committed": 15, "failed": 16}.items():
        assert setup.value("kvferry_worker_handoffs_total", worker="decode-0", outcome=outcome) == count
    registry.drain(worker)
    assert setup.value("kvferry_workers", role="decode", state="draining") == 1
    registry.detach(worker)
    assert setup.value("kvferry_worker_blocks", worker="decode-0", state="free") is None
    assert setup.value("kvferry_worker_tickets_refused", worker="decode-0") is None
    assert setup.value("kvferry_workers", role="decode", state="ready") == 0


def test_the_state_of_a_breaker_is_shown() -> None:
    clock = ManualClock()
    setup, registry = Setup(), WorkerRegistry(clock)
    setup.metrics.watch(registry, Desk().admission)
    registry.attach(registration("decode-0", Role.DECODE), lambda: None)

    def states() -> list[float | None]:
        names = ("closed", "open", "half_open")
        return [setup.value("kvferry_worker_breaker", worker="decode-0", state=name) for name in names]

    assert states() == [1, 0, 0]
    for _ in range(MAX_FAILURES):
        registry.failed("decode-0", 0.5)
    assert states() == [0, 1, 0]
    clock.advance(60.0)
    assert states() == [0, 0, 1]


async def test_requests_in_flight_and_queued_are_read_at_each_scrape() -> None:
    setup, desk = Setup(), Desk(max_in_flight=1)
    setup.metrics.watch(WorkerRegistry(ManualClock()), desk.admission)
    tasks = [desk.come("0"), desk.come("1", slo=BATCH), desk.come("2", tokens=25)]
    await settle()
    assert setup.value("kvferry_requests_in_flight") == 1
    assert setup.value("kvferry_requests_queued") == 2
    assert setup.value("kvferry_queue_tokens") == 35
    depths = [setup.value("kvferry_queue_depth", slo=name) for name in ("interactive", "batch", "none")]
    assert depths == [0, 1, 1]
    await desk.end(*"012")
    await asyncio.gather(*tasks)
    assert setup.value("kvferry_requests_in_flight") == 0
    assert setup.value("kvferry_requests_queued") == 0


def _slo_counts(setup: Setup) -> dict[str, float]:
    outcomes = ("met", "missed_ttft", "missed_tpot", "no_answer", "cancelled")
    counts = {name: setup.value("kvferry_slo_requests_total", slo="interactive", outcome=name) for name in outcomes}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize(
    ("ttft_s", "gap_s", "outcome"),
    [(1.9, 0.19, "met"), (2.1, 0.01, "missed_ttft"), (0.1, 0.21, "missed_tpot"), (1.0, None, "met")],
)
def test_goodput_is_what_met_both_targets_of_its_class(ttft_s: float, gap_s: float | None, outcome: str) -> None:
    setup = Setup()
    with setup.metrics.request(INTERACTIVE) as meter:
        setup.clock.advance(ttft_s)
        meter.tokens(1)
        if gap_s is not None:
            setup.clock.advance(4 * gap_s)
            meter.tokens(4)
        meter.finished(KVReceipt(), 0)
    assert _slo_counts(setup) == {outcome: 1}


@pytest.mark.parametrize(
    ("problem", "outcome"),
    [(KvferryError(ErrorCode.OVERLOADED, ""), "no_answer"), (asyncio.CancelledError(), "cancelled")],
)
def test_a_request_of_a_class_without_an_answer_met_nothing(problem: BaseException, outcome: str) -> None:
    setup = Setup()
    with pytest.raises(type(problem)), setup.metrics.request(INTERACTIVE):
        raise problem
    assert _slo_counts(setup) == {outcome: 1}


def test_what_was_shed_is_counted_by_reason_and_class() -> None:
    setup = Setup()
    setup.metrics.shed(ShedReason.DEADLINE, "batch")
    assert setup.value("kvferry_requests_shed_total", reason="deadline", slo="batch") == 1


def test_the_page_is_valid_text_without_unbounded_labels() -> None:
    setup, registry = Setup(), WorkerRegistry(ManualClock())
    setup.metrics.watch(registry, Desk().admission)
    registry.attach(registration("decode-0", Role.DECODE), lambda: None)
    setup.end_with(None)
    with setup.metrics.request(INTERACTIVE, "red") as meter:
        meter.tokens(2)
        meter.finished(KVReceipt(transport="tcp"), 0)
    setup.metrics.handoff_committed(KVReceipt(transport="tcp", transfer_ms=1.0, expected_transport="shm"))
    body, content_type = setup.metrics.render()
    assert content_type.startswith("text/plain")
    families = list(text_string_to_metric_families(body.decode()))
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    of_requests = {"outcome", "transport", "clause", "le", "slo", "reason", "expected", "used", "proof"}
    assert labels <= of_requests | {"tenant", "kind", "role", "state", "worker"}
    help_texts = {family.name: family.documentation for family in families}
    assert all(help_texts.values())
    assert {"kvferry_time_to_first_token_seconds", "kvferry_worker_steps", "kvferry_receipts"} <= help_texts.keys()
