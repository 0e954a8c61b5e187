"""A request whose workers are lost, refuse or fail: what is resumed, what is tried again, what the caller is told."""

import asyncio

import grpc
import pytest

from kvferry_rpc.common_pb2 import ErrorCode, FinishReason
from router.dispatch.dispatch_limits import DispatchLimits
from router.generation import TokenEnd
from tests.support.fake_workers import error
from tests.support.router_cluster import ANSWER, PROMPT, failure_of, first_tokens, router_cluster


@pytest.mark.parametrize("position", [0, 1, 3, 7])
async def test_a_lost_decode_worker_costs_no_token_and_changes_none(position: int) -> None:
    async with router_cluster() as cluster:
        first = await cluster.decode("decode-0")
        prefill = await cluster.prefill()
        first.pause_after = position
        stream = cluster.stream(cluster.request())
        tokens = await first_tokens(stream, max(1, position))
        second = await cluster.decode("decode-1")
        await cluster.kill("decode-0")
        tokens += await first_tokens(stream, 8 - len(tokens))
        end = await anext(stream)
        assert isinstance(end, TokenEnd)
        assert tokens == ANSWER
        resumed = second.admitted[0]
        assert resumed.attempt == 2
        assert list(resumed.prompt_token_ids) == [*PROMPT, *ANSWER[: resumed.num_output_tokens]]
        assert resumed.num_output_tokens == max(1, position)
        assert prefill.requests[-1].num_output_tokens == resumed.num_output_tokens
        assert end.receipt.decode_worker == "decode-1"
        assert end.receipt.attempt == 2
        assert len(end.receipt.earlier_failures) == 1
        assert "unavailable" in end.receipt.earlier_failures[0]
        assert end.prompt_tokens == 40
        assert end.cached_tokens == 0
        await stream.aclose()


async def test_a_broken_session_is_tried_again_on_another_worker() -> None:
    async with router_cluster() as cluster:
        bad = await cluster.decode("decode-0")
        await cluster.decode("decode-1")
        await cluster.prefill()
        bad.drop_session_after = 2
        answers = await asyncio.gather(*(cluster.run(cluster.request()) for _ in range(6)))
        assert [answer.tokens for answer in answers] == [ANSWER] * 6
        assert {answer.end.receipt.decode_worker for answer in answers} <= {"decode-0", "decode-1"}
        assert any(answer.end.receipt.attempt > 1 for answer in answers)


@pytest.mark.parametrize("where", ["start", "after_first_token", "status", "decode"])
async def test_a_failed_hand_off_is_tried_with_another_pair(where: str) -> None:
    # H020, H073: the failure of one branch ends the other.
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        prefill = await cluster.prefill("prefill-0")
        failure = error(ErrorCode.HANDOFF_FAILED, "link broke")
        if where == "start":
            prefill.failures.append(failure)
        elif where == "after_first_token":
            prefill.failures_after_first_token.append(failure)
        elif where == "status":
            prefill.statuses.append(grpc.StatusCode.UNKNOWN)
        else:
            decode.fail_after = (0, failure)
        stream = cluster.stream(cluster.request())
        reading = asyncio.create_task(first_tokens(stream, 8))
        await prefill.until(lambda: prefill.requests)
        other = await cluster.prefill("prefill-1")
        if where == "decode":
            await decode.until(lambda: len(decode.admitted) == 2)
            decode.fail_after = None
        assert await reading == ANSWER
        end = await anext(stream)
        assert isinstance(end, TokenEnd)
        assert len(end.receipt.earlier_failures) == 1
        assert end.receipt.attempt == 2
        if other.requests:
            assert end.receipt.prefill_worker == "prefill-1"
        assert cluster.counter("kvferry_handoffs_total", transport="unknown", outcome="failed") == 1
        assert cluster.counter("kvferry_retries_total") == 1
        await decode.until(lambda: not decode.live)
        await stream.aclose()


async def test_the_only_prefill_worker_failing_the_prompt_is_computed_on_decode() -> None:
    async with router_cluster() as cluster:
        await cluster.decode()
        prefill = await cluster.prefill()
        prefill.failures.append(error(ErrorCode.HANDOFF_FAILED))
        answer = await cluster.run(cluster.request())
        assert answer.tokens == ANSWER
        assert answer.end.receipt.transport == "local"
        assert "failed this request" in answer.end.receipt.plan_reason


