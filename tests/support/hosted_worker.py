"""A whole worker in this process, with its host around it, and what a router says to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from decode_worker.config import DecodeConfig
from kvferry_rpc.common_pb2 import SamplingParams
from kvferry_rpc.internal_pb2 import Admit, DecodeCommand, DecodeEvent, Hello, Register
from kvferry_rpc.internal_pb2_grpc import DecodeWorkerStub
from prefill_worker.config import PrefillConfig
from runtime.grpc_life import channel
from runtime.worker_host import host_worker
from tests.support.tiny_checkpoints import make_model, save_checkpoint
from worker.main import Worker

WAIT_S = 30.0  # only ever reached by a test that fails
SECRET = b"0123456789abcdef0123456789abcdef"
ROLES: dict[str, Any] = {"decode": DecodeConfig, "prefill": PrefillConfig}
SAMPLING = SamplingParams(max_tokens=30, ignore_eos=True)


def worker_settings(directory: Path) -> dict[str, Any]:
    """Flags of a small worker, whose model and secret are put into this directory. Its router is nowhere: membership
    goes on knocking, and nobody answers."""
    (directory / "secret").write_bytes(SECRET)
    model = save_checkpoint(directory / "model", make_model("llama_gqa"))
    return {
        "worker_id": "w",
        "routers": ("127.0.0.1:1",),
        "cluster_secret_file": directory / "secret",
        "model": str(model),
        "cache_dir": directory / "cache",
        "num_blocks": 32,
        "block_size": 8,
        "token_budget": 16,
        "max_num_seqs": 4,
    }


class Hosted:
    """A worker that its host runs."""

    def __init__(self, role: str, settings: dict[str, Any]) -> None:
        self.shutdown = asyncio.Event()
        self.drains = asyncio.Event()
        self.registered: asyncio.Future[Register] = asyncio.get_running_loop().create_future()
        self.lives: list[Register] = []
        self.process: Any = None
        self.worker: Any = None
        self._config = ROLES[role](**settings)
        self.life = asyncio.create_task(host_worker(self._config, role, self._build, self.shutdown))

    def _build(self, secret: bytes) -> Any:
        self.process = process = Worker(self._config, secret)
        take_role = process.take_role

        def took(role: str) -> Any:
            self.worker = worker = take_role(role)
            describe, set_draining = worker.describe, worker.set_draining

            def described(address: str) -> Register:
                register: Register = describe(address)
                self.lives.append(register)
                if not self.registered.done():
                    self.registered.set_result(register)
                return register

            def drains(draining: bool) -> None:
                set_draining(draining)
                self.drains.set()

            worker.describe, worker.set_draining = described, drains
            return worker

        process.take_role = took  # type: ignore[method-assign]
        return process

    async def ended(self) -> int:
        """The exit status."""
        async with asyncio.timeout(WAIT_S):
            return await asyncio.shield(self.life)


@asynccontextmanager
async def hosted(role: str, settings: dict[str, Any]) -> AsyncIterator[tuple[Hosted, grpc.aio.Channel]]:
    worker = Hosted(role, settings)
    try:
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait({worker.registered, worker.life}, return_when=asyncio.FIRST_COMPLETED)
        assert not worker.life.done(), worker.life.result()
        async with channel(worker.registered.result().address, SECRET) as connection:
            yield worker, connection
    finally:
        worker.shutdown.set()
        await worker.ended()


async def open_session(worker: Hosted, connection: grpc.aio.Channel) -> Any:
    call: Any = DecodeWorkerStub(connection).Session()
    await call.write(DecodeCommand(hello=Hello(router_id="r", incarnation=worker.lives[-1].incarnation)))
    return call


def admission(name: str) -> DecodeCommand:
    prompt = [5, 6, 7]
    fields: dict[str, Any] = {"prompt_token_ids": prompt, "sampling": SAMPLING, "deadline_ms": 60_000}
    return DecodeCommand(admit=Admit(request_id=name, attempt=1, local_prefill=True, **fields))


async def events_until(call: Any, name: str) -> list[DecodeEvent]:
    """What a session says, up to the last word about one request."""
    events: list[DecodeEvent] = []
    async with asyncio.timeout(WAIT_S):
        while not any(e.request_id == name and e.WhichOneof("kind") in ("done", "failed") for e in events):
            events.extend((await call.read()).events)
    return events
