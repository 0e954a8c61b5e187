"""A worker end in another process, as a test drives it; see kv_peer.py for what runs there."""

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvferry_rpc.internal_pb2 import Ticket
from tests.support.kv_pair import WAIT_S

ROOT = Path(__file__).parents[2]


class Peer:
    """One process. Whoever makes it closes it."""

    def __init__(self, role: str, transports: str | Sequence[str], num_blocks: int, options: dict[str, Any]) -> None:
        names = [transports] if isinstance(transports, str) else list(transports)
        config = {"transports": names, "num_blocks": num_blocks, "options": options}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.kv_peer", role, json.dumps(config)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.wait(lambda line: "ready" in line)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def do(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def reserve(self, block_ids: Sequence[int], num_tokens: int) -> Ticket:
        """A place in the pool of a `decode` peer."""
        self.do(block_ids=list(block_ids), first_block=0, num_tokens=num_tokens)
        return Ticket.FromString(bytes.fromhex(self.wait(lambda line: "ticket" in line)["ticket"]))

    def wait(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next line that is wanted; those before it are gone."""
        deadline = time.monotonic() + WAIT_S
        while True:
            line = self._lines.get(timeout=deadline - time.monotonic())
            if wanted(line):
                return line

    def wait_event(self, *kinds: str) -> dict[str, Any]:
        return self.wait(lambda line: line.get("event") in kinds)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def finish(self) -> int:
        """Let it close by itself, as it does when nobody has more for it; its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10.0)
        self._reader.join(10.0)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
