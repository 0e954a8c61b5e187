"""The processes of the failover benchmark, as the benchmark sees them: started ahead of time, heard, and ended."""

import itertools
import multiprocessing
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from bench.common.failover_ends import serve
from bench.common.failover_messages import DECODE, PREFILL, Command, Happened, Leave, Message, Ready, Setup
from bench.common.harness import BenchmarkError

_WAIT_S = 120.0  # For answers of a process that is well.
_JOIN_S = 10.0

Answer = TypeVar("Answer", bound=Message)
Heard = tuple["End", Message | None]


class End:
    """One process. Used by one thread; another one listens to the process all the time, so it never blocks on us."""

    def __init__(self, setup: Setup, inbox: "queue.SimpleQueue[Heard]") -> None:
        context = multiprocessing.get_context("spawn")
        self.role = setup.role
        self.ended = False
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, setup), name=f"failover-{setup.role}", daemon=True)
        self._process.start()
        theirs.close()
        self._listener = threading.Thread(target=self._listen, args=(inbox,), name="listen", daemon=True)
        self._listener.start()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    def tell(self, command: Command) -> None:
        """Send it, unless the process is gone."""
        try:
            self._connection.send(command)
        except OSError:
            self.ended = True

    def signal(self, number: int) -> None:
        """Our own child, which is not waited for before `kill` or `close`: the id cannot be anybody else's."""
        pid = self._process.pid
        assert pid is not None
        if not self.ended:
            os.kill(pid, number)

    def kill(self) -> None:
        """SIGKILL, which ends a stopped process too, and wait for the end. Idempotent."""
        self.ended = True
        self._process.kill()
        self._finish()

    def close(self) -> None:
        """Let it close what it has and leave; kill it if it does not."""
        self.tell(Leave())
        self.ended = True
        self._process.join(_JOIN_S)
        self._process.kill()
        self._finish()

    def _finish(self) -> None:
        self._process.join()
        self._listener.join()
        self._connection.close()

    def _listen(self, inbox: "queue.SimpleQueue[Heard]") -> None:
        try:
            while True:
                inbox.put((self, self._connection.recv()))
        except (EOFError, OSError):
            inbox.put((self, None))


class Cast:
    """The prefill and decode process in use, and others that stand ready to take their place.

    Leaving the context ends every process that was ever started, and checks it.
    """

    def __init__(self, setup: Setup, on_event: Callable[[End, Happened], None]) -> None:
        """`role` and `incarnation` of the setup are not used; every other prefill process is as slow as it says."""
        self._setup = setup
        self._speeds = itertools.cycle((setup.bytes_per_second, None))
        self._on_event = on_event
        self._inbox: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._all: list[End] = []
        self._spares: dict[str, deque[End]] = {PREFILL: deque(), DECODE: deque()}
        self._ready: set[End] = set()

    def __enter__(self) -> Self:
        for _ in range(2):  # One to use and one to spare; the four start at the same time.
            for role in (PREFILL, DECODE):
                self._spares[role].append(self._start(role))
        self.ends = {role: self._take(role) for role in (PREFILL, DECODE)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in self._all:
            if error or end.ended:
                end.kill()
            else:
                end.close()
        left = [end for end in self._all if end.exit_code is None]
        assert not left, f"{len(left)} processes were left behind"

    def other(self, role: str) -> End:
        """The end that is not `role`."""
        return self.ends[DECODE if role == PREFILL else PREFILL]

    def replace(self, role: str) -> End:
        """Put a fresh process in this place; the one that had it is returned, and still the caller's to end."""
        old, self.ends[role] = self.ends[role], self._take(role)
        return old

    def restore(self, end: End) -> None:
        """Put this process back into its place; the one that has it stands ready again."""
        self._spares[end.role].appendleft(self.ends[end.role])
        self.ends[end.role] = end

    def ask(self, end: End, command: Command, kind: type[Answer]) -> Answer:
        """The answer to a command. Raises BenchmarkError if the process does not give one."""
        end.tell(command)
        return self._await(end, kind)

    def listen(self, until_s: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Hear what happens until `done`, or until this time (monotonic); which of the two."""
        while not done():
            try:
                end, message = self._inbox.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                return False
            self._hear(end, message)
        return True

    def _await(self, end: End, kind: type[Answer]) -> Answer:
        until_s = time.monotonic() + _WAIT_S
        while not end.ended:
            try:
                heard, message = self._inbox.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                raise BenchmarkError(f"the {end.role} process did not answer with {kind.__name__}") from None
            if heard is end and isinstance(message, kind):
                return message
            self._hear(heard, message)
        raise BenchmarkError(f"the {end.role} process ended by itself, with exit code {end.exit_code}")

    def _hear(self, end: End, message: Message | None) -> None:
        if message is None:
            end.ended = True
        elif isinstance(message, Ready):
            self._ready.add(end)
        elif isinstance(message, Happened):
            self._on_event(end, message)

    def _take(self, role: str) -> End:
        end = self._spares[role].popleft()
        if end not in self._ready:
            self._await(end, Ready)
            self._ready.add(end)
        if not self._spares[role]:
            self._spares[role].append(self._start(role))
        return end

    def _start(self, role: str) -> End:
        speed = next(self._speeds) if role == PREFILL else None
        setup = replace(self._setup, role=role, incarnation=os.urandom(16), bytes_per_second=speed)
        end = End(setup, self._inbox)
        self._all.append(end)
        return end
