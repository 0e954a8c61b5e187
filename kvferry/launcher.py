"""A router and its workers as processes of this host: start in order, watch, restart, stop in order.

1. The router starts and says which ports it took. 2. All workers start together and dial it. 3. The cluster is up
when the router's /ready answers 200. 4. A process that dies is reported and, unless told otherwise, started again
after a growing wait; the router keeps its ports. 5. Stop: the router drains, then the workers; whoever misses its
deadline is killed. Only own children are ever signalled.
"""

import asyncio
import http.client
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.cluster_spec import INTERNAL_HOST, ClusterSpec
from kvferry.run_dir import RunDir
from runtime.child_process import ChildProcess, LaunchError, describe_exit
from runtime.grpc_life import join_host_port

ROUTER = "router"
_READY_POLL_S = 0.1
_WORKER_EXIT_GRACE_S = 10.0
_FIRST_RESTART_WAIT_S = 0.5
_LONGEST_RESTART_WAIT_S = 15.0
_HEALTHY_LIFE_S = 60.0  # a process that lived this long restarts as quickly as after its first death


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """Something to tell the person who runs the cluster. `kind`: ready, died, restarting, up, stopping, stopped
    or killed. `details` is what its ready line said, for `ready`."""

    kind: str
    name: str
    text: str
    details: dict[str, Any] = field(default_factory=dict)


class LocalCluster:
    """One cluster, one life. Event-loop thread only."""

    def __init__(
        self,
        spec: ClusterSpec,
        run_dir: RunDir,
        on_event: Callable[[ClusterEvent], None],
        *,
        log_dir: Path | None = None,
    ) -> None:
        spec.validate()
        self._spec = spec
        self._run_dir = run_dir
        self._on_event = on_event
        self._log_dir = log_dir or run_dir.path / "logs"
        self._ports = {"http_port": spec.http_port, "grpc_port": spec.grpc_port, "internal_port": 0}
        self._children: dict[str, ChildProcess] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self.router_lost = asyncio.Event()  # set when the router died for good: the cluster is useless

    @property
    def http_address(self) -> str:
        """host:port of the OpenAI HTTP API, once started."""
        return join_host_port(self._spec.local_host, self._ports["http_port"])

    @property
    def grpc_address(self) -> str:
        """host:port of the public gRPC service, once started."""
        return join_host_port(self._spec.local_host, self._ports["grpc_port"])

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {name: child.pid for name, child in self._children.items()}

    async def start(self) -> None:
        """Bring everything up. Raises LaunchError, or whatever interrupts it; nothing is left running then."""
        deadline = time.monotonic() + self._spec.start_timeout_s
        self._log_dir.mkdir(parents=True, exist_ok=True)
        try:
            await self._start_child(ROUTER, deadline)
            self._ports = _ports_of(self._children[ROUTER])
            async with asyncio.TaskGroup() as group:
                for worker_id in self._spec.worker_ids:
                    group.create_task(self._start_child(worker_id, deadline))
            await self._wait_ready(deadline)
        except BaseException as error:
            await self.kill()
            if isinstance(error, BaseExceptionGroup) and (failures := error.subgroup(LaunchError)):
                raise _first_leaf(failures) from None
            raise
        self._write_state()
        self._keepers = [asyncio.create_task(self._keep(name)) for name in self._children]
        self._tell("up", "cluster", f"{self._spec.http_scheme}://{self.http_address} and gRPC {self.grpc_address}")

    async def stop(self) -> bool:
        """Drain and stop everything. Returns False when a process had to be killed."""
        await self._stop_keepers()
        self._tell("stopping", "cluster", "draining")
        # The router goes first: it refuses new requests and waits for the running ones, which need the workers.
        clean = await self._stop_child(ROUTER, self._spec.drain_timeout_s + _WORKER_EXIT_GRACE_S)
        workers = [self._stop_child(name, _WORKER_EXIT_GRACE_S) for name in self._children if name != ROUTER]
        clean = all([*await asyncio.gather(*workers), clean])
        self._run_dir.clear()
        self._tell("stopped", "cluster", "all processes have ended")
        return clean

    async def kill(self) -> None:
        """End every process at once."""
        await self._stop_keepers()
        await asyncio.gather(*(child.kill() for child in self._children.values()))
        self._run_dir.clear()

    async def _start_child(self, name: str, deadline: float) -> None:
        secret = self._run_dir.secret_path
        if name == ROUTER:
            argv = self._spec.router_argv(secret, self._ports)
        else:
            first = self._ports["internal_port"]
            addresses = [join_host_port(INTERNAL_HOST, first + index) for index in range(self._spec.num_routers)]
            argv = self._spec.worker_argv(name, secret, ",".join(addresses))
        child = ChildProcess(name, argv, self._log_dir / f"{name}.log", self._run_dir.path)
        self._children[name] = child
        await child.start(max(deadline - time.monotonic(), 0.001))
        self._tell("ready", name, _describe_ready(child), {**child.ready, "pid": child.pid})

    async def _wait_ready(self, deadline: float) -> None:
        """Ask /ready until it says 200. HTTP offers nothing to wait on, so this polls."""
        last = "no answer"
        while time.monotonic() < deadline:
            for child in self._children.values():
                if child.exit_status is not None:
                    tail = child.log_tail()
                    raise LaunchError(f"{child.name} {describe_exit(child.exit_status)} while starting:\n{tail}")
            status, last = await asyncio.to_thread(_get_ready, self._spec, self._ports["http_port"])
            if status == http.client.OK:
                return
            await asyncio.sleep(_READY_POLL_S)
        raise LaunchError(
            f"the router did not become ready within {self._spec.start_timeout_s:g} s (last answer: {last})"
        )

    async def _keep(self, name: str) -> None:
        """Watch one process for as long as the cluster lives, and start it again when it dies."""
        wait_s = _FIRST_RESTART_WAIT_S
        while True:
            started = time.monotonic()
            status = await self._children[name].wait()
            self._tell("died", name, describe_exit(status))
            if not self._spec.restart:
                break
            if time.monotonic() - started > _HEALTHY_LIFE_S:
                wait_s = _FIRST_RESTART_WAIT_S
            restarted = False
            while not restarted:
                self._tell("restarting", name, f"in {wait_s:g} s")
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_RESTART_WAIT_S)
                restarted = await self._try_restart(name)
            self._write_state()
        if name == ROUTER:
            self.router_lost.set()

    async def _try_restart(self, name: str) -> bool:
        try:
            await self._start_child(name, time.monotonic() + self._spec.start_timeout_s)
        except LaunchError as error:
            self._tell("died", name, str(error))
            return False
        return True

    async def _stop_keepers(self) -> None:
        for task in self._keepers:
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers = []

    async def _stop_child(self, name: str, grace_s: float) -> bool:
        clean = await self._children[name].stop(grace_s)
        if not clean:
            self._tell("killed", name, f"did not end within {grace_s:g} s of SIGTERM")
        return clean

    def _write_state(self) -> None:
        processes = [
            {"name": name, "pid": child.pid, "log": str(self._log_dir / f"{name}.log"), **child.ready}
            for name, child in self._children.items()
        ]
        self._run_dir.write_state(
            {
                "model": self._spec.served_model_name,
                "model_dir": str(self._spec.model_dir),
                "http_address": self.http_address,
                "grpc_address": self.grpc_address,
                "secret_file": str(self._run_dir.secret_path),
                "processes": processes,
            }
        )

    def _tell(self, kind: str, name: str, text: str, details: dict[str, Any] | None = None) -> None:
        self._on_event(ClusterEvent(kind, name, text, details or {}))


