"""A whole worker whose model is split over two processes, and one of them is lost."""

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from decode_worker.config import DecodeConfig
from decode_worker.job import AdmitRequest
from engine.sequence import SamplingParams, Sequence
from runtime.clock import SystemClock
from runtime.worker_host import host_worker
from worker.engine_role import EngineRole
from worker.main import Worker

WAIT_S = 60.0  # only ever reached by a test that fails


async def test_a_worker_that_has_lost_a_rank_ends_at_its_next_step_and_says_which(
    checkpoint: Path, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "secret").write_bytes(b"0123456789abcdef0123456789abcdef")
    config = DecodeConfig(
        worker_id="w",
        routers=("127.0.0.1:1",),
        cluster_secret_file=tmp_path / "secret",
        model=str(checkpoint),
        cache_dir=cache,
        num_blocks=32,
        max_num_seqs=4,
        tensor_parallel=2,
    )
    loop = asyncio.get_running_loop()
    built: asyncio.Future[tuple[Worker, EngineRole[Any]]] = loop.create_future()

    class Watched(Worker):
        def take_role(self, role: str) -> EngineRole[Any]:
            worker = super().take_role(role)
            assert isinstance(worker, EngineRole)
            loop.call_soon_threadsafe(built.set_result, (self, worker))
            return worker

    life = asyncio.create_task(host_worker(config, "decode", lambda secret: Watched(config, secret), asyncio.Event()))
    async with asyncio.timeout(WAIT_S):
        await asyncio.wait({built, life}, return_when=asyncio.FIRST_COMPLETED)
        process, worker = built.result()
        followers = process.parts.followers
        assert followers is not None
        (pid,) = followers.pids
        os.kill(pid, signal.SIGKILL)
        sequence = Sequence("r", [5, 6, 7], SamplingParams(max_tokens=4), max_context_tokens=64)
        deadline = SystemClock().now() + WAIT_S
        with caplog.at_level(logging.ERROR):
            worker._engine_loop.submit(AdmitRequest(1, "r", 1, sequence, True, deadline, lambda events: None))
            assert await life == 1
    assert f"rank 1 of this worker (process {pid}) was killed by SIGKILL" in caplog.text
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
