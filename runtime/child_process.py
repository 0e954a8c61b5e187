"""One process that a launcher started: its ready line, its log, its end.

The child's standard input is a pipe that only the launcher holds: when the launcher dies, however it dies, the child
sees it close and exits. It runs in a session of its own, so a Ctrl-C in the terminal reaches the launcher alone, which
then stops everything in order.
"""

import asyncio
import json
import os
import signal
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

# Spinning OpenMP threads of several processes on few cores slow each other down a hundredfold.
CHILD_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
_STDERR = 2
_LINE_LIMIT_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16


class LaunchError(Exception):
    """A process did not come up; the message names it and ends with the last lines of its log."""


class ChildProcess:
    """Start, wait for the ready line, stop. Event-loop thread only; one life: a restart is a new object."""

    def __init__(self, name: str, argv: Sequence[str], log_path: Path | None, working_dir: Path) -> None:
        """`log_path` None: what it writes beside the ready line goes where this process writes its errors."""
        self.name = name
        self.ready: dict[str, Any] = {}
        self._argv = argv
        self._log_path = log_path
        self._working_dir = working_dir
        self._process: asyncio.subprocess.Process | None = None
        self._pump: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self._process.pid if self._process else 0

    @property
    def exit_status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.returncode if self._process else None

    async def start(self, ready_timeout_s: float) -> None:
        """Start it and wait for its ready line, kept in `ready`.

        Raises LaunchError when it cannot be started, ends first, or is not ready in time. No process is left behind
        then, nor when the wait is cancelled.
        """
        ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        try:
            with self._open_log() as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._argv,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    cwd=self._working_dir,
                    env={**os.environ, **CHILD_ENVIRONMENT},
                    start_new_session=True,
                    limit=_LINE_LIMIT_BYTES,
                )
        except OSError as error:
            raise LaunchError(f"cannot start {self.name}: {error}") from error
        self._pump = asyncio.create_task(self._read_output(self._process, ready))
        try:
            async with asyncio.timeout(ready_timeout_s):
                self.ready = await ready
        except TimeoutError:
            await self.kill()
            raise LaunchError(self._failure(f"was not ready after {ready_timeout_s:g} s")) from None
        except EOFError:
            status = await self.wait()
            raise LaunchError(self._failure(f"{describe_exit(status)} before it was ready")) from None
        except BaseException:
            await self.kill()
            raise

    async def wait(self) -> int:
        """Wait for its end; returns the exit status."""
        if self._process is None or self._pump is None:
            return 0
        status = await self._process.wait()
        # A grandchild may hold the pipe open: its output is not worth waiting for.
        await asyncio.wait([self._pump], timeout=1.0)
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        self._close_stdin()
        return status

    async def stop(self, grace_s: float, number: signal.Signals = signal.SIGTERM) -> bool:
        """SIGTERM, or `number`, then SIGKILL after `grace_s`. Returns False when it had to be killed. Idempotent."""
        self._signal(number)
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            await self.kill()
            return False
        return True

    async def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._signal(signal.SIGKILL)
        await self.wait()

    def log_tail(self, num_lines: int = 15) -> str:
        """The last lines of its log."""
        if self._log_path is None:
            return ""
        try:
            with self._log_path.open(errors="replace") as log:
                return "".join(deque(log, num_lines)).rstrip()
        except OSError:
            return ""

    async def _read_output(self, process: asyncio.subprocess.Process, ready: "asyncio.Future[dict[str, Any]]") -> None:
        """Find the ready line; whatever else it writes goes to the log, for a full pipe would stop it."""
        assert process.stdout is not None
        with self._open_log() as log:
            while not ready.done():
                try:
                    line = await process.stdout.readline()
                except ValueError:
                    continue  # longer than the limit: dropped
                facts = _ready_facts(line)
                if facts is not None:
                    ready.set_result(facts)
                elif line:
                    _append(log, line)
                else:
                    ready.set_exception(EOFError())
            while rest := await process.stdout.read(_CHUNK_BYTES):
                _append(log, rest)

    def _open_log(self) -> FileIO:
        if self._log_path is None:
            return FileIO(_STDERR, "a", closefd=False)
        return FileIO(self._log_path, "a")

    def _signal(self, number: signal.Signals) -> None:
        # The event loop has not reaped it while returncode is None, so the pid cannot belong to another.
        if self._process is not None and self._process.returncode is None:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:
                return
            if number is signal.SIGKILL:
                self._close_stdin()

    def _close_stdin(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _failure(self, what: str) -> str:
        if self._log_path is None:
            return f"{self.name} {what}"
        tail = self.log_tail()
        shown = "\n".join(f"    {line}" for line in tail.splitlines()) or "    (its log is empty)"
        return f"{self.name} {what}; the end of {self._log_path}:\n{shown}"


def _append(log: FileIO, data: bytes) -> None:
    # On a full disk it is lost: the process must not be held up, and its end still has to be seen.
    with suppress(OSError):
        log.write(data)


def describe_exit(status: int) -> str:
    """`exited with status 1`, or `was ended by SIGKILL`."""
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def _ready_facts(line: bytes) -> dict[str, Any] | None:
    try:
        value: Any = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and value.get("ready") is True else None
