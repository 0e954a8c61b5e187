"""An engine in a process of its own, as the benchmark sees it: started, asked line by line, measured, ended."""

import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from bench.peers.protocol import Setup

_LEAVE_S = 20.0
_FIRST_PROMPT = [3, 4, 5, 6]  # Any tokens will do: it shows that the engine is up.


class PeerError(Exception):
    """The engine cannot be started, failed, or gave no answer in time. The message says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of prompts that were handed over together; of each request its tokens, and when they came (s)."""

    tokens: list[list[int]]
    times_s: list[list[float]]


class PeerProcess:
    """One process with one adapter. Used by one thread. Leaving the context, or `close`, ends it."""

    def __init__(self, name: str, command: Sequence[str], threads: int, timeout_s: float) -> None:
        """Start it. `timeout_s`: longest wait for an answer. Raises PeerError if there is no such program."""
        self.name = name
        self._began = time.perf_counter()
        self._timeout_s = timeout_s
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - `close` does
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env={**os.environ, **offline, "OMP_NUM_THREADS": str(threads)},
            )
        except OSError as error:
            self._log.close()
            raise PeerError(f"{command[0]} cannot be run: {error.strerror}") from error
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands = self._process.stdin
        self._listener = threading.Thread(
            target=_listen, args=(self._process.stdout, self._answers), name=f"listen-{name}", daemon=True
        )
        self._listener.start()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative if a signal ended it."""
        return self._process.poll()

    def load(self, setup: Setup) -> str:
        """Load the model; the version of the engine. Raises PeerError if it cannot."""
        return str(self._ask({"command": "load", "setup": setup.to_json()})["version"])

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Outcome:
        """Greedy tokens for all prompts at once. Raises PeerError, also unless each has as many as asked for."""
        answer = self._ask({"command": "generate", "prompts": list(map(list, prompts)), "max_tokens": max_tokens})
        tokens, times_s = answer["tokens"], answer["times_s"]
        lengths = {len(one) for one in (*tokens, *times_s)}
        if len(tokens) != len(prompts) or lengths != {max_tokens}:
            raise PeerError(f"{len(prompts)} x {max_tokens} tokens were asked for, not {sorted(map(len, tokens))}")
        return Outcome(tokens, times_s)

    def first_token_s(self) -> float:
        """Seconds from the start of the process to the answer that a first request gets now."""
        self.generate([_FIRST_PROMPT], 1)
        return time.perf_counter() - self._began

    def memory_mb(self) -> float:
        """Resident memory in MB of 10^6 bytes: all of the process, and what its children have for themselves."""
        pid = self._process.pid
        own = _kilobytes(pid, ("Rss",))
        return 1.024e-3 * (own + sum(_kilobytes(child, ("Private_Clean", "Private_Dirty")) for child in _below(pid)))

    def close(self) -> None:
        """End the process, and wait for it. Idempotent."""
        try:
            self._commands.write('{"command": "leave"}\n')
            self._commands.close()
            self._process.wait(_LEAVE_S)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._listener.join(_LEAVE_S)
        self._log.close()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        try:
            self._commands.write(json.dumps(command) + "\n")
            self._commands.flush()
        except OSError:
            raise PeerError(self._last_words()) from None
        try:
            line = self._answers.get(timeout=self._timeout_s)
        except queue.Empty:
            raise PeerError(f"no answer within {self._timeout_s:.0f} s") from None
        if line is None:
            raise PeerError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        return answer

    def _last_words(self) -> str:
        """Why it ended, as far as it said so."""
        code = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return f"it ended with exit code {code}" + (f": {lines[-1]}" if lines else "")


def _listen(answers: TextIO, into: "queue.SimpleQueue[str | None]") -> None:
    with answers:
        for line in answers:
            into.put(line)
    into.put(None)


def _below(pid: int) -> list[int]:
    """Processes that it started, and those that they started."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *_below(child)]
    return found


def _kilobytes(pid: int, kinds: Sequence[str]) -> int:
    rows = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(row[1]) for row in rows if row[0].removesuffix(":") in kinds)
