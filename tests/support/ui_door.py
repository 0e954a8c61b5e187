"""The HTTP front door with a live page, on a real socket, in a thread of its own: for browsers."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvferry_rpc.common_pb2 import SamplingParams
from kvferry_rpc.internal_pb2 import Role
from router.generation import GenerationRequest
from router.http.protocol import HttpServer
from router.observation.live_page import LivePage
from router.observation.live_requests import LiveRequests
from router.tenants import TenantDirectory
from router.workers.worker_registry import WorkerRegistry
from runtime.clock import SystemClock
from tests.support.http_door import MODEL, Door
from tests.support.registry_parts import attach
from tests.support.scripted_source import Script


@contextmanager
def ui_door(
    script: Script, tenants: TenantDirectory, *, workers: Sequence[str] = (), waiting: Sequence[str] = ()
) -> Iterator[str]:
    """Serve until the block ends; gives the base URL. `workers`: names of decode workers that are attached. `waiting`:
    ids of requests that are in the queue."""
    ready, base_url = threading.Event(), []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        clock = SystemClock()
        registry, requests = WorkerRegistry(clock), LiveRequests(clock, dict, model=MODEL)
        page = LivePage(registry, requests, clock, "router-test")
        server = HttpServer(Door(script, tenants=tenants, live_page=page).app, host="127.0.0.1", port=0)
        with ExitStack() as held:
            for worker_id in workers:
                attach(registry, worker_id, Role.DECODE)
            for request_id in waiting:
                request = GenerationRequest(request_id, (1, 2, 3), SamplingParams(), 1e9)
                held.enter_context(requests.request(request, clock.now(), []))
            await server.start()
            page.start()
            base_url.append(f"http://127.0.0.1:{server.port}")
            ready.set()
            await stop.wait()
            await page.close()
            await server.close(0.0)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(30)
        yield base_url[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
