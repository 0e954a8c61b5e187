"""`kvferry up`: a whole cluster on this machine, until Ctrl-C or SIGTERM."""

import argparse
import asyncio
import secrets
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from kvferry.cluster_file import cluster_yaml, settle
from kvferry.cluster_spec import ClusterSpec, RoleCommands
from kvferry.commands.autoscaling import autoscale_options
from kvferry.commands.base import Command
from kvferry.commands.in_ray import ray_options
from kvferry.commands.up_flags import add_up_arguments, spec_of
from kvferry.console import Console
from kvferry.launchers.launcher import ROUTER, ClusterEvent, Launcher
from kvferry.launchers.local import LocalCluster
from kvferry.launchers.ray_cluster import RayCluster
from kvferry.launchers.ray_link import RayLink, connect
from kvferry.launchers.ray_node import ProcessOrder
from kvferry.model_prep import PREPARE_COMMAND, prepare_model
from kvferry.run_dir import DEFAULT_ROOT, RunDir
from kvferry.scaling.elasticity import Elasticity
from runtime.config import flag_name
from runtime.secret import new_secret

_INTERRUPTED_STATUS = 130


def _run(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.print_config:
        settled = settle(arguments)
        _Up(settled, console, RoleCommands(), PREPARE_COMMAND).check()
        sys.stdout.write(cluster_yaml(settled))
        return 0
    settled = settle(arguments)
    if not settled.ray:
        return asyncio.run(run_up(arguments, console))
    # Before the event loop, whose signal handlers are to be the last ones set.
    link = connect(ray_options(settled), may_start=not settled.detach)
    try:
        return asyncio.run(run_up(arguments, console, link=link))
    finally:
        link.close()


async def run_up(
    arguments: argparse.Namespace,
    console: Console,
    *,
    commands: RoleCommands | None = None,
    prepare_command: tuple[str, ...] = PREPARE_COMMAND,
    link: RayLink | None = None,
) -> int:
    """Prepare, start, wait for a signal, drain. Returns 0 after a clean drain, or with --detach once it serves.

    `link`: the Ray to start it in, with --ray. 130 when interrupted before it was up or by a second signal; 1 when a
    process had to be killed or the router died for good.
    """
    arguments = settle(arguments)
    first, second = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (second if first.is_set() else first).set())
    try:
        up = _Up(arguments, console, commands or RoleCommands(), prepare_command, link)
        return await _up_until(first, second, up)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _up_until(first: asyncio.Event, second: asyncio.Event, up: "_Up") -> int:
    starting = asyncio.create_task(up.start())
    if await _earlier(starting, first):
        cluster = await starting
    else:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return _INTERRUPTED_STATUS
    if isinstance(cluster, RayCluster) and up.detaches:
        await cluster.leave()
        return 0
    async with up.elasticity(cluster):
        lost = asyncio.create_task(cluster.router_lost.wait())
        router_lost = await _earlier(lost, first)
        lost.cancel()
    stopping = asyncio.create_task(cluster.stop())
    if await _earlier(stopping, second):
        return 0 if await stopping and not router_lost else 1
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    await cluster.kill()
    return _INTERRUPTED_STATUS


