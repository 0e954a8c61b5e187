"""The Attach stream, which keeps true what the router believes of its workers."""

import grpc
import pytest

from kvferry_rpc import internal_pb2_grpc
from kvferry_rpc.internal_pb2 import KVEvents, LoadReport, Role, WorkerMessage
from router.policy import Health
from router.workers.membership_service import SERVICE_NAME, MembershipService
from router.workers.worker_registry import WorkerRegistry
from runtime.clock import SystemClock
from runtime.grpc_life import GrpcServer
from runtime.kv_event_log import KVEventLog
from runtime.membership import MembershipClient, RetryTimes
from runtime.protocol_version import CONTROL_VERSION, ProtocolVersion
from tests.support.attach_stream import Membership, membership, registered, stream
from tests.support.fake_workers import SECRET, registration
from tests.support.registry_parts import block, stored


async def test_a_worker_is_attached_for_as_long_as_its_stream_lives() -> None:
    async with membership() as router:
        async with stream(router.address) as call:
            answer = await registered(call, registration("d0", Role.DECODE))
            assert answer.registered.router_id == "router-test"
            await call.write(WorkerMessage(load=LoadReport(blocks_free=5, steps=9)))
            await router.until(lambda: router.registry.views()[0].load.steps == 9)
        await router.until(lambda: router.registry.views() == [])


async def test_closing_its_half_of_the_stream_detaches_a_worker() -> None:
    async with membership() as router, stream(router.address) as call:
        await registered(call, registration("d0", Role.DECODE))
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        assert router.registry.views() == []


async def test_a_refused_worker_learns_why() -> None:
    async with membership() as router, stream(router.address) as call:
        await call.write(WorkerMessage(register=registration("d0", Role.DECODE, protocol_version=7)))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (
            f"7.0 of the protocol between routers and workers is spoken there and {CONTROL_VERSION} here"
            in await call.details()
        )
        assert router.registry.views() == []


@pytest.mark.parametrize(("distance", "is_taken"), [(-1, True), (0, True), (1, True), (2, False)])
async def test_a_worker_one_minor_version_away_is_taken_and_told_ours(distance: int, is_taken: bool) -> None:
    minor = CONTROL_VERSION.minor + distance
    async with membership() as router, stream(router.address) as call:
        register = registration("d0", Role.DECODE, protocol_version=CONTROL_VERSION.major, protocol_minor=minor)
        if is_taken:
            answer = (await registered(call, register)).registered
            assert ProtocolVersion(answer.protocol_version, answer.protocol_minor) == CONTROL_VERSION
        else:
            await call.write(WorkerMessage(register=register))
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"{CONTROL_VERSION.major}.{minor} of the protocol" in await call.details()
            assert router.registry.views() == []


async def test_the_first_message_must_be_the_registration() -> None:
    async with membership() as router, stream(router.address) as call:
        await call.write(WorkerMessage(load=LoadReport()))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_without_the_cluster_secret_nobody_attaches() -> None:
    # H085
    async with membership() as router, stream(router.address, b"not the cluster's secret") as call:
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert router.registry.views() == []


async def test_lost_events_are_answered_with_a_resync() -> None:
    async with membership() as router, stream(router.address) as call:
        await registered(call, registration("d0", Role.DECODE))
        await call.write(WorkerMessage(kv_events=KVEvents(first_sequence=0, snapshot=True, events=stored(1))))
        await call.write(WorkerMessage(kv_events=KVEvents(first_sequence=5, events=stored(2))))
        answer = await call.read()
        assert answer.WhichOneof("kind") == "resync"
        assert router.registry.views()[0].index_blocks == 0
        await call.write(WorkerMessage(kv_events=KVEvents(first_sequence=6, snapshot=True, events=stored(1, 2))))
        await call.write(WorkerMessage(load=LoadReport()))
        await router.until(lambda: router.registry.views()[0].index_blocks == 2)


async def test_a_silent_worker_is_cut_off() -> None:
    async with membership(silence_limit_s=0.2) as router, stream(router.address) as call:
        await registered(call, registration("d0", Role.DECODE))
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert router.registry.views() == []


async def test_the_stream_of_a_replaced_worker_ends() -> None:
    async with membership() as router, stream(router.address) as old, stream(router.address) as new:
        first = registration("d0", Role.DECODE)
        await registered(old, first)
        await registered(new, first)
        assert await old.code() is grpc.StatusCode.ABORTED
        assert len(router.registry.views()) == 1
        async with stream(router.address) as other_life:
            await registered(other_life, registration("d0", Role.DECODE))
            # Another process with the same name: it must not come back at once and fight.
            assert await new.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert len(router.registry.views()) == 1


async def test_a_worker_with_the_real_client_attaches_reports_its_cache_drains_and_leaves() -> None:
    log = KVEventLog()
    log.publish([(block(1), False), (block(2), False)])
    async with membership() as router:
        client = MembershipClient(
            [router.address], SECRET, registration("d0", Role.DECODE), LoadReport, log, lambda: None,
            report_interval_s=0.02, retry=RetryTimes(0.02, 0.05),
        )  # fmt: skip
        client.start()
        await router.until(lambda: [view.index_blocks for view in router.registry.views()] == [2])
        log.publish([(block(1), True), (block(3), False), (block(4), False)])
        await router.until(lambda: router.registry.views()[0].index_blocks == 3)
        client.announce_draining()
        await router.until(lambda: router.registry.views()[0].health is Health.DRAINING)
        await client.stop()
        await router.until(lambda: router.registry.views() == [])


async def test_a_router_that_comes_back_has_its_workers_and_their_caches_again() -> None:
    # H001, H025: no registry service, nothing to rebuild from.
    log = KVEventLog()
    log.publish([(block(1), False)])
    async with membership() as router:
        address = router.address
        client = MembershipClient(
            [address], SECRET, registration("d0", Role.DECODE), LoadReport, log, lambda: None,
            report_interval_s=0.02, retry=RetryTimes(0.02, 0.05),
        )  # fmt: skip
        client.start()
        await router.until(lambda: [view.index_blocks for view in router.registry.views()] == [1])
    registry = WorkerRegistry(SystemClock())
    server = GrpcServer("127.0.0.1", int(address.rpartition(":")[2]), secret=SECRET)
    server.add_service(
        internal_pb2_grpc.add_MembershipServicer_to_server,
        MembershipService(registry, "router-again"),
        SERVICE_NAME,
        internal=True,
    )
    await server.start()
    try:
        await Membership(registry, address).until(lambda: [view.index_blocks for view in registry.views()] == [1])
    finally:
        await client.stop()
        await server.stop(0)
