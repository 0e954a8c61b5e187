"""How much of a transfer stays exposed behind a prefill, beside what layer-wise pushing should leave of it.

A real prefill worker computes random prompts and pushes each layer as it is stored; a receiver in another process
verifies. The link is throttled to a share of what prefill produces: kappa is the time of the bytes on the link over the
time of the prefill. With U = layers x chunks units of equal size, each sent when it has been computed, what is left

    exposed = T_x / U + max(0, T_x - T_prefill) (1 - 1/U)

after the last token is computed. T_prefill is that of the very prompt that is compared. K and V of a layer are pushed
before its attention, so kvferry can be ahead of this by up to a unit, and a link that keeps up may leave nothing.
"""

import argparse
import contextlib
import itertools
import queue
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from bench.common import transfer_peer as peers
from bench.common.harness import BenchmarkError, Better, Options, Pair, Report, summarise
from bench.common.origin import ROOT
from engine.build import EnginePlan, build_engine, plan_engine
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.options import DEFAULT_CACHE_DIR, EngineOptions
from engine.wire import build_sequence
from kv_transfer.events import SendEvent, Sent
from kv_transfer.faults import FaultPlan
from kv_transfer.identity import Identity
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.region import MemoryRegion
from kv_transfer.sender import HandoffSender
from kvferry_rpc.common_pb2 import SamplingParams
from kvferry_rpc.internal_pb2 import Admit, PrefillDone, PrefillEvent
from prefill_worker.job import Submit
from prefill_worker.pull import Puller
from prefill_worker.worker import Command, PrefillView, PrefillWorker
from runtime.clock import SystemClock
from runtime.kv_event_log import KVEventLog

DEFAULT_MODEL = "smollm2-135m-instruct"
TINY_MODEL = ROOT / "tests" / "data" / "tiny-real"
_WAIT_S = 120.0
_CALIBRATION_PROMPTS = 3
_UNTHROTTLED = 1e12


@dataclass(frozen=True, slots=True)
class Case:
    """`kappa`: time of the bytes on the link over the time of the prefill. The prompt is computed in `chunks`."""

    kappa: float
    chunks: int

    @property
    def variant(self) -> str:
        return f"kappa={self.kappa:g},chunks={self.chunks}"


class Prefill:
    """A prefill worker in this process, with one engine for all cases and a new sender for each link speed."""

    def __init__(self, model: str, cache_dir: Path, num_tokens: int, chunks: int, peer: peers.Peer) -> None:
        self._options = options = engine_options(model, cache_dir, num_tokens, chunks)
        self._plan: EnginePlan = plan_engine(options, available_bytes=None)
        self._pool = MemoryRegion.allocate(self._plan.pool_bytes, shared=False)
        self._engine: Engine = build_engine(options, self._plan, self._pool.buffer, prefill_only=True)
        self._num_tokens = num_tokens
        self._peer = peer
        self._ids = itertools.count()

    def close(self) -> None:
        """Give the pool back."""
        self._pool.close()

    @contextlib.contextmanager
    def over(self, bytes_per_second: float) -> Iterator["Link"]:
        """A worker whose sender writes no faster than this."""
        link = Link(self._engine, self._plan, self._pool, bytes_per_second, self._peer)
        try:
            yield link
        finally:
            link.close()

    def admit(self, seed: int) -> Admit:
        """A prompt that no cache has seen."""
        number = next(self._ids)
        tokens = np.random.default_rng((seed, number)).integers(0, self._plan.limits.vocab_size, self._num_tokens)
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        return Admit(request_id=f"r{number}", attempt=1, prompt_token_ids=tokens.tolist(), sampling=sampling)


