"""Orders to workers: which are refused, and that they reach the worker on its stream."""

import pytest

from kvferry_rpc.common_pb2 import ErrorCode
from kvferry_rpc.internal_pb2 import Draining, DrainWorkerRequest, Role, RouterMessage, WorkerMessage
from kvferry_rpc.internal_pb2_grpc import FleetStub
from router.policy import Health
from router.workers.orders import WorkerOrders
from router.workers.worker_registry import WorkerRegistry
from runtime.clock import ManualClock
from runtime.errors import KvferryError
from runtime.grpc_life import channel
from tests.support.attach_stream import membership, registered, stream
from tests.support.fake_workers import registration


class Fleet:
    """Attached workers that write down what they are told."""

    def __init__(self, **roles: Role.ValueType) -> None:
        self.registry = WorkerRegistry(ManualClock())
        self.told: list[tuple[str, str]] = []
        for name, role in roles.items():
            self.attach(name, role)
        self.orders = WorkerOrders(self.registry)

    def attach(self, name: str, role: Role.ValueType, **changes: object) -> None:
        def order(message: RouterMessage) -> None:
            self.told.append((name, str(message.WhichOneof("kind"))))

        self.registry.attach(registration(name, role, **changes), lambda: None, order)

    def health(self, name: str) -> Health:
        return next(view.health for view in self.registry.views() if view.worker_id == name)


def test_a_worker_that_is_told_to_drain_gets_no_more_work_from_that_moment_on() -> None:
    fleet = Fleet(d0=Role.DECODE, d1=Role.DECODE)
    fleet.orders.drain("d0")
    assert fleet.told == [("d0", "drain")]
    assert fleet.health("d0") is Health.DRAINING
    assert fleet.registry.is_draining("d0")


def test_two_orders_cannot_take_the_last_two_workers_of_a_role() -> None:
    fleet = Fleet(d0=Role.DECODE, d1=Role.DECODE, p0=Role.PREFILL)
    fleet.orders.set_role("d0", Role.PREFILL)
    with pytest.raises(KvferryError, match="d1 is the last decode worker that is ready") as refused:
        fleet.orders.drain("d1")
    assert refused.value.code == ErrorCode.INVALID_REQUEST
    assert fleet.told == [("d0", "set_role")]
    fleet.orders.drain("d1", force=True)
    assert fleet.health("d1") is Health.DRAINING


def test_a_worker_that_has_the_role_already_is_told_nothing() -> None:
    fleet = Fleet(d0=Role.DECODE)
    fleet.orders.set_role("d0", Role.DECODE)
    assert fleet.told == []
    assert fleet.health("d0") is Health.READY


@pytest.mark.parametrize("role", [Role.ROLE_UNSPECIFIED, 7])
def test_a_role_that_does_not_exist_is_refused(role: Role.ValueType) -> None:
    fleet = Fleet(d0=Role.DECODE, d1=Role.DECODE)
    with pytest.raises(KvferryError, match="role must be PREFILL or DECODE"):
        fleet.orders.set_role("d0", role)


def test_a_role_in_which_its_blocks_would_not_go_with_others_is_refused() -> None:
    fleet = Fleet(d0=Role.DECODE, d1=Role.DECODE, p0=Role.PREFILL)
    other_model = registration("d0", Role.DECODE).layout
    other_model.CopyFrom(fleet.registry.views()[0].register.layout)
    other_model.num_layers += 1
    # The registry would not have let such a worker in: the check does not rest on that.
    next(worker for worker, _ in fleet.registry.attached()).layout = fleet.registry.attached()[0][0].layout.from_proto(
        other_model
    )
    with pytest.raises(KvferryError, match="role of d0 cannot change beside"):
        fleet.orders.set_role("d0", Role.PREFILL)
    assert fleet.told == []


def test_a_drain_that_is_lifted_is_over_when_the_worker_says_so() -> None:
    fleet = Fleet(d0=Role.DECODE, d1=Role.DECODE)
    fleet.orders.drain("d0")
    fleet.orders.lift_drain("d0")
    assert fleet.health("d0") is Health.DRAINING
    worker = fleet.registry.attached()[0][0]
    fleet.registry.drain(worker, False)
    assert fleet.health("d0") is Health.READY


async def test_orders_reach_the_worker_on_its_stream_and_its_word_is_final() -> None:
    async with membership() as router, stream(router.address) as call, stream(router.address) as other:
        await registered(call, registration("d0", Role.DECODE))
        await registered(other, registration("d1", Role.DECODE))
        orders = WorkerOrders(router.registry)
        orders.drain("d0")
        assert (await call.read()).WhichOneof("kind") == "drain"
        orders.lift_drain("d0")
        assert (await call.read()).drain.over
        await call.write(WorkerMessage(draining=Draining(over=True)))
        await router.until(lambda: not router.registry.is_draining("d0"))
        orders.set_role("d0", Role.PREFILL)
        assert (await call.read()).set_role.role == Role.PREFILL
        await call.write(WorkerMessage(draining=Draining()))
        await router.until(lambda: router.registry.is_draining("d0"))


async def test_a_worker_that_reads_nothing_hears_of_no_more_orders() -> None:
    async with membership() as router, stream(router.address) as call:
        await registered(call, registration("d0", Role.DECODE))
        orders = WorkerOrders(router.registry)
        # Nothing is written to the stream before the event loop has its turn.
        for _ in range(16):
            orders.lift_drain("d0")
        with pytest.raises(KvferryError, match="16 messages wait for this worker") as refused:
            orders.lift_drain("d0")
        assert refused.value.code == ErrorCode.OVERLOADED


async def test_without_the_cluster_secret_nobody_orders_anything() -> None:
    async with membership() as router, channel(router.address, b"x" * 32) as link:
        with pytest.raises(Exception, match="UNAUTHENTICATED"):
            await FleetStub(link).Drain(DrainWorkerRequest(worker_id="d0"), timeout=10)
