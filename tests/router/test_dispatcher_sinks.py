"""Whoever takes tokens: in which call they come, what happens while there is no room, and when it fails."""

import asyncio
import gc
from collections.abc import Callable

import pytest

from kvferry_rpc.common_pb2 import ErrorCode, FinishReason
from router.generation import TokenBatch
from runtime.errors import KvferryError
from tests.support.router_cluster import ANSWER, RouterCluster, router_cluster
from tests.support.sinks import Collected


class Sink(Collected[TokenBatch]):
    """Has room unless it is `closed`. It knows in which task each batch came."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.open.set()
        self.enough = False
        self.tasks: list[asyncio.Task[object] | None] = []
        self.fails_at: int | None = None
        self.failure: Exception = RuntimeError("the sink broke")

    def push(self, item: TokenBatch) -> bool:
        self.tasks.append(asyncio.current_task())
        if len(self.tasks) - 1 == self.fails_at:
            raise self.failure
        super().push(item)
        return self.open.is_set() and not self.enough

    async def wants_more(self) -> bool:
        if self.fails_at == len(self.tasks):
            raise self.failure
        await self.open.wait()
        return not self.enough

    @property
    def tokens(self) -> list[int]:
        return [token.token_id for batch in self.items for token in batch.tokens]


def has(sink: Sink, count: int) -> Callable[[], bool]:
    return lambda: len(sink.tokens) >= count


@pytest.mark.parametrize("remote", [True, False], ids=["remote", "local"])
async def test_tokens_behind_the_first_ones_wake_no_task(remote: bool) -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        if remote:
            await cluster.prefill()
        decode.pause_after = 3
        sink = Sink()
        running = asyncio.create_task(cluster.dispatcher.run(cluster.request(), sink))
        await cluster.until(has(sink, 3))
        assert sink.tasks[0] is running
        decode.resume.set()
        end = await running
        assert sink.tokens == ANSWER
        assert (end.reason, end.completion_tokens) == (FinishReason.LENGTH, len(ANSWER))
        assert running not in sink.tasks[-3:]


async def test_while_there_is_no_room_tokens_wait_and_come_together() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        decode.pause_after = 2
        sink = Sink()
        running = asyncio.create_task(cluster.dispatcher.run(cluster.request(), sink))
        await cluster.until(has(sink, 2))
        sink.open.clear()
        decode.resume.set()
        await decode.until(lambda: not decode.live)
        await cluster.until(has(sink, 3))
        taken = len(sink.items)
        # The worker is done, and so is its half of the way; the rest lies at the router.
        session = cluster.links.decode_session("decode-0")
        assert session is not None
        await cluster.until(lambda: session.requests_in_flight == 0)
        assert len(sink.items) == taken
        assert not running.done()
        sink.open.set()
        await running
        assert sink.tokens == ANSWER
        assert len(sink.items) == taken + 1


async def test_a_sink_that_has_enough_in_the_middle_ends_the_request_as_served() -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        decode.pause_after = 2
        sink = Sink()
        running = asyncio.create_task(cluster.dispatcher.run(cluster.request(max_tokens=50), sink))
        await cluster.until(has(sink, 2))
        sink.enough = True
        decode.resume.set()
        decode.resume.clear()  # For one token: it stands still behind that.
        end = await running
        assert end.reason == FinishReason.STOP
        assert end.completion_tokens == len(sink.tokens) < 50
        await decode.until(lambda: decode.cancelled == [("request-1", 1)])
        assert cluster.counter("kvferry_requests_ended_total", outcome="ok") == 1


@pytest.mark.parametrize("failure", [RuntimeError("defect"), KvferryError(ErrorCode.DEADLINE_EXCEEDED, "not read")])
@pytest.mark.parametrize("place", ["first push", "later push", "wants_more"])
async def test_a_sink_that_fails_is_a_caller_that_left_and_costs_nobody_else(place: str, failure: Exception) -> None:
    async with router_cluster() as cluster:
        decode = await cluster.decode()
        decode.pause_after = 2
        broken, sound = Sink(), Sink()
        broken.failure = failure
        if place == "first push":
            broken.fails_at = 0
        running = [asyncio.create_task(cluster.dispatcher.run(cluster.request(), sink)) for sink in (broken, sound)]
        await cluster.until(has(sound, 2))
        if place != "first push":
            await cluster.until(has(broken, 2))
            broken.fails_at = len(broken.tasks) + (place == "wants_more")
            if place == "wants_more":
                broken.open.clear()
        decode.resume.set()
        with pytest.raises(type(failure), match=str(failure)):
            await running[0]
        await running[1]
        assert sound.tokens == ANSWER
        assert ANSWER[: len(broken.tokens)] == broken.tokens
        receipt = cluster.store.get("request-1")
        assert receipt is not None
        assert list(receipt.earlier_failures) == ["final: cancelled: the caller left"]
        assert cluster.counter("kvferry_requests_ended_total", outcome="cancelled") == 1


async def test_nothing_of_a_request_waits_for_the_collector() -> None:
    async with router_cluster() as cluster:
        await cluster.decode()
        await cluster.prefill()
        await _answer(cluster)
        gc.collect()
        gc.disable()
        try:
            await _answer(cluster)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            found = [type(it).__name__ for it in gc.garbage if isinstance(it, (list, tuple)) and len(it) >= 200]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert found == []


async def _answer(cluster: RouterCluster) -> None:
    await cluster.run(cluster.request(range(200)))
    await asyncio.sleep(0)