def _ports_of(router: ChildProcess) -> dict[str, int]:
    try:
        return {name: int(router.ready[name]) for name in ("http_port", "grpc_port", "internal_port")}
    except (KeyError, TypeError, ValueError):
        raise LaunchError(f"the router's ready line names no ports: {router.ready}") from None


def _describe_ready(child: ChildProcess) -> str:
    facts = [f"pid {child.pid}"]
    for key, form in (
        ("address", "{}"),
        ("num_blocks", "{} blocks"),
        ("http_port", "HTTP port {}"),
        ("grpc_port", "gRPC port {}"),
    ):
        if key in child.ready:
            facts.append(form.format(child.ready[key]))
    if "transports" in child.ready:
        facts.append("transports " + ", ".join(map(str, child.ready["transports"])))
    return ", ".join(facts)


def _get_ready(spec: ClusterSpec, port: int) -> tuple[int, str]:
    connection = http.client.HTTPConnection(spec.local_host, port, timeout=5)
    if spec.http_scheme == "https":
        # Our own child on this host: its certificate is for the names by which others know it.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(spec.local_host, port, timeout=5, context=context)
    try:
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        return answer.status, f"{answer.status} {answer.read(500).decode(errors='replace')}"
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error) or type(error).__name__
    finally:
        connection.close()


def _first_leaf(group: "BaseExceptionGroup[LaunchError]") -> LaunchError:
    first = group.exceptions[0]
    return first if isinstance(first, LaunchError) else _first_leaf(first)
