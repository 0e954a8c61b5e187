"""One process of a cluster, on the node where Ray has put it: this runs inside a Ray actor and knows nothing of Ray.

1. A life of this actor may follow another one: the process of that life ends by itself, as its standard input is
   closed, and is waited for, then killed. Two workers never share a device, two routers never a port.
2. The secret becomes a file that only its owner reads. 3. A model that is not there is prepared.
4. The process starts, and is started again whenever it dies, after a growing wait; a router keeps its ports.
5. `stop` drains it. When the actor dies, however it dies, the process drains and ends.
"""

import asyncio
import json
import os
import secrets
import signal
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvferry.cluster_spec import ClusterSpec, RoleCommands, role_of
from kvferry.launchers.kept_process import KeptProcess
from kvferry.launchers.launcher import ROUTER, ClusterEvent
from kvferry.launchers.ray_shapes import RayOptions
from kvferry.launchers.readiness import ports_of
from kvferry.model_prep import PREPARE_COMMAND, prepare_model
from kvferry.run_dir import RunDir, process_start_ticks
from runtime.child_process import LaunchError
from runtime.grpc_life import join_host_port
from runtime.process import ORPHAN_GRACE_S
from runtime.restart_wait import RestartWait
from runtime.role_file import Role, read_role
from runtime.secret import write_secret_file

