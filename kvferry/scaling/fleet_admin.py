"""A cluster's routers, seen by whoever scales it: what they tell of the workers, and orders that they pass on."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from kvferry.scaling.fleet_view import FleetView, WorkerFacts
from kvferry_rpc.common_pb2 import ErrorCode
from kvferry_rpc.internal_pb2 import (
    DrainWorkerRequest,
    FleetState,
    FleetWorker,
    ObserveRequest,
    Role,
    SetWorkerRoleRequest,
)
from kvferry_rpc.internal_pb2_grpc import FleetStub
from runtime.errors import KvferryError
from runtime.grpc_life import channel
from runtime.tls import ChannelTls

if TYPE_CHECKING:  # The asyncio face of the stub exists for type checkers alone.
    from kvferry_rpc.internal_pb2_grpc import FleetAsyncStub

_TIMEOUT_S = 5.0
_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}


class FleetAdmin:
    """Event-loop thread only. Whoever makes it closes it."""

    def __init__(
        self, addresses: Sequence[str], secret: bytes, *, tls: ChannelTls | None = None, timeout_s: float = _TIMEOUT_S
    ) -> None:
        """`addresses`: host:port of the internal service of every router process. `timeout_s`: of each call."""
        self._connect: Callable[[str], grpc.aio.Channel] = lambda address: channel(address, secret, tls=tls)
        self._timeout_s = timeout_s
        self._open(addresses)

    async def follow(self, addresses: Sequence[str]) -> None:
        """The routers are at these addresses from now on. Not while a call is under way."""
        await self.close()
        self._open(addresses)

    async def view(self) -> FleetView:
        """What the routers that answer know. Raises KvferryError (UNAVAILABLE, and others) when none does."""
        calls = [stub.Observe(ObserveRequest(), timeout=self._timeout_s) for stub in self._stubs]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        states = [answer for answer in answers if isinstance(answer, FleetState)]
        if not states:
            raise _error(answers[0])
        return fleet_view(states, is_complete=len(states) == len(answers))

    async def drain(self, name: str, *, over: bool = False, force: bool = False) -> None:
        """Let a worker take no new work, or work again (`over`). Returns once it is told. Raises KvferryError."""
        request = DrainWorkerRequest(worker_id=name, over=over, force=force)
        await self._tell(lambda stub: stub.Drain(request, timeout=self._timeout_s))

    async def set_role(self, name: str, role: str, *, force: bool = False) -> None:
        """Let a worker drain and take this role. Returns once it is told. Raises KvferryError."""
        request = SetWorkerRoleRequest(worker_id=name, role=_ROLES[role], force=force)
        await self._tell(lambda stub: stub.SetRole(request, timeout=self._timeout_s))

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        for one in self._channels:
            await one.close()

    def _open(self, addresses: Sequence[str]) -> None:
        self._channels = [self._connect(address) for address in addresses]
        self._stubs: list[FleetAsyncStub] = [FleetStub(one) for one in self._channels]

    async def _tell(self, call: Any) -> None:
        """Any router will do: what a worker hears from one, it says to all. The next is asked if one is away."""
        for number, stub in enumerate(self._stubs, 1):
            try:
                await call(stub)
                return
            except grpc.RpcError as error:
                failure = _error(error)
                if failure.code != ErrorCode.UNAVAILABLE or number == len(self._stubs):
                    raise failure from None


def fleet_view(states: Iterable[FleetState], *, is_complete: bool) -> FleetView:
    """One view of what several routers know. Of a worker, the first router that has it tells most; requests add up."""
    workers: dict[str, FleetWorker] = {}
    requests: dict[str, int] = {}
    queued = in_flight = met = missed = 0
    for state in states:
        queued += state.requests_queued
        in_flight += state.requests_in_flight
        met += state.slo_met
        missed += state.slo_missed
        for worker in state.workers:
            name = worker.register.worker_id
            workers.setdefault(name, worker)
            requests[name] = requests.get(name, 0) + worker.requests_in_flight
    facts = tuple(_facts(worker, requests[name]) for name, worker in sorted(workers.items()))
    return FleetView(facts, queued, in_flight, met, missed, is_complete)


def _facts(worker: FleetWorker, requests: int) -> WorkerFacts:
    register, load = worker.register, worker.load
    return WorkerFacts(
        name=register.worker_id,
        role="prefill" if register.role == Role.PREFILL else "decode",
        state=worker.state,
        incarnation=register.incarnation,
        requests=requests,
        sequences=load.sequences_running + load.sequences_waiting + load.sequences_receiving,
        tokens_waiting=load.tokens_waiting,
        blocks_total=register.num_blocks,
        blocks_used=load.blocks_used,
        blocks_quarantined=load.blocks_quarantined,
        token_budget=max(1, register.token_budget),
        max_num_seqs=max(1, register.max_num_seqs),
    )


def _error(error: object) -> KvferryError:
    if isinstance(error, grpc.RpcError):
        return KvferryError.from_rpc(error, "the router's internal service")
    return KvferryError(ErrorCode.INTERNAL, f"the router's internal service: {error!r}")
