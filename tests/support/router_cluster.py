"""A router's control side with fake workers behind it, in one event loop."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvferry_rpc.common_pb2 import SamplingParams
from kvferry_rpc.internal_pb2 import KVEvent, LoadReport
from router.dispatch.dispatch_limits import DispatchLimits
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.receipts import ReceiptStore
from router.dispatch.worker_links import WorkerLinks
from router.generation import GenerationRequest, TokenBatch, TokenEnd
from router.observation.metrics import RouterMetrics
from router.workers.attached_worker import AttachedWorker
from router.workers.worker_registry import WorkerRegistry
from runtime.clock import SystemClock
from runtime.errors import KvferryError
from runtime.grpc_life import channel
from tests.support.fake_model import continuation
from tests.support.fake_moves import MovingDecode
from tests.support.fake_workers import SECRET, Fabric, FakeDecode, FakePrefill
from tests.support.sinks import Collected, pulled

PROMPT = tuple(range(40))
ANSWER = continuation(PROMPT, 8)


@dataclass
class Answer:
    """What a reader of a token stream got."""

    tokens: list[int]
    indices: list[int]
    end: TokenEnd


class RouterCluster:
    """Registry, links and dispatcher of a router, and fake workers that are attached without an Attach stream."""

    def __init__(self, limits: DispatchLimits, eos_token_ids: frozenset[int]) -> None:
        self.clock = SystemClock()
        self.prometheus = CollectorRegistry()
        self.registry = WorkerRegistry(self.clock)
        rng = random.Random(7)
        self.links = WorkerLinks(self.registry, "router-test", lambda address: channel(address, SECRET), rng)
        self.store = ReceiptStore(1000)
        self.metrics = RouterMetrics(self.prometheus, self.clock)
        self.dispatcher = Dispatcher(
            self.registry, self.links, self.store, self.metrics, limits, self.clock, rng, eos_token_ids
        )
        self.fabric = Fabric()
        self.workers: dict[str, FakeDecode | FakePrefill] = {}
        self.attached: dict[str, AttachedWorker] = {}
        self._ids = 0

    async def decode(self, worker_id: str = "decode-0") -> MovingDecode:
        """Start and attach a decode worker."""
        worker = MovingDecode(worker_id, self.fabric)
        await self._attach(worker_id, worker)
        return worker

    async def prefill(self, worker_id: str = "prefill-0") -> FakePrefill:
        """Start and attach a prefill worker."""
        worker = FakePrefill(worker_id, self.fabric)
        await self._attach(worker_id, worker)
        return worker

    async def kill(self, worker_id: str) -> None:
        """The worker's process is gone: its connections break, its Attach stream ends."""
        await self.workers[worker_id].stop()
        self.registry.detach(self.attached[worker_id])

    def drain(self, worker_id: str) -> None:
        """The worker says that it wants to leave."""
        self.registry.drain(self.attached[worker_id])

    def report(self, worker_id: str, **load: Any) -> None:
        """A load report of that worker arrives."""
        self.registry.report(self.attached[worker_id], LoadReport(**{"blocks_free": 64, **load}))

    def caches(self, worker_id: str, prompt: Sequence[int], salt: bytes = b"") -> None:
        """That worker's events say that it holds these tokens, and nothing else."""
        hasher = self.registry.hashers[self.attached[worker_id].layout]
        names = hasher.hash_blocks(prompt, salt)
        self.attached[worker_id].index.apply(0, True, [KVEvent(block_hash=name) for name in names])

    def request(
        self, prompt: Sequence[int] = PROMPT, max_tokens: int = 8, timeout_s: float = 20.0, **changes: Any
    ) -> GenerationRequest:
        """A request with an id of its own."""
        self._ids += 1
        request = GenerationRequest(
            request_id=f"request-{self._ids}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=1),
            deadline=self.clock.now() + timeout_s,
        )
        return replace(request, **changes)

    def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenBatch | TokenEnd, None]:
        """An answer whose reader takes its time: it stands still until it is asked for more."""
        return pulled(lambda sink: self.dispatcher.run(request, sink))

    async def run(self, request: GenerationRequest) -> Answer:
        """Take a whole answer, as fast as it comes."""
        sink = Collected[TokenBatch]()
        end = await self.dispatcher.run(request, sink)
        tokens = [token for batch in sink.items for token in batch.tokens]
        return Answer([token.token_id for token in tokens], [token.index for token in tokens], end)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the event loop run until it holds."""
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - what is waited for is inside the router and tells nobody
                await asyncio.sleep(0.001)

    def counter(self, name: str, **labels: str) -> float:
        """A sample of the router's metrics, 0 when absent."""
        return self.prometheus.get_sample_value(name, labels) or 0.0

    def in_flight(self) -> dict[str, int]:
        """What this router believes to run on each worker."""
        return {view.worker_id: view.requests_in_flight for view in self.registry.views()}

    async def _attach(self, worker_id: str, worker: FakeDecode | FakePrefill) -> None:
        register = await worker.start()
        self.workers[worker_id] = worker
        self.attached[worker_id] = self.registry.attach(register, lambda: None)


@asynccontextmanager
async def router_cluster(
    limits: DispatchLimits | None = None, eos_token_ids: frozenset[int] = frozenset()
) -> AsyncIterator[RouterCluster]:
    """A cluster without workers; at the end nothing may be counted in flight, and no task may be left."""
    before = asyncio.all_tasks()
    cluster = RouterCluster(limits or DispatchLimits(), eos_token_ids)
    try:
        yield cluster
        assert cluster.dispatcher.in_flight == 0
        assert set(cluster.in_flight().values()) <= {0}
    finally:
        await cluster.links.close()
        for worker in cluster.workers.values():
            await worker.stop()
        left = asyncio.all_tasks() - before
        if left:
            await asyncio.wait(left, timeout=5)
    stuck = [task for task in asyncio.all_tasks() - before if not task.done() and not _waits_inside_grpc(task)]
    # The frames tell who waits for what; a task's own name tells little.
    assert not stuck, "\n".join(f"{task!r}\n{task.get_stack()}" for task in stuck)


def _waits_inside_grpc(task: asyncio.Task[Any]) -> bool:
    """Whether it is gRPC's own wait for the status of a call.

    Where a write fails because the call has just been broken from afar, gRPC takes the call for ended, reads and
    cancels no more, and so its status may never come. Nothing outside of gRPC can end that wait but the end of the
    event loop.
    """
    return "<_AioCall._handle_status_once_received()" in repr(task)


async def failure_of(awaitable: Awaitable[Any]) -> KvferryError:
    """Await what must fail, and return its failure."""
    with pytest.raises(KvferryError) as caught:
        await awaitable
    return caught.value


async def first_tokens(stream: AsyncGenerator[TokenBatch | TokenEnd, None], count: int) -> list[int]:
    """Read until at least `count` tokens came."""
    tokens: list[int] = []
    while len(tokens) < count:
        batch = await anext(stream)
        assert isinstance(batch, TokenBatch)
        tokens.extend(token.token_id for token in batch.tokens)
    return tokens
