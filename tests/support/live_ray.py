"""Ray nodes as real processes, for tests: started by `ray start --block`, ended with all that belongs to them."""

import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.run_dir import process_start_ticks

HEAD_HOST = "127.0.0.2"  # loopback, as Ray takes it: 127.0.0.1 it would replace by the host's own address
# Token authentication; no reports to its makers; no processes made in advance for each command that joins; nodes that
# bear a head that is away for longer than the minute that is usual.
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
}
_START_TIMEOUT_S = 120.0
_TRIES = 3
_PR_SET_PDEATHSIG = 1
_END_TIMEOUT_S = 12.0


@dataclass
class LiveRay:
    """A head node with token authentication, and room for more nodes."""

    address: str
    env: dict[str, str]
    head: "subprocess.Popen[str]"
    nodes: ExitStack = field(default_factory=ExitStack)

    def join(self, address: str, cpus: int, gpus: int) -> None:
        """A second node of this host; it ends with the cluster."""
        flags = (f"--address={self.address}", f"--node-ip-address={address}", *_room(cpus, gpus))
        self.nodes.enter_context(_node(self.env, *flags))

    def kvferry(self, *argv: str, timeout_s: float = 120.0) -> list[dict[str, Any]]:
        """The objects that a command prints with --json; it must end well."""
        command = [sys.executable, "-m", "kvferry", *argv, "--ray", "--ray-address", self.address, "--json"]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return [json.loads(line) for line in done.stdout.splitlines()]

    @contextmanager
    def without_head(self) -> Iterator[None]:
        """The one process that knows the whole cluster stands still, as if its host could not be reached."""
        for pid in _session(self.head.pid):
            if b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
                os.kill(pid, signal.SIGSTOP)
                try:
                    yield
                finally:
                    os.kill(pid, signal.SIGCONT)
                return
        raise AssertionError("no gcs_server among the head's processes")


@contextmanager
def live_ray(cpus: int, gpus: int) -> Iterator[LiveRay]:
    """A head on a free port. Ray believes what it is told of GPUs. At the end nothing of it is left."""
    # Short, for its sockets lie there.
    directory = Path(tempfile.mkdtemp(prefix="kvr", dir="/tmp"))
    token = directory / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    env = {**os.environ, **_ENVIRONMENT, "RAY_AUTH_TOKEN_PATH": str(token)}
    env.pop("RAY_ADDRESS", None)
    port = _free_port()
    flags = ("--head", f"--port={port}", f"--node-ip-address={HEAD_HOST}", *_room(cpus, gpus))
    more = ("--include-dashboard=false", f"--temp-dir={directory / 'ray'}", f"--ray-client-server-port={_free_port()}")
    try:
        with _node(env, *flags, *more) as head:
            ray = LiveRay(f"{HEAD_HOST}:{port}", env, head)
            with ray.nodes:
                yield ray
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _node(env: dict[str, str], *flags: str) -> Iterator["subprocess.Popen[str]"]:
    node = _started(env, *flags)
    try:
        yield node
    finally:
        _end(node)


def _started(env: dict[str, str], *flags: str) -> "subprocess.Popen[str]":
    """Ray gives its own start half a minute, which can be too little where much else runs: it may try again."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--object-store-memory=80000000"]
    for _ in range(_TRIES):
        with tempfile.TemporaryFile("w+") as output:
            # A session of its own: all that it starts is known by it, at its end too.
            node = subprocess.Popen(
                [*command, *flags],
                env=env,
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            deadline = time.monotonic() + _START_TIMEOUT_S
            while node.poll() is None and time.monotonic() < deadline:
                if "Ray runtime started" in (said := _text(output)):
                    return node
                time.sleep(0.1)
            said = _text(output)
        _end(node)
        if "timed out during startup" not in said:
            break
    raise AssertionError(said)


def _end_with_parent() -> None:
    """In the child: SIGTERM once who started it is gone, however it went."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(node: "subprocess.Popen[str]") -> None:
    """SIGTERM, upon which it ends its processes; then SIGKILL for each of its session that is left."""
    node.send_signal(signal.SIGTERM)
    try:
        node.wait(timeout=_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        node.kill()
        node.wait()
    deadline = time.monotonic() + _END_TIMEOUT_S
    while left := _session(node.pid):
        assert time.monotonic() < deadline, f"left running: {left}"
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


def _room(cpus: int, gpus: int) -> tuple[str, ...]:
    return f"--num-cpus={cpus}", f"--num-gpus={gpus}"


def _session(leader: int) -> list[int]:
    """The processes of a session, its leader apart."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        try:
            if pid != leader and os.getsid(pid) == leader and process_start_ticks(pid) is not None:
                found.append(pid)
        except ProcessLookupError:
            continue
    return found


def _text(output: Any) -> str:
    output.seek(0)
    text: str = output.read()
    return text


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HEAD_HOST, 0))
        return int(probe.getsockname()[1])
