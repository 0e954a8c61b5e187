"""A router process, put together from its configuration: what it owns, in the order in which it starts and stops."""

import asyncio
import logging
import random
import secrets
from collections.abc import Callable
from dataclasses import replace

from kvferry_rpc import internal_pb2_grpc, public_pb2_grpc
from kvferry_rpc.internal_pb2 import FleetState
from router.admission.fair_queue import TenantShare
from router.config import RouterConfig
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.receipts import ReceiptStore
from router.dispatch.worker_links import WorkerLinks
from router.generation import TokenSource
from router.grpc import server as grpc_server
from router.grpc.server import PublicService
from router.http.protocol import HttpServer
from router.http.server import build_app
from router.http.services import Services
from router.observation.access_log import AccessLog, App
from router.observation.live_page import LivePage
from router.observation.metrics import RouterMetrics
from router.observation.traces import Traces, request_spans, untraced
from router.plans.generation_plan import ModelLimits
from router.succession import workers_attached
from router.tenant_limits import MeteredSource
from router.tenants import TenantDirectory
from router.text.chat_format import chat_format
from router.text.tokenizer import AsyncTokenizer, Tokenizer
from router.workers import fleet_service, membership_service
from router.workers.cluster_state import cluster_state
from router.workers.fleet_service import FleetService
from router.workers.membership_service import MembershipService
from router.workers.worker_registry import WorkerRegistry
from runtime.clock import SystemClock
from runtime.grpc_life import GrpcServer, channel
from runtime.limits import MAX_BODY_BYTES
from runtime.telemetry import new_registry
from runtime.tls import https_context, internal_channel_tls, server_credentials
from runtime.tracing import Tracer, open_tracer

_STOP_GRACE_S = 2.0
# Clients that have said nothing for so long find their connection closed, as after any idle time.
_LINGER_S = 3.0
_MAX_PUBLIC_MESSAGE_BYTES = MAX_BODY_BYTES + 64 * 1024  # The longest prompt, and all the fields beside it.
_ANY_CONTEXT = 2**20  # No worker and no file says how long it is: nothing is refused for its length yet.

_log = logging.getLogger(__name__)


