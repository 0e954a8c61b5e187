"""Rank 0's side: it starts the other ranks, tells them of each step, and notices when one is gone.

1. `Followers`: the processes start and load their parts, while this one loads its own.
2. `connect`: all have said that they are ready; the group meets.
3. For each step `LeaderModel` sends the batch, and then all ranks run the same model on it.
4. `close`, or the end of this process: the streams end, and the followers exit.

A follower that dies makes the step raise ParallelError; one that does not come within the time, RuntimeError. Both are
fatal for the engine, and so for the worker: a share of the weights and of the work is missing.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.batch import Batch
from engine.model_runner import LayerHook, Model
from engine.options import EngineOptions
from engine.parallel.batch_wire import pack_batch
from engine.parallel.channel import FollowerSetup, PoolFile, decode_answer, encode, receive_frame, send_frame
from engine.parallel.group import STEP_TIMEOUT_S, GroupStore, TensorParallel
from engine.parallel.ops import ShardedOps
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.errors import KvferryError

_COMMAND: Final = (sys.executable, "-m", "engine.parallel.follower")
# Spinning OpenMP threads of several processes on few cores slow each other down a hundredfold.
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
_START_TIMEOUT_S: Final = 600.0
_OBITUARY_WAIT_S: Final = 1.0

_log = logging.getLogger(__name__)


class ParallelError(RuntimeError):
    """A rank of this worker's model is gone: the model cannot be computed any more."""


@dataclass(frozen=True, slots=True)
class _Follower:
    rank: int
    process: "subprocess.Popen[bytes]"
    control: socket.socket

    def obituary(self) -> str:
        """How it ended; empty while it runs."""
        status = self.process.poll()
        if status is None:
            return ""
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        return f"rank {self.rank} of this worker (process {self.process.pid}) {how}"


class Followers:
    """The processes of ranks 1 to size - 1, seen from rank 0. Methods are called by one thread at a time."""

    def __init__(self, options: EngineOptions, pool: PoolFile, pool_bytes: int) -> None:
        """Start the processes and return at once; they load meanwhile.

        `options` name the prepared model, the number of blocks, and with `tensor_parallel` the number of ranks.
        Raises OSError when a process cannot be started.
        """
        size = options.tensor_parallel
        self.group = TensorParallel(0, size)
        self._store = GroupStore(size)
        self._stay = threading.Event()
        self._followers = _start_processes(size - 1, pool.fd, self._stay)
        for follower in self._followers:
            follower.control.settimeout(STEP_TIMEOUT_S)
            setup = FollowerSetup(
                rank=follower.rank,
                size=size,
                store_port=self._store.port,
                parent_pid=os.getpid(),
                pool=pool,
                pool_bytes=pool_bytes,
                options=options,
                log_level=logging.getLevelName(_log.getEffectiveLevel()).lower(),
            )
            send_frame(follower.control, encode(setup))

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, by rank."""
        return tuple(follower.process.pid for follower in self._followers)

    def connect(self) -> None:
        """Wait until all ranks are ready and the group has met. Raises KvferryError (UNAVAILABLE) if one is not."""
        for follower in self._followers:
            follower.control.settimeout(_START_TIMEOUT_S)
            message = receive_frame(follower.control)
            follower.control.settimeout(STEP_TIMEOUT_S)
            if message is None:
                self._wait_for_any_end()
                ended = follower.obituary() or f"rank {follower.rank} of this worker closed its stream"
                raise KvferryError(ErrorCode.UNAVAILABLE, f"{ended} before it was ready; its log lines are among ours")
            if error := decode_answer(message).error:
                raise KvferryError(ErrorCode.UNAVAILABLE, f"rank {follower.rank} of this worker cannot start: {error}")
        self.group.connect(self._store)
        _log.info("the model is split over %d processes: %s", self.group.size, (os.getpid(), *self.pids))

    def send(self, batch: Batch) -> None:
        """Tell all ranks what the next step computes. Raises ParallelError when one is gone."""
        with self.noticing_losses():
            message = pack_batch(batch)
            for follower in self._followers:
                send_frame(follower.control, message)

    @contextmanager
    def noticing_losses(self) -> Iterator[None]:
        """Around what all ranks do together: a failure that is another rank's becomes a ParallelError that says so."""
        self._check()
        try:
            yield
        except (OSError, RuntimeError) as error:
            # Its sockets close a little before it can be asked how it ended.
            self._wait_for_any_end()
            self._check(error)
            raise

    def close(self, timeout_s: float) -> None:
        """End the processes; one that has not ended in time is killed. Idempotent."""
        for follower in self._followers:
            follower.control.close()
        for follower in self._followers:
            try:
                follower.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                follower.process.kill()
                follower.process.wait()
        self.group.close()
        self._stay.set()

    def _check(self, cause: BaseException | None = None) -> None:
        for follower in self._followers:
            if obituary := follower.obituary():
                raise ParallelError(f"{obituary}: its part of the model is missing") from cause

    def _wait_for_any_end(self) -> None:
        deadline = time.monotonic() + _OBITUARY_WAIT_S
        while time.monotonic() < deadline and not any(follower.obituary() for follower in self._followers):
            time.sleep(0.01)


class LeaderModel:
    """The Model that rank 0's engine runs: each step is run by all ranks."""

    def __init__(self, inner: Model, ops: ShardedOps, followers: Followers) -> None:
        """`inner`: rank 0's part of the model, written in `ops`."""
        self._inner = inner
        self._ops = ops
        self._followers = followers

    def forward(self, batch: Batch, attention: AttentionBackend, on_layer: LayerHook) -> Tensor:
        """See Model. `on_layer(l)` is called once *all* ranks have stored layer l, after its attention.

        Raises ParallelError when a rank is gone, RuntimeError when one does not come in time.
        """
        self._followers.send(batch)
        with self._followers.noticing_losses():
            return self._inner.forward(batch, attention, self._ops.announce_when_summed(on_layer))

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model. The other ranks do the same when the batch wants logits, so it is called then and only then: once
        for each of its `scored_slices`, in their order, and then for its `logits_rows`."""
        with self._followers.noticing_losses():
            return self._inner.logits(hidden)


def _start_processes(count: int, pool_fd: int, stay: threading.Event) -> tuple[_Follower, ...]:
    """Start ranks 1 to `count` from a thread of their own, which lives until `stay` is set.

    The kernel kills a follower when the *thread* that started it ends, and the caller's may be a short-lived one.
    """
    started: Future[tuple[_Follower, ...]] = Future()

    def start_and_stay() -> None:
        try:
            started.set_result(tuple(_start_process(rank, pool_fd) for rank in range(1, count + 1)))
        except OSError as error:  # Those that did start see the end of their stream.
            started.set_exception(error)
            return
        stay.wait()

    threading.Thread(target=start_and_stay, name="ranks", daemon=True).start()
    return started.result()


def _start_process(rank: int, pool_fd: int) -> _Follower:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            (*_COMMAND, str(theirs.fileno())),
            # Standard output belongs to the worker's ready line; logs go where the worker's go.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), pool_fd),
            env={**os.environ, **_ENVIRONMENT},
        )
    return _Follower(rank, process, ours)
