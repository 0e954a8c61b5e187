"""Strict hand-off: what is not proven fails the request, with its reason, before anything of it reaches the client."""

import asyncio
import logging
from collections.abc import Callable

import pytest

from kvferry_rpc.common_pb2 import ErrorCode
from router.dispatch import strict_gate
from router.dispatch.dispatch_limits import DispatchLimits
from router.dispatch.proof import Clause
from router.generation import TokenEnd
from tests.support.fake_workers import CHECKSUM, FakeDecode, FakePrefill, error
from tests.support.router_cluster import ANSWER, RouterCluster, failure_of, first_tokens, router_cluster
from tests.support.sinks import EnoughTokens

STRICT = DispatchLimits(strict_handoff=True)
REQUIRE_SHM = DispatchLimits(strict_handoff=True, require_transports=("shm",))

Fault = Callable[[FakeDecode, FakePrefill], None]


def _set(**values: object) -> Fault:
    """Knobs as `decode_...` and `prefill_...`."""

    def apply(decode: FakeDecode, prefill: FakePrefill) -> None:
        for name, value in values.items():
            worker, _, knob = name.partition("_")
            assert knob in vars(decode if worker == "decode" else prefill)
            setattr(decode if worker == "decode" else prefill, knob, value)

    return apply


def _refused(cluster: RouterCluster) -> dict[str, float]:
    counts = {clause.value: cluster.counter("kvferry_strict_refusals_total", clause=clause.value) for clause in Clause}
    return {name: count for name, count in counts.items() if count}


async def test_a_proven_hand_off_passes_and_an_answer_may_be_cut_like_any_other() -> None:
    async with router_cluster(STRICT) as cluster:
        await cluster.decode()
        await cluster.prefill()
        assert (await cluster.run(cluster.request())).tokens == ANSWER
        stream = cluster.stream(cluster.request())
        assert await first_tokens(stream, 1)
        end = await stream.athrow(EnoughTokens())
        assert isinstance(end, TokenEnd)
        assert end.receipt.checksum_verified
        await stream.aclose()
        assert _refused(cluster) == {}


async def test_without_a_prefill_worker_a_strict_router_refuses() -> None:
    async with router_cluster(STRICT) as cluster:
        await cluster.decode()
        failure = await failure_of(cluster.run(cluster.request()))
        assert failure.code == ErrorCode.HANDOFF_FAILED
        assert failure.field == "prefill_worker"
        assert "no prefill worker" in failure.message
        assert failure.retry_after_ms > 0
        assert _refused(cluster) == {"prefill_worker": 1}


@pytest.mark.parametrize(
    ("limits", "fault", "clause", "said"),
    [
        (STRICT, _set(decode_checks=False), Clause.UNVERIFIED, "decode-0 did not verify the blocks from prefill-0"),
        (STRICT, _set(decode_checksum=b"other"), Clause.DIGESTS, CHECKSUM.hex()),
        (STRICT, _set(decode_tells=False), Clause.DECODE_HALF, "no receipt from decode-0"),
        (STRICT, _set(prefill_expected_transport="nixl"), Clause.TRANSPORT, "over tcp, and nixl was expected"),
        (REQUIRE_SHM, _set(), Clause.TRANSPORT, "from prefill-0 to decode-0 over tcp, and shm is required"),
        (
            STRICT,
            _set(prefill_failures_after_commit=[error(ErrorCode.INTERNAL, "lost it")]),
            Clause.PREFILL_HALF,
            "no receipt from prefill-0: lost it",
        ),
    ],
)
async def test_what_is_known_before_the_first_token_is_refused_before_it(
    limits: DispatchLimits, fault: Fault, clause: Clause, said: str
) -> None:
    async with router_cluster(limits) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        fault(decode, prefill)
        stream = cluster.stream(cluster.request())
        failure = await failure_of(anext(stream))
        assert (failure.code, failure.field) == (ErrorCode.HANDOFF_FAILED, clause.value)
        assert said in failure.message
        assert len(decode.admitted) == 1, "it was tried again"
        assert _refused(cluster) == {clause.value: 1}
        await decode.until(lambda: not decode.live)
        await prefill.until(lambda: not prefill.running)
        assert cluster.counter("kvferry_requests_ended_total", outcome="failed") == 1


async def test_a_prefill_half_that_does_not_come_is_refused_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_gate, "RECEIPT_WAIT_S", 0.05)
    async with router_cluster(STRICT) as cluster:
        await cluster.decode()
        prefill = await cluster.prefill()
        prefill.done_gate = asyncio.Event()
        failure = await failure_of(anext(cluster.stream(cluster.request())))
        assert (failure.code, failure.field) == (ErrorCode.HANDOFF_FAILED, "prefill_half")
        assert "did not report within" in failure.message
        await prefill.until(lambda: not prefill.running)


async def test_recomputed_tokens_are_refused_when_the_decode_worker_says_so_at_the_end() -> None:
    async with router_cluster(STRICT) as cluster:
        (await cluster.decode()).tokens_recomputed = 16
        await cluster.prefill()
        failure = await failure_of(cluster.run(cluster.request()))
        assert (failure.code, failure.field) == (ErrorCode.HANDOFF_FAILED, "tokens_recomputed")
        assert "16 prompt tokens" in failure.message


@pytest.mark.parametrize("strict", [True, False])
async def test_only_a_strict_router_holds_the_first_token_until_the_proof_is_there(strict: bool) -> None:
    async with router_cluster(DispatchLimits(strict_handoff=strict)) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        decode.verified_gate = asyncio.Event()
        stream = cluster.stream(cluster.request())
        first = asyncio.ensure_future(anext(stream))
        await cluster.until(lambda: cluster.in_flight()["prefill-0"] == 0 and bool(prefill.requests))
        if strict:
            for _ in range(20):
                await asyncio.sleep(0)
            assert not first.done()
        else:
            await first
            assert decode.live
        decode.verified_gate.set()
        await first
        await first_tokens(stream, 7)
        assert isinstance(await anext(stream), TokenEnd)


async def test_a_hand_off_that_fails_before_any_proof_is_tried_again_and_the_second_one_must_prove_itself() -> None:
    async with router_cluster(STRICT) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        prefill.failures.append(error(ErrorCode.HANDOFF_FAILED, "link broke"))
        answer = await cluster.run(cluster.request())
        assert answer.tokens == ANSWER
        assert answer.end.receipt.attempt == 2
        assert len(decode.admitted) == 2


async def test_a_decode_worker_lost_between_proof_and_answer_is_no_matter_of_proof() -> None:
    async with router_cluster(STRICT) as cluster:
        bad = await cluster.decode("decode-0")
        await cluster.prefill()
        bad.pause_after = 2
        stream = cluster.stream(cluster.request())
        tokens = await first_tokens(stream, 2)
        await cluster.decode("decode-1")
        await cluster.kill("decode-0")
        tokens += await first_tokens(stream, 6)
        assert tokens == ANSWER
        assert isinstance(await anext(stream), TokenEnd)
        assert _refused(cluster) == {}


async def test_a_transport_that_is_not_the_required_one_is_a_warning_when_nothing_is_strict(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with router_cluster(DispatchLimits(require_transports=("shm",))) as cluster:
        await cluster.decode()
        await cluster.prefill()
        for _ in range(2):
            assert (await cluster.run(cluster.request())).tokens == ANSWER
        assert cluster.counter("kvferry_handoffs_degraded_total", expected="shm", used="tcp") == 2
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [line for line in warnings if "not over shm, as required, but over tcp" in line] == warnings[:1]
