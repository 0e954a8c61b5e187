"""A small cluster under twice the load that it can carry, by clients of every kind, for ten minutes.

One prefill and two decode workers of the tiny test model, with pools so small that requests wait for room; twice as
many clients as sequences fit. They stream, cancel, disconnect, read slowly, send bodies that are too large, compressed
or wrong, and use tools. Nothing but 503 may be a 5xx, every accepted request must end well with the text that it has
undisturbed, memory must not grow, and every counter must be 0 at the end.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx

from bench.common.failover_cluster import StreamCluster
from bench.common.harness import Options, Report, Result
from bench.common.soak_clients import SoakClients, Tally
from bench.common.soak_process import at_rest, resident_mib

MODEL = Path(__file__).resolve().parents[1] / "tests" / "data" / "tiny-real"
NUM_PREFILL, NUM_DECODE, SEQUENCES_A_WORKER = 1, 2, 8
_FLAGS = ("--max-num-seqs", str(SEQUENCES_A_WORKER), "--num-blocks", "160", "--served-model-name", "tiny-real")
# What the router keeps of the past is as large as it gets before memory is looked at, and not after half of the run.
_CONFIG = "router: {receipts_kept: 256}\n"
_WARM_UP_SHARE = 0.25
_LOOKS = 90
# The test model's own template knows no tools.
_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}{{- 'Call with <tool_call>{"name": ..., "arguments": ...}</tool_call>.' }}
{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}
{%- for message in messages %}{{- '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class Soaked:
    """What became of a soak. `memory`: MiB by process, at equal intervals from the end of the warm-up on."""

    tally: Tally
    left: dict[str, float]
    memory: list[dict[str, float]]


async def soak(cluster: StreamCluster, duration_s: float, num_clients: int, seed: int) -> Soaked:
    """Load for so long, then rest."""
    clients = SoakClients(cluster.base_url.removeprefix("http://"), "tiny-real", seed)
    await clients.learn()
    await clients.send_large()
    begun = time.monotonic()
    running = asyncio.create_task(clients.run(num_clients, begun + duration_s))
    await asyncio.sleep(duration_s * _WARM_UP_SHARE)
    looks = []
    for _ in range(_LOOKS):
        looks.append(memory(cluster))
        await asyncio.sleep(duration_s * (1 - _WARM_UP_SHARE) / _LOOKS)
    await running
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=30) as http:
        left = await at_rest(http)
    return Soaked(clients.tally, left, looks)


def memory(cluster: StreamCluster) -> dict[str, float]:
    """Of each of its processes, in MiB."""
    return {name: resident_mib(pid) for name, pid in cluster.pids().items()}


def none_line(metric: str, variant: str, value: float, unit: str, n: int) -> Result:
    """A number of things that must not be. The ratio is 1 for none and falls with each."""
    ratio = 1 / (1 + value)
    return Result(metric, variant, value, unit, "none", 0, ratio, n, (ratio, ratio))


def report_soak(report: Report, soaked: Soaked) -> None:
    """Its lines, and in words what was wrong."""
    tally, requests = soaked.tally, soaked.tally.ways.total()
    share = tally.finished / max(1, tally.accepted)
    report.add(none_line("server_errors", "all", tally.server_errors, "answers", requests))
    report.add(none_line("odd_answers", "all", tally.odd_answers, "answers", requests))
    report.add(none_line("wrong_texts", "all", tally.wrong_texts, "answers", tally.compared))
    report.add(Result("finished_share", "all", share, "share", "all", 1.0, share, tally.accepted, (share, share)))
    for name, value in soaked.left.items():
        report.add(none_line("left_at_rest", name, value, "", requests))
    for name in soaked.memory[0]:
        report_memory(report, name, [look.get(name, 0.0) for look in soaked.memory])
    report.note(f"ways: {dict(tally.ways.most_common())}")
    report.note(f"statuses: {dict(tally.statuses.most_common())}")
    for kind, text in tally.problems.items():
        report.note(f"{kind}: {text}")


def report_memory(report: Report, name: str, series: Sequence[float]) -> None:
    """What a process keeps, in the last third of the looks and in the first: the least that it had. Above that is what
    was under way, such as large bodies."""
    third = len(series) // 3
    first, last = min(series[:third]), min(series[-third:])
    ratio = first / last if last else 0.0
    report.add(Result("memory_mib", name, last, "MiB", "after_warm_up", first, ratio, third, (ratio, ratio)))
    lows = [min(series[start : start + third // 3]) for start in range(0, len(series), third // 3)]
    report.note(f"memory of {name}, MiB: at least {' '.join(f'{low:.1f}' for low in lows)}; at most {max(series):.0f}")


def with_tools(directory: Path) -> Path:
    """The model with a template that knows tools."""
    model = directory / "model"
    shutil.copytree(MODEL, model)
    (model / "chat_template.jinja").write_text(_TEMPLATE)
    return model


def main(argv: list[str] | None = None) -> None:
    """Run it. Raises BenchmarkError when the cluster does not come up; whatever goes wrong then is counted instead."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.0, help="length of the load")
    parser.add_argument("--clients", type=int, default=2 * NUM_DECODE * SEQUENCES_A_WORKER, help="at the same time")
    options, given = Options.parse(parser, argv)
    duration_s = given.seconds or options.pick(25.0, 600.0, 3600.0)
    with Report(options) as report, tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        (directory / "soak.yaml").write_text(_CONFIG)
        flags = (*_FLAGS, "--config", str(directory / "soak.yaml"))
        with StreamCluster(directory, with_tools(directory), NUM_PREFILL, NUM_DECODE, *flags) as cluster:
            report_soak(report, asyncio.run(soak(cluster, duration_s, given.clients, options.seed)))


if __name__ == "__main__":
    main()
