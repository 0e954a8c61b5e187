"""What fingerprinting KV pages at both ends costs, beside a copy of the same bytes and within a hand-off.

Scattered blocks of 16 tokens and 24 layers. The pages of a hand-off are fingerprinted where they leave and where they
land. Hand-offs go over shm, so nothing but the CPU is in their way; those without fingerprints return 0 for each page.
"""

import argparse
import contextlib
import queue
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from bench.common import transfer_peer as peers
from bench.common.harness import BenchmarkError, Better, Options, Report, summarise, take_pairs
from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer import fingerprint
from kv_transfer.events import CommitRecord, Drained, SendEvent, Sent
from kv_transfer.fingerprinter import best_fingerprinter
from kv_transfer.identity import Identity
from kv_transfer.pages import PageRun, PagesAt
from kv_transfer.region import MemoryRegion
from kv_transfer.sender import HandoffSender
from runtime.clock import SystemClock

SAMPLE_BYTES = 64_000_000
_TRANSPORT = "shm"
_BLOCK_SIZE = 16
_HEAD_DIM = 64
_SEED = 0x0123456789ABCDEF
_SPARE = 1.25  # Pools are larger than what moves, so that its blocks lie scattered.
_WAIT_S = 120.0


def layout_for(page_kb: int) -> KVCacheLayout:
    """A layout with pages of this many KiB: bf16, with as many heads as it takes."""
    head_bytes = 2 * _BLOCK_SIZE * _HEAD_DIM * KVDtype.BF16.itemsize
    return KVCacheLayout("bench", "0", 24, page_kb * 1024 // head_bytes, _HEAD_DIM, _BLOCK_SIZE, KVDtype.BF16)


class Ends:
    """Both ends of hand-offs of the same blocks: this process with a pool, a copy of it, and the peer's pool."""

    def __init__(self, peer: peers.Peer, layout: KVCacheLayout, pool: MemoryRegion, copy: MemoryRegion) -> None:
        self._peer = peer
        self._layout = layout
        self._pool, self._copy = pool.buffer, copy.buffer
        self._events: queue.SimpleQueue[SendEvent] = queue.SimpleQueue()
        identity = Identity("bench-prefill", b"p" * 16, peers.SECRET, layout, pool)
        self._fingerprinter = peers.SwitchedFingerprinter()
        self._sender = HandoffSender(
            identity,
            forced=_TRANSPORT,
            clock=SystemClock(),
            on_event=self._events.put,
            fingerprinter=self._fingerprinter,
        )

    def close(self) -> None:
        """End the link and its thread."""
        self._sender.close(10.0)

    def use(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Make these the blocks, and check that the copy and both kinds of hand-off bring exactly their content.

        Raises BenchmarkError if one does not, or if the two ends would not agree on the fingerprints.
        """
        self._source = source
        self._destination = destination
        self._sources = peers.block_views(self._pool, self._layout, source)
        self._copies = peers.block_views(self._copy, self._layout, destination)
        self._size_bytes = len(source) * self._layout.block_bytes
        self._peer.use(destination)
        expected = peers.content_digest(self._sources)
        for checked in (True, False):
            self._peer.erase()
            self.hand_off_gb_s(checked)
            if self._peer.digest() != expected:
                raise BenchmarkError(f"a hand-off did not bring the content, checked: {checked}")
        self.copy_gb_s()
        if self.fingerprints(self._copy, destination) != self.fingerprints(self._pool, source):
            raise BenchmarkError("the copy and its source have different fingerprints")

    def fingerprints(self, pool: memoryview, block_ids: Sequence[int]) -> bytes:
        """The digest of a hand-off of all blocks, as either end computes it."""
        layout = self._layout
        run = PageRun(range(len(block_ids)), range(layout.num_layers))
        pages = best_fingerprinter().fingerprints(PagesAt.in_pool(run, layout, pool, block_ids), _SEED)
        return fingerprint.digest(fingerprint.fold_blocks(pages, layout.num_layers, _SEED))

    def fingerprints_gb_s(self) -> float:
        """How fast content is fingerprinted at both ends, one after the other."""
        began = time.perf_counter()
        self.fingerprints(self._pool, self._source)
        self.fingerprints(self._copy, self._destination)
        return self._gb_s(began)

    def copy_gb_s(self) -> float:
        """How fast it is copied within this process, block by block."""
        sources, copies = peers.as_arrays(self._sources), peers.as_arrays(self._copies)
        began = time.perf_counter()
        for copy, source in zip(copies, sources, strict=True):
            np.copyto(copy, source)
        return self._gb_s(began)

    def hand_off_gb_s(self, checked: bool) -> float:
        """How fast a hand-off brings it, with or without fingerprints. Raises BenchmarkError if it fails."""
        self._peer.check(checked)
        self._fingerprinter.enabled = checked
        try:
            ticket, _ = self._peer.reserve()
            num_tokens = len(self._source) * _BLOCK_SIZE
            began = time.perf_counter()
            self._sender.open(ticket, num_tokens, time.monotonic() + _WAIT_S)
            self._sender.push(ticket.handoff_id, 0, self._source, range(self._layout.num_layers))
            self._sender.commit(ticket.handoff_id, CommitRecord(num_tokens, b""))
            event = self._events.get(timeout=_WAIT_S)
            speed = self._gb_s(began)
            if not isinstance(event, Sent) or not isinstance(self._events.get(timeout=_WAIT_S), Drained):
                raise BenchmarkError(f"a hand-off failed: {event}")
            return speed
        finally:
            self._fingerprinter.enabled = True

    def _gb_s(self, began: float) -> float:
        return self._size_bytes / (time.perf_counter() - began) / 1e9


def measure(ends: Ends, variant: str, report: Report, options: Options) -> None:
    """Both lines of one page size."""
    pairs = take_pairs(ends.fingerprints_gb_s, ends.copy_gb_s, options.num_pairs)
    report.add(summarise("fingerprints_vs_memcpy", variant, "GB/s", Better.HIGHER, "memcpy", pairs, options.seed))
    pairs = take_pairs(
        lambda: ends.hand_off_gb_s(checked=True), lambda: ends.hand_off_gb_s(checked=False), options.num_pairs
    )
    speeds = summarise("handoff_gb_s", variant, "GB/s", Better.HIGHER, "unchecked", pairs, options.seed)
    report.note(
        f"{variant}: a hand-off moves {speeds.value:.3f} GB/s, one that checks nothing {speeds.baseline_value:.3f}"
    )
    # The ratio is the time of a hand-off that checks nothing over that of one that checks: the rest is their share.
    report.add(replace(speeds, metric="fingerprint_share", unit="share", value=1.0 - speeds.ratio, baseline_value=0.0))


@contextlib.contextmanager
def two_ends(layout: KVCacheLayout, num_blocks: int, seed: int) -> Iterator[Ends]:
    """This process with a pool of random content and one to copy to, and a process that receives."""
    size_bytes = layout.pool_bytes(num_blocks)
    with (
        MemoryRegion.allocate(size_bytes, shared=False) as pool,
        MemoryRegion.allocate(size_bytes, shared=False) as copy,
        peers.receiving_peer(peers.Setup(layout, num_blocks)) as peer,
    ):
        pool.buffer[:] = np.random.default_rng(seed).bytes(size_bytes)
        with contextlib.closing(Ends(peer, layout, pool, copy)) as ends:
            yield ends


def main(argv: list[str] | None = None) -> None:
    """Run it. Raises BenchmarkError when a way does not deliver."""
    options, _ = Options.parse(argparse.ArgumentParser(description=__doc__), argv)
    sizes_kb = options.pick((4, 16, 64, 256), (4, 8, 16, 32, 64, 128, 256), (4, 8, 16, 32, 64, 128, 256))
    orders = np.random.default_rng(options.seed)
    with Report(options) as report:
        for page_kb in sizes_kb:
            layout = layout_for(page_kb)
            count = SAMPLE_BYTES // layout.block_bytes
            num_blocks = round(count * _SPARE)
            source, destination = (orders.permutation(num_blocks)[:count].tolist() for _ in range(2))
            with two_ends(layout, num_blocks, options.seed) as ends:
                ends.use(source, destination)
                measure(ends, f"{page_kb}KiB", report, options)


if __name__ == "__main__":
    main()
