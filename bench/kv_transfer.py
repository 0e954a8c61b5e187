"""How fast KV blocks reach the pool of another process, beside a copy, a raw socket, naive gRPC and plain libraries.

Two processes, page-aligned pools, scattered blocks of 16 tokens and 24 layers, checksums on. A hand-off takes from
`HandoffSender.open` to the receiver's word that the content is verified; its ticket is made before.
"""

import argparse
import contextlib
import functools
import queue
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

# This file has the name of a package that it imports, so the root must come before the directory of this file.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from bench.common import transfer_peer as peers
from bench.common.harness import BenchmarkError, Better, Options, Pair, Report, summarise, take_pairs, take_rounds
from bench.common.plain_ways import Load, PlainWays
from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer.end_facts import importable_transports
from kv_transfer.events import CommitRecord, Drained, Failed, SendEvent, Sent
from kv_transfer.identity import Identity
from kv_transfer.network import build_network
from kv_transfer.region import MemoryRegion
from kv_transfer.sender import HandoffSender
from runtime.clock import SystemClock

LAYOUT = KVCacheLayout(
    model_id="bench",
    model_revision="0",
    num_layers=24,
    num_kv_heads=2,
    head_dim=64,
    block_size=16,
    dtype=KVDtype.BF16,
)
BASELINES = {
    "transfer_vs_memcpy": ("memcpy",),
    "transfer_vs_raw_socket": ("raw_socket",),
    "transfer_vs_naive_grpc": ("naive_grpc",),
}
OWN_LIBRARY = {"ucx": ("plain_ucx", "plain_ucx_blocks"), "nixl": ("plain_nixl",)}
# Each transport right beside what it is measured by first.
_ORDER = (
    *("shm", "memcpy", "tcp", "raw_socket", "ucx", "plain_ucx", "plain_ucx_blocks", "nixl", "plain_nixl"),
    "naive_grpc",
)
_FIXED_REPEATS = 50
_SPARE = 1.25  # Pools are larger than what moves, so that its blocks lie scattered.
_WAIT_S = 120.0


class Sender:
    """This process: a pool of random content, and every way of bringing blocks of it to the peer's pool."""

    def __init__(self, peer: peers.Peer, pool: MemoryRegion, copy: MemoryRegion, transports: Sequence[str]) -> None:
        """`copy` is where the plain copy goes; it has the size of the pool."""
        self.transports = transports
        self._peer = peer
        self._events: queue.SimpleQueue[SendEvent] = queue.SimpleQueue()
        self._network = build_network(transports, peers.HOST)
        identity = Identity("bench-prefill", b"p" * 16, peers.SECRET, LAYOUT, pool)
        self._senders = {
            name: HandoffSender(
                identity, forced=name, network=self._network, clock=SystemClock(), on_event=self._events.put
            )
            for name in transports
        }
        self._plain = PlainWays(peer, pool, copy, [name for name in transports if name in OWN_LIBRARY])
        ways: dict[str, Callable[[], float]] = {
            **{name: functools.partial(self.hand_off, name) for name in transports},
            **self._plain.by_name,
        }
        self.ways = {name: ways[name] for name in _ORDER if name in ways}

    def close(self) -> None:
        """End the links and their threads."""
        for sender in self._senders.values():
            sender.close(10.0)
        self._plain.close()
        self._network.close()

    def use(self, load: Load) -> None:
        """Make these the blocks of every way, and check that each brings exactly their content, over zeros.

        Raises BenchmarkError if one does not. It is the warm-up too: afterwards all memory has been touched.
        """
        self._load = load
        self._plain.use(load)
        for name, way in self.ways.items():
            self._plain.check(name, way)

    def speed(self, way: str) -> float:
        """GB/s over as many transfers as make a sample."""
        seconds = sum(self.ways[way]() for _ in range(self._load.repeats))
        return self._load.repeats * self._load.size_bytes / seconds / 1e9

    def latency_ms(self, way: Callable[[], float]) -> float:
        """Median of some transfers."""
        return 1000 * statistics.median(way() for _ in range(_FIXED_REPEATS))

    def hand_off(self, transport: str, *, with_ticket: bool = False) -> float:
        """Seconds of one hand-off, as the sender sees it; on request with those that the receiver made the ticket in.

        Raises BenchmarkError if it fails.
        """
        ticket, reserved_s = self._peer.reserve()
        sender, source = self._senders[transport], self._load.source
        num_tokens = len(source) * LAYOUT.block_size
        began = time.perf_counter()
        sender.open(ticket, num_tokens, time.monotonic() + _WAIT_S)
        sender.push(ticket.handoff_id, 0, source, range(LAYOUT.num_layers))
        sender.commit(ticket.handoff_id, CommitRecord(num_tokens, b""))
        event = self._events.get(timeout=_WAIT_S)
        took_s = time.perf_counter() - began
        if isinstance(event, Failed):
            raise BenchmarkError(f"a hand-off over {transport} failed: {event.error.message}")
        if not isinstance(event, Sent) or event.stats.transport != transport:
            raise BenchmarkError(f"not sent over {transport}: {event}")
        if not isinstance(self._events.get(timeout=_WAIT_S), Drained):
            raise BenchmarkError("a hand-off that was sent did not drain")
        return took_s + reserved_s if with_ticket else took_s

    def details(self) -> list[str]:
        """What the libraries chose for the links."""
        views = (sender.snapshot().transports.values() for sender in self._senders.values())
        return [f"{view.transport} goes over {view.detail}" for of_one in views for view in of_one if view.detail]


