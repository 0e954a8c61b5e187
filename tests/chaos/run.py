"""`python -m tests.chaos.run`: a cluster in namespaces of its own, under load, while things go wrong.

1. One router, two prefill and two decode workers start, each in a network of its own. 2. Each case is answered once
while nothing is wrong: that is what every later answer must be. 3. Clients ask without pause while the faults of a
seeded plan come and go; after each step the cluster has to become whole again. 4. The clients stop; nothing may be held
any more; the processes are told to end, and none may be left.

Exit status 0: nothing happened that must not. 1: something did. 3: such namespaces cannot be had here.
"""

import argparse
import asyncio
import itertools
import json
import logging
import sys
import tempfile
import time
from pathlib import Path

import httpx

from bench.common.soak_process import at_rest
from kvferry.client.asynchronous import AsyncClient
from kvferry.client.retry import ONE_TRY
from kvferry.model_prep import prepare_model
from runtime.errors import KvferryError
from tests.chaos import world as worlds
from tests.chaos.faults import inject
from tests.chaos.load import Ending, Load, cases, undisturbed
from tests.chaos.nodes import GRPC_PORT, HTTP_PORT, Nodes, other_processes
from tests.chaos.plan import LONG, NODES, ROUTER, SHORT, WORKERS, FaultKind, Step, steps
from tests.chaos.report import FaultRecord, Report, percentiles
from tests.support.live_cluster import TINY_REAL, resting_problems

MODULE = "tests.chaos.run"
NOT_PERMITTED_STATUS = 3
PACES = {"long": LONG, "short": SHORT}
NUM_CASES, NUM_CLIENTS = 12, 6
# A worker that was partitioned for long is cut off, dials again, and may have to wait for the other end to notice.
RECOVERY_LIMIT_S = 60.0
DISK_BYTES = 64 << 20
_LOOK_S = 0.1
_ORPHAN_GRACE_S = 5.0
_EXCEPTIONS = ("Traceback (most recent", "never retrieved", "was destroyed but it is pending")


async def chaos(arguments: argparse.Namespace, directory: Path) -> Report:
    """One whole run, inside the namespaces."""
    report = Report(arguments.seed, arguments.pace)
    started = time.monotonic()
    prepared = await prepare_model(str(TINY_REAL), arguments.cache_dir or directory / "models", lambda *_: None)
    world = worlds.World(directory / "disk", DISK_BYTES, arguments.seed)
    nodes = Nodes(world, prepared.path, directory)
    try:
        await nodes.start()
        _say(f"the cluster is up after {time.monotonic() - started:.1f} s")
        await _disturb(arguments, nodes, world, report)
        await nodes.stop()
    finally:
        await nodes.kill()
        world.close()
    report.violations += nodes.surprises
    report.violations += [f"still running: {command}" for command in (await _orphans()).values()]
    report.violations += _lost_exceptions(world.disk)
    report.duration_s = time.monotonic() - started
    return report


async def _disturb(arguments: argparse.Namespace, nodes: Nodes, world: worlds.World, report: Report) -> None:
    address = worlds.ADDRESSES[ROUTER]
    limits = httpx.Limits(max_connections=4 * NUM_CLIENTS)
    async with (
        httpx.AsyncClient(base_url=f"http://{address}:{HTTP_PORT}", timeout=None, limits=limits) as http,
        AsyncClient(f"{address}:{GRPC_PORT}", timeout_s=2.0, retry=ONE_TRY) as client,
    ):
        watch = _Watch(client, nodes)
        await watch.whole()
        expected = [(case, await undisturbed(http, case)) for case in cases(arguments.seed, NUM_CASES)]
        load = Load(http, expected, arguments.seed)
        load.start(NUM_CLIENTS)
        await _play(arguments, _Stage(nodes, world, watch, load), report)
        await load.stop()
        report.requests = load.counts()
        report.failures = load.details(Ending.FAILED)
        times_s = load.times_s()
        median_s, late_s = percentiles(times_s)
        report.request_s = {"p50": median_s or 0.0, "p99": late_s or 0.0, "most": max(times_s, default=0.0)}
        report.violations += [f"wrong text: {detail}" for detail in load.details(Ending.WRONG)]
        report.violations += [f"hung: {detail}" for detail in load.details(Ending.HUNG)]
        report.violations += [f"not given back: {what}" for what in await _leaks(http, client)]


class _Watch:
    """Looks at the cluster from outside."""

    def __init__(self, client: AsyncClient, nodes: Nodes) -> None:
        self._client = client
        self._nodes = nodes

    async def whole(self) -> bool:
        """Wait until all processes run and the router has all workers, those that run now, ready; False when it takes
        too long. It can only be asked."""
        deadline = time.monotonic() + RECOVERY_LIMIT_S
        while time.monotonic() < deadline:
            try:
                state = await self._client.cluster_state()
            except KvferryError:
                state = None
            ready = {one.worker_id: one.pid for one in state.workers if one.state == "ready"} if state else {}
            running = self._nodes.pids
            if len(running) == len(NODES) and ready == {name: running[name] for name in WORKERS}:
                return True
            await asyncio.sleep(_LOOK_S)
        return False


