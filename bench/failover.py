"""What becomes of hand-offs when one side is killed or stopped in the middle of them.

A prefill and a decode process, each with a block manager; several hand-offs of different sizes are under way, at
different points, when one of the two gets SIGKILL or SIGSTOP. The other must end every one of them in time, and no byte
may come to lie where it does not belong, also when a stopped process goes on later. Spare processes stand ready.

With --stream: what becomes of streamed answers when a worker of a whole cluster is lost or drained under them. Each is
compared with the same answer undisturbed; the wait that it added, with a new request for prompt and text so far.
"""

import argparse
import asyncio
import functools
import itertools
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from bench.common.failover_cast import Cast
from bench.common.failover_cluster import StreamCluster
from bench.common.failover_messages import DECODE, PREFILL, Setup
from bench.common.failover_round import Case, Play, Rules, Tally
from bench.common.failover_streams import Loss, StreamRounds
from bench.common.failover_streams import Tally as StreamTally
from bench.common.harness import Options, Report, Result
from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer.end_facts import importable_transports
from kv_transfer.options import TRANSPORTS

LAYOUT = KVCacheLayout(
    model_id="failover",
    model_revision="0",
    num_layers=8,
    num_kv_heads=2,
    head_dim=64,
    block_size=16,
    dtype=KVDtype.BF16,
)
NUM_BLOCKS = 1536
HANDOFFS_A_ROUND = 8
SLOW_BYTES_PER_SECOND = 40e6
_SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
_SIDES = (DECODE, PREFILL)
_RESAMPLES = 2000

MODEL = Path(__file__).resolve().parents[1] / "tests" / "data" / "tiny-real"
STREAMS_A_ROUND = 8
_STREAM_TOKENS = 160
_STREAM_CASES = {
    "decode:SIGKILL": ("decode", signal.SIGKILL),
    "prefill:SIGKILL": ("prefill", signal.SIGKILL),
    "decode:SIGTERM": ("decode", signal.SIGTERM),
}


@dataclass(slots=True)
class Outcome:
    """All rounds of one variant."""

    handoffs: int = 0
    wrong: int = 0
    hangs: int = 0
    leaked_blocks: int = 0
    detected_ms: list[float] = field(default_factory=list)

    def count(self, tally: Tally, handoffs: int) -> None:
        """Add a round."""
        self.handoffs += handoffs
        self.wrong += len(tally.wrong)
        self.hangs += len(tally.hung)
        self.leaked_blocks += tally.leaked_blocks
        self.detected_ms += [1000 * seconds for seconds in tally.detected_s]


def run_transport(transport: str, given: argparse.Namespace, options: Options, report: Report) -> dict[str, Outcome]:
    """Rounds of all cases in turn over one transport; what came of them by variant."""
    setup = Setup(
        role="",
        transport=transport,
        layout=LAYOUT,
        num_blocks=NUM_BLOCKS,
        lease_s=given.lease_s,
        io_timeout_s=given.io_timeout_s,
        seed=options.seed,
        incarnation=b"",
        bytes_per_second=SLOW_BYTES_PER_SECOND,
    )
    rules = Rules(HANDOFFS_A_ROUND, LAYOUT.num_layers, given.lease_s + given.io_timeout_s + given.margin_s)
    cases = itertools.cycle(Case(transport, number, side) for number in _SIGNALS for side in _SIDES)
    rounds = given.rounds or options.pick(4, 25, 250)
    outcomes: dict[str, Outcome] = {}
    play = Play(functools.partial(Cast, setup), rules)
    with play.stage:
        for number, case in zip(range(rounds), cases, strict=False):
            tally = play.round(case, np.random.default_rng((options.seed, number)))
            outcomes.setdefault(case.variant, Outcome()).count(tally, HANDOFFS_A_ROUND)
            for text in (*tally.wrong, *tally.hung):
                report.note(f"seed {options.seed}, round {number}, {case.variant}: {text}")
            if tally.leaked_blocks:
                report.note(f"seed {options.seed}, round {number}, {case.variant}: {tally.leaked_blocks} blocks leaked")
    return outcomes


def count_line(metric: str, variant: str, value: int, unit: str, handoffs: int) -> Result:
    """A number of things that must not be, of so many hand-offs. The ratio is 1 for none and falls with each."""
    ratio = 1 / (1 + value)
    return Result(metric, variant, value, unit, "none", 0, ratio, handoffs, (ratio, ratio))


def detection_line(share: float, variant: str, samples_ms: Sequence[float], bound_ms: float, seed: int) -> Result:
    """A percentile of the times of detection, against the longest that the two timeouts allow."""
    samples = np.asarray(samples_ms)
    chosen = np.random.default_rng(seed).integers(0, len(samples), (_RESAMPLES, len(samples)))
    resampled = np.quantile(samples[chosen], share, axis=1)
    value = float(np.quantile(samples, share))
    slowest, fastest = np.percentile(resampled, [97.5, 2.5])
    interval = (bound_ms / float(slowest), bound_ms / float(fastest))
    name = f"detect_ms_p{share * 100:.0f}"
    return Result(name, variant, value, "ms", "timeouts", bound_ms, bound_ms / value, len(samples), interval)


