"""Workers that change their role while a router sends them requests: all of it real, in one process."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import worker.parts
from kvferry.scaling.fleet_admin import FleetAdmin
from kvferry.scaling.fleet_view import WorkerFacts
from kvferry_rpc import internal_pb2_grpc
from kvferry_rpc.common_pb2 import SamplingParams
from kvferry_rpc.internal_pb2 import FleetState, Role
from router.dispatch.dispatch_limits import DispatchLimits
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.receipts import ReceiptStore
from router.dispatch.worker_links import WorkerLinks
from router.generation import GenerationRequest, TokenBatch, TokenEnd
from router.observation.metrics import RouterMetrics
from router.workers import fleet_service, membership_service
from router.workers.fleet_service import FleetService
from router.workers.membership_service import MembershipService
from router.workers.worker_registry import WorkerRegistry
from runtime.clock import SystemClock
from runtime.errors import KvferryError
from runtime.grpc_life import GrpcServer, channel
from tests.support.hosted_worker import SECRET, WAIT_S, Hosted, worker_settings
from tests.support.sinks import Collected

PROMPTS = [tuple(range(3, 30)), tuple(range(40, 60)), (9, 8, 7) * 8]
NUM_TOKENS = 40


class Router:
    """What a router has between its doors and its workers."""

    def __init__(self) -> None:
        self.clock, rng = SystemClock(), random.Random(5)
        self.registry = WorkerRegistry(self.clock)
        self.links = WorkerLinks(self.registry, "r", lambda address: channel(address, SECRET), rng)
        metrics = RouterMetrics(CollectorRegistry(), self.clock)
        store = ReceiptStore(100)
        self.dispatcher = Dispatcher(self.registry, self.links, store, metrics, DispatchLimits(), self.clock, rng)
        self.server = GrpcServer("127.0.0.1", secret=SECRET)
        self.server.add_service(
            internal_pb2_grpc.add_MembershipServicer_to_server,
            MembershipService(self.registry, "r"), membership_service.SERVICE_NAME, internal=True,
        )  # fmt: skip
        self.server.add_service(
            internal_pb2_grpc.add_FleetServicer_to_server,
            FleetService(self.registry, FleetState), fleet_service.SERVICE_NAME, internal=True,
        )  # fmt: skip
        self._ids = 0

    async def text(self, prompt: tuple[int, ...]) -> tuple[list[int], TokenEnd]:
        """The whole answer to a prompt."""
        self._ids += 1
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, seed=1, ignore_eos=True)
        request = GenerationRequest(f"r{self._ids}", prompt, sampling, deadline=self.clock.now() + WAIT_S)
        sink = Collected[TokenBatch]()
        end = await self.dispatcher.run(request, sink)
        return [token.token_id for batch in sink.items for token in batch.tokens], end


class Cluster:
    """A router, its workers, and whoever scales them."""

    def __init__(self, router: Router, workers: dict[str, Hosted], admin: FleetAdmin) -> None:
        self.router = router
        self.workers = workers
        self.admin = admin

    async def until(self, name: str, role: str, state: str = "ready") -> WorkerFacts:
        """Wait until the router sees that worker like this."""
        async with asyncio.timeout(WAIT_S):
            while True:
                one = (await self.admin.view()).get(name)
                if one is not None and (one.role, one.state) == (role, state):
                    return one
                await asyncio.sleep(0.05)


@asynccontextmanager
async def cluster(settings: dict[str, Any], **roles: str) -> AsyncIterator[Cluster]:
    """Workers by name, each in its role, all attached."""
    router = Router()
    await router.server.start()
    admin = FleetAdmin((router.server.address,), SECRET)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(router.server.stop, 0)
        stack.push_async_callback(router.links.close)
        stack.push_async_callback(admin.close)
        workers = {}
        for name, role in roles.items():
            own = {**settings, "worker_id": name, "routers": (router.server.address,)}
            workers[name] = hosted = Hosted(role, own)
            stack.push_async_callback(_end, hosted)
        running = Cluster(router, workers, admin)
        for name, role in roles.items():
            await running.until(name, role)
        yield running


async def _end(worker: Hosted) -> None:
    worker.shutdown.set()
    assert await worker.ended() == 0


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {**worker_settings(tmp_path_factory.mktemp("worker")), "num_blocks": 64}


async def test_workers_swap_their_roles_under_load_and_no_text_changes(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    load = worker.parts.load_on_pool
    monkeypatch.setattr(
        worker.parts, "load_on_pool", lambda options, *rest: loads.append(options.worker_id) or load(options, *rest)
    )
    async with cluster(settings, a="prefill", b="prefill", c="decode") as running:
        router, admin = running.router, running.admin
        undisturbed = [(await router.text(prompt))[0] for prompt in PROMPTS]
        stop = asyncio.Event()
        ends: list[TokenEnd] = []

        async def go_on(number: int) -> None:
            while not stop.is_set():
                tokens, end = await router.text(PROMPTS[number])
                assert tokens == undisturbed[number]
                ends.append(end)

        load_tasks = [asyncio.create_task(go_on(number)) for number in range(len(PROMPTS))]
        before = await running.until("b", "prefill")
        await admin.set_role("b", "decode")
        after = await running.until("b", "decode")
        assert after.incarnation != before.incarnation
        # Its running answers go to b with their KV.
        await admin.set_role("c", "prefill")
        await running.until("c", "prefill")
        seen = len(ends)
        async with asyncio.timeout(WAIT_S):
            while len(ends) < seen + len(PROMPTS):  # noqa: ASYNC110 - each end is a sign that nobody waits for
                await asyncio.sleep(0.02)
        stop.set()
        await asyncio.gather(*load_tasks)
        assert ends[-1].receipt.decode_worker == "b"
        assert {one.name: one.role for one in (await admin.view()).workers} == {
            "a": "prefill", "b": "decode", "c": "prefill",
        }  # fmt: skip
    assert sorted(loads) == ["a", "b", "c"], "weights were loaded again"


async def test_what_a_worker_has_cached_stays_in_its_next_role(settings: dict[str, Any]) -> None:
    async with cluster(settings, a="prefill", b="prefill", c="decode") as running:
        await running.router.text(PROMPTS[0])
        await running.admin.set_role("c", "prefill", force=True)
        await running.until("c", "prefill")
        await running.admin.set_role("a", "decode")
        await running.until("a", "decode")
        engine = running.workers["c"].process.parts._engine
        assert engine.usage().cached >= len(PROMPTS[0]) // 8
        told = {one.register.worker_id: one.index.blocks for one, _ in running.router.registry.attached()}
        assert len(told["c"]) >= len(PROMPTS[0]) // 8


async def test_the_last_worker_of_a_role_stays_unless_that_is_insisted_on(settings: dict[str, Any]) -> None:
    async with cluster(settings, a="prefill", c="decode") as running:
        with pytest.raises(KvferryError, match="c is the last decode worker that is ready"):
            await running.admin.set_role("c", "prefill")
        with pytest.raises(KvferryError, match="a is the last prefill worker that is ready"):
            await running.admin.drain("a")
        with pytest.raises(KvferryError, match="'z' is not attached"):
            await running.admin.drain("z")
        await running.admin.drain("a", force=True)
        await running.until("a", "prefill", "draining")
        # The decode worker computes prompts by itself meanwhile.
        assert (await running.router.text(PROMPTS[1]))[1].receipt.prefill_worker in ("", "c")
        await running.admin.drain("a", over=True)
        await running.until("a", "prefill")
        assert (await running.router.text(PROMPTS[2]))[1].receipt.prefill_worker == "a"


async def test_a_worker_that_is_started_again_begins_in_the_role_that_it_had_last(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    own = {**settings, "role_file": tmp_path / "role"}
    async with cluster(own, a="prefill") as running:
        await running.admin.set_role("a", "decode", force=True)
        await running.until("a", "decode")
    # Its command line says what it did before. `cluster` waits for the role that it is told.
    router = Router()
    await router.server.start()
    again = Hosted("prefill", {**own, "worker_id": "a", "routers": (router.server.address,)})
    try:
        async with asyncio.timeout(WAIT_S):
            assert (await again.registered).role == Role.DECODE
    finally:
        await _end(again)
        await router.links.close()
        await router.server.stop(0)
