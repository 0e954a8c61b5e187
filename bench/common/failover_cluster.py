"""A cluster of real processes for the benchmark of lost streams, started by the real command."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from bench.common.harness import BenchmarkError
from kvferry.client import Client
from kvferry.run_dir import live_state

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 60.0
_WHOLE_TIMEOUT_S = 120.0
_LOOK_S = 0.05


class StreamCluster:
    """`kvferry up` with so many workers; use as a context manager. The launcher starts again what dies."""

    def __init__(self, directory: Path, model: Path, num_prefill: int, num_decode: int, *flags: str) -> None:
        """`flags` are added to the command."""
        self._directory = directory
        self._state_dir = directory / "state"
        self._num_decode = num_decode
        command = [sys.executable, "-m", "kvferry", "up", "--json", "--model", str(model)]
        command += ["--prefill", str(num_prefill), "--decode", str(num_decode), "--num-blocks", "512"]
        command += ["--http-port", "0", "--grpc-port", "0", "--state-dir", str(self._state_dir)]
        self._command = [*command, "--cache-dir", str(directory / "models"), *flags]
        self._launcher: subprocess.Popen[str] | None = None
        self._grpc = ""
        self.base_url = ""

    def __enter__(self) -> Self:
        """Raises BenchmarkError when it does not come up."""
        with (self._directory / "up.log").open("w") as log:
            self._launcher = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            self._wait_serving()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *details: object) -> None:
        launcher = self._launcher
        if launcher is None:
            return
        launcher.send_signal(signal.SIGTERM)
        try:
            launcher.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()
        if launcher.stdout is not None:
            launcher.stdout.close()

    def kill(self, worker_id: str, number: signal.Signals) -> None:
        """Send a signal to the process that has this name now. Raises BenchmarkError when there is none."""
        pid = self.pids().get(worker_id)
        if pid is None:
            raise BenchmarkError(f"{worker_id} has no process")
        os.kill(pid, number)

    def pids(self) -> dict[str, int]:
        """Its processes now, by name."""
        state = live_state(self._state_dir)
        return {str(process["name"]): int(process["pid"]) for process in (state["processes"] if state else [])}

    async def attached(self) -> list[str]:
        """Ids of the workers that are ready for work."""
        return await asyncio.to_thread(self._ready_workers)

    async def wait_whole_enough(self) -> list[str]:
        """Wait until one decode worker, and any prefill worker, may be lost and another is there; the ready ones.

        Reports offer nothing to wait on. Raises BenchmarkError when that takes too long.
        """
        deadline = time.monotonic() + _WHOLE_TIMEOUT_S
        while True:
            ready = await self.attached()
            if sum(name.startswith("decode") for name in ready) >= min(2, self._num_decode):
                return ready
            if time.monotonic() > deadline:
                raise BenchmarkError(f"only {ready} came back")
            await asyncio.sleep(_LOOK_S)

    def _ready_workers(self) -> list[str]:
        with Client(self._grpc) as client:
            return [worker.worker_id for worker in client.cluster_state().workers if worker.state == "ready"]

    def _wait_serving(self) -> None:
        launcher = self._launcher
        assert launcher is not None
        assert launcher.stdout is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        for line in launcher.stdout:
            event = json.loads(line)
            if event.get("event") == "serving":
                self.base_url, self._grpc = f"http://{event['http_address']}", event["grpc_address"]
                return
            if time.monotonic() > deadline:
                break
        raise BenchmarkError(f"the cluster did not start: see {self._directory / 'up.log'}")