def report_outcome(report: Report, variant: str, outcome: Outcome, bound_ms: float, seed: int) -> None:
    """Its lines; those of detection only if there was something to detect."""
    report.add(count_line("wrong_answers", variant, outcome.wrong, "answers", outcome.handoffs))
    report.add(count_line("hangs", variant, outcome.hangs, "hand-offs", outcome.handoffs))
    report.add(count_line("leaked_blocks", variant, outcome.leaked_blocks, "blocks", outcome.handoffs))
    if outcome.detected_ms:
        for share in (0.5, 0.99):
            report.add(detection_line(share, variant, outcome.detected_ms, bound_ms, seed))


async def run_streams(cluster: StreamCluster, rounds: int, seed: int, report: Report) -> dict[str, StreamTally]:
    """Rounds of all cases in turn over one cluster; what came of their streams by variant."""
    tallies = {variant: StreamTally() for variant in _STREAM_CASES}
    play = StreamRounds(cluster, random.Random(seed), width=STREAMS_A_ROUND, max_tokens=_STREAM_TOKENS)
    try:
        for number, (variant, case) in zip(range(rounds), itertools.cycle(_STREAM_CASES.items()), strict=False):
            tally = tallies[variant]
            seen = len(tally.wrong)
            await play.round(*case, tally)
            for text in tally.wrong[seen:]:
                report.note(f"seed {seed}, round {number}, {variant}: {text}")
    finally:
        await play.close()
    return tallies


def added_line(share: float, variant: str, losses: Sequence[Loss], seed: int) -> Result:
    """A percentile of what losses added, beside the same percentile of new requests."""
    pairs_ms = 1000 * np.asarray([(loss.added_s, loss.recompute_s) for loss in losses])
    chosen = np.random.default_rng(seed).integers(0, len(losses), (_RESAMPLES, len(losses)))
    added, fresh = np.quantile(pairs_ms, share, axis=0)
    resampled = np.quantile(pairs_ms[chosen], share, axis=1)
    low, high = np.percentile(resampled[:, 1] / np.maximum(resampled[:, 0], 1e-3), [2.5, 97.5])
    name = f"added_ms_p{share * 100:.0f}"
    value, baseline = float(added), float(fresh)
    ratio = baseline / max(value, 1e-3)
    return Result(name, variant, value, "ms", "full_recompute", baseline, ratio, len(losses), (float(low), float(high)))


def report_streams(report: Report, variant: str, tally: StreamTally, seed: int) -> None:
    """Its lines; those of delays only if any stream had to go on elsewhere."""
    share = tally.equal / tally.streams
    line = ("streams_equal_share", variant, share, "share", "undisturbed", 1.0, share, tally.streams, (share, share))
    report.add(Result(*line))
    report.add(count_line("client_errors", variant, tally.errors, "streams", tally.streams))
    moved = sum(loss.moved for loss in tally.losses)
    report.note(f"{variant}: {len(tally.losses)} of {tally.streams} streams went on elsewhere, {moved} with their KV")
    if pauses_ms := [pause for loss in tally.losses for pause in loss.pauses_ms]:
        p50, p99 = np.quantile(pauses_ms, [0.5, 0.99])
        report.note(f"{variant}: {len(pauses_ms)} moves stood still for {p50:.0f} ms (p99 {p99:.0f} ms)")
    if tally.losses:
        for percentile in (0.5, 0.99):
            report.add(added_line(percentile, variant, tally.losses, seed))


def main_streams(given: argparse.Namespace, options: Options) -> None:
    """`--stream`. Raises BenchmarkError when the cluster does not come up, or not back."""
    rounds = given.rounds or options.pick(3, 25, 100)
    with Report(options) as report, tempfile.TemporaryDirectory() as directory:
        with StreamCluster(Path(directory), MODEL, given.prefill, given.decode) as cluster:
            tallies = asyncio.run(run_streams(cluster, rounds, options.seed, report))
        for variant, tally in tallies.items():
            if tally.streams:
                report_streams(report, variant, tally, options.seed)


def positive(text: str) -> float:
    """Seconds above zero."""
    seconds = float(text)
    if not 0.0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time")
    return seconds


def main(argv: list[str] | None = None) -> None:
    """Run it. Raises BenchmarkError when it cannot go on; whatever goes wrong with a hand-off is counted instead."""
    installed = importable_transports()
    usable = [name for name in TRANSPORTS if name in installed]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="+", choices=usable, default=usable, help="those to try (default: all)")
    parser.add_argument("--rounds", type=int, default=0, help="rounds over each, of 8 hand-offs")
    parser.add_argument("--lease-s", type=positive, default=1.0, help="lease of a place at the decode side")
    parser.add_argument("--io-timeout-s", type=positive, default=1.0, help="longest silence of a link")
    parser.add_argument("--margin-s", type=positive, default=5.0, help="beyond both, before an ending is overdue")
    parser.add_argument("--stream", action="store_true", help="streams over a cluster instead")
    parser.add_argument("--prefill", type=int, default=2, help="with --stream: prefill workers")
    parser.add_argument("--decode", type=int, default=3, help="with --stream: decode workers")
    options, given = Options.parse(parser, argv)
    if given.stream:
        main_streams(given, options)
        return
    files = set(os.listdir("/dev/shm"))
    with Report(options) as report:
        for transport in given.transports:
            outcomes = run_transport(transport, given, options, report)
            for variant, outcome in sorted(outcomes.items()):
                report_outcome(report, variant, outcome, 1000 * (given.lease_s + given.io_timeout_s), options.seed)
        left = sorted(set(os.listdir("/dev/shm")) - files)
        if left:
            report.note(f"new in /dev/shm, maybe by somebody else: {', '.join(left)}")
    assert not multiprocessing.active_children()


if __name__ == "__main__":
    main()
