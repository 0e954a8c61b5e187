"""A peer whose process stands still keeps its connections open: only an unanswered ping tells."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from runtime import grpc_life
from runtime.grpc_life import channel

METHOD = "/test.Service/Listen"
# One message, and then nothing for ever.
SERVER = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import grpc

def listen(request, context):
    yield b"here"
    threading.Event().wait()

handlers = {"Listen": grpc.unary_stream_rpc_method_handler(listen)}
server = grpc.server(ThreadPoolExecutor(2))
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
sys.stdin.read()
"""


@asynccontextmanager
async def peer() -> AsyncIterator[tuple[str, int]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield f"127.0.0.1:{int(await process.stdout.readline())}", process.pid
    finally:
        process.kill()
        await process.wait()
        process.stdin.close()  # type: ignore[union-attr]


async def test_a_stream_to_a_process_that_stands_still_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Right behind its first message gRPC has a ping of its own under way, which ours must not have to wait for.
    monkeypatch.setattr(grpc_life, "PING_TIMEOUT_S", 0.5)
    async with peer() as (address, pid), channel(address, ping_interval_s=0.5) as link:
        call = link.unary_stream(METHOD)(b"")
        assert await call.read() == b"here"
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            # A minute is what the ping of gRPC's own would have.
            await asyncio.wait_for(call.read(), 40)
        assert broken.value.code() is grpc.StatusCode.UNAVAILABLE
