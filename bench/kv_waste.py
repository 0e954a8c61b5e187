"""How much of a full KV pool is wasted, and how many sequences it holds, beside two ways of contiguous reservation.

kvferry's real scheduler and block manager serve requests of the lengths of public traces, as many as fit, a token each
a step; no model computes. The same requests are served from contiguous pieces: of the longest length there is, and of
powers of two (a buddy allocator). Nothing is shared between sequences.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from bench.common.harness import BenchmarkError, Better, Options, Pair, Report, summarise
from bench.common.lengths import TRACES, Lengths, longest, read_lengths
from bench.common.reservations import Buddies, Contiguous, FirstFit, Moment
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import SamplingParams, TokenSample
from engine.sequence import Sequence as Request
from kv_cache.block_hash import BlockHasher
from kv_cache.block_manager import BlockManager
from kv_cache.layout import KVDtype

BLOCK_SIZE = 16
# Enough that the pool is what bounds the number of sequences, not the computing of prompts.
TOKEN_BUDGET = 8192
_MAX_WAITING = 8
_POOL_OF_LONGEST = 8  # The pool holds this many sequences of the longest length.
_DRAWN = 20000


class Server(Protocol):
    """A pool and what serves requests from it."""

    def step(self) -> Moment:
        """Compute a step."""
        ...


class Paged:
    """kvferry: its scheduler over its block manager. What would be computed counts as computed."""

    def __init__(self, requests: Iterator[Lengths], pool_tokens: int) -> None:
        self._requests = requests
        self._manager = BlockManager(pool_tokens // BLOCK_SIZE, BLOCK_SIZE, prefix_caching=False)
        config = SchedulerConfig(TOKEN_BUDGET, max_num_seqs=TOKEN_BUDGET, max_waiting=1 << 20)
        self._scheduler = Scheduler(config, self._manager, BlockHasher("bench", "0", BLOCK_SIZE, KVDtype.FP32))
        self._arrived = 0

    def step(self) -> Moment:
        """Schedule, and complete what was scheduled. Waiting requests never run out."""
        while len(self._scheduler.waiting) < _MAX_WAITING:
            self._arrive(next(self._requests))
        for item in self._scheduler.schedule().items:
            seq = item.seq
            reason = seq.append_token(TokenSample(0)) if item.samples else None
            self._scheduler.complete(seq, item.num_new_tokens)
            if reason is not None:
                self._scheduler.remove(seq)
                seq.finish(reason)
                self._manager.free(seq.seq_id)
        running = self._scheduler.running
        tokens = sum(seq.num_computed_tokens for seq in running)
        return Moment(len(running), tokens, self._manager.usage().used * BLOCK_SIZE)

    def check(self) -> None:
        """Raises BenchmarkError if the pool holds blocks that no sequence has, and IntegrityError if it is at odds with
        itself."""
        self._manager.check_integrity()
        used, tables = self._manager.usage().used, sum(len(seq.block_table) for seq in self._scheduler.running)
        if used != tables:
            raise BenchmarkError(f"{used} blocks are in use, and {tables} are in block tables")

    def _arrive(self, lengths: Lengths) -> None:
        sampling = SamplingParams(max_tokens=lengths.output, ignore_eos=True)
        self._arrived += 1
        name, tokens = f"s{self._arrived}", [0] * lengths.prompt
        self._scheduler.add(Request(name, tokens, sampling, max_context_tokens=lengths.prompt + lengths.output))


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a pool, in the mean over some steps: sequences in it, and the share of the slots taken that hold no KV."""

    num_sequences: float
    waste: float


