"""A module of the tests that runs as a process of its own, is told things line by line and answers in lines of JSON."""

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class JsonProcess:
    """One process. Whoever makes it closes it."""

    def __init__(self, module: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear_within(self, timeout_s: float) -> dict[str, Any]:
        """The next line. Raises queue.Empty."""
        return self._lines.get(timeout=timeout_s)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10.0)
        self._reader.join(10.0)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