def compare_speeds(sender: Sender, report: Report, options: Options, size_mb: int) -> None:
    """All transports against all baselines at this size, in rounds of all ways."""
    ways = {name: functools.partial(sender.speed, name) for name in sender.ways}
    taken = take_rounds(ways, options.num_pairs)
    for transport in sender.transports:
        metrics = {**BASELINES, "transfer_vs_own_library": OWN_LIBRARY.get(transport, ())}
        for metric, baselines in metrics.items():
            for baseline in baselines:
                pairs = [Pair(*both) for both in zip(taken[transport], taken[baseline], strict=True)]
                variant = f"{transport}:{size_mb}MB"
                report.add(summarise(metric, variant, "GB/s", Better.HIGHER, baseline, pairs, options.seed))


def compare_fixed_cost(sender: Sender, report: Report, options: Options) -> None:
    """A hand-off of one block, its ticket included, against a naive call with the same block."""
    for transport in sender.transports:
        hand_off = functools.partial(sender.hand_off, transport, with_ticket=True)
        pairs = take_pairs(
            functools.partial(sender.latency_ms, hand_off),
            functools.partial(sender.latency_ms, sender.ways["naive_grpc"]),
            options.num_pairs,
        )
        variant = f"{transport}:1block"
        report.add(summarise("handoff_fixed_ms", variant, "ms", Better.LOWER, "naive_grpc", pairs, options.seed))


@contextlib.contextmanager
def two_processes(num_blocks: int, seed: int, transports: tuple[str, ...]) -> Iterator[Sender]:
    """This process with a pool of random content, and one that receives."""
    size_bytes = LAYOUT.pool_bytes(num_blocks)
    with (
        MemoryRegion.allocate(size_bytes, shared=False) as pool,
        MemoryRegion.allocate(size_bytes, shared=False) as copy,
        peers.receiving_peer(peers.Setup(LAYOUT, num_blocks, transports)) as peer,
    ):
        pool.buffer[:] = np.random.default_rng(seed).bytes(size_bytes)
        with contextlib.closing(Sender(peer, pool, copy, transports)) as sender:
            yield sender


def check_memory(num_blocks: int) -> None:
    """Raises BenchmarkError when three pools, and the copies that naive gRPC makes, do not fit."""
    needed = 6 * LAYOUT.pool_bytes(num_blocks)
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    if free < needed:
        raise BenchmarkError(f"{needed / 1e9:.1f} GB of memory are needed, {free / 1e9:.1f} GB are available")


def main(argv: list[str] | None = None) -> None:
    """Run it. Raises BenchmarkError when a way does not deliver, or there is too little memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", nargs="+", default=importable_transports(), help="default: all installed")
    options, given = Options.parse(parser, argv)
    sizes_mb = options.pick((1, 16, 64), (1, 4, 16, 64, 256), (1, 4, 16, 64, 256, 1000))
    num_blocks = round(max(sizes_mb) * 1e6 / LAYOUT.block_bytes * _SPARE)
    check_memory(num_blocks)
    orders = np.random.default_rng(options.seed)

    def load(count: int) -> Load:
        source, destination = (orders.permutation(num_blocks)[:count].tolist() for _ in range(2))
        return Load(LAYOUT, tuple(source), tuple(destination))

    with Report(options) as report, two_processes(num_blocks, options.seed, tuple(given.transports)) as sender:
        sender.use(load(1))
        for detail in sender.details():
            report.note(detail)
        compare_fixed_cost(sender, report, options)
        for size_mb in sizes_mb:
            report.note(f"{size_mb} MB: each way brings the same bytes; now timing")
            sender.use(load(round(size_mb * 1e6 / LAYOUT.block_bytes)))
            compare_speeds(sender, report, options, size_mb)


if __name__ == "__main__":
    main()