class Link:
    """The worker's loop and its sender, at one link speed."""

    def __init__(
        self, engine: Engine, plan: EnginePlan, pool: MemoryRegion, bytes_per_second: float, peer: peers.Peer
    ) -> None:
        self._plan, self._peer, self._clock = plan, peer, SystemClock()
        identity = Identity("bench-prefill", b"p" * 16, peers.SECRET, plan.layout, pool)
        self._sender = HandoffSender(
            identity,
            forced="shm",
            clock=self._clock,
            on_event=self._on_event,
            faults=FaultPlan(bytes_per_second=bytes_per_second),
        )
        # Nothing is pulled here, so its receiver is never started.
        receiver = HandoffReceiver(identity, bind_host=peers.HOST, clock=self._clock, on_event=lambda event: None)
        puller = Puller(engine, receiver, plan.layout.block_bytes, self._clock)
        self._worker = PrefillWorker(engine, self._sender, puller, plan.layout.num_layers, KVEventLog(), self._clock)
        self._loop: EngineLoop[Command, PrefillView] = EngineLoop(self._worker, clock=self._clock, max_inbox=4)
        self._replies: queue.SimpleQueue[PrefillEvent | Exception] = queue.SimpleQueue()
        self._loop.start(self._replies.put)

    def close(self) -> None:
        """End the threads."""
        self._sender.close(10.0)
        self._loop.stop(10.0)

    def prefill(self, admit: Admit) -> PrefillDone:
        """One prompt to its verified end. Raises BenchmarkError if it fails."""
        ticket, _ = self._peer.reserve()
        now = self._clock.now()
        sequence = build_sequence(admit, self._plan.limits, ticket.handoff_id)
        self._loop.submit(Submit(sequence, ticket, now, now + _WAIT_S, self._replies.put))
        while True:
            reply = self._replies.get(timeout=_WAIT_S)
            if isinstance(reply, Exception):
                raise BenchmarkError(f"the prefill worker failed: {reply!r}")
            if reply.HasField("error"):
                raise BenchmarkError(f"a prefill failed: {reply.error.message}")
            if reply.HasField("done"):
                self._at_rest()
                return reply.done

    def _at_rest(self) -> None:
        """Until no block is held any more: the next prompt needs them."""
        deadline = time.monotonic() + _WAIT_S
        while self._sender.snapshot().handoffs or not self._all_blocks_back():
            if time.monotonic() > deadline:
                raise BenchmarkError("the prefill worker keeps blocks of a request that is done")
            time.sleep(0.005)  # A snapshot can only be looked at.

    def _all_blocks_back(self) -> bool:
        blocks = self._loop.snapshot.view.load.blocks
        return blocks.available == blocks.total

    def _on_event(self, event: SendEvent) -> None:
        if isinstance(event, Sent):
            self._worker.report_sent(event)
        self._loop.notify(event)


