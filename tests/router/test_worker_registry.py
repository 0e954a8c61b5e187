"""Who is attached, what the router believes of them, and the Attach stream that keeps it true."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from kvferry_rpc import internal_pb2_grpc
from kvferry_rpc.common_pb2 import ErrorCode
from kvferry_rpc.internal_pb2 import KVEvent, KVEvents, LoadReport, Register, Role, RouterMessage, WorkerMessage
from router.membership_service import SERVICE_NAME, MembershipService
from router.policy import Health
from router.prefix_index import Applied, PrefixIndex
from router.worker_registry import AttachedWorker, ModelLimits, WorkerRegistry
from runtime.clock import ManualClock, SystemClock
from runtime.errors import KvferryError
from runtime.grpc_life import GrpcServer, channel
from runtime.kv_event_log import KVEventLog
from runtime.membership import MembershipClient, RetryTimes
from tests.support.fake_workers import SECRET, layout, registration


def block(number: int) -> bytes:
    return number.to_bytes(16, "little")


def stored(*numbers: int) -> list[KVEvent]:
    return [KVEvent(block_hash=block(number)) for number in numbers]


def removed(*numbers: int) -> list[KVEvent]:
    return [KVEvent(block_hash=block(number), removed=True) for number in numbers]


def attach(registry: WorkerRegistry, worker_id: str = "d0", role: Any = Role.DECODE, **changes: Any) -> AttachedWorker:
    return registry.attach(registration(worker_id, role, **changes), lambda: None)


@dataclass
class Listener:
    """Writes down what a registry tells."""

    told: list[str] = field(default_factory=list)
    rooms: int = 0

    def worker_attached(self, register: Register) -> None:
        self.told.append(f"+{register.worker_id}")

    def worker_detached(self, register: Register) -> None:
        self.told.append(f"-{register.worker_id}")

    def room_changed(self) -> None:
        self.rooms += 1


# ---- the index ----


def test_events_in_order_give_the_workers_content() -> None:
    index = PrefixIndex(10)
    assert not index.in_sync
    assert index.apply(0, True, stored(1, 2)) is Applied.OK
    assert index.apply(2, False, [*stored(3), *removed(1)]) is Applied.OK
    assert index.blocks == {block(2), block(3)}
    assert index.in_sync


def test_an_incarnations_first_events_need_no_snapshot_but_later_ones_do() -> None:
    assert PrefixIndex(10).apply(1, False, stored(1)) is Applied.OK
    late = PrefixIndex(10)
    assert late.apply(7, False, stored(1)) is Applied.NEEDS_RESYNC
    assert late.blocks == set()


def test_a_gap_empties_the_index_until_a_snapshot_comes_and_is_reported_once() -> None:
    index = PrefixIndex(10)
    index.apply(0, True, stored(1, 2))
    assert index.apply(3, False, stored(4)) is Applied.NEEDS_RESYNC
    assert index.blocks == set()
    assert not index.in_sync
    assert index.apply(4, False, stored(5)) is Applied.IGNORED
    assert index.apply(5, True, stored(1, 5)) is Applied.OK
    assert index.apply(7, False, stored(6)) is Applied.OK
    assert index.blocks == {block(1), block(5), block(6)}


def test_a_snapshot_longer_than_a_message_goes_on_in_ordinary_ones() -> None:
    index = PrefixIndex(10)
    index.apply(0, True, stored(1, 2))
    assert index.apply(2, False, stored(3, 4)) is Applied.OK
    assert len(index.blocks) == 4


def test_the_index_never_grows_beyond_the_pool() -> None:
    index = PrefixIndex(3)
    assert index.apply(0, True, stored(1, 2, 3)) is Applied.OK
    assert index.apply(3, False, stored(4)) is Applied.IGNORED
    assert index.blocks == set()
    assert index.apply(4, True, stored(1)) is Applied.OK


def test_a_name_that_is_no_block_hash_is_not_kept() -> None:
    index = PrefixIndex(3)
    index.apply(0, True, [KVEvent(block_hash=b"short"), KVEvent(block_hash=b"x" * 1000), *stored(1)])
    assert index.blocks == {block(1)}


@pytest.mark.parametrize("seed", range(8))
def test_an_index_with_lost_messages_equals_the_worker_once_it_is_in_sync(seed: int) -> None:
    # H021: drop 5 % of the messages, and the first ones always.
    rng = random.Random(seed)
    index, truth, sequence = PrefixIndex(200), set[bytes](), 0
    resync_wanted = False
    for message in range(400):
        if resync_wanted:
            events = [KVEvent(block_hash=name) for name in sorted(truth)]
            index.apply(sequence, True, events)
            sequence += len(events)
            resync_wanted = False
        events = []
        for _ in range(rng.randrange(4)):
            name = block(rng.randrange(60))
            events.append(KVEvent(block_hash=name, removed=name in truth))
            truth ^= {name}
        lost = message < 5 or rng.random() < 0.05
        if not lost:
            resync_wanted = index.apply(sequence, False, events) is Applied.NEEDS_RESYNC
            assert index.blocks == (truth if index.in_sync else set())
        sequence += len(events)


# ---- registration ----


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"protocol_version": 99}, "protocol_version"),
        ({"worker_id": ""}, "worker_id"),
        ({"worker_id": "x" * 200}, "worker_id"),
        ({"worker_id": "a\nb"}, "worker_id"),
        ({"incarnation": b"short"}, "incarnation"),
        ({"role": Role.ROLE_UNSPECIFIED}, "role"),
        ({"address": ""}, "address"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"max_context_tokens": 0}, "max_context_tokens"),
        ({"layout": layout(dtype="fp99")}, "layout"),
        ({"layout": layout(num_layers=0)}, "layout"),
    ],
)
def test_a_registration_that_makes_no_sense_is_refused_by_its_field(changes: dict[str, Any], field: str) -> None:
    registry = WorkerRegistry(ManualClock())
    register = registration(**{"worker_id": "d0", "role": Role.DECODE, **changes})
    with pytest.raises(KvferryError) as caught:
        registry.attach(register, lambda: None)
    assert caught.value.code == ErrorCode.INVALID_REQUEST
    assert caught.value.field == field
    assert registry.views() == []


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"layout": layout(dtype="bf16")}, ("bf16", "fp32")),
        ({"layout": layout(block_size=32)}, ("32", "16")),
        ({"layout": layout(model_revision="f" * 16)}, ("f" * 16, "0" * 16)),
        ({"layout": layout(num_layers=3)}, ("3", "2")),
        ({"vocab_size": 5000}, ("5000", "1000")),
    ],
)
def test_a_worker_that_does_not_match_the_others_is_refused_and_both_values_are_named(
    changes: dict[str, Any], values: tuple[str, str]
) -> None:
    # H076, H075
    registry = WorkerRegistry(ManualClock())
    attach(registry, "d0")
    with pytest.raises(KvferryError) as caught:
        attach(registry, "p0", Role.PREFILL, **changes)
    assert all(value in caught.value.message for value in (*values, "d0", "p0"))
    assert [view.worker_id for view in registry.views()] == ["d0"]


def test_a_model_can_be_exchanged_once_all_its_workers_are_gone() -> None:
    registry = WorkerRegistry(ManualClock())
    first = attach(registry, "d0")
    registry.detach(first)
    assert registry.limits is None
    assert registry.hasher is None
    attach(registry, "d0", layout=layout(model_revision="f" * 16), vocab_size=5000)
    assert registry.limits == ModelLimits(5000, 512)
    hasher = registry.hasher
    assert hasher is not None
    assert hasher.model_revision == "f" * 16


def test_the_context_is_that_of_the_smallest_worker() -> None:
    # H013: limits that differ between the halves are known at the door.
    registry = WorkerRegistry(ManualClock())
    attach(registry, "d0", max_context_tokens=2000)
    small = attach(registry, "p0", Role.PREFILL, max_context_tokens=1000)
    assert registry.limits == ModelLimits(1000, 1000)
    registry.detach(small)
    assert registry.limits == ModelLimits(1000, 2000)


def test_a_new_life_of_a_worker_takes_the_place_of_the_old_one() -> None:
    registry, listener, replaced = WorkerRegistry(ManualClock()), Listener(), []
    registry.subscribe(listener)
    old = registry.attach(registration("d0", Role.DECODE), lambda: replaced.append("old"))
    registry.apply_events(old, KVEvents(snapshot=True, events=stored(1, 2)))
    new = attach(registry, "d0")
    assert replaced == ["old"]
    assert listener.told == ["+d0", "-d0", "+d0"]
    assert registry.views()[0].index_blocks == 0
    registry.detach(old)  # The old stream ends late.
    assert registry.is_current(new)
    assert listener.told == ["+d0", "-d0", "+d0"]


# ---- health ----


def test_a_silent_worker_is_stalled_until_it_reports_again() -> None:
    clock = ManualClock()
    registry = WorkerRegistry(clock, silent_after_s=5)
    worker = attach(registry)
    assert registry.ready
    clock.advance(5.1)
    assert registry.views()[0].health is Health.STALLED
    assert not registry.ready
    registry.report(worker, LoadReport())
    assert registry.views()[0].health is Health.READY


def test_a_worker_whose_engine_stands_still_is_stalled_but_stays_attached() -> None:
    # H018, H094
    registry = WorkerRegistry(ManualClock())
    worker = attach(registry)
    registry.report(worker, LoadReport(engine_stalled_ms=10_000))
    assert registry.ready
    registry.report(worker, LoadReport(engine_stalled_ms=10_001))
    assert not registry.ready
    assert registry.cluster_load().decode[0].health is Health.STALLED


def test_a_suspect_is_avoided_until_its_next_report() -> None:
    # H003: the first broken connection is remembered.
    registry = WorkerRegistry(ManualClock())
    worker = attach(registry)
    registry.suspect("d0")
    assert registry.views()[0].health is Health.STALLED
    registry.report(worker, LoadReport())
    assert registry.views()[0].health is Health.READY
    registry.suspect("nobody")


def test_draining_is_for_good_and_never_ready() -> None:
    registry = WorkerRegistry(ManualClock())
    worker = attach(registry)
    registry.drain(worker)
    registry.report(worker, LoadReport())
    assert registry.views()[0].health is Health.DRAINING
    assert not registry.ready


def test_a_prefill_worker_alone_makes_nothing_ready() -> None:
    registry = WorkerRegistry(ManualClock())
    attach(registry, "p0", Role.PREFILL)
    assert not registry.ready


# ---- what runs there ----


def test_the_load_is_the_larger_of_what_was_reported_and_what_was_sent() -> None:
    registry = WorkerRegistry(ManualClock())
    worker = attach(registry)
    registry.report(worker, LoadReport(sequences_running=2, sequences_waiting=1, tokens_waiting=50))
    with registry.lease("d0", 30):
        load = registry.cluster_load().decode[0]
        assert (load.requests, load.pending_tokens) == (3, 50)
        with registry.lease("d0", 40), registry.lease("d0", 0), registry.lease("d0", 0):
            load = registry.cluster_load().decode[0]
            assert (load.requests, load.pending_tokens) == (4, 70)


def test_a_lease_counts_from_its_start_to_its_end_however_it_ends() -> None:
    # H019
    registry = WorkerRegistry(ManualClock())
    attach(registry)

    def fail_half_way() -> None:
        with registry.lease("d0", 7) as lease:
            assert registry.views()[0].requests_in_flight == 1
            lease.computed()
            assert registry.cluster_load().decode[0].pending_tokens == 0
            lease.computed()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert registry.views()[0].requests_in_flight == 0
    assert registry.cluster_load().decode[0].pending_tokens == 0


def test_leases_of_an_earlier_life_do_not_touch_the_counters_of_the_next() -> None:
    registry = WorkerRegistry(ManualClock())
    attach(registry)
    with registry.lease("d0", 7):
        attach(registry)
        assert registry.views()[0].requests_in_flight == 0
        with registry.lease("d0", 3):
            pass
    assert registry.views()[0].requests_in_flight == 0
    assert registry.cluster_load().decode[0].pending_tokens == 0


def test_a_lease_on_a_worker_that_is_gone_is_refused() -> None:
    registry = WorkerRegistry(ManualClock())
    with pytest.raises(KvferryError) as caught, registry.lease("d0", 1):
        pass
    assert caught.value.code == ErrorCode.UNAVAILABLE


def test_a_refused_lease_marks_the_worker_full_until_a_report_or_a_request_leaving_it() -> None:
    registry, listener = WorkerRegistry(ManualClock()), Listener()
    worker = attach(registry)
    registry.subscribe(listener)

    def refuse() -> None:
        with registry.lease("d0", 1) as lease:
            lease.refused()

    refuse()
    assert registry.cluster_load().decode[0].full
    assert listener.rooms == 0
    registry.report(worker, LoadReport())
    assert not registry.cluster_load().decode[0].full
    with registry.lease("d0", 1):
        refuse()
        assert registry.cluster_load().decode[0].full
    assert not registry.cluster_load().decode[0].full
    assert listener.rooms == 2


@pytest.mark.parametrize("seed", range(3))
def test_counters_equal_what_is_in_flight_at_any_moment_of_a_random_run(seed: int) -> None:
    rng = random.Random(seed)
    registry = WorkerRegistry(ManualClock())
    names = ["d0", "d1"]
    for name in names:
        attach(registry, name)
    open_leases: list[tuple[str, int, Any]] = []
    for _ in range(500):
        if rng.random() < 0.5:
            name, tokens = rng.choice(names), rng.randrange(100)
            lease = registry.lease(name, tokens)
            lease.__enter__()
            open_leases.append((name, tokens, lease))
        elif open_leases:
            _, _, lease = open_leases.pop(rng.randrange(len(open_leases)))
            lease.__exit__(None, None, None)
        for view, load in zip(registry.views(), registry.cluster_load().decode, strict=True):
            mine = [tokens for name, tokens, _ in open_leases if name == view.worker_id]
            assert view.requests_in_flight == len(mine)
            assert load.pending_tokens == sum(mine)
    while open_leases:
        open_leases.pop()[2].__exit__(None, None, None)
    assert {view.requests_in_flight for view in registry.views()} == {0}


# ---- the Attach stream ----


@dataclass
class Membership:
    """A registry behind a real server."""

    registry: WorkerRegistry
    address: str
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.registry.subscribe(self)

    def worker_attached(self, register: Register) -> None:
        self.changed.set()

    def worker_detached(self, register: Register) -> None:
        self.changed.set()

    def room_changed(self) -> None:
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds; looked at whenever a worker comes, goes or reports its load."""
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def membership(silence_limit_s: float = 10.0) -> AsyncIterator[Membership]:
    registry = WorkerRegistry(SystemClock())
    server = GrpcServer("127.0.0.1", secret=SECRET)
    service = MembershipService(registry, "router-test", silence_limit_s=silence_limit_s)
    server.add_service(internal_pb2_grpc.add_MembershipServicer_to_server, service, SERVICE_NAME, internal=True)
    await server.start()
    try:
        yield Membership(registry, server.address)
    finally:
        await server.stop(0)


@asynccontextmanager
async def stream(address: str, secret: bytes = SECRET) -> AsyncIterator[Any]:
    async with channel(address, secret) as link, asyncio.timeout(10):
        call = internal_pb2_grpc.MembershipStub(link).Attach()
        try:
            yield call
        finally:
            call.cancel()


async def registered(call: Any, register: Register) -> RouterMessage:
    await call.write(WorkerMessage(register=register))
    answer = await call.read()
    assert isinstance(answer, RouterMessage), await call.details()
    return answer


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
        assert "protocol_version is 7 there and 1 here" in await call.details()
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
