"""What the router says of the requests that it has: what each one waits for, since when, and how the last ones went."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext

import pytest

from kvferry_rpc.common_pb2 import ErrorCode, KVReceipt, SamplingParams
from router.dispatch.dispatch_limits import DispatchLimits
from router.generation import GenerationRequest
from router.observation.live_requests import LiveRequests, Phase, Progress, RequestView
from router.policy import Plan
from runtime.clock import ManualClock
from runtime.errors import KvferryError
from tests.support.fake_workers import error
from tests.support.router_cluster import RouterCluster, failure_of, first_tokens, router_cluster

REMOTE = Plan("decode-0", "prefill-0", "")


def request(request_id: str = "r1", tenant: str = "red") -> GenerationRequest:
    return GenerationRequest(request_id, (1, 2, 3), SamplingParams(max_tokens=9), 1e9, tenant=tenant, endpoint="chat")


class Attempt:
    """An attempt whose progress the test sets."""

    def __init__(self, **changes: object) -> None:
        self.steps = [step(**changes)]

    def progress(self) -> Sequence[Progress]:
        return self.steps


def step(**changes: object) -> Progress:
    values = {
        "attempt": 1,
        "plan": REMOTE,
        "planned_at": 1.5,
        "moves": False,
        "was_taken": True,
        "placed_at": None,
        "sampled_at": None,
        "decoding_at": None,
        "is_paused": False,
        "has_unread_tokens": False,
        "is_over": False,
    }
    return Progress(**{**values, **changes})  # type: ignore[arg-type]


def table(clock: ManualClock, kept: int = 200) -> LiveRequests:
    return LiveRequests(clock, dict, model="tiny", kept=kept)


def phases(view: RequestView) -> list[tuple[str, float, int, str]]:
    return [(begin.phase.value, begin.began_at, begin.attempt, begin.worker) for begin in view.phases]


# ---- from what attempts know ----


@pytest.mark.parametrize(
    ("progress", "phase", "since", "waits_for"),
    [
        ({"was_taken": False}, "queued", 1.0, "room on decode-0"),
        ({"placed_at": 2.0}, "prefill", 2.0, "first token from prefill-0"),
        ({"placed_at": 2.0, "sampled_at": 3.0}, "transfer", 3.0, "its KV on decode-0"),
        ({"placed_at": 2.0, "sampled_at": 3.0, "decoding_at": 4.0}, "decode", 4.0, "tokens from decode-0"),
        ({"placed_at": 2.0, "sampled_at": 3.0, "decoding_at": 2.5}, "decode", 2.5, "tokens from decode-0"),
        ({"placed_at": 2.0, "sampled_at": 3.0, "has_unread_tokens": True}, "transfer", 3.0, "its client to read"),
        (
            {"placed_at": 2.0, "decoding_at": 4.0, "is_paused": True},
            "decode",
            4.0,
            "another decode worker than decode-0",
        ),
        ({"placed_at": 2.0, "decoding_at": 4.0, "is_over": True}, "decode", 4.0, "the rest of its receipt"),
    ],
)
def test_a_request_says_what_it_waits_for_and_since_when(
    progress: dict[str, float], phase: str, since: float, waits_for: str
) -> None:
    clock = ManualClock(1.0)
    live = table(clock)
    with live.request(request(), 1.0, []) as entry:
        entry.begun(Attempt(**progress))
        (view,) = live.snapshot(5.0)
    assert (view.phase.value, view.since, view.waits_for) == (phase, since, waits_for)
    assert (view.prefill_worker, view.decode_worker, view.attempt) == ("prefill-0", "decode-0", 1)


def test_a_failed_attempt_leaves_its_phases_and_the_next_one_adds_its_own() -> None:
    clock = ManualClock(1.0)
    live = table(clock)
    with live.request(request(), 1.0, []) as entry:
        entry.begun(Attempt(placed_at=2.0))
        clock.advance(2.0)
        entry.attempt_failed()
        (view,) = live.snapshot(3.0)
        assert (view.phase, view.since, view.waits_for) == (Phase.QUEUED, 3.0, "room on a decode worker")
        entry.begun(Attempt(attempt=2, plan=Plan("decode-1", None, ""), placed_at=4.0, decoding_at=5.0))
        clock.advance(3.0)
    (view,) = live.snapshot(7.0)
    assert phases(view) == [
        ("queued", 1.0, 0, ""),
        ("prefill", 2.0, 1, "prefill-0"),
        ("queued", 3.0, 1, ""),
        ("prefill", 4.0, 2, "decode-1"),
        ("decode", 5.0, 2, "decode-1"),
        ("finished", 6.0, 2, ""),
    ]


def test_a_move_is_a_transfer_from_one_decode_worker_to_another() -> None:
    clock = ManualClock(1.0)
    live = table(clock)
    with live.request(request(), 1.0, []) as entry:
        attempt = Attempt(placed_at=2.0, decoding_at=3.0)
        attempt.steps.append(step(attempt=2, plan=Plan("decode-1", "decode-0", ""), moves=True, placed_at=4.0))
        entry.begun(attempt)
        (view,) = live.snapshot(5.0)
    assert [begin[::3] for begin in phases(view)[1:]] == [
        ("prefill", "prefill-0"),
        ("decode", "decode-0"),
        ("transfer", "decode-1"),
    ]


@pytest.mark.parametrize(
    ("problem", "phase", "code"),
    [
        (None, Phase.FINISHED, ""),
        (KvferryError(ErrorCode.UNAVAILABLE, "secret words"), Phase.FAILED, "unavailable"),
        (ValueError("secret words"), Phase.FAILED, "internal"),
        (KvferryError(ErrorCode.CANCELLED, ""), Phase.CANCELLED, ""),
        (GeneratorExit(), Phase.CANCELLED, ""),
        (asyncio.CancelledError(), Phase.CANCELLED, ""),
    ],
)
def test_how_a_request_ended_is_kept_without_a_word_of_what_it_said(
    problem: BaseException | None, phase: Phase, code: str
) -> None:
    live = table(ManualClock(1.0))
    ended: list[RequestView] = []
    live.subscribe(ended.append)
    expected = pytest.raises(type(problem)) if problem is not None else nullcontext()
    with expected, live.request(request(), 1.0, [7, 7]) as entry:
        entry.left_receipt(KVReceipt(request_id="r1"), 2)
        if problem is not None:
            raise problem
    assert live.snapshot(2.0) == tuple(ended)
    (view,) = ended
    assert (view.phase, view.error, view.waits_for) == (phase, code, "")
    assert (view.prompt_tokens, view.output_tokens, view.cached_tokens) == (3, 2, 2)
    assert view.receipt is not None
    assert view.receipt.request_id == "r1"
    assert "secret" not in repr(view)


def test_only_the_last_ones_are_kept_and_the_newest_comes_first() -> None:
    live = table(ManualClock(1.0), kept=3)
    for number in range(5):
        with live.request(request(f"r{number}"), 1.0, []):
            pass
    with live.request(request("now"), 1.0, []):
        assert [view.request_id for view in live.snapshot(1.0)] == ["now", "r4", "r3", "r2"]


def test_two_requests_of_one_id_are_both_there() -> None:
    live = table(ManualClock(1.0))
    with live.request(request(), 1.0, []):
        with live.request(request(), 1.0, []):
            assert len(live.snapshot(1.0)) == 2
        assert len([view for view in live.snapshot(1.0) if not view.phase.is_end]) == 1


# ---- from a dispatcher with workers ----


def seen(cluster: RouterCluster, request_id: str) -> RequestView:
    (view,) = [view for view in cluster.dispatcher.live.snapshot(cluster.clock.now()) if view.request_id == request_id]
    return view


def passed(view: RequestView) -> list[str]:
    return [begin.phase.value for begin in view.phases]


async def test_a_request_is_seen_on_its_way_from_prefill_to_decode() -> None:
    async with router_cluster() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        decode.ticket_gate, prefill.compute_gate, decode.verified_gate = (
            asyncio.Event(),
            asyncio.Event(),
            asyncio.Event(),
        )
        answer = asyncio.create_task(cluster.run(cluster.request(tenant="red")))
        await decode.until(lambda: decode.admitted)
        assert seen(cluster, "request-1").waits_for == "room on decode-0"
        decode.ticket_gate.set()
        await prefill.until(lambda: prefill.running)
        assert seen(cluster, "request-1").waits_for == "first token from prefill-0"
        prefill.compute_gate.set()
        await cluster.until(lambda: seen(cluster, "request-1").output_tokens > 0)
        assert seen(cluster, "request-1").waits_for == "its KV on decode-0"
        decode.verified_gate.set()
        await answer
        view = seen(cluster, "request-1")
        assert passed(view) == ["queued", "prefill", "transfer", "decode", "finished"]
        times = [begin.began_at for begin in view.phases]
        assert times == sorted(times)
        assert (view.output_tokens, view.prompt_tokens, view.tenant) == (8, 40, "red")
        assert view.receipt == cluster.store.get("request-1", "red")


async def test_those_that_wait_for_a_place_know_how_many_are_before_them() -> None:
    async with router_cluster(DispatchLimits(max_in_flight=1)) as cluster:
        decode = await cluster.decode()
        decode.pause_after = 0
        tasks = [asyncio.create_task(cluster.run(cluster.request())) for _ in range(3)]
        await cluster.until(lambda: cluster.dispatcher.queued == 2)
        assert seen(cluster, "request-2").waits_for == "a place (0 before it)"
        assert seen(cluster, "request-3").waits_for == "a place (1 before it)"
        decode.resume.set()
        await asyncio.gather(*tasks)
        assert [view.phase for view in cluster.dispatcher.live.snapshot(0.0)] == [Phase.FINISHED] * 3


async def test_a_second_attempt_is_seen_and_a_cancelled_request_leaves() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        decode.fail_after = (2, error(ErrorCode.HANDOFF_FAILED))
        stream = cluster.stream(cluster.request())
        await first_tokens(stream, 2)
        decode.fail_after = None
        await first_tokens(stream, 1)
        view = seen(cluster, "request-1")
        assert view.attempt == 2
        assert passed(view) == ["queued", "prefill", "decode", "queued", "prefill", "decode"]
        await stream.aclose()
        assert seen(cluster, "request-1").phase is Phase.CANCELLED


async def test_a_request_without_a_worker_is_among_those_that_failed() -> None:
    async with router_cluster() as cluster:
        await failure_of(cluster.run(cluster.request()))
        view = seen(cluster, "request-1")
        assert (passed(view), view.error) == (["queued", "failed"], "unavailable")
