"""A door on a real socket, for clients that block or are processes of their own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from router.http.protocol import HttpServer
from tests.support.http_door import Door


@contextmanager
def threaded_door(door: Door) -> Iterator[str]:
    """Its address, served by a thread of its own: whoever asks knows no event loop."""
    ready = threading.Event()
    facts: dict[str, Any] = {}

    async def serve() -> None:
        server = HttpServer(door.app, host="127.0.0.1", port=0)
        await server.start()
        facts.update(loop=asyncio.get_running_loop(), port=server.port, stop=asyncio.Event())
        ready.set()
        await facts["stop"].wait()
        await server.close(grace_s=0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10.0)
    try:
        yield f"http://127.0.0.1:{facts['port']}"
    finally:
        facts["loop"].call_soon_threadsafe(facts["stop"].set)
        thread.join(10.0)
