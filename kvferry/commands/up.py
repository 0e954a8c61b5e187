"""`kvferry up`: a whole cluster on this machine, until Ctrl-C or SIGTERM."""

import argparse
import asyncio
import secrets
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from kvferry.cluster_file import add_config_flags, cluster_yaml, settle
from kvferry.cluster_spec import ClusterSpec, RoleCommands
from kvferry.commands.autoscaling import add_autoscale_arguments, autoscale_options
from kvferry.commands.base import Command, absolute_path
from kvferry.commands.door import add_door_arguments, door_fields
from kvferry.commands.dtypes import add_dtype_arguments
from kvferry.commands.in_ray import add_placement_arguments, add_ray_arguments, ray_options
from kvferry.commands.observing import add_observing_arguments, observing_fields
from kvferry.commands.routing import add_router_arguments, router_flags
from kvferry.commands.transfer import add_transfer_arguments, transfer_fields
from kvferry.console import Console
from kvferry.launchers.launcher import ROUTER, ClusterEvent, Launcher
from kvferry.launchers.local import LocalCluster
from kvferry.launchers.ray_cluster import RayCluster
from kvferry.launchers.ray_link import RayLink, connect
from kvferry.launchers.ray_node import ProcessOrder
from kvferry.model_prep import DEFAULT_CACHE_DIR, PREPARE_COMMAND, prepare_model
from kvferry.run_dir import DEFAULT_ROOT, RunDir
from kvferry.scaling.elasticity import Elasticity
from runtime.config import flag_name
from runtime.secret import new_secret

_INTERRUPTED_STATUS = 130


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="Required. A directory, a .gguf file, or smollm2-135m-instruct.")
    parser.add_argument("--served-model-name", help="Name in requests. Default: the model's own.")
    parser.add_argument(
        "--prefill-workers", "--prefill", type=int, default=1, metavar="N", help="How many. Default: 1."
    )
    parser.add_argument("--decode-workers", "--decode", type=int, default=1, metavar="N", help="How many. Default: 1.")
    parser.add_argument("--host", default="127.0.0.1", help="Address the router listens on. Default: %(default)s.")
    parser.add_argument("--http-port", type=int, default=8000, help="OpenAI API; 0 = any free. Default: %(default)s.")
    parser.add_argument("--grpc-port", type=int, default=8001, help="gRPC API; 0 = any free. Default: %(default)s.")
    parser.add_argument("--block-size", type=int, help="Tokens a KV block; a power of two from 8 to 128.")
    parser.add_argument(
        "--num-blocks", type=int, help="Blocks in each worker's KV pool. Default: by free memory, 2 GiB at most."
    )
    parser.add_argument("--token-budget", type=int, help="Most tokens a worker computes in one step.")
    parser.add_argument("--max-num-seqs", type=int, help="Most sequences a worker computes in one step.")
    parser.add_argument("--tensor-parallel", type=int, metavar="N", help="Processes that each worker's model is split over. Default: 1.")  # fmt: skip # noqa: E501
    parser.add_argument("--speculative-tokens", type=int, metavar="N", help="Most tokens that a decoding sequence guesses ahead in a step, from its own text. Default: 0, none.")  # fmt: skip # noqa: E501
    add_dtype_arguments(parser)
    add_transfer_arguments(parser)
    add_door_arguments(parser)
    add_router_arguments(parser)
    add_observing_arguments(parser)
    parser.add_argument("--strict-handoff", action=argparse.BooleanOptionalAction, default=False, help="Fail a request whose hand-off from a prefill worker is not proven whole.")  # fmt: skip # noqa: E501
    parser.add_argument("--cache-dir", type=absolute_path, default=DEFAULT_CACHE_DIR, help="Prepared models. Default: %(default)s.")  # fmt: skip # noqa: E501
    parser.add_argument(
        "--state-dir", type=absolute_path, help="State, secret and logs of this cluster. Default: a new one."
    )
    parser.add_argument("--log-dir", type=absolute_path, help="Logs of its processes. Default: in the state directory.")
    parser.add_argument("--restart", action=argparse.BooleanOptionalAction, default=True, help="Start a process that has died again. Default: on.")  # fmt: skip # noqa: E501
    parser.add_argument(
        "--start-timeout-s",
        "--start-timeout",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="Longest wait until all is up. Default: %(default)g.",
    )
    parser.add_argument("--drain-timeout-s", "--drain-timeout", type=float, default=30.0, metavar="SECONDS", help="Time for running requests to finish at the end. Default: %(default)g.")  # fmt: skip # noqa: E501
    add_ray_arguments(parser, address_flags=("--ray-address", "--address"))
    add_placement_arguments(parser)
    add_autoscale_arguments(parser)
    # Last: every flag above is a key of the file too.
    add_config_flags(parser)


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
        self._spec(Path(), "").validate()
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
        spec = self._spec(model.path, arguments.served_model_name or model.name)
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

    def _spec(self, model_dir: Path, name: str) -> ClusterSpec:
        arguments = self._arguments
        return ClusterSpec(
            model_dir=model_dir,
            served_model_name=name,
            num_prefill=arguments.prefill_workers,
            num_decode=arguments.decode_workers,
            host=arguments.host,
            http_port=arguments.http_port,
            grpc_port=arguments.grpc_port,
            block_size=arguments.block_size,
            num_blocks=arguments.num_blocks,
            token_budget=arguments.token_budget,
            max_num_seqs=arguments.max_num_seqs,
            speculative_tokens=arguments.speculative_tokens,
            tensor_parallel=arguments.tensor_parallel,
            kv_cache_dtype=arguments.kv_cache_dtype,
            strict_handoff=arguments.strict_handoff,
            router={**router_flags(arguments), **arguments.sections["router"]},
            prefill=arguments.sections["prefill"],
            decode=arguments.sections["decode"],
            restart=arguments.restart,
            start_timeout_s=arguments.start_timeout_s,
            drain_timeout_s=arguments.drain_timeout_s,
            commands=self._commands,
            **transfer_fields(arguments),
            **door_fields(arguments),
            **observing_fields(arguments),
        )


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


COMMAND = Command("up", "Start a cluster on this machine.", _add_arguments, _run)
