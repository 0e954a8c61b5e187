"""A router and its workers as processes of this host: start in order, watch, restart, add, remove, stop in order.

1. The router starts and says which ports it took. 2. All workers start together and dial it. 3. The cluster is up
when the router's /ready answers 200. 4. A process that dies is reported and, unless told otherwise, started again
after a growing wait; the router keeps its ports. 5. Stop: the router drains, then the workers; whoever misses its
deadline is killed. Only own children are ever signalled. 6. The router can be replaced: the next one starts beside it,
on the same two ports, which the launcher holds; workers find both through a file that names them.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from kvferry.cluster_spec import INTERNAL_HOST, MAX_LOCAL_WORKERS, ClusterSpec, role_of
from kvferry.launchers.kept_process import KeptProcess
from kvferry.launchers.launcher import ROUTER, ClusterEvent, WorkerProcess
from kvferry.launchers.readiness import ports_of, wait_serving
from kvferry.run_dir import RunDir
from runtime.child_process import LaunchError, describe_exit
from runtime.grpc_life import join_host_port
from runtime.ports import free_run, hold_port, port_of
from runtime.process import SUCCESSOR_SIGNAL
from runtime.role_file import Role, read_role
from runtime.router_names import FILE_PREFIX, write_routers_file
from runtime.secret import read_secret_file

_WORKER_EXIT_GRACE_S = 10.0
_SHARED = ("--share-ports",)


class LocalCluster:
    """A `Launcher`. One cluster, one life. Event-loop thread only."""

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
        self._processes: dict[str, KeptProcess] = {}
        self._leaving: KeptProcess | None = None  # the router before the one there is, while it drains
        self._held: list[socket.socket] = []
        self._is_up = False

    @property
    def http_address(self) -> str:
        """See `Launcher`."""
        return join_host_port(self._spec.local_host, self._ports["http_port"])

    @property
    def grpc_address(self) -> str:
        """See `Launcher`."""
        return join_host_port(self._spec.local_host, self._ports["grpc_port"])

    @property
    def spec(self) -> ClusterSpec:
        """See `Launcher`."""
        return self._spec

    @property
    def secret(self) -> bytes:
        """See `Launcher`."""
        return read_secret_file(self._run_dir.secret_path)

    @property
    def internal_addresses(self) -> tuple[str, ...]:
        """See `Launcher`."""
        return self._spec.internal_addresses(INTERNAL_HOST, self._ports)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {name: process.pid for name, process in self._processes.items()}

    @property
    def router_lost(self) -> asyncio.Event:
        """See `Launcher`."""
        return self._processes[ROUTER].lost

    def workers(self) -> tuple[WorkerProcess, ...]:
        """See `Launcher`."""
        return tuple(
            WorkerProcess(name, self._role_now(name), process.pid, process.running)
            for name, process in self._processes.items()
            if name != ROUTER
        )

    async def start(self) -> None:
        """See `Launcher`."""
        deadline = time.monotonic() + self._spec.start_timeout_s
        self._log_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._hold_ports()
            await self._launch(ROUTER, deadline)
            self._ports = ports_of(self._processes[ROUTER].ready)
            write_routers_file(self._run_dir.routers_path, self.internal_addresses)
            async with asyncio.TaskGroup() as group:
                for worker_id in self._spec.worker_ids:
                    group.create_task(self._launch(worker_id, deadline))
            await wait_serving(self._spec, self._ports["http_port"], deadline, self._check_alive)
        except BaseException as error:
            await self.kill()
            if isinstance(error, BaseExceptionGroup) and (failures := error.subgroup(LaunchError)):
                raise _first_leaf(failures) from None
            raise
        self._is_up = True
        self._write_state()
        for process in self._processes.values():
            process.keep(restart=self._spec.restart)
        self._tell("up", "cluster", f"{self._spec.http_scheme}://{self.http_address} and gRPC {self.grpc_address}")

    async def add(self, role: Role) -> str:
        """See `Launcher`."""
        if len(self._processes) > MAX_LOCAL_WORKERS:
            raise LaunchError(f"there are {MAX_LOCAL_WORKERS} workers on this host, and no more are started")
        name = free_name(role, self._processes)
        try:
            await self._launch(name, time.monotonic() + self._spec.start_timeout_s)
        except BaseException:
            del self._processes[name]
            raise
        self._write_state()
        self._processes[name].keep(restart=self._spec.restart)
        return name

    async def remove(self, name: str) -> bool:
        """See `Launcher`."""
        if name == ROUTER:
            raise KeyError(name)
        process = self._processes[name]
        self._tell("stopping", name, "draining")
        clean = await process.stop(self._spec.drain_timeout_s + _WORKER_EXIT_GRACE_S)
        del self._processes[name]
        # Another worker may have its name one day.
        self._run_dir.role_path(name).unlink(missing_ok=True)
        self._write_state()
        self._tell("stopped", name, "has left the cluster")
        return clean

    async def replace_router(self) -> None:
        """Start another router beside the one there is, and let that one go once every worker that runs is attached to
        the other. Clients find either at the same ports; no request is lost. Neither `add` nor `remove` meanwhile.

        Raises LaunchError when it does not come up; the one there is stays then.
        """
        secret, routers, known = self._run_dir.secret_path, self._run_dir.routers_path, self.internal_addresses
        try:
            ports = {**self._ports, "internal_port": free_run(INTERNAL_HOST, self._spec.num_routers)}
        except OSError as error:
            raise LaunchError(f"no other router can be started: {error}") from None
        awaited: tuple[str, ...] = (f"--await-workers={sum(worker.running for worker in self.workers())}",)
        old = self._processes[ROUTER]
        new = self._kept(ROUTER, lambda: (*self._spec.router_argv(secret, ports), *_SHARED, *awaited))
        try:
            write_routers_file(routers, (*known, *self._spec.internal_addresses(INTERNAL_HOST, ports)))
            await new.start(self._spec.start_timeout_s)
        except BaseException:
            write_routers_file(routers, known)
            raise
        # When it is started again one day, there may be fewer workers to wait for.
        awaited = ()
        new.lost, self._leaving = old.lost, old
        self._processes[ROUTER], self._ports = new, ports
        new.keep(restart=self._spec.restart)
        write_routers_file(routers, self.internal_addresses)
        self._write_state()
        if not await old.stop(self._spec.drain_timeout_s + _WORKER_EXIT_GRACE_S, SUCCESSOR_SIGNAL):
            self._tell("killed", ROUTER, "the router before did not end in time")
        self._leaving = None

    async def stop(self) -> bool:
        """See `Launcher`."""
        self._is_up = False
        self._tell("stopping", "cluster", "draining")
        # The router goes first: it refuses new requests and waits for the running ones, which need the workers.
        clean = await self._processes[ROUTER].stop(self._spec.drain_timeout_s + _WORKER_EXIT_GRACE_S)
        workers = [one.stop(_WORKER_EXIT_GRACE_S) for name, one in self._processes.items() if name != ROUTER]
        clean = all([*await asyncio.gather(*workers), clean])
        await self._let_ports_go()
        self._run_dir.clear()
        self._tell("stopped", "cluster", "all processes have ended")
        return clean

    async def kill(self) -> None:
        """See `Launcher`."""
        self._is_up = False
        await asyncio.gather(*(process.kill() for process in self._processes.values()))
        await self._let_ports_go()
        self._run_dir.clear()

    def _hold_ports(self) -> None:
        """Choose the two that clients know, and keep everybody else from them while a router is away. Routers of this
        launcher share them. Raises LaunchError when another process has one."""
        for name in ("http_port", "grpc_port"):
            host, port = self._spec.host, self._ports[name]
            try:
                self._held.append(hold_port(host, port))
            except OSError as error:
                raise LaunchError(f"--{name.replace('_', '-')} {port}: cannot listen there: {error}") from None
            self._ports[name] = port_of(self._held[-1])

    async def _let_ports_go(self) -> None:
        if self._leaving is not None:
            await self._leaving.kill()
        for held in self._held:
            held.close()
        self._held.clear()

    async def _launch(self, name: str, deadline: float) -> None:
        process = self._processes[name] = self._kept(name, lambda: self._argv(name))
        await process.start(max(deadline - time.monotonic(), 0.001))

    def _kept(self, name: str, argv: Callable[[], Sequence[str]]) -> KeptProcess:
        return KeptProcess(
            name,
            argv,
            self._log_dir / f"{name}.log",
            self._on_process_event,
            working_dir=self._run_dir.path,
            start_timeout_s=self._spec.start_timeout_s,
        )

    def _argv(self, name: str) -> tuple[str, ...]:
        secret = self._run_dir.secret_path
        if name == ROUTER:
            return (*self._spec.router_argv(secret, self._ports), *_SHARED)
        routers, role_file = f"{FILE_PREFIX}{self._run_dir.routers_path}", self._run_dir.role_path(name)
        return self._spec.worker_argv(name, secret, routers, role_file=role_file)

    def _role_now(self, name: str) -> Role:
        return read_role(self._run_dir.role_path(name), role_of(name))

    def _check_alive(self) -> None:
        for process in self._processes.values():
            if process.exit_status is not None:
                what = f"{process.name} {describe_exit(process.exit_status)} while starting"
                raise LaunchError(f"{what}:\n{process.log_tail()}")

    def _on_process_event(self, event: ClusterEvent) -> None:
        if self._is_up:
            with suppress(OSError):  # a full disk is no reason to watch nobody any more
                self._write_state()
        self._on_event(event)

    def _write_state(self) -> None:
        processes = [
            {"name": name, "pid": process.pid, "log": str(process.log_path), **process.ready}
            for name, process in self._processes.items()
        ]
        self._run_dir.write_state(
            {
                "model": self._spec.served_model_name,
                "model_dir": str(self._spec.model_dir),
                "http_address": self.http_address,
                "grpc_address": self.grpc_address,
                "internal_addresses": list(self.internal_addresses),
                "secret_file": str(self._run_dir.secret_path),
                "processes": processes,
            }
        )

    def _tell(self, kind: str, name: str, text: str) -> None:
        self._on_event(ClusterEvent(kind, name, text))


def free_name(role: Role, taken: Iterable[str]) -> str:
    """The first of `decode-0`, `decode-1`, ... that is not taken."""
    names = set(taken)
    index = 0
    while f"{role}-{index}" in names:
        index += 1
    return f"{role}-{index}"


def _first_leaf(group: "BaseExceptionGroup[LaunchError]") -> LaunchError:
    first = group.exceptions[0]
    return first if isinstance(first, LaunchError) else _first_leaf(first)
