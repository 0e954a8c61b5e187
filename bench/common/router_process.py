"""A router under measurement: a process (or several) bound to some CPUs, started, watched, measured, ended."""

import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_LEAVE_S = 10.0
_POLL_S = 0.1
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
# Binds itself, and so whatever threads it will have, then becomes the program.
_BIND = "import os, sys; os.sched_setaffinity(0, eval(sys.argv[1])); os.execvp(sys.argv[2], sys.argv[2:])"


class RouterDied(Exception):
    """It ended by itself or is not ready in time. The message says why."""


class BoundProcess:
    """One process. Leaving the context, or `close`, ends it. Used by one thread."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        cpus: set[int],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        talks: bool = False,
    ) -> None:
        """`talks`: its standard input and output are pipes for `ask_line`; else its output goes to its log."""
        self.name = name
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - `close` does
        self._process = subprocess.Popen(
            (sys.executable, "-c", _BIND, repr(cpus), *command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if talks else self._log,
            stderr=self._log,
            text=True,
            cwd=cwd,
            env={**os.environ, **(environment or {})},
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far, user and system, in whole ticks of the kernel's clock."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK_S

    def ask_line(self, line: str | None = None) -> str:
        """Write a line, if one is given, and read one. Raises RouterDied at the end of its output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if line is not None:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RouterDied(self._last_words())
        return answer

    def wait_for(self, url: str, timeout_s: float, contains: str = "") -> None:
        """Return when `url` is answered with 200 and this text. Raises RouterDied."""
        deadline = time.monotonic() + timeout_s
        last = "no answer"
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RouterDied(self._last_words())
            try:
                with urllib.request.urlopen(url, timeout=2.0) as answer:
                    last = answer.read().decode(errors="replace")
                    if contains in last:
                        return
            except (OSError, urllib.error.HTTPError) as error:
                last = str(error)
            time.sleep(_POLL_S)
        raise RouterDied(f"{self.name} was not ready after {timeout_s:.0f} s: {last[:200]}; {self._tail()}")

    def close(self) -> None:
        """End it, and wait for it. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _last_words(self) -> str:
        return f"{self.name} ended with exit code {self._process.wait()}: {self._tail()}"

    def _tail(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "(it said nothing)"
