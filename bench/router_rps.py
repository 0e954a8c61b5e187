"""What a router costs: the time it adds to a stream, and its CPU, beside other routers. No model computes anything.

One router process on one core; the load and a mock of the workers, which emits 16 tokens a request, share another. Each
peer runs in an environment of its own, kept in .peers/NAME or given by --peer-env NAME=PYTHON; how to make them is in
docs/benchmarks.md. A peer that cannot be started is reported as missing, and the run goes on without it.
"""

import argparse
import asyncio
import os
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import uvloop

from bench.common.harness import MIN_PAIRS, BenchmarkError, Better, Options, Pair, Report, summarise
from bench.common.origin import ROOT
from bench.common.router_peers import NUM_TOKENS, PEERS, Backend, Cpus, Running, start_kvferry
from bench.common.router_process import RouterDied
from bench.common.stream_load import Streamed, StreamLoad

_FLAT_STEP_S, _PACED_STEP_S = 0.001, 0.005
_CONCURRENT = 64
_PACED_PER_S, _LATENCY_PER_S = 88.0, 200.0
_SETTLE_S = 0.25


@dataclass(frozen=True, slots=True)
class Sizes:
    """Requests of one sample in each mode."""

    flat: int
    paced: int
    latency: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One mode at one router."""

    results: list[Streamed]
    cpu_s: float
    held: dict[str, list[float]]

    def added_ms(self, *, first: bool) -> list[float]:
        """What each request took beyond what the mock itself took for it, sorted: to the first chunk, or in all."""
        place = 0 if first else 1
        return sorted(
            1e3 * ((one.first_s if first else one.whole_s) - self.held[one.request_id][place]) for one in self.results
        )

    @property
    def cpu_s_per_1000_requests(self) -> float:
        return 1e3 * self.cpu_s / len(self.results)

    @property
    def cpu_s_per_1000_chunks(self) -> float:
        return 1e3 * self.cpu_s / sum(one.chunks for one in self.results)


class Bench:
    """All routers that run, sampled in turn. One thread."""

    def __init__(self, backend: Backend, cpus: Cpus, report: Report, options: Options) -> None:
        self._backend = backend
        self._cpus = cpus
        self._report = report
        self._options = options
        self._running: list[Running] = []
        self._stack = ExitStack()

    def start(self, interpreters: dict[str, str]) -> None:
        """kvferry, and each peer that has an interpreter. Raises RouterDied if kvferry fails."""
        self._running.append(start_kvferry(sys.executable, self._backend, self._cpus, self._stack))
        for name, begin in PEERS.items():
            if name not in interpreters:
                self._report.missing(name, f"it has no environment: --peer-env {name}=PYTHON, or .peers/{name}")
                continue
            try:
                self._running.append(begin(interpreters[name], self._backend, self._cpus, self._stack))
            except (RouterDied, OSError) as error:
                self._report.missing(name, str(error))

    def close(self) -> None:
        """End all of them."""
        self._stack.close()

    async def measure(self, sizes: Sizes, rounds: int) -> None:
        """All modes. The first round of each is not counted."""
        flat = await self._rounds("flat", _FLAT_STEP_S, None, sizes.flat, rounds)
        self._add_cpu("flat", flat)
        paced = await self._rounds("paced", _PACED_STEP_S, _PACED_PER_S, sizes.paced, rounds)
        self._add_cpu("paced", {name: of for name, of in paced.items() if name != "dynamo"})
        at_rate = await self._rounds("200/s", _PACED_STEP_S, _LATENCY_PER_S, sizes.latency, rounds)
        self._add_latency({name: of for name, of in at_rate.items() if name != "dynamo"})

    async def _rounds(
        self, mode: str, step_s: float, per_s: float | None, num_requests: int, rounds: int
    ) -> dict[str, list[Sample]]:
        self._backend.ask("pace", step_s=step_s)
        samples: dict[str, list[Sample]] = {}
        for number in range(rounds + 1):
            for router in list(self._running):
                if per_s is not None and not router.knows_held:
                    continue  # Its backend has a pace of its own.
                try:
                    sample = await self._sample(router, per_s, num_requests)
                except (BenchmarkError, OSError, TimeoutError, ExceptionGroup) as error:
                    self._lose(router, error)
                    continue
                if number:
                    samples.setdefault(router.name, []).append(sample)
        for name, taken in samples.items():
            requests = sum(len(one.results) for one in taken)
            chunks = sum(streamed.chunks for one in taken for streamed in one.results)
            self._report.note(f"{mode}: {name}: {chunks / requests:.1f} chunks of {NUM_TOKENS} tokens a request")
        return samples

    async def _sample(self, router: Running, per_s: float | None, num_requests: int) -> Sample:
        load = StreamLoad(router.target)
        await asyncio.sleep(_SETTLE_S)
        self._backend.ask("held")
        before = router.process.cpu_s()
        try:
            if per_s is None:
                results = await load.at_once(_CONCURRENT, num_requests)
            else:
                results = await load.at_rate(per_s, num_requests)
        finally:
            await load.close()
        return Sample(results, router.process.cpu_s() - before, self._backend.ask("held")["held"])

    def _lose(self, router: Running, error: Exception) -> None:
        """A peer that fails is out from now on. Raises BenchmarkError if it is kvferry."""
        if router.name == "kvferry":
            raise BenchmarkError(f"kvferry failed: {error}") from error
        self._running.remove(router)
        self._report.missing(router.name, str(error) or type(error).__name__)

    def _add_cpu(self, variant: str, samples: dict[str, list[Sample]]) -> None:
        for metric in ("cpu_s_per_1000_requests", "cpu_s_per_1000_chunks"):
            values = {name: [float(getattr(one, metric)) for one in taken] for name, taken in samples.items()}
            self._add(metric, variant, "s", values)

    def _add_latency(self, samples: dict[str, list[Sample]]) -> None:
        for variant, first in (("200rps", False), ("200rps:first-chunk", True)):
            for metric, share in (("added_ms_p50", 0.5), ("added_ms_p99", 0.99)):
                values = {
                    name: [percentile(one.added_ms(first=first), share) for one in taken]
                    for name, taken in samples.items()
                }
                self._add(metric, variant, "ms", values)

    def _add(self, metric: str, variant: str, unit: str, values: dict[str, list[float]]) -> None:
        mine = values["kvferry"]
        self._report.note(f"{metric} {variant}: kvferry {statistics.median(mine):.4g} {unit}")
        for name, theirs in values.items():
            if name == "kvferry" or len(theirs) != len(mine):
                continue
            pairs = [Pair(a, b) for a, b in zip(mine, theirs, strict=True)]
            self._report.add(summarise(metric, variant, unit, Better.LOWER, name, pairs, self._options.seed))


def percentile(ordered: list[float], share: float) -> float:
    """The value below which this share of a sorted list lies (nearest rank)."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def interpreters(given: list[str]) -> dict[str, str]:
    """The interpreter of each peer that has one. Raises ValueError for a --peer-env that is not NAME=PYTHON."""
    found = {name: str(path) for name in PEERS if (path := ROOT / ".peers" / name / "bin" / "python").exists()}
    for entry in given:
        name, equals, python = entry.partition("=")
        if name not in PEERS or not equals or not python:
            raise ValueError(f"--peer-env takes NAME=PYTHON with a NAME of {', '.join(PEERS)}, not {entry}")
        found[name] = python
    return found


def parse(argv: list[str] | None) -> tuple[Options, argparse.Namespace]:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-env", action="append", default=[], metavar="NAME=PYTHON", help="may be repeated")
    options, given = Options.parse(parser, argv)
    try:
        given.interpreters = interpreters(given.peer_env)
    except ValueError as error:
        parser.error(str(error))
    return options, given


def main(argv: list[str] | None = None) -> None:
    """Run it. Raises BenchmarkError or RouterDied when kvferry itself fails."""
    options, given = parse(argv)
    available = sorted(os.sched_getaffinity(0))
    cpus = Cpus(router=available[-1], others=available[0])
    os.sched_setaffinity(0, {cpus.others})
    sizes = options.pick(Sizes(128, 44, 100), Sizes(640, 264, 600), Sizes(1920, 880, 2000))
    with Report(options) as report, Backend.running(cpus) as backend:
        bench = Bench(backend, cpus, report, options)
        try:
            bench.start(given.interpreters)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(bench.measure(sizes, options.pick(MIN_PAIRS, MIN_PAIRS, 11)))
        finally:
            bench.close()


if __name__ == "__main__":
    main()