class _Stage:
    """All that a step of the plan needs."""

    def __init__(self, nodes: Nodes, world: worlds.World, watch: _Watch, load: Load) -> None:
        self.nodes, self.world, self.watch, self.load = nodes, world, watch, load

    async def play(self, step: Step) -> float | None:
        """The faults of a step, all at once; how long it then took until everything was well."""
        await asyncio.sleep(step.calm_s)
        await asyncio.gather(*(inject(fault, self.nodes, self.world) for fault in step.faults))
        over = time.monotonic()
        while time.monotonic() - over < RECOVERY_LIMIT_S:
            if await self.watch.whole() and (await self.load.one()).ending is Ending.GOOD:
                return time.monotonic() - over
        return None


async def _play(arguments: argparse.Namespace, stage: _Stage, report: Report) -> None:
    began = time.monotonic()
    kinds = arguments.kinds or tuple(FaultKind)
    for step in itertools.islice(steps(arguments.seed, PACES[arguments.pace], kinds), arguments.steps):
        at_s = time.monotonic() - began
        if arguments.steps is None and at_s > arguments.duration:
            break
        faults = tuple(map(str, step.faults))
        asked = len(stage.load.outcomes)
        recovery_s = await stage.play(step)
        report.records.append(FaultRecord(at_s, faults, recovery_s))
        longest_s = max((one.ended - one.began for one in stage.load.outcomes[asked:]), default=0.0)
        well = "NOT WELL AGAIN" if recovery_s is None else f"well after {recovery_s:.2f} s"
        _say(f"{at_s:7.1f} s  {'; '.join(faults)} -> {well}, longest request {longest_s:.1f} s")
        if recovery_s is None:
            report.violations.append(f"not whole {RECOVERY_LIMIT_S:g} s after {'; '.join(faults)}")
            break


async def _leaks(http: httpx.AsyncClient, client: AsyncClient) -> list[str]:
    """What is still held at rest, by the router's counters and by the workers' pools."""
    counters = await at_rest(http)
    held = [f"{name} is {value:g}" for name, value in counters.items() if value]
    return held + resting_problems(await client.cluster_state())


async def _orphans() -> dict[int, str]:
    """What is left after a while: a process that is ending needs a moment, and can only be looked at."""
    for _ in range(round(_ORPHAN_GRACE_S / _LOOK_S)):
        if not other_processes():
            break
        await asyncio.sleep(_LOOK_S)
    return other_processes()


def _lost_exceptions(disk: Path) -> list[str]:
    found = []
    for path in sorted(disk.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()
        for index, line in enumerate(lines):
            if any(sign in line for sign in _EXCEPTIONS):
                found.append(
                    f"an exception that nobody handled, in {path.name}:\n" + "\n".join(lines[index : index + 25])
                )
                break
    return found


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Faults under load, from a seed.")
    parser.add_argument("--seed", type=int, default=1, help="What the plan is drawn from. Default: %(default)s.")
    parser.add_argument("--duration", type=float, default=900.0, help="Seconds of faults. Default: %(default)g.")
    parser.add_argument("--steps", type=int, help="So many steps instead of a duration.")
    parser.add_argument("--pace", choices=PACES, default="long", help="How long faults last. Default: %(default)s.")
    parser.add_argument("--kinds", type=FaultKind, nargs="+", metavar="KIND", help=f"Only these kinds. Of: {', '.join(kind.value for kind in FaultKind)}.")  # fmt: skip # noqa: E501
    parser.add_argument("--json", type=Path, metavar="FILE", help="Where the report goes as JSON.")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="Copy the logs there.")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="Where the model is prepared. Default: anew.")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Enter the namespaces, and play there."""
    arguments = _arguments()
    if not arguments.inside:
        if reason := worlds.why_not():
            _say(reason)
            return NOT_PERMITTED_STATUS
        return worlds.enter(MODULE, ["--inside", *sys.argv[1:]])
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="kvferry-chaos-") as name:
        report = asyncio.run(chaos(arguments, Path(name)))
        if arguments.keep:
            _copy_logs(Path(name) / "disk", arguments.keep)
        worlds.unmount(Path(name) / "disk")
    if arguments.json:
        arguments.json.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    for line in report.lines():
        _say(line)
    return 0 if report.is_good else 1


def _copy_logs(disk: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in disk.glob("*.log"):
        (target / path.name).write_bytes(path.read_bytes())


if __name__ == "__main__":
    sys.exit(main())