def engine_options(model: str, cache_dir: Path, num_tokens: int, chunks: int) -> EngineOptions:
    """An engine that computes the prompt in so many chunks of equal size."""
    return EngineOptions(
        model=model,
        cache_dir=cache_dir,
        num_blocks=num_tokens // 16 * 2,
        token_budget=num_tokens // chunks,
        max_num_seqs=1,
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt: times in ms, what was exposed as measured and by the formula."""

    prefill_ms: float
    exposed_ms: float
    formula_ms: float

    @property
    def until_sent(self) -> Pair:
        """From the start of the prefill to the last byte. Never zero, so it has a ratio."""
        return Pair(self.prefill_ms + self.exposed_ms, self.prefill_ms + self.formula_ms)


def formula_ms(prefill_ms: float, transfer_ms: float, units: int) -> float:
    """What stays exposed, with the prefill's own time."""
    return transfer_ms / units + max(0.0, transfer_ms - prefill_ms) * (1 - 1 / units)


def free_run(prefill: Prefill, options: Options) -> tuple[float, int]:
    """(time of a prefill in ms, bytes of its KV) now, with a link that is not throttled: the median of some."""
    with prefill.over(_UNTHROTTLED) as link:
        done = [link.prefill(prefill.admit(options.seed)) for _ in range(_CALIBRATION_PROMPTS)]
    return statistics.median(one.prefill_ms for one in done), done[-1].bytes_sent


def measure(prefill: Prefill, transfer_ms: float, size_bytes: int, units: int, options: Options) -> list[Sample]:
    """Some prompts over a link that takes so long for all their KV."""
    samples = []
    with prefill.over(1e3 * size_bytes / transfer_ms) as link:
        for _ in range(options.pick(5, 7, 15)):
            done = link.prefill(prefill.admit(options.seed))
            expected = formula_ms(done.prefill_ms, transfer_ms, units)
            samples.append(Sample(done.prefill_ms, done.exposed_transfer_ms, expected))
    return samples


def report_case(
    report: Report, case: Case, samples: Sequence[Sample], transfer_ms: float, units: int, seed: int
) -> None:
    """Two lines: against the formula, and as a share of the whole transfer beside the one unit that must be left.

    What is exposed can be nothing, so the ratio of both is that of the whole times: prefill and what is exposed.
    """
    whole = [sample.until_sent for sample in samples]
    result = summarise("exposed_vs_formula", case.variant, "ms", Better.LOWER, "formula", whole, seed)
    exposed = statistics.median(sample.exposed_ms for sample in samples)
    expected = statistics.median(sample.formula_ms for sample in samples)
    report.add(replace(result, value=exposed, baseline_value=expected))
    share = replace(result, metric="exposed_share", unit="share", baseline="one unit")
    report.add(replace(share, value=exposed / transfer_ms, baseline_value=1 / units))


def run(given: argparse.Namespace, chunks: int, kappas: tuple[float, ...], options: Options, report: Report) -> None:
    """All link speeds for one way of cutting the prompt."""
    num_tokens = options.pick(128, 512, 1024)
    engine = engine_options(given.model, given.cache_dir.expanduser(), num_tokens, chunks)
    layout = plan_engine(engine, available_bytes=None).layout
    with peers.receiving_peer(peers.Setup(layout, layout.blocks_for(num_tokens))) as peer:
        peer.use(range(layout.blocks_for(num_tokens)))
        prefill = Prefill(given.model, given.cache_dir.expanduser(), num_tokens, chunks, peer)
        with contextlib.closing(prefill):
            free_run(prefill, options)  # A warm-up.
            for kappa in kappas:
                # Measured anew for each link speed: a machine that does something else computes more slowly.
                prefill_ms, size_bytes = free_run(prefill, options)
                case, units, transfer_ms = Case(kappa, chunks), layout.num_layers * chunks, kappa * prefill_ms
                samples = measure(prefill, transfer_ms, size_bytes, units, options)
                took_ms = statistics.median(sample.prefill_ms for sample in samples)
                report.note(
                    f"{case.variant}: {num_tokens} tokens make {size_bytes / 1e6:.1f} MB of KV in {units} units; "
                    f"prefill takes {prefill_ms:.0f} ms, with the throttled link {took_ms:.0f} ms; "
                    f"the bytes take {transfer_ms:.0f} ms"
                )
                report_case(report, case, samples, transfer_ms, units, options.seed)


def main(argv: list[str] | None = None) -> None:
    """Run it. Raises BenchmarkError when a prefill fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory, .gguf file, prepared directory or known alias")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR, help="where prepared models are kept")
    options, given = Options.parse(parser, argv)
    given.model = given.model or options.pick(str(TINY_MODEL), DEFAULT_MODEL, DEFAULT_MODEL)
    torch.set_num_threads(1)
    with Report(options) as report:
        run(
            given,
            1,
            options.pick((0.5, 2.0), (0.25, 0.5, 0.9, 1.5, 3.0), (0.25, 0.5, 0.75, 0.9, 1.5, 3.0)),
            options,
            report,
        )
        if not options.quick:
            run(given, 4, (0.5, 2.0), options, report)


if __name__ == "__main__":
    main()
