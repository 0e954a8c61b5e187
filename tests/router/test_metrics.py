"""What the router counts, and that it adds up."""

import asyncio
import logging

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvferry_rpc.common_pb2 import ErrorCode, KVReceipt
from kvferry_rpc.internal_pb2 import LoadReport, Role
from router.admission import Admission, RoomQueue
from router.metrics import RouterMetrics
from router.proof import Clause, HandoffRules
from router.worker_registry import WorkerRegistry
from runtime.clock import ManualClock
from runtime.errors import KvferryError
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
        meter.finished(KVReceipt(prompt_tokens=40))
    assert (setup.value("kvferry_ttft_seconds_count"), setup.value("kvferry_ttft_seconds_sum")) == (1, 0.5)
    assert setup.value("kvferry_itl_seconds_count") == 4
    assert setup.value("kvferry_itl_seconds_sum") == pytest.approx(0.4)
    assert setup.value("kvferry_e2e_seconds_sum") == pytest.approx(1.0)
    assert setup.value("kvferry_tokens_generated_total") == 5
    assert setup.value("kvferry_prompt_tokens_total") == 40


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
    setup.metrics.watch(registry, Admission(1, 1, 1), RoomQueue())
    worker = registry.attach(registration("decode-0", Role.DECODE), lambda: None)
    load = LoadReport(blocks_free=1, blocks_cached=2, blocks_used=3, blocks_quarantined=4, tickets_refused=5)
    load.drafted_tokens, load.accepted_tokens = 7, 6
    registry.report(worker, load)
    with registry.lease("decode-0", 0):
        assert setup.value("kvferry_worker_requests_in_flight", worker="decode-0") == 1
    for state, count in {"free": 1, "cached": 2, "used": 3, "quarantined": 4}.items():
        assert setup.value("kvferry_worker_blocks", worker="decode-0", state=state) == count
    assert setup.value("kvferry_worker_tickets_refused", worker="decode-0") == 5
    assert setup.value("kvferry_worker_guessed_tokens", worker="decode-0", outcome="drafted") == 7
    assert setup.value("kvferry_worker_guessed_tokens", worker="decode-0", outcome="accepted") == 6
    assert setup.value("kvferry_workers", role="decode", state="ready") == 1
    assert setup.value("kvferry_workers", role="prefill", state="ready") == 0
    registry.drain(worker)
    assert setup.value("kvferry_workers", role="decode", state="draining") == 1
    registry.detach(worker)
    assert setup.value("kvferry_worker_blocks", worker="decode-0", state="free") is None
    assert setup.value("kvferry_worker_tickets_refused", worker="decode-0") is None
    assert setup.value("kvferry_workers", role="decode", state="ready") == 0


async def test_requests_in_flight_and_queued_are_read_at_each_scrape() -> None:
    setup, admission, room = Setup(), Admission(1, 5, 1000), RoomQueue()
    setup.metrics.watch(WorkerRegistry(ManualClock()), admission, room)
    release = asyncio.Event()

    async def hold() -> None:
        async with admission.place(1, 5.0):
            await release.wait()

    tasks = [asyncio.create_task(hold()) for _ in range(3)]
    tasks.append(asyncio.create_task(room.wait(5.0, 0.0)))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert setup.value("kvferry_requests_in_flight") == 1
    assert setup.value("kvferry_requests_queued") == 3
    release.set()
    room.wake()
    await asyncio.gather(*tasks)
    assert setup.value("kvferry_requests_in_flight") == 0


def test_the_page_is_valid_text_without_unbounded_labels() -> None:
    setup, registry = Setup(), WorkerRegistry(ManualClock())
    setup.metrics.watch(registry, Admission(1, 1, 1), RoomQueue())
    registry.attach(registration("decode-0", Role.DECODE), lambda: None)
    setup.end_with(None)
    body, content_type = setup.metrics.render()
    assert content_type.startswith("text/plain")
    families = list(text_string_to_metric_families(body.decode()))
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    assert labels <= {"outcome", "role", "state", "worker", "transport", "clause", "le"}
