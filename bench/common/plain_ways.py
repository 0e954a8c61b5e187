"""The ways that hand-offs are compared with: a copy, a raw socket, naive gRPC, and the plain use of a library.

Each moves the blocks of a load from the sender's pool into the receiver's (the copy: within this process).
"""

import functools
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import numpy as np

from bench.common import transfer_peer as peers
from bench.common.harness import BenchmarkError
from bench.common.plain_libraries import PlainEnd, Run, plain_end
from kv_cache.layout import KVCacheLayout
from kv_transfer.region import MemoryRegion

_SAMPLE_BYTES = 64_000_000  # Small transfers are repeated until a sample moves about this much.
_MAX_REPEATS = 16


@dataclass(frozen=True, slots=True)
class Load:
    """The blocks that one transfer moves: their ids here and there, in the order of the prompt."""

    layout: KVCacheLayout
    source: tuple[int, ...]
    destination: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Of all blocks."""
        return len(self.source) * self.layout.block_bytes

    @property
    def repeats(self) -> int:
        """Transfers in one sample."""
        return max(1, min(_MAX_REPEATS, _SAMPLE_BYTES // self.size_bytes))

    def in_a_row(self) -> "Load":
        """As many blocks, neighbours on both sides."""
        row = tuple(range(len(self.source)))
        return Load(self.layout, row, row)

    def runs(self, block_ids: Sequence[int]) -> list[Run]:
        """Where these blocks lie in a pool, neighbours merged."""
        size, merged = self.layout.block_bytes, list[Run]()
        for offset in (self.layout.page_offset(block_id, 0) for block_id in block_ids):
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        return merged


class PlainWays:
    """`by_name`: what moves the current load once, and gives the seconds that it took."""

    def __init__(self, peer: peers.Peer, pool: MemoryRegion, copy: MemoryRegion, libraries: Sequence[str]) -> None:
        """`copy` is where the plain copy goes; it has the size of the pool."""
        self._peer = peer
        self._pool, self._copy = pool.buffer, copy.buffer
        self._raw = socket.create_connection((peers.HOST, peer.addresses.raw_port), timeout=peers.WAIT_S)
        self._raw.settimeout(None)
        self._raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._channel = grpc.insecure_channel(f"{peers.HOST}:{peer.addresses.grpc_port}", options=peers.UNBOUNDED)
        self._put: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(peers.GRPC_METHOD)
        self._ends = {name: plain_end(name, pool, peers.HOST) for name in libraries}
        for name, end in self._ends.items():
            end.meet(peer.meet(name, end.greeting()))
        self._aims: dict[str, Load] = {}
        self.by_name: dict[str, Callable[[], float]] = {
            "memcpy": self._memcpy,
            "raw_socket": self._raw_socket,
            "naive_grpc": self._naive_grpc,
        }
        if "ucx" in libraries:
            self.by_name["plain_ucx"] = functools.partial(self._plain, "ucx", in_a_row=True)
            self.by_name["plain_ucx_blocks"] = functools.partial(self._plain, "ucx")
        if "nixl" in libraries:
            self.by_name["plain_nixl"] = functools.partial(self._plain, "nixl")

    def close(self) -> None:
        """End the connections."""
        for end in self._ends.values():
            end.close()
        self._raw.close()
        self._channel.close()

    def use(self, load: Load) -> None:
        """Make these the blocks of every way. The peer must use them too."""
        self._load = load
        self._sources = peers.block_views(self._pool, load.layout, load.source)
        self._copies = peers.block_views(self._copy, load.layout, load.destination)

    def check(self, name: str, way: Callable[[], float]) -> None:
        """Move the load by `way` over zeros. Raises BenchmarkError unless it brings exactly its content."""
        load = self._load.in_a_row() if name == "plain_ucx" else self._load
        self._peer.use(load.destination)
        self._peer.erase()
        peers.erase(self._copies)
        way()
        found = peers.content_digest(self._copies) if name == "memcpy" else self._peer.digest()
        if found != peers.content_digest(peers.block_views(self._pool, load.layout, load.source)):
            raise BenchmarkError(f"{name} did not bring the content of {load.size_bytes} bytes")
        self._peer.use(self._load.destination)

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
        self._put(b"".join(self._sources), timeout=peers.WAIT_S)
        return time.perf_counter() - began

    def _plain(self, library: str, *, in_a_row: bool = False) -> float:
        end = self._aimed(library, self._load.in_a_row() if in_a_row else self._load)
        self._peer.take(library)
        began = time.perf_counter()
        end.send()
        return time.perf_counter() - began

    def _aimed(self, library: str, load: Load) -> PlainEnd:
        end = self._ends[library]
        if self._aims.get(library) != load:
            there, here = load.runs(load.destination), load.runs(load.source)
            if library == "ucx" and len(here) > 1:  # A message for each block: runs that are cut alike at both ends.
                here, there = (
                    [run for block_id in ids for run in load.runs([block_id])]
                    for ids in (load.source, load.destination)
                )
            self._peer.expect(library, there)
            end.aim(here, there)
            self._aims[library] = load
        return end
