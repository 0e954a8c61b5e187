"""Life of a gRPC server (listen, health, reflection, secret, drain) and the channels that fit it.

Keepalive has two sides that must agree: a client that pings more often than its server allows is cut off with all
its calls. So both sides take their options from this file, and nowhere else is an option set.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from runtime.secret import SECRET_METADATA_KEY, secret_matches
from runtime.secret_channel import SecretChannel
from runtime.tls import ChannelTls

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
LIVE = "live"
"""The service name that a liveness probe asks health for: SERVING from the start of a server to its stop, also while
it drains. The empty name is for readiness."""
PING_INTERVAL_S = 10.0
PING_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 1.0
_HANDLERS_END_TIMEOUT_S = 5.0

if TYPE_CHECKING:  # generic in the stubs only
    _Handler = grpc.RpcMethodHandler[Any, Any]

_Servicer = TypeVar("_Servicer")
_Options = tuple[tuple[str, int | str], ...]


def _message_options(max_received_bytes: int = MAX_MESSAGE_BYTES) -> _Options:
    return (
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", max_received_bytes),
    )


def channel_options(ping_interval_s: float = PING_INTERVAL_S, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> _Options:
    """Options of every client channel, synchronous or not: pings also while nothing is called, quick reconnects.

    A connection that is not up, its greeting included, after `connect_timeout_s` has failed, and so have the calls that
    waited for it; one that is refused has failed at once.
    """
    return (
        *_message_options(),
        ("grpc.keepalive_time_ms", round(ping_interval_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(PING_TIMEOUT_S * 1000)),
        # A ping of gRPC's own, to measure the link, may be under way already; ours then waits for that one, which would
        # have a minute.
        ("grpc.http2.ping_timeout_ms", round(PING_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # For gRPC this is also how long an attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", round(connect_timeout_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", 1500),
        # A proxy from the environment must never see traffic between processes of the cluster, and two
        # channels must not share a broken connection.
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    )


def server_options(max_received_bytes: int = MAX_MESSAGE_BYTES, *, share_port: bool = False) -> _Options:
    """Options of every server: any ping rate is accepted, silent peers are noticed, a port is shared only if asked."""
    return (
        *_message_options(max_received_bytes),
        ("grpc.keepalive_time_ms", round(2 * PING_INTERVAL_S * 1000)),
        ("grpc.keepalive_timeout_ms", round(PING_TIMEOUT_S * 1000)),
        ("grpc.http2.ping_timeout_ms", round(PING_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10),
        ("grpc.so_reuseport", int(share_port)),
    )


def channel(
    address: str,
    secret: bytes | None = None,
    *,
    tls: ChannelTls | None = None,
    ping_interval_s: float = PING_INTERVAL_S,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
) -> grpc.aio.Channel:
    """An asyncio channel to `address` (host:port) whose calls carry `secret`, if given, as metadata.

    Connects on the first call, over `tls` if given. The caller closes it (`async with`, or `close()`). Event-loop
    thread only.
    """
    options = channel_options(ping_interval_s, connect_timeout_s)
    if tls is None:
        plain = grpc.aio.insecure_channel(address, options=options)
    else:
        plain = grpc.aio.secure_channel(address, tls.credentials(), options=(*options, *tls.options))
    return plain if secret is None else SecretChannel(plain, ((SECRET_METADATA_KEY, secret),))


def join_host_port(host: str, port: int) -> str:
    """`host:port`, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class GrpcServer:
    """One listening gRPC server: add services, start, serve, stop. All methods: event-loop thread only.

    Health (grpc.health.v1) and reflection are always there and need no secret. Health says NOT_SERVING until
    `set_serving(True)`; of `LIVE` it says SERVING as long as the server answers at all.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        secret: bytes | None = None,
        credentials: grpc.ServerCredentials | None = None,
        max_received_bytes: int = MAX_MESSAGE_BYTES,
        max_calls: int | None = None,
        share_port: bool = False,
    ) -> None:
        """`port` 0 takes any free one. `secret` is required if an internal service is going to be added. With
        `credentials` (`runtime.tls`) it speaks TLS and nothing else. `share_port`: other processes may listen there.
        A message larger than `max_received_bytes` ends its call with RESOURCE_EXHAUSTED, unparsed; so do more calls at
        once than `max_calls`, of all services and connections, unread. A connection may have as many streams."""
        self._host = host
        self._port = port
        self._secret = secret
        self._credentials = credentials
        self._internal: set[str] = set()
        self._services: list[str] = []
        self._handlers = _RunningHandlers()
        interceptors = [self._handlers, _SecretInterceptor(self._internal, secret or b"")]
        options = server_options(max_received_bytes, share_port=share_port)
        if max_calls is not None:
            # One more than the calls: a client holds back what is over this, and would never hear that it is too much.
            options += (("grpc.max_concurrent_streams", max_calls + 1),)
        self._server = grpc.aio.server(interceptors=interceptors, options=options, maximum_concurrent_rpcs=max_calls)
        self._health = health.aio.HealthServicer()
        self._stopping: asyncio.Task[None] | None = None

    def add_service(
        self,
        register: Callable[[_Servicer, grpc.aio.Server], None],
        servicer: _Servicer,
        full_name: str,
        *,
        internal: bool,
    ) -> None:
        """Offer one service, before `start`.

        `register` is the generated `add_XServicer_to_server`, `full_name` the proto name with its package, such as
        `kvferry.internal.v1.PrefillWorker`. Calls to an internal service must show the cluster secret.
        Raises ValueError for an internal service on a server without a secret.
        """
        if internal:
            if not self._secret:
                raise ValueError(f"{full_name} is internal: its server needs a cluster secret")
            self._internal.add(full_name)
        self._services.append(full_name)
        register(servicer, self._server)

    @property
    def port(self) -> int:
        """The port in use; before `start`, the one asked for."""
        return self._port

    @property
    def address(self) -> str:
        """host:port for clients."""
        return join_host_port(self._host, self._port)

    async def start(self) -> int:
        """Listen and serve; returns the port. Raises OSError when the address cannot be bound."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self.set_serving(False)
        await self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        reflection.enable_server_reflection(
            (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        try:
            if self._credentials is None:
                self._port = self._server.add_insecure_port(self.address)
            else:
                self._port = self._server.add_secure_port(self.address, self._credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self.address}: {error}") from error
        await self._server.start()
        return self._port

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers for the server ("") and for each of its services."""
        states = health_pb2.HealthCheckResponse
        status = states.SERVING if serving else states.NOT_SERVING
        for name in ("", *self._services):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Say NOT_SERVING, refuse new calls, let running ones finish for `grace_s`, then cut them. Idempotent.

        No handler runs any more afterwards, so what they use can be closed, and the event loop too."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(grace_s))
        await asyncio.shield(self._stopping)

    async def _stop(self, grace_s: float) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        await self._handlers.wait_ended(_HANDLERS_END_TIMEOUT_S)


class _RunningHandlers(grpc.aio.ServerInterceptor):
    """Knows the tasks of the calls under way: gRPC's own `stop` cancels their handlers but does not wait for them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        task = asyncio.current_task()  # The one that will run the handler.
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await continuation(handler_call_details)

    async def wait_ended(self, timeout_s: float) -> None:
        """Return when no handler runs, or after `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)


class _SecretInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls to internal services with UNAUTHENTICATED unless they show the secret."""

    def __init__(self, internal_services: set[str], secret: bytes) -> None:
        self._internal = internal_services
        self._secret = secret

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        handler = await continuation(handler_call_details)
        service = handler_call_details.method.rpartition("/")[0].removeprefix("/")
        if handler is None or service not in self._internal:
            return handler
        if self._secret and secret_matches(self._secret, handler_call_details.invocation_metadata or ()):
            return handler
        return _refusal(handler)


def _refusal(handler: "_Handler") -> "_Handler":
    """A handler of the same shape that only aborts. It has no deserializer: strangers' bytes are not parsed."""
    make: Callable[[Any], _Handler]
    if handler.request_streaming:
        streams = handler.response_streaming
        make = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
    else:
        streams = handler.response_streaming
        make = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
    return make(_abort_unauthenticated)


async def _abort_unauthenticated(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster secret is missing or wrong")
