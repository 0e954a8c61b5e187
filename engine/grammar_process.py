"""The worker's end of `engine.grammar_trial`: the child process in which grammars are tried."""

import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, Final

from engine.prepared_model import PreparedModel
from kvferry_rpc.common_pb2 import ErrorCode, Grammar
from runtime.errors import KvferryError
from runtime.grammar_limits import grammar_field

_COMMAND: Final = (sys.executable, "-m", "engine.grammar_trial")
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
# It imports torch, which takes long on a busy machine.
_START_LIMIT_S: Final = 120.0
# It keeps to its limit itself; only if it does not, it is killed.
_GRACE_S: Final = 30.0


class TrialProcess:
    """One child at a time, started when first needed and again after it was lost.

    One thread at a time, but for `interrupt`.
    """

    def __init__(self, model: PreparedModel) -> None:
        """Starts nothing yet. Grammars are tried with the vocabulary of `model`."""
        self._hello = {
            "tokenizer": str(model.tokenizer_path),
            "settings": str(model.tokenizer_config_path),
            "vocab_size": model.shape.vocab_size,
            "eos_token_ids": sorted(model.eos_token_ids),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the child; None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Begin to start the child, unless it runs; waits for nothing. Raises KvferryError when it cannot start."""
        if self._process is not None and self._process.poll() is None:
            return
        self._drop()
        if self._closed:
            raise KvferryError(ErrorCode.UNAVAILABLE, "this worker is shutting down")
        try:
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT},
            )
            self._send(self._hello)
        except OSError as error:
            self._drop()
            raise KvferryError(ErrorCode.INTERNAL, f"no process to try grammars in: {error}") from error

    def check(self, grammar: Grammar, limit_s: float) -> None:
        """Raises KvferryError: INVALID_REQUEST naming the field when the grammar is refused, takes longer than
        `limit_s` (starting the child not counted) or makes the compiler crash; INTERNAL when there is no child."""
        self.start()
        if not self._is_ready:
            if self._receive(_START_LIMIT_S) is None:
                self._drop()
                raise KvferryError(ErrorCode.INTERNAL, "the process to try grammars in does not start")
            self._is_ready = True
        field = grammar_field(grammar)
        answer = None
        with suppress(OSError):  # the child is gone
            self._send({"kind": grammar.kind, "text": grammar.text, "field": field, "limit_s": limit_s})
            answer = self._receive(limit_s + _GRACE_S)
        if answer is None:
            self._drop()
            raise KvferryError(ErrorCode.INTERNAL, "the process to try grammars in was lost")
        if "refused" in answer:
            raise KvferryError(ErrorCode.INVALID_REQUEST, answer["refused"], field=field)

    def interrupt(self) -> None:
        """End the child; a check under way fails, and no other begins. Any thread; idempotent."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the child and let go of its pipes. Idempotent."""
        self.interrupt()
        self._drop()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self, limit_s: float) -> dict[str, str] | None:
        """The next line; None when the child ends first or the time is over."""
        assert self._process is not None
        assert self._process.stdout is not None
        fd, received = self._process.stdout.fileno(), b""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        deadline = time.monotonic() + limit_s
        while not received.endswith(b"\n"):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
                return None
            part = os.read(fd, 65536)
            if not part:
                return None
            received += part
        answer: dict[str, str] = json.loads(received)
        return answer

    def _drop(self) -> None:
        """Kill the child, if there is one, and forget it."""
        process, self._process, self._is_ready = self._process, None, False
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was not sent has no reader any more
                    pipe.close()
