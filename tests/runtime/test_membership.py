import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from kvferry_rpc.internal_pb2 import (
    Drain,
    LoadReport,
    Register,
    Resync,
    RouterMessage,
)
from runtime.membership import MAX_EVENTS_PER_MESSAGE, MembershipClient, RetryTimes
from runtime.protocol_version import CONTROL_VERSION, ProtocolVersion
from tests.support.membership_router import QUICK, SECRET, FakeRouter, Harness


@asynccontextmanager
async def attached(harness: Harness, num_routers: int = 1) -> AsyncIterator[tuple[MembershipClient, list[FakeRouter]]]:
    routers = [FakeRouter() for _ in range(num_routers)]
    client = harness.client(*[await router.start() for router in routers])
    client.start()
    try:
        async with asyncio.timeout(20):
            await client.wait_attached()
        yield client, routers
    finally:
        await client.stop()
        for router in routers:
            await router.stop()


async def test_a_worker_registers_then_reports_its_load_again_and_again() -> None:
    async with attached(Harness()) as (client, (router,)):
        await router.until(lambda: router.loads >= 3)
        assert client.num_attached == 1
        (register,) = router.registers
        assert ProtocolVersion(register.protocol_version, register.protocol_minor) == CONTROL_VERSION
        assert register.pid == os.getpid()
        assert register.worker_id == "decode-0"


async def test_each_router_gets_the_content_and_then_the_changes_by_its_own_numbers() -> None:
    harness = Harness()
    harness.log.publish([(b"a" * 16, False), (b"b" * 16, False)])
    async with attached(harness, num_routers=2) as (_, routers):
        for router in routers:
            await router.until(lambda router=router: router.content == {b"a" * 16, b"b" * 16})
        harness.log.publish([(b"a" * 16, True), (b"c" * 16, False)])
        for router in routers:
            await router.until(lambda router=router: router.content == {b"b" * 16, b"c" * 16})
            assert router.snapshots == 1
            assert router.expected == 4


async def test_an_empty_cache_is_announced_by_an_empty_snapshot() -> None:
    async with attached(Harness()) as (_, (router,)):
        await router.until(lambda: router.snapshots == 1)
        assert router.content == set()


async def test_a_long_snapshot_is_cut_into_bounded_messages() -> None:
    harness = Harness()
    hashes = {number.to_bytes(16, "big") for number in range(2 * MAX_EVENTS_PER_MESSAGE + 1)}
    harness.log.replace(hashes)
    async with attached(harness) as (_, (router,)):
        await router.until(lambda: router.content == hashes)
        assert router.snapshots == 1
        assert router.largest_message == MAX_EVENTS_PER_MESSAGE


async def test_a_resync_is_answered_by_a_snapshot() -> None:
    harness = Harness()
    harness.log.publish([(b"a" * 16, False)])
    async with attached(harness) as (_, (router,)):
        await router.until(lambda: router.snapshots == 1)
        router.content.clear()
        router.outgoing.put_nowait(RouterMessage(resync=Resync()))
        await router.until(lambda: router.snapshots == 2)
        assert router.content == {b"a" * 16}


async def test_lost_changes_reach_the_router_as_a_snapshot() -> None:
    harness = Harness()
    async with attached(harness) as (_, (router,)):
        await router.until(lambda: router.snapshots == 1)
        harness.log.replace([b"z" * 16])
        await router.until(lambda: router.content == {b"z" * 16})
        assert router.snapshots == 2


async def test_a_drain_order_reaches_the_worker_and_its_answer_every_router() -> None:
    harness = Harness()
    async with attached(harness, num_routers=2) as (client, routers):
        routers[0].outgoing.put_nowait(RouterMessage(drain=Drain()))
        await routers[0].until(lambda: len(harness.orders) == 1)
        client.announce_draining()
        client.announce_draining()
        for router in routers:
            loads = router.loads
            await router.until(lambda router=router, loads=loads: router.loads > loads + 2)
            assert router.drainings == 1


async def test_draining_is_said_again_after_a_reconnect() -> None:
    async with attached(Harness()) as (client, (router,)):
        client.announce_draining()
        await router.until(lambda: router.drainings == 1)
        router.outgoing.put_nowait(None)
        await router.until(lambda: router.drainings == 2)


