"""The routers of `bench/router_rps.py`: how each is started in front of a mock backend, and asked for a stream.

kvferry's router and Dynamo's frontend render the chat template and tokenise; the others pass on bytes. Dynamo's
frontend stands before its own mocker, as it speaks to nobody else; the proxies stand before the mock OpenAI server.
"""

import contextlib
import json
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common.origin import ROOT
from bench.common.router_process import BoundProcess
from bench.common.stream_load import Target
from router.text.tokenizer import Tokenizer

MODEL_DIR = ROOT / "tests" / "data" / "tiny-real"
MODEL = "mock"
NUM_TOKENS = 16
_START_TIMEOUT_S = 60.0
_ANSWER = " the ship came to the shore and the men went down to the sea again with"
_PROMPT = " ".join(["Please tell me a story about a ship that sails to the north."] * 4)
_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Cpus:
    """The router under measurement has one for itself; load, mocks and everything else share the other."""

    router: int
    others: int


@dataclass(frozen=True, slots=True)
class Running:
    """A router that is up. `knows_held`: its answers carry the id under which the mock knows them."""

    name: str
    process: BoundProcess
    target: Target
    knows_held: bool = True


class Backend:
    """The process of `mock_backend.py`. Leaving `running` ends it."""

    def __init__(self, process: BoundProcess, secret: str) -> None:
        self.secret = secret
        self._process = process
        tokenizer = Tokenizer.load(MODEL_DIR)
        token_ids = tokenizer.encode(_ANSWER, add_special_tokens=False)[:NUM_TOKENS]
        words = [tokenizer.token_text(token_id) for token_id in token_ids]
        start = {"secret": secret, "token_ids": token_ids, "vocab_size": tokenizer.vocab_size, "words": words}
        self.openai_url = str(self.ask("start", **start)["openai_url"])

    @classmethod
    @contextlib.contextmanager
    def running(cls, cpus: Cpus) -> "Iterator[Backend]":
        """Start it."""
        command = (sys.executable, "-m", "bench.common.mock_backend")
        with BoundProcess("mock backend", command, {cpus.others}, cwd=ROOT, talks=True) as process:
            yield cls(process, secrets.token_hex(16))

    def ask(self, command: str, **facts: Any) -> dict[str, Any]:
        """One command and its answer. Raises RouterDied."""
        answer: dict[str, Any] = json.loads(self._process.ask_line(json.dumps({"command": command, **facts})))
        return answer


Start = Callable[[str, Backend, Cpus, ExitStack], Running]
"""Starts one with this interpreter; what it started ends with the stack. Raises RouterDied."""


def start_kvferry(python: str, backend: Backend, cpus: Cpus, stack: ExitStack) -> Running:
    """This tree's router, with a mock decode worker attached."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    secret_file = directory / "secret"
    secret_file.write_text(backend.secret)
    flags = ("--http-port=0", "--grpc-port=0", "--internal-port=0")
    model = (f"--model={MODEL_DIR}", f"--served-model-name={MODEL}", f"--cluster-secret-file={secret_file}")
    command = (python, "-m", "router", *model, *flags)
    process = stack.enter_context(BoundProcess("kvferry", command, {cpus.router}, cwd=ROOT, talks=True))
    ready = json.loads(process.ask_line())
    backend.ask("attach", routers=[f"{_HOST}:{ready['internal_port']}"])
    process.wait_for(f"http://{_HOST}:{ready['http_port']}/ready", _START_TIMEOUT_S)
    return Running("kvferry", process, _target(ready["http_port"]))


def start_proxy(package: str) -> Start:
    """A router of the family that began as sglang's: a Rust proxy with a Python launcher, here round robin."""

    def start(python: str, backend: Backend, cpus: Cpus, stack: ExitStack) -> Running:
        port, metrics_port = free_ports(2)
        flags = (
            "--host",
            _HOST,
            "--port",
            str(port),
            "--policy",
            "round_robin",
            "--prometheus-port",
            str(metrics_port),
        )
        command = (python, "-m", f"{package}.launch_router", "--worker-urls", backend.openai_url, *flags)
        process = stack.enter_context(BoundProcess(package, command, {cpus.router}))
        process.wait_for(f"http://{_HOST}:{port}/health", _START_TIMEOUT_S)
        return Running(package, process, _target(port))

    return start


def start_dynamo(python: str, backend: Backend, cpus: Cpus, stack: ExitStack) -> Running:
    """Dynamo's frontend, and its mocker on the other CPU, at a speed at which it computes nothing."""
    directory = stack.enter_context(tempfile.TemporaryDirectory())
    environment = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": directory,
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "HF_HUB_OFFLINE": "1",
    }
    (port,) = free_ports(1)
    mocker = (python, "-m", "dynamo.mocker", "--model-path", str(MODEL_DIR), "--model-name", MODEL)
    frontend = (python, "-m", "dynamo.frontend", "--http-port", str(port), "--http-host", _HOST)
    speed = ("--speedup-ratio", "1000")
    stack.enter_context(BoundProcess("dynamo mocker", (*mocker, *speed), {cpus.others}, environment=environment))
    process = stack.enter_context(BoundProcess("dynamo", frontend, {cpus.router}, environment=environment))
    process.wait_for(f"http://{_HOST}:{port}/v1/models", _START_TIMEOUT_S, contains=MODEL)
    return Running("dynamo", process, _target(port), knows_held=False)


PEERS: dict[str, Start] = {
    "dynamo": start_dynamo,
    "sglang-router": start_proxy("sglang_router"),
    "vllm-router": start_proxy("vllm_router"),
}


def free_ports(count: int) -> list[int]:
    """Ports that nobody has this moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((_HOST, 0))) for _ in range(count)]
        return [int(one.getsockname()[1]) for one in sockets]


def _target(port: int) -> Target:
    return Target(_HOST, port, MODEL, _PROMPT, NUM_TOKENS)