def usage(server: Server, warm_up_steps: int, num_steps: int) -> Usage:
    """Run it until ages are mixed, then look at each step."""
    for _ in range(warm_up_steps):
        server.step()
    moments = [server.step() for _ in range(num_steps)]
    slots = sum(moment.num_slots for moment in moments)
    tokens = sum(moment.num_tokens for moment in moments)
    return Usage(sum(moment.num_sequences for moment in moments) / num_steps, 1 - tokens / slots)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one trace, and the size of a pool for them."""

    name: str
    requests: Sequence[Lengths]
    longest: Lengths

    @property
    def pool_tokens(self) -> int:
        """A power of two, so that buddies lose nothing at the edge."""
        return 1 << (_POOL_OF_LONGEST * sum(self.longest) - 1).bit_length()

    @property
    def mean_output(self) -> int:
        """Steps that a sequence stays, in the mean."""
        return round(sum(each.output for each in self.requests) / len(self.requests))

    def endless(self, generator: np.random.Generator) -> list[Iterator[Lengths]]:
        """Four times the same requests, from a random one on."""
        start = int(generator.integers(len(self.requests)))
        turned = [*self.requests[start:], *self.requests[:start]]
        return [itertools.cycle(turned) for _ in range(4)]


def measure(workload: Workload, report: Report, options: Options) -> None:
    """All lines of one trace."""
    steps = options.pick(100, 300, 1000)
    generator = np.random.default_rng(options.seed)
    pool, most = workload.pool_tokens, workload.longest
    taken: dict[str, list[Usage]] = {"paged": [], "contiguous": [], "contiguous_prompt": [], "buddy": []}
    for _ in range(options.num_pairs):
        streams = workload.endless(generator)
        paged = Paged(streams[0], pool)
        servers: dict[str, Server] = {
            "paged": paged,
            "contiguous": Contiguous(streams[1], FirstFit(pool), reserved_tokens=sum(most)),
            "contiguous_prompt": Contiguous(streams[2], FirstFit(pool), reserved_output=most.output),
            "buddy": Contiguous(streams[3], Buddies(pool)),
        }
        for name, server in servers.items():
            taken[name].append(usage(server, 2 * workload.mean_output, steps))
        paged.check()
    report.note(f"{workload.name}: a pool of {pool} tokens, sequences of up to {sum(most)}")
    report_usage(workload.name, taken, report, options.seed)


def report_usage(name: str, taken: dict[str, list[Usage]], report: Report, seed: int) -> None:
    """Lines for what was seen of each way, in pairs."""
    for baseline in ("contiguous", "buddy"):
        waste = [Pair(ours.waste, other.waste) for ours, other in zip(taken["paged"], taken[baseline], strict=True)]
        report.add(summarise("waste_share", f"{name}:{baseline}", "share", Better.LOWER, baseline, waste, seed))
    for metric, baseline, variant in (
        ("concurrency_vs_contiguous", "contiguous", name),
        ("concurrency_vs_contiguous", "contiguous_prompt", f"{name}:known_prompt"),
        ("concurrency_vs_buddy", "buddy", name),
    ):
        pairs = [
            Pair(ours.num_sequences, other.num_sequences)
            for ours, other in zip(taken["paged"], taken[baseline], strict=True)
        ]
        report.add(summarise(metric, variant, "sequences", Better.HIGHER, baseline, pairs, seed))


def workloads(paths: Sequence[Path], seed: int) -> list[Workload]:
    """Of the trace files given, else drawn by the statistics of the public traces. Raises TraceError."""
    if paths:
        read = {path.stem: read_lengths(path) for path in paths}
        return [Workload(name, requests, longest(requests)) for name, requests in read.items()]
    generator = np.random.default_rng(seed)
    return [Workload(name, trace.draw(_DRAWN, generator), trace.longest) for name, trace in TRACES.items()]


def main(argv: list[str] | None = None) -> None:
    """Run it. Raises BenchmarkError or IntegrityError if the pool is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        default=[],
        help="a trace file in place of the statistics: .jsonl or .csv",
    )
    options, given = Options.parse(parser, argv)
    with Report(options) as report:
        for workload in workloads(given.trace, options.seed):
            measure(workload, report, options)


if __name__ == "__main__":
    main()