async def test_a_worker_comes_back_by_itself_after_its_router_was_away() -> None:
    harness = Harness()
    harness.log.publish([(b"a" * 16, False)])
    async with attached(harness) as (client, (router,)):
        await router.until(lambda: router.content == {b"a" * 16})
        assert router.server is not None
        port, numbers = router.server.port, router.expected
        await router.stop()
        harness.log.publish([(b"b" * 16, False)])
        again = FakeRouter()
        await again.start(port)
        try:
            await again.until(lambda: again.content == {b"a" * 16, b"b" * 16})
            assert again.expected is not None
            assert numbers is not None
            assert again.expected > numbers  # consecutive over the incarnation, also over reconnects
            assert again.registers[0].incarnation == router.registers[0].incarnation
            await again.until(lambda: again.loads >= 1)
            assert client.num_attached == 1
        finally:
            await client.stop()
            await again.stop()


async def test_a_dead_router_does_not_disturb_the_link_to_another() -> None:
    harness = Harness()
    alive, dead = FakeRouter(), FakeRouter()
    addresses = [await alive.start(), await dead.start()]
    await dead.stop()
    client = harness.client(*addresses)
    client.start()
    try:
        await alive.until(lambda: alive.loads >= 3)
        assert client.num_attached == 1
    finally:
        await client.stop()
        await alive.stop()


async def test_a_refusal_is_logged_in_the_routers_words_and_retried(caplog: pytest.LogCaptureFixture) -> None:
    router, harness = FakeRouter(), Harness()
    router.refusal = (grpc.StatusCode.FAILED_PRECONDITION, "block_size 32 here, 16 there")
    client = harness.client(await router.start())
    with caplog.at_level(logging.ERROR):
        client.start()
        try:
            await router.until(lambda: len(router.registers) >= 2)
            assert client.num_attached == 0
            assert "block_size 32 here, 16 there" in caplog.text
            router.refusal = None
            async with asyncio.timeout(20):
                await client.wait_attached()
        finally:
            await client.stop()
            await router.stop()


class LogWatch(logging.Handler):
    """Sets `seen` when a line with `text` is logged."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.seen = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self.text in record.getMessage():
            self.seen.set()


async def test_a_wrong_secret_is_a_refusal() -> None:
    router, harness = FakeRouter(), Harness()
    client = harness.client(await router.start(), secret=b"another secret 00")
    watch = LogWatch("the cluster secret is missing or wrong")
    logging.getLogger("runtime.membership").addHandler(watch)
    client.start()
    try:
        async with asyncio.timeout(20):
            await watch.seen.wait()
    finally:
        logging.getLogger("runtime.membership").removeHandler(watch)
        await client.stop()
        await router.stop()
    assert router.registers == []


async def test_a_failing_load_callback_is_logged_and_the_worker_attaches_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = Harness()
    calls = 0

    def load() -> LoadReport:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("a defect")
        return LoadReport()

    router = FakeRouter()
    register = Register(worker_id="w", incarnation=b"i" * 16)
    client = MembershipClient(
        [await router.start()], SECRET, register, load, harness.log, harness.on_order,
        report_interval_s=0.02, retry=QUICK,
    )  # fmt: skip
    client.start()
    try:
        await router.until(lambda: len(router.registers) == 2 and router.loads >= 3)
        assert "a defect" in caplog.text
    finally:
        await client.stop()
        await router.stop()


async def test_stop_detaches_and_can_be_repeated() -> None:
    async with attached(Harness()) as (client, (router,)):
        await router.until(lambda: router.loads >= 1)
        await client.stop()
        await client.stop()
        assert client.num_attached == 0
        await router.until(lambda: router.attached == 0)


def test_waits_grow_are_capped_and_jittered() -> None:
    rng = random.Random(1)
    retry = RetryTimes(first_s=0.1, longest_s=3.0)
    delays = [[retry.delay_s(failures, rng) for _ in range(50)] for failures in range(1, 2000, 1)]
    for failures, row in enumerate(delays[:8], start=1):
        full = min(0.1 * 2 ** (failures - 1), 3.0)
        assert all(0.5 * full <= delay <= full for delay in row)
        assert len(set(row)) > 40
    assert max(delays[-1]) <= 3.0
    assert retry.refusal_delay_s(rng) > 5.0
