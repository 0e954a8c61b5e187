"""How fast KV blocks reach the pool of another process, beside a plain copy, a raw socket and naive gRPC.

Two processes, page-aligned pools, scattered blocks of 16 tokens and 24 layers, checksums on. A hand-off takes from
`HandoffSender.open` to the receiver's word that the content is verified; its ticket is made before.
"""

import argparse
import contextlib
import functools
import queue
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# This file has the name of a package that it imports, so the root must come before the directory of this file.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc
import numpy as np

from bench.common import transfer_peer as peers
from bench.common.harness import BenchmarkError, Better, Options, Report, summarise, take_pairs
from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer.events import CommitRecord, Drained, Failed, SendEvent, Sent
from kv_transfer.identity import Identity
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
TRANSPORTS = ("shm", "tcp")
BASELINES = {
    "transfer_vs_memcpy": "memcpy",
    "transfer_vs_raw_socket": "raw_socket",
    "transfer_vs_naive_grpc": "naive_grpc",
}
_SAMPLE_BYTES = 64_000_000  # Small transfers are repeated until a sample moves about this much.
_MAX_REPEATS = 16
_FIXED_REPEATS = 50
_WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Load:
    """The blocks that one transfer moves: their ids here and there, in the order of the prompt."""

    source: tuple[int, ...]
    destination: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return len(self.source) * LAYOUT.block_bytes

    @property
    def repeats(self) -> int:
        return max(1, min(_MAX_REPEATS, _SAMPLE_BYTES // self.size_bytes))


class Sender:
    """This process: a pool of random content, and every way of bringing blocks of it to the peer's pool."""

    def __init__(self, peer: peers.Peer, pool: MemoryRegion, copy: MemoryRegion) -> None:
        """`copy` is where the plain copy goes; it has the size of the pool."""
        self._peer = peer
        self._pool, self._copy = pool.buffer, copy.buffer
        self._events: queue.SimpleQueue[SendEvent] = queue.SimpleQueue()
        identity = Identity("bench-prefill", b"p" * 16, peers.SECRET, LAYOUT, pool)
        self._senders = {
            name: HandoffSender(identity, forced=name, clock=SystemClock(), on_event=self._events.put)
            for name in TRANSPORTS
        }
        self._raw = socket.create_connection((peers.HOST, peer.addresses.raw_port), timeout=_WAIT_S)
        self._raw.settimeout(None)
        self._raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._channel = grpc.insecure_channel(f"{peers.HOST}:{peer.addresses.grpc_port}", options=peers.UNBOUNDED)
        self._put: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(peers.GRPC_METHOD)
        self.ways: dict[str, Callable[[], float]] = {
            **{name: functools.partial(self.hand_off, name) for name in TRANSPORTS},
            "memcpy": self._memcpy,
            "raw_socket": self._raw_socket,
            "naive_grpc": self._naive_grpc,
        }

    def close(self) -> None:
        """End the links and their threads."""
        for sender in self._senders.values():
            sender.close(10.0)
        self._raw.close()
        self._channel.close()

    def use(self, load: Load) -> None:
        """Make these the blocks of every way, and check that each brings exactly their content, over zeros.

        Raises BenchmarkError if one does not. It is the warm-up too: afterwards all memory has been touched.
        """
        self._load = load
        self._sources = peers.block_views(self._pool, LAYOUT, load.source)
        self._copies = peers.block_views(self._copy, LAYOUT, load.destination)
        self._peer.use(load.destination)
        expected = peers.content_digest(self._sources)
        for name, way in self.ways.items():
            self._peer.erase()
            peers.erase(self._copies)
            way()
            found = peers.content_digest(self._copies) if name == "memcpy" else self._peer.digest()
            if found != expected:
                raise BenchmarkError(f"{name} did not bring the content of {load.size_bytes} bytes")

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

    def _memcpy(self) -> float:
        sources, copies = peers.as_arrays(self._sources), peers.as_arrays(self._copies)
        began = time.perf_counter()
        for copy, source in zip(copies, sources, strict=True):
            np.copyto(copy, source)
        return time.perf_counter() - began

    def _raw_socket(self) -> float:
        began = time.perf_counter()
        peers.send_all(self._raw, [peers.START, *self._sources])
        if not self._raw.recv(1):
            raise BenchmarkError("the receiving process closed the raw socket")
        return time.perf_counter() - began

    def _naive_grpc(self) -> float:
        began = time.perf_counter()
        self._put(b"".join(self._sources), timeout=_WAIT_S)
        return time.perf_counter() - began


def compare_speeds(sender: Sender, report: Report, options: Options, size_mb: int) -> None:
    """All transports against all baselines at this size."""
    for transport in TRANSPORTS:
        for metric, baseline in BASELINES.items():
            treatment, other = (functools.partial(sender.speed, way) for way in (transport, baseline))
            pairs = take_pairs(treatment, other, options.num_pairs)
            variant = f"{transport}:{size_mb}MB"
            report.add(summarise(metric, variant, "GB/s", Better.HIGHER, baseline, pairs, options.seed))


def compare_fixed_cost(sender: Sender, report: Report, options: Options) -> None:
    """A hand-off of one block, its ticket included, against a naive call with the same block."""
    for transport in TRANSPORTS:
        hand_off = functools.partial(sender.hand_off, transport, with_ticket=True)
        pairs = take_pairs(
            functools.partial(sender.latency_ms, hand_off),
            functools.partial(sender.latency_ms, sender.ways["naive_grpc"]),
            options.num_pairs,
        )
        variant = f"{transport}:1block"
        report.add(summarise("handoff_fixed_ms", variant, "ms", Better.LOWER, "naive_grpc", pairs, options.seed))


@contextlib.contextmanager
def two_processes(num_blocks: int, seed: int) -> Iterator[Sender]:
    """This process with a pool of random content, and one that receives."""
    size_bytes = LAYOUT.pool_bytes(num_blocks)
    with (
        MemoryRegion.allocate(size_bytes, shared=False) as pool,
        MemoryRegion.allocate(size_bytes, shared=False) as copy,
        peers.receiving_peer(peers.Setup(LAYOUT, num_blocks)) as peer,
    ):
        pool.buffer[:] = np.random.default_rng(seed).bytes(size_bytes)
        with contextlib.closing(Sender(peer, pool, copy)) as sender:
            yield sender


def main(argv: list[str] | None = None) -> None:
    """Run it. Raises BenchmarkError when a way does not deliver."""
    options, _ = Options.parse(argparse.ArgumentParser(description=__doc__), argv)
    sizes_mb = options.pick((1, 16, 64), (1, 4, 16, 64, 256), (1, 4, 16, 64, 256, 1000))
    num_blocks = round(max(sizes_mb) * 1e6 / LAYOUT.block_bytes * 1.25)  # Not all of it, so that blocks lie scattered.
    orders = np.random.default_rng(options.seed)

    def load(count: int) -> Load:
        source, destination = (orders.permutation(num_blocks)[:count].tolist() for _ in range(2))
        return Load(tuple(source), tuple(destination))

    with Report(options) as report, two_processes(num_blocks, options.seed) as sender:
        sender.use(load(1))
        compare_fixed_cost(sender, report, options)
        for size_mb in sizes_mb:
            report.note(f"{size_mb} MB: each way brings the same bytes; now timing")
            sender.use(load(round(size_mb * 1e6 / LAYOUT.block_bytes)))
            compare_speeds(sender, report, options, size_mb)


if __name__ == "__main__":
    main()