async def test_a_prefill_worker_that_dies_under_a_request_is_replaced() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        prefill = await cluster.prefill("prefill-0")
        prefill.compute_gate = asyncio.Event()
        reading = asyncio.create_task(cluster.run(cluster.request()))
        await prefill.until(lambda: prefill.running == 1)
        other = await cluster.prefill("prefill-1")
        await cluster.kill("prefill-0")
        answer = await reading
        assert answer.tokens == ANSWER
        assert answer.end.receipt.prefill_worker == "prefill-1"
        assert len(other.requests) == 1
        assert ("request-1", 1) in decode.cancelled


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_is_stopped_but_not_dead_holds_nobody_once_it_is_detached(role: str) -> None:
    # H070: its connections stay open and silent; the registry's deadline on its reports is what ends the wait.
    async with router_cluster() as cluster:
        decode, prefill = await cluster.decode("decode-0"), await cluster.prefill("prefill-0")
        if role == "prefill":
            prefill.compute_gate = asyncio.Event()
        else:
            decode.pause_after = 0
        reading = asyncio.create_task(cluster.run(cluster.request()))
        await prefill.until(lambda: prefill.requests)
        await decode.until(lambda: decode.live)
        await (cluster.prefill("prefill-1") if role == "prefill" else cluster.decode("decode-1"))
        cluster.registry.detach(cluster.attached[f"{role}-0"])
        answer = await reading
        assert answer.tokens == ANSWER
        assert getattr(answer.end.receipt, f"{role}_worker") == f"{role}-1"


async def test_once_decode_runs_a_prefill_failure_matters_no_more() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        prefill = await cluster.prefill()
        prefill.done_gate = asyncio.Event()
        decode.pause_after = 4
        stream = cluster.stream(cluster.request())
        tokens = await first_tokens(stream, 4)
        await cluster.kill("prefill-0")
        decode.resume.set()
        tokens += await first_tokens(stream, 4)
        end = await anext(stream)
        assert isinstance(end, TokenEnd)
        assert tokens == ANSWER
        assert end.receipt.attempt == 1
        assert len(decode.admitted) == 1


async def test_attempts_are_bounded_and_the_last_failure_is_told() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        decode.refusals = [error(ErrorCode.UNAVAILABLE, f"refusal {number}") for number in range(9)]
        failure = await failure_of(cluster.run(cluster.request()))
        assert failure.code == ErrorCode.UNAVAILABLE
        assert "refusal 2" in failure.message
        assert len(decode.admitted) == 3
        assert [sent.attempt for sent in decode.admitted] == [1, 2, 3]
        assert cluster.counter("kvferry_requests_ended_total", outcome="failed") == 1


async def test_retries_stop_when_their_budget_is_spent() -> None:
    # H032
    async with router_cluster(DispatchLimits(max_in_flight=4)) as cluster:
        decode = await cluster.decode()
        decode.refusals = [error(ErrorCode.UNAVAILABLE) for _ in range(1000)]
        for _ in range(12):
            await failure_of(cluster.run(cluster.request()))
        # 12 first attempts, 4 retries saved up, a tenth of the requests, and what a few moments add.
        assert len(decode.admitted) <= 12 + 4 + 1.2 + 3
        assert len(decode.admitted) >= 12 + 4


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("code", [code for code in ErrorCode.values() if code])
async def test_every_failure_of_a_worker_reaches_the_caller_with_its_code(
    side: str, code: "ErrorCode.ValueType"
) -> None:
    # H022
    limits = DispatchLimits(max_room_wait_s=0.1, strict_handoff=True)
    async with router_cluster(limits) as cluster:
        decode = await cluster.decode()
        prefill = await cluster.prefill()
        if side == "decode":
            decode.refusals = [error(code, "the reason") for _ in range(100)]
        else:
            prefill.failures = [error(code, "the reason") for _ in range(100)]
        failure = await failure_of(cluster.run(cluster.request()))
        internal_codes = {ErrorCode.CANCELLED, ErrorCode.UNAUTHENTICATED}
        assert failure.code == (ErrorCode.UNAVAILABLE if code in internal_codes else code)
        retried = code in {ErrorCode.UNAVAILABLE, ErrorCode.HANDOFF_FAILED, *internal_codes}
        if code != ErrorCode.OVERLOADED:
            assert "the reason" in failure.message
            assert len(decode.admitted) == (3 if retried else 1)
        await decode.until(lambda: not decode.live)


