"""A router as a real process, and fake workers that attach to it."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvferry_rpc.internal_pb2 import LoadReport
from runtime.kv_event_log import KVEventLog
from runtime.membership import MembershipClient, RetryTimes
from tests.support.fake_workers import SECRET, FakeDecode, FakePrefill
from tests.support.http_door import MODEL_DIR

ROOT = Path(__file__).parents[2]
VOCAB_SIZE = 4032


@dataclass
class RouterProcess:
    """A running router and how to reach it."""

    process: asyncio.subprocess.Process
    ports: dict[str, int]
    secret: bytes

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['http_port']}"

    async def exit_status(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 20)


@asynccontextmanager
async def router(tmp_path: Path, *flags: str, model: Path = MODEL_DIR) -> AsyncIterator[RouterProcess]:
    """Start it; at the end it is killed, if it still runs."""
    secret_file = tmp_path / "secret"
    secret_file.write_bytes(SECRET)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", f"--model={model}", "--served-model-name=tiny",
        f"--cluster-secret-file={secret_file}", "--http-port=0", "--grpc-port=0", "--internal-port=0",
        "--exit-on-stdin-close", *flags,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))
        assert line["ready"] is True
        assert line["role"] == "router"
        ports = {name: line[name] for name in ("http_port", "grpc_port", "internal_port")}
        yield RouterProcess(process, ports, SECRET)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        # So that the pipe's transport is not left to the garbage collector.
        process.stdin.close()  # type: ignore[union-attr]


@asynccontextmanager
async def attached(running: RouterProcess, *workers: FakeDecode | FakePrefill) -> AsyncIterator[None]:
    """Start the workers and keep them attached."""
    clients = []
    for worker in workers:
        register = await worker.start()
        register.vocab_size = VOCAB_SIZE
        client = MembershipClient(
            [f"127.0.0.1:{running.ports['internal_port']}"], running.secret, register,
            lambda: LoadReport(blocks_free=64), KVEventLog(), lambda: None, retry=RetryTimes(0.05, 0.2),
        )  # fmt: skip
        client.start()
        clients.append(client)
    try:
        async with asyncio.timeout(15):
            for client in clients:
                await client.wait_attached()
        yield
    finally:
        for client in clients:
            await client.stop()
        for worker in workers:
            await worker.stop()
