"""What the front doors need from the rest of the router, in one value."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvferry_rpc.common_pb2 import ErrorCode, KVReceipt
from router.generation import TokenSource
from router.http.errors import ClientGone, HttpError
from router.observation.live_page import LivePage
from router.observation.live_requests import RequestView
from router.observation.traces import untraced
from router.plans.generation_plan import ModelLimits
from router.request_cap import RequestCap
from router.tenants import TenantDirectory
from router.text.tokenizer import AsyncTokenizer
from runtime.clock import Clock, SystemClock
from runtime.errors import KvferryError
from runtime.limits import DEFAULT_REQUEST_TIMEOUT_S


def count_elsewhere(error: KvferryError) -> None:
    """For those who do not count refusals."""


def no_requests(now: float) -> Sequence[RequestView]:
    """For sources that do not tell what they have."""
    return ()


def everybody() -> TenantDirectory:
    """No keys: one anonymous tenant. Its salts are of no cluster, so only a router that has none may use it."""
    return TenantDirectory(None, b"", SystemClock())


@dataclass(frozen=True, slots=True)
class Services:
    """All callables are quick and run on the event loop.

    `limits` is asked anew for each request, since the workers that set them come and go.
    `unready_reason` says why requests cannot be served now; None when they can. `draining` turns true for good
    once the process shuts down: new generations are refused, running ones finish. `render_metrics` gives body and
    content type. `find_receipt` knows the last requests by id, each for the tenant of that name alone.
    `refused_at_door` hears of each generation request that ends before the source has seen it. `quiet_s` is the longest
    silence in a stream. `live_requests` has those of this moment and the last that ended. `begin_trace` tells from
    a client's `traceparent` what a request's is to be. `tenants` knows who asks; with `protect_metrics` metrics need a
    key like all else. Without `live_page` the page at /ui has no data. `cap` holds both front doors to `max_requests`
    together.
    """

    source: TokenSource
    tokenizer: AsyncTokenizer
    limits: Callable[[], ModelLimits]
    clock: Clock
    unready_reason: Callable[[], str | None]
    draining: Callable[[], bool]
    render_metrics: Callable[[], tuple[bytes, str]]
    find_receipt: Callable[[str, str], KVReceipt | None]
    live_requests: Callable[[float], Sequence[RequestView]] = no_requests
    begin_trace: Callable[[str | None], str] = untraced
    refused_at_door: Callable[[KvferryError], None] = count_elsewhere
    request_timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S
    quiet_s: float = 10.0
    max_requests: int = 1024
    tenants: TenantDirectory = field(default_factory=everybody)
    protect_metrics: bool = False
    live_page: LivePage | None = None
    cap: RequestCap = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cap", RequestCap(self.max_requests))

    @contextmanager
    def at_door(self) -> Iterator[None]:
        """What a front door does before the source sees the request: if it ends in here, nobody else counts it."""
        try:
            yield
        except KvferryError as error:
            self.refused_at_door(error)
            raise
        except HttpError as error:
            self.refused_at_door(KvferryError(ErrorCode.INVALID_REQUEST, error.message))
            raise
        except (ClientGone, asyncio.CancelledError):
            self.refused_at_door(KvferryError(ErrorCode.CANCELLED, "the client left"))
            raise
        except Exception:
            self.refused_at_door(KvferryError(ErrorCode.INTERNAL, "a defect"))
            raise
