"""What a worker process loads once and keeps in every role: the model, the pool, the KV transports.

A role takes from it, with `begin`, an engine on the one pool, and its own identity to other workers. The prefix cache
goes on from role to role wherever both would have put the same bytes under the same name.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from engine.build import load_on_pool, plan_engine, start_followers
from engine.engine import Engine
from engine.grammar import GrammarCompiler
from kv_transfer.events import ReceiveEvent
from kv_transfer.identity import Identity
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.region import MemoryRegion, available_memory_bytes
from runtime.clock import SystemClock
from runtime.kv_event_log import KVEventLog
from runtime.tracing import open_tracer
from worker.options import WorkerOptions


@dataclass(frozen=True, slots=True)
class RoleParts:
    """What one life in one role has for itself. `engine` belongs to the thread that will step it."""

    engine: Engine
    identity: Identity
    kv_events: KVEventLog


class WorkerParts:
    """One thread at a time."""

    def __init__(self, options: WorkerOptions, secret: bytes) -> None:
        """Prepares and maps the model and takes the pool's memory: seconds, or minutes for a new model. Raises
        KvferryError, RegionError, OSError or ValueError when that cannot be done."""
        self.options = options
        self.clock = SystemClock()
        self.tracer = open_tracer(options, options.worker_id, self.clock)
        self.network = options.network(options.host)
        self.transports = options.working(self.network, options.host, self.clock)
        self.plan = plan_engine(options, available_bytes=available_memory_bytes())
        shared = "shm" in self.transports or options.tensor_parallel > 1
        self._pool = MemoryRegion.allocate(self.plan.pool_bytes, shared=shared)
        self.followers = start_followers(options, self.plan, self._pool.file)
        self._loaded = load_on_pool(options, self.plan, self._pool.buffer, self.followers)
        self.grammars = GrammarCompiler(self.plan.model)
        self._secret = secret
        self._engine: Engine | None = None
        self._kv_events = KVEventLog()

    def begin(self, *, prefill_only: bool) -> RoleParts:
        """For a new life, in a new incarnation. Nobody uses what the last one was given, and nobody but this process
        can touch the pool. Raises KvferryError or ValueError when the engine cannot be built."""
        last = self._engine
        block_manager = None
        if last is not None and self._keeps_cache and last.is_idle:
            last.check_integrity()
            block_manager = last.block_manager
        else:
            self._kv_events = KVEventLog()
        engine = self._engine = self._loaded.engine(prefill_only=prefill_only, block_manager=block_manager)
        options = self.options
        incarnation = secrets.token_bytes(16)
        identity = Identity(options.worker_id, incarnation, self._secret, self.plan.layout, self._pool)
        return RoleParts(engine, identity, self._kv_events)

    def receiver(self, own: RoleParts, on_event: Callable[[ReceiveEvent], None], *, lease_s: float) -> HandoffReceiver:
        """Takes KV into the pool for this life; not started. Raises ValueError as `HandoffReceiver`."""
        return HandoffReceiver(
            own.identity,
            network=self.network,
            bind_host=self.options.host,
            port=self.options.data_port,
            transports=self.transports,
            lease_s=lease_s,
            clock=self.clock,
            on_event=on_event,
        )

    def close(self, timeout_s: float) -> None:
        """Give everything back, after the last life. Blocks."""
        self.grammars.close()
        if self.followers is not None:
            self.followers.close(timeout_s)
        self.network.close()
        if self.tracer is not None:
            self.tracer.close()
        self._pool.close()

    @property
    def _keeps_cache(self) -> bool:
        """Not where what a decode worker holds has been through fewer bits, which a prefill worker does not give out as
        its own; nor where a device has blocks that the pool of the host, which is sent from, has not."""
        return self.options.wire_dtype is None and self.options.device == "cpu"
