"""A process that computes one rank of a worker's model: `python -m engine.parallel.follower FD`, started by rank 0.

1. The setup comes on the socket FD; the part of the model is loaded; "ready" goes back; the group meets.
2. Each frame that follows is a batch: run the model on it, as all ranks do. Nothing is sampled here.
3. The end of the stream ends the process at once, whatever it is doing. So does the death of the worker, by a signal
   from the kernel. SIGINT and SIGTERM do not: a worker that drains still needs its ranks.
"""

import ctypes
import logging
import mmap
import os
import select
import signal
import socket
import sys
import threading
from typing import Final

import torch

from engine.attention.interface import AttentionBackend
from engine.batch import Batch
from engine.build import build_rank, plan_engine
from engine.model_runner import Model
from engine.parallel.batch_wire import unpack_batch
from engine.parallel.channel import FollowerAnswer, FollowerSetup, decode_setup, encode, receive_frame, send_frame
from engine.parallel.group import TensorParallel
from engine.prompt_scoring import scored_slices
from runtime.errors import KvferryError
from runtime.telemetry import setup_logging

_PR_SET_PDEATHSIG: Final = 1

_log = logging.getLogger(__name__)


class Follower:
    """The engine's part of one rank: a model, its view of the pool, its place in the group."""

    def __init__(self, setup: FollowerSetup) -> None:
        """Maps the pool and loads the model. Raises what `plan_engine` and `build_rank` do, and OSError."""
        plan = plan_engine(setup.options, available_bytes=None)
        if plan.pool_bytes != setup.pool_bytes:
            raise ValueError(f"a pool of {plan.pool_bytes} bytes was planned here, {setup.pool_bytes} by the worker")
        self._group = TensorParallel(setup.rank, setup.size)
        self._store_port = setup.store_port
        pool = mmap.mmap(setup.pool.fd, setup.pool_bytes, flags=mmap.MAP_SHARED, offset=setup.pool.offset_bytes)
        parts = build_rank(setup.options, plan, memoryview(pool), self._group)
        self._model: Model = parts.model
        self._attention: AttentionBackend = parts.attention

    def connect(self) -> None:
        """Meet the other ranks. Raises RuntimeError when they do not come."""
        self._group.connect(self._store_port)

    @torch.inference_mode()
    def step(self, batch: Batch) -> None:
        """Compute one step with the other ranks: what rank 0's ModelRunner computes, up to the logits."""
        hidden = self._model.forward(batch, self._attention, _nobody)
        for rows in scored_slices(batch):
            self._model.logits(hidden[rows])
        if len(batch.logits_rows):
            self._model.logits(hidden[batch.logits_rows])


def follow(control: socket.socket) -> int:
    """The life of a follower; returns the exit status."""
    message = receive_frame(control)
    if message is None:
        return 0
    setup = decode_setup(message)
    _die_with_parent(setup.parent_pid, control)
    setup_logging(level=setup.log_level, json_lines=False, process=f"rank-{setup.rank}")
    try:
        follower = Follower(setup)
    except (KvferryError, OSError, ValueError) as error:
        send_frame(control, encode(FollowerAnswer(str(error))))
        return 1
    send_frame(control, encode(FollowerAnswer()))
    follower.connect()
    while (message := receive_frame(control)) is not None:
        follower.step(unpack_batch(message))
    return 0


def _die_with_parent(parent_pid: int, control: socket.socket) -> None:
    """Two ways: the kernel's signal needs nothing of this process, the end of the stream holds in any case."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # It died before we asked for the signal.
        os._exit(0)
    threading.Thread(target=_exit_at_end_of_stream, args=(control,), name="stream-watch", daemon=True).start()


def _exit_at_end_of_stream(control: socket.socket) -> None:
    """Even in the middle of a step that waits for a rank which is gone."""
    watch = select.poll()
    watch.register(control, select.POLLRDHUP)
    watch.poll()
    os._exit(0)


def _nobody(layer: int) -> None:
    """Rank 0 tells whoever wants to know."""


def main() -> int:
    """The command line. Returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return follow(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