async def test_without_any_decode_worker_requests_are_refused_at_once() -> None:
    async with router_cluster() as cluster:
        failure = await failure_of(cluster.run(cluster.request()))
        assert failure.code == ErrorCode.UNAVAILABLE
        assert "no worker is attached" in failure.message
        assert failure.retry_after_ms > 0
        await cluster.prefill()
        failure = await failure_of(cluster.run(cluster.request()))
        assert "no decode worker is attached" in failure.message


async def test_the_end_of_text_is_not_run_over_when_the_worker_dies_before_saying_done() -> None:
    async with router_cluster(eos_token_ids=frozenset({ANSWER[3]})) as cluster:
        decode = await cluster.decode()
        await cluster.decode("decode-1")
        decode.drop_session_after = 4
        answers = [await cluster.run(cluster.request()) for _ in range(2)]
        on_first = [answer for answer in answers if answer.end.receipt.decode_worker == "decode-0"]
        assert [answer.tokens for answer in on_first] == [ANSWER[:4]]
        assert on_first[0].end.reason == FinishReason.STOP


async def test_a_complete_answer_needs_no_second_attempt_when_done_is_lost() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        decode.fail_after = (3, error(ErrorCode.UNAVAILABLE))
        # The fake worker checks its knob before each token, so with 3 tokens allowed it fails instead of `done`.
        request = cluster.request(max_tokens=4)
        stream = cluster.stream(request)
        tokens = await first_tokens(stream, 3)
        decode.fail_after = (1, error(ErrorCode.UNAVAILABLE))
        tokens += await first_tokens(stream, 1)
        end = await anext(stream)
        assert isinstance(end, TokenEnd)
        assert tokens == ANSWER[:4]
        assert end.reason == FinishReason.LENGTH


async def test_workers_that_disagree_on_the_first_token_end_the_request() -> None:
    async with router_cluster() as cluster:
        await cluster.decode()
        prefill = await cluster.prefill()
        prefill.first_token_offset = 1
        failure = await failure_of(cluster.run(cluster.request()))
        assert failure.code == ErrorCode.INTERNAL
        assert "disagree" in failure.message


async def test_a_prefill_call_that_never_hears_of_the_end_of_its_worker_is_given_up_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # gRPC keeps a call for ever whose request could not be written because the connection had just broken.
    async with router_cluster() as cluster:
        await cluster.decode()
        await cluster.prefill("prefill-0")
        link = cluster.links.prefill_link("prefill-0")
        assert link is not None
        asked = asyncio.Event()

        class DeadCall:
            def __aiter__(self) -> "DeadCall":
                return self

            async def __anext__(self) -> None:
                asked.set()
                await asyncio.Event().wait()

            def cancel(self) -> None:
                """Nobody hears of it."""

        monkeypatch.setattr(link.stub, "Prefill", lambda request, timeout: DeadCall())
        reading = asyncio.create_task(cluster.run(cluster.request()))
        await asked.wait()
        await cluster.prefill("prefill-1")
        await cluster.kill("prefill-0")
        answer = await reading
        assert answer.tokens == ANSWER
        assert answer.end.receipt.prefill_worker == "prefill-1"


async def test_a_prefill_worker_that_goes_while_the_ticket_is_awaited_is_replaced_at_once() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        await cluster.prefill("prefill-0")
        decode.ticket_gate = asyncio.Event()
        reading = asyncio.create_task(cluster.run(cluster.request()))
        await decode.until(lambda: decode.live)
        await cluster.prefill("prefill-1")
        await cluster.kill("prefill-0")
        decode.ticket_gate.set()
        answer = await reading
        assert answer.tokens == ANSWER
        assert answer.end.receipt.prefill_worker == "prefill-1"
        assert "prefill worker prefill-0 is gone" in answer.end.receipt.earlier_failures[0]