_EVENTS_KEPT = 256
_LOOK_INTERVAL_S = 0.05
_KILL_GRACE_S = 5.0
_NOTE_NAME = "process.json"  # what it was in the life before


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOrder:
    """All that a node must know to run one process. `root` is the cluster's directory, the same path on every node;
    `run_id` tells this cluster from an earlier one there; `model_source` is what the user named. `routers` is empty
    for the router itself, and so is its `group`. `commands` and `prepare_command` None: those of the node's own Python.
    """

    options: RayOptions
    run_id: str
    name: str
    group: str
    spec: ClusterSpec
    secret: bytes = field(repr=False)
    root: Path
    routers: str
    model_source: str
    cache_dir: Path
    weight_dtype: str | None = None
    commands: RoleCommands | None = None
    prepare_command: tuple[str, ...] | None = None

    @property
    def directory(self) -> Path:
        """Of this process alone: its secret, its log, what it was in the life before."""
        return self.root / self.name

    @property
    def secret_path(self) -> Path:
        """The cluster secret on this node."""
        return self.directory / "secret"

    @property
    def role_path(self) -> Path:
        """Where a worker keeps its role."""
        return self.directory / "role"

    @property
    def log_path(self) -> Path:
        """What the process writes."""
        return self.directory / "process.log"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the process is now. `role`: the one that a worker was given last; None for a router."""

    name: str
    group: str
    host: str
    node_id: str
    pid: int
    running: bool
    starts: int
    devices: str
    ports: dict[str, int]
    log: str
    role: Role | None


class NodeProcess:
    """See the module. All methods: the event loop that `run` runs on."""

    def __init__(self, order: ProcessOrder, host: str, node_id: str) -> None:
        """`host`: the node's address, where others reach what runs on it."""
        self._order = order
        self._host = host
        self._node_id = node_id
        self._spec = replace(order.spec, commands=order.commands or RoleCommands())
        self._life = secrets.token_hex(8)
        self._events: deque[tuple[int, ClusterEvent]] = deque(maxlen=_EVENTS_KEPT)
        self._num_events = 0
        self._told = asyncio.Event()
        self._starts = 0
        self._settled = asyncio.Event()  # the first start has gone well, or not
        self._failure = ""
        self._process: KeptProcess | None = None
        self._beginning: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start the process, in the background, and keep it."""
        self._beginning = asyncio.create_task(self._try_begin(), name=f"begin {self._order.name}")

    async def _try_begin(self) -> None:
        try:
            await self._begin()
        except (LaunchError, OSError, ValueError) as error:
            self._failure = str(error)
            self._tell(ClusterEvent("died", self._order.name, self._failure))
        self._settled.set()

    async def wait_ready(self, timeout_s: float) -> str:
        """Wait for the first start; empty if it went well, else why it did not."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        except TimeoutError:
            return f"{self._order.name} was not ready after {timeout_s:g} s"
        return self._failure

    async def events(self, life: str, after: int, wait_s: float) -> tuple[str, list[tuple[int, ClusterEvent]]]:
        """Numbered events behind number `after` of this life; waits `wait_s` for one if there is none. The first call,
        and one behind an actor that has died, gets all that are kept, and this life's name to go on with."""
        after = after if life == self._life else 0
        if self._num_events <= after:
            self._told.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._told.wait()
        return self._life, [(number, event) for number, event in self._events if number > after]

    def facts(self) -> NodeFacts:
        """What the process is now."""
        process = self._process
        return NodeFacts(
            name=self._order.name,
            group=self._order.group,
            host=self._host,
            node_id=self._node_id,
            pid=process.pid if process else 0,
            running=process is not None and process.running,
            starts=self._starts,
            devices=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            ports=ports_of(process.ready) if process and self._order.name == ROUTER and process.ready else {},
            log=str(self._order.log_path),
            role=None if self._order.name == ROUTER else read_role(self._order.role_path, role_of(self._order.name)),
        )

    def order(self) -> ProcessOrder:
        """What this was made from: whoever attaches to the cluster learns it from its router."""
        return self._order

    def log_tail(self, num_lines: int) -> str:
        """The last lines of its log."""
        return self._process.log_tail(num_lines) if self._process else ""

    async def stop(self, grace_s: float) -> bool:
        """Drain it; it stays ended. False when it had to be killed after `grace_s`."""
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.gather(self._beginning, return_exceptions=True)
        clean = await self._process.stop(grace_s) if self._process else True
        if self._order.name == ROUTER:
            RunDir(self._order.root).clear()
        for path in (self._order.secret_path, self._order.role_path, self._order.directory / _NOTE_NAME):
            path.unlink(missing_ok=True)
        # For those who watch, and have not asked for it.
        self._tell(ClusterEvent("stopped", self._order.name, "has been stopped"))
        return clean

    async def _begin(self) -> None:
        order, directory = self._order, self._order.directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        was_ready = await self._end_predecessor()
        if not was_ready:
            order.role_path.unlink(missing_ok=True)  # of another cluster
        order.secret_path.unlink(missing_ok=True)
        write_secret_file(order.secret_path, order.secret)
        await self._find_model()
        self._process = KeptProcess(
            order.name,
            self._argv,
            order.log_path,
            self._on_process_event,
            working_dir=directory,
            start_timeout_s=order.spec.start_timeout_s,
        )
        wait = RestartWait()
        while True:
            try:
                await self._process.start(order.spec.start_timeout_s)
                break
            except LaunchError as error:
                # The first start of all is its launcher's business; a later one has nobody else.
                if not (was_ready and order.spec.restart):
                    raise
                wait_s = wait.after(0.0)
                self._tell(ClusterEvent("died", order.name, str(error)))
                self._tell(ClusterEvent("restarting", order.name, f"in {wait_s:g} s"))
                await asyncio.sleep(wait_s)
        self._process.keep(restart=order.spec.restart)

    async def _find_model(self) -> None:
        """Prepare the model here if it is not, as on the first node of a new machine."""
        if self._spec.model_dir.is_dir() or self._order.name == ROUTER:
            return
        self._tell(ClusterEvent("progress", self._order.name, f"preparing the model on {self._host}"))
        prepared = await prepare_model(
            self._order.model_source,
            self._order.cache_dir,
            lambda stage, share: self._tell(ClusterEvent("progress", self._order.name, f"{stage} ({share:.0%})")),
            command=self._order.prepare_command or PREPARE_COMMAND,
            weight_dtype=self._order.weight_dtype,
        )
        self._spec = replace(self._spec, model_dir=prepared.path)

    def _argv(self) -> tuple[str, ...]:
        order = self._order
        if order.name != ROUTER:
            return self._spec.worker_argv(order.name, order.secret_path, order.routers, self._host, order.role_path)
        ports = {"http_port": self._spec.http_port, "grpc_port": self._spec.grpc_port, "internal_port": 0}
        note = self._note()
        if note.get("run_id") == order.run_id:
            ports |= note["ports"]
        return self._spec.router_argv(order.secret_path, ports, self._host)

    def _on_process_event(self, event: ClusterEvent) -> None:
        if event.kind == "ready":
            self._starts += 1
            with suppress(OSError):  # a full disk is no reason to watch it no more
                self._note_life(event)
        self._tell(replace(event, text=f"{event.text}, on {self._host}") if event.kind == "ready" else event)

    def _note_life(self, event: ClusterEvent) -> None:
        order, pid = self._order, event.details["pid"]
        ports = ports_of(event.details) if order.name == ROUTER else {}
        note = {"run_id": order.run_id, "pid": pid, "started": process_start_ticks(pid), "ports": ports}
        temporary = order.directory / f".{_NOTE_NAME}"
        temporary.write_text(json.dumps(note))
        temporary.rename(order.directory / _NOTE_NAME)
        if ports:
            RunDir(order.root).write_state(self._state(ports, pid))

    def _state(self, ports: dict[str, int], pid: int) -> dict[str, Any]:
        """What commands on the router's node find, as they find a local cluster's."""
        spec = self._spec
        return {
            "model": spec.served_model_name,
            "model_dir": str(spec.model_dir),
            "http_address": join_host_port(spec.local_host, ports["http_port"]),
            "grpc_address": join_host_port(spec.local_host, ports["grpc_port"]),
            "internal_addresses": list(spec.internal_addresses(self._host, ports)),
            "secret_file": str(self._order.secret_path),
            "ray_cluster": self._order.options.cluster,
            "ray_address": self._order.options.address,
            "processes": [{"name": ROUTER, "pid": pid, "log": str(self._order.log_path)}],
        }

    async def _end_predecessor(self) -> bool:
        """Wait for the process of the life before, then kill it. Whether that life was one of this same cluster."""
        note = self._note()
        if not note:
            return False
        deadline = time.monotonic() + ORPHAN_GRACE_S + 1.0
        while process_start_ticks(note["pid"]) == note["started"]:
            if time.monotonic() > deadline + _KILL_GRACE_S:
                raise LaunchError(f"process {note['pid']} of the life before cannot be ended")
            if time.monotonic() > deadline:
                with suppress(ProcessLookupError):
                    os.kill(note["pid"], signal.SIGKILL)
            await asyncio.sleep(_LOOK_INTERVAL_S)
        return bool(note["run_id"] == self._order.run_id)

    def _note(self) -> dict[str, Any]:
        try:
            note: dict[str, Any] = json.loads((self._order.directory / _NOTE_NAME).read_text())
        except (OSError, ValueError):
            return {}
        return note if {"run_id", "pid", "started", "ports"} <= note.keys() and note["started"] is not None else {}

    def _tell(self, event: ClusterEvent) -> None:
        self._num_events += 1
        self._events.append((self._num_events, event))
        self._told.set()
