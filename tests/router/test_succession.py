"""One router after the other on the same ports, as real processes with scripted workers."""

import asyncio
import os
import socket
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from kvferry_rpc.internal_pb2 import Role
from router.succession import Succession, before, workers_attached
from router.workers.worker_registry import WorkerRegistry
from runtime.clock import ManualClock
from runtime.ports import hold_port, port_of
from runtime.process import SUCCESSOR_SIGNAL
from tests.router.test_supervisor import is_alive, supervised
from tests.support.fake_workers import Fabric, FakeDecode, registration
from tests.support.router_process import RouterProcess, attached, router


async def test_the_doors_wait_for_workers_of_which_one_decodes() -> None:
    registry = WorkerRegistry(ManualClock())
    waiting = asyncio.create_task(workers_attached(registry, 2))
    for worker_id in ("prefill-0", "prefill-1"):
        registry.attach(registration(worker_id, Role.PREFILL), lambda: None)
    await asyncio.sleep(0)
    assert not waiting.done()
    first = registry.attach(registration("decode-0", Role.DECODE), lambda: None)
    async with asyncio.timeout(10):
        await waiting
    registry.detach(first)


async def test_work_is_cancelled_by_a_shutdown_and_its_failures_come_through() -> None:
    shutdown = asyncio.Event()
    assert await before(shutdown, asyncio.sleep(0, "done")) == "done"

    async def fails() -> str:
        raise OSError("no port")

    with pytest.raises(OSError, match="no port"):
        await before(shutdown, fails())
    endless = asyncio.create_task(before(shutdown, asyncio.sleep(3600, "never")))
    await asyncio.sleep(0)
    shutdown.set()
    async with asyncio.timeout(10):
        assert await endless is None


async def test_the_signal_is_a_shutdown_that_says_why() -> None:
    shutdown = asyncio.Event()
    succession = Succession(shutdown)
    try:
        assert not succession.has_successor
        os.kill(os.getpid(), SUCCESSOR_SIGNAL)
        async with asyncio.timeout(10):
            await shutdown.wait()
        assert succession.has_successor
    finally:
        asyncio.get_running_loop().remove_signal_handler(SUCCESSOR_SIGNAL)


async def test_who_watches_several_processes_passes_the_signal_on(capsys: pytest.CaptureFixture[str]) -> None:
    # These end by this signal, and not by SIGTERM.
    async with supervised(capsys, "ignores-sigterm") as (ready, _, running):
        os.kill(os.getpid(), SUCCESSOR_SIGNAL)
        assert await running == 0
        assert not any(map(is_alive, ready["processes"]))
    asyncio.get_running_loop().remove_signal_handler(SUCCESSOR_SIGNAL)


def test_a_successor_holds_the_ports_that_are_listened_at() -> None:
    with socket.socket() as before:
        before.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        before.bind(("127.0.0.1", 0))
        before.listen()
        with closing(hold_port("127.0.0.1", port_of(before), shared=True)) as held:
            assert port_of(held) == port_of(before)
        with pytest.raises(OSError, match="in use"):
            hold_port("127.0.0.1", port_of(before))


def body(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": list(range(1, 30)), "max_tokens": 8, "temperature": 0, **fields}


@pytest.mark.e2e
async def test_a_router_hands_its_ports_to_the_next_one_and_no_request_fails(tmp_path: Path) -> None:
    decode = FakeDecode("decode-0", Fabric())
    async with router(tmp_path, "--share-ports") as old, attached(old, decode):
        ports = old.ports
        same = (f"--http-port={ports['http_port']}", f"--grpc-port={ports['grpc_port']}", "--share-ports")
        async with httpx.AsyncClient(base_url=old.url, timeout=110) as http:
            assert (await http.post("/v1/completions", json=body())).status_code == 200
            decode.pause_after = 3
            under_way = asyncio.create_task(http.post("/v1/completions", json=body()))
            await decode.until(lambda: len(decode.live) == 1)
            async with router(tmp_path, *same) as new, attached(new, FakeDecode("decode-1", Fabric())):
                old.process.send_signal(SUCCESSOR_SIGNAL)
                await asyncio.gather(*(_ask_anew(new) for _ in range(8)))
                assert not under_way.done()
                decode.resume.set()
                assert (await under_way).json()["usage"]["completion_tokens"] == 8
                assert await old.exit_status() == 0
                await asyncio.gather(*(_ask_anew(new) for _ in range(8)))


async def _ask_anew(running: RouterProcess) -> None:
    async with httpx.AsyncClient(base_url=running.url, timeout=110) as http:
        assert (await http.post("/v1/completions", json=body())).status_code == 200