class RouterService:
    """All methods: event-loop thread only.

    1. `start`: listens on its three ports. Health answers at once; readiness says no until a decode worker is there.
    2. `drain`: readiness says no for good, new requests are refused, running ones finish.
    3. `stop`: what still runs is cancelled on its workers; everything is closed.
    """

    def __init__(self, config: RouterConfig, secret: bytes, tokenizer: Tokenizer) -> None:
        clock = SystemClock()
        rng = random.Random()
        self.router_id = f"router-{secrets.token_hex(4)}"
        self._config = config
        self._clock = clock
        self._draining = False
        self._doors_open = False
        self._leaving: asyncio.Task[None] | None = None  # The gRPC port, for a successor.
        self._tokenizer = AsyncTokenizer(tokenizer)
        self._chat_format = chat_format(config.tool_parser, config.reasoning_parser, tokenizer.chat_template_source)
        self.registry = WorkerRegistry(clock, silent_after_s=config.heartbeat_s)
        tls = internal_channel_tls(config, clock)
        connect = lambda address: channel(address, secret, tls=tls)  # noqa: E731
        self._links = WorkerLinks(self.registry, self.router_id, connect, rng)
        metrics = self._metrics = RouterMetrics(new_registry(), clock)
        store = ReceiptStore(config.receipts_kept)
        tenants = TenantDirectory(config.api_keys_file, secret, clock)
        limits = replace(config.dispatch_limits, share_of=lambda name: TenantShare(weight=tenants.weight(name)))
        self.dispatcher = Dispatcher(
            self.registry, self._links, store, metrics, limits, clock, rng, tokenizer.eos_token_ids
        )
        self.dispatcher.live.model = config.model_name
        self._tracer = open_tracer(config, self.router_id, clock)
        begin_trace = self._follow(self._tracer) if self._tracer is not None else untraced
        self._page = LivePage(self.registry, self.dispatcher.live, clock, self.router_id)
        source: TokenSource = self.dispatcher
        if tenants.needs_key:
            source = MeteredSource(self.dispatcher, tenants, clock, metrics.refused_at_door)
        services = Services(
            source=source,
            tokenizer=self._tokenizer,
            limits=self._limits,
            clock=clock,
            unready_reason=self._unready_reason,
            draining=lambda: self._draining,
            render_metrics=metrics.render,
            find_receipt=store.get,
            live_requests=self.dispatcher.live.snapshot,
            begin_trace=begin_trace,
            refused_at_door=metrics.refused_at_door,
            request_timeout_s=config.request_timeout_s,
            max_requests=config.max_in_flight + config.max_queued,
            tenants=tenants,
            protect_metrics=config.protect_metrics,
            live_page=self._page,
        )
        self._open_ports(services, secret)

    def _open_ports(self, services: Services, secret: bytes) -> None:
        """Make the three servers; none listens yet. Raises OSError or ValueError for certificates that are no good."""
        config, clock = self._config, self._clock
        https = https_context(config.http_tls, clock) if config.http_tls else None
        public = server_credentials(config.grpc_tls, clock) if config.grpc_tls else None
        internal = server_credentials(config.internal_tls, clock) if config.internal_tls else None
        app: App = build_app(services)
        if config.access_log:
            app = AccessLog(app, clock)
        shared = config.share_ports
        self._http = [HttpServer(app, host=config.host, port=config.http_port, tls=https, share_port=shared)]
        if config.process_port is not None:
            own = HttpServer(app, host=config.host, port=config.process_port, tls=https, share_port=shared)
            self._http.append(own)
        self._public = GrpcServer(
            config.host,
            config.grpc_port,
            credentials=public,
            max_received_bytes=_MAX_PUBLIC_MESSAGE_BYTES,
            # More than the service takes, which refuses with its own words; health has to be heard beside that.
            max_calls=2 * services.max_requests + 256,
            share_port=shared,
        )
        self._internal = GrpcServer(
            config.internal_host or config.host, config.internal_port, secret=secret, credentials=internal
        )
        self._add_services(services)

    async def start(self) -> dict[str, int]:
        """Listen, first for workers; returns the ports by name. Raises OSError when an address cannot be had."""
        await self._internal.start()
        await self._internal.set_serving(True)
        if self._config.await_workers:
            await workers_attached(self.registry, self._config.await_workers)
        await self._public.start()
        for server in self._http:
            await server.start()
        self._doors_open = True
        self._page.start()
        await self._public.set_serving(True)
        ports = {"http_port": self._http[0].port, "grpc_port": self._public.port, "internal_port": self._internal.port}
        return ports if len(self._http) == 1 else {**ports, "process_port": self._http[1].port}

    async def drain(self, *, has_successor: bool = False) -> None:
        """Refuse what is new, wait for what runs, and close the front doors; all within the drain timeout.

        With a successor on the same ports, first take no new connection and serve those there are a little longer.
        """
        if has_successor:
            await self._leave_the_ports()
        self._draining = True
        await self._public.set_serving(False)
        deadline = self._clock.now() + self._config.drain_timeout_s
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self.dispatcher.wait_idle()
        except TimeoutError:
            _log.warning("%d requests are cut off by the drain timeout", self.dispatcher.in_flight)
        # What came just before the end may still be on its way to the dispatcher, and answers to their clients.
        await self._close_doors(max(_STOP_GRACE_S, deadline - self._clock.now()))

    async def _leave_the_ports(self) -> None:
        """What comes on connections that clients have is still served here; each ends with its next answer."""
        _log.info("another router serves on these ports: this one leaves")
        self._leaving = asyncio.create_task(self._public.stop(self._config.drain_timeout_s))
        await asyncio.gather(*(server.retire(_LINGER_S) for server in self._http))

    async def stop(self) -> None:
        """Close everything. Front doors first, so that no answer is cut for want of what is below it. Idempotent."""
        await self._close_doors(0.0)
        await self._links.close()
        await self._internal.stop(0)
        self._tokenizer.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    async def _close_doors(self, grace_s: float) -> None:
        if not self._doors_open:
            return
        self._doors_open = False
        await self._page.close()
        leaving = [] if self._leaving is None else [self._leaving]
        await asyncio.gather(*(server.close(grace_s) for server in self._http), self._public.stop(grace_s), *leaving)

    def _add_services(self, services: Services) -> None:
        state = lambda: cluster_state(self._config.model_name, self.router_id, self.registry, self.dispatcher)  # noqa: E731
        self._public.add_service(
            public_pb2_grpc.add_KvferryServicer_to_server,
            PublicService(services, state, log_calls=self._config.access_log),
            grpc_server.SERVICE_NAME,
            internal=False,
        )
        self._internal.add_service(
            internal_pb2_grpc.add_MembershipServicer_to_server,
            MembershipService(self.registry, self.router_id, silence_limit_s=3 * self._config.heartbeat_s),
            membership_service.SERVICE_NAME,
            internal=True,
        )
        self._internal.add_service(
            internal_pb2_grpc.add_FleetServicer_to_server,
            FleetService(self.registry, self._demand),
            fleet_service.SERVICE_NAME,
            internal=True,
        )

    def _demand(self) -> FleetState:
        """What this router has to do, for whoever scales the cluster."""
        return FleetState(
            router_id=self.router_id,
            requests_in_flight=self.dispatcher.in_flight,
            requests_queued=self.dispatcher.queued,
            slo_met=self._metrics.slo_met,
            slo_missed=self._metrics.slo_missed,
        )

    def _follow(self, tracer: Tracer) -> Callable[[str | None], str]:
        """Have spans made of each request that ends; returns how a front door begins one."""
        self.dispatcher.live.subscribe(lambda view: tracer.emit(request_spans(view)))
        return Traces(lambda: secrets.token_hex(16)).begin

    def _limits(self) -> ModelLimits:
        """What the attached workers state, the smallest context among them; while there is none, the model's files."""
        tokenizer, limits = self._tokenizer.tokenizer, self.registry.limits
        if limits is None:
            vocab_size, context = tokenizer.vocab_size, tokenizer.max_context_tokens or _ANY_CONTEXT
        else:
            vocab_size, context = limits.vocab_size, limits.max_context_tokens
        return ModelLimits(self._config.model_name, vocab_size, context, self._chat_format)

    def _unready_reason(self) -> str | None:
        if self.registry.ready:
            return None
        has_decode = any(view.role == "decode" for view in self.registry.views())
        return "no decode worker is well" if has_decode else "no decode worker is attached"