class _Up:
    """Brings the cluster up and tells the person about it."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        console: Console,
        commands: RoleCommands,
        prepare_command: tuple[str, ...],
        link: RayLink | None = None,
    ) -> None:
        self._arguments = arguments
        self._link = link
        self._console = console
        self._commands = commands
        self._prepare_command = prepare_command
        self._run_dir: RunDir | None = None
        self._log_dir = Path()

    def check(self) -> None:
        """Raises ValueError for flags that do not make a cluster."""
        spec_of(self._arguments, self._commands, Path(), "").validate()
        ray_options(self._arguments)
        autoscale_options(self._arguments)
        for name, needs_ray in (("log_dir", False), ("detach", True)):
            if getattr(self._arguments, name) and self._arguments.ray is not needs_ray:
                raise ValueError(f"{flag_name(name)} goes {'only' if needs_ray else 'not'} with --ray")

    @property
    def detaches(self) -> bool:
        """Whether the cluster is to be left alone once it serves."""
        return bool(self._arguments.detach)

    async def start(self) -> Launcher:
        arguments, console = self._arguments, self._console
        self.check()  # before minutes of preparing
        model = await prepare_model(
            arguments.model,
            arguments.cache_dir,
            ProgressLines(console).show,
            command=self._prepare_command,
            weight_dtype=arguments.weight_dtype,
        )
        spec = spec_of(arguments, self._commands, model.path, arguments.served_model_name or model.name)
        cluster, state_dir = self._launcher(spec)
        await cluster.start()
        console.emit(
            {
                "event": "serving",
                "http_address": cluster.http_address,
                "grpc_address": cluster.grpc_address,
                "state_dir": str(state_dir),
                "pids": cluster.pids,
            }
        )
        for line in how_to_call(spec, cluster.http_address, cluster.grpc_address):
            console.say(line)
        return cluster

    def elasticity(self, cluster: Launcher) -> Elasticity:
        """What may change the cluster while it is up."""
        return Elasticity(
            cluster,
            autoscale_options(self._arguments),
            control_path=self._run_dir.control_path if self._run_dir else None,
            record_path=self._log_dir / "autoscaler.log",
            replace_router=cluster.replace_router if isinstance(cluster, LocalCluster) else None,
            say=self._console.say,
            emit=self._console.emit,
        )

    def _launcher(self, spec: ClusterSpec) -> tuple[Launcher, Path]:
        """What is to run it, and its state directory."""
        arguments, console = self._arguments, self._console

        def show(event: ClusterEvent) -> None:
            show_event(event, console)

        if self._link is None:
            self._run_dir = run_dir = RunDir.create(arguments.state_dir)
            self._log_dir = log_dir = arguments.log_dir or run_dir.path / "logs"
            console.say(f"starting {spec.served_model_name}; logs in {log_dir}")
            return LocalCluster(spec, run_dir, show, log_dir=log_dir), run_dir.path
        self._log_dir = root = arguments.state_dir or DEFAULT_ROOT / f"ray-{arguments.ray_cluster}"
        order = ProcessOrder(
            options=ray_options(arguments),
            run_id=secrets.token_hex(8),
            name=ROUTER,
            group="",
            spec=spec,
            secret=new_secret(),
            root=root,
            routers="",
            model_source=arguments.model,
            cache_dir=arguments.cache_dir,
            weight_dtype=arguments.weight_dtype,
            commands=None if self._commands == RoleCommands() else self._commands,
            prepare_command=None if self._prepare_command == PREPARE_COMMAND else self._prepare_command,
        )
        console.say(f"starting {spec.served_model_name} in Ray; logs in {root} on each node")
        return RayCluster(self._link, order, show), root


class ProgressLines:
    """Shows preparation as one line a stage, so that it reads well in a log too."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""

    def show(self, stage: str, fraction: float) -> None:
        self._console.emit({"event": "progress", "stage": stage, "fraction": fraction})
        if stage != self._stage:
            self._stage = stage
            self._console.say(f"model: {stage} ({fraction:.0%})")


def show_event(event: ClusterEvent, console: Console) -> None:
    """One line a thing that happened."""
    console.emit({"event": event.kind, **{key: value for key, value in asdict(event).items() if key != "kind"}})
    if event.kind != "up":
        console.say(f"{event.name}: {event.kind}, {event.text}")


def how_to_call(spec: ClusterSpec, http_address: str, grpc_address: str) -> list[str]:
    """What to type next; keys and certificates are the reader's to add."""
    model, url = spec.served_model_name, f"{spec.http_scheme}://{http_address}"
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return [
        "",
        f"{model} is served: HTTP {url}/v1, gRPC {grpc_address}. Ctrl-C drains and stops.",
        f"  kvferry chat 'Hello' --receipt --address {grpc_address}",
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        "",
    ]


async def _earlier(task: "asyncio.Task[object]", event: asyncio.Event) -> bool:
    """Whether `task` ends before `event` is set."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        waiting.cancel()


COMMAND = Command("up", "Start a cluster on this machine.", add_up_arguments, _run)
