"""One hand-off on its way out of a prefill pool: what was pushed, what was written, what is left. Pure.

Pushes name blocks of the local pool, pages and tickets those of the receiver's. Where its blocks are larger, one of its
pages can be written once all local blocks that it covers are pushed in that layer, up to the end of the prompt:

    local    | 0 | 1 | 2 | 3 | 4 |  ends here
    peer's   |   0   |   1   |   2   |
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kv_cache.layout import KVCacheLayout
from kv_transfer.convert import describe
from kv_transfer.handoff import HandoffState
from kv_transfer.pages import USUAL_WRITE_BYTES, PageRun, split
from kv_transfer.records import CommitRecord, SendStats


@dataclass(slots=True)
class OutboundHandoff:
    """One outbound hand-off. Block indices count from the start of the prompt; pages are kept block by block.

    `layout` is that of the receiver's pool, `pool` that of the local one (None: the same), `num_tokens` the prompt's
    (None: the receiver's blocks are full) and `length` what it comes to. `wire`, the layout of pages on their way, and
    `write_bytes`, the size of a write, are known once the link is ready; `wire` differs from `layout` in dtype at most.
    `source`: the local block of each local prompt block pushed so far. `asked`: the Open of that `number` has been
    posted.
    `writing`: the link's writer thread is using this hand-off and the local pool, for `num_taken` pages.
    `fingerprints` (uint64, [page]): of the pages on the wire, as far as they were taken.
    `num_waiting`: pages to be written, those included. The table counts both.
    """

    handoff_id: str
    attempt: int
    incarnation: bytes
    secret: bytes
    first_block: int
    block_ids: tuple[int, ...]
    lease_s: float
    deadline: float
    link: int
    layout: KVCacheLayout
    pool: KVCacheLayout | None = None
    num_tokens: int | None = None
    state: HandoffState = HandoffState.RESERVED
    asked: bool = False
    number: int = 0
    queued: bool = False
    writing: bool = False
    record: CommitRecord | None = None
    commit_taken: bool = False
    commit_sent: bool = False
    renew_at: float = 0.0
    first_write_at: float | None = None
    last_write_at: float | None = None
    digest: bytes = b""
    num_waiting: int = 0
    num_taken: int = 0
    write_bytes: int = field(default=USUAL_WRITE_BYTES, init=False)
    wire: KVCacheLayout = field(init=False)
    length: int = field(init=False)
    source: dict[int, int] = field(default_factory=dict, init=False)
    pushed: bytearray = field(init=False)
    written: bytearray = field(init=False)
    fingerprints: npt.NDArray[np.uint64] = field(init=False)
    _local: KVCacheLayout = field(init=False)
    _written_bytes: int = field(default=0, init=False)
    _arrived: bytearray = field(init=False)
    _runs: deque[PageRun] = field(default_factory=deque, init=False)
    _pieces: deque[PageRun] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        num_pages = len(self.block_ids) * self.layout.num_layers
        self.pushed, self.written = bytearray(num_pages), bytearray(num_pages)
        self.fingerprints = np.zeros(num_pages, np.uint64)
        self.wire, self._local = self.layout, self.pool or self.layout
        full = (self.first_block + len(self.block_ids)) * self.layout.block_size
        self.length = full if self.num_tokens is None else self.num_tokens
        # Only where a page waits for several local blocks need these be remembered, layer by layer.
        gathers = self._local.block_size < self.layout.block_size
        self._arrived = bytearray(self.num_local_blocks * self._local.num_layers if gathers else 0)

    @property
    def num_local_blocks(self) -> int:
        """Blocks of the local pool that the prompt fills."""
        return self._local.blocks_for(self.length)

    @property
    def converts(self) -> bool:
        """Whether pages on the wire are other bytes than those of the local pool."""
        return self.wire != self._local

    @property
    def has_work(self) -> bool:
        """Whether its writer has something to do for it now."""
        if self.state is not HandoffState.TRANSFERRING or self.writing:
            return False
        return bool(self._pieces or self._runs) or (self.record is not None and not self.commit_taken)

    def moved(self, first: int, local_ids: Sequence[int]) -> str:
        """Which block was pushed from another local block before, or nothing.

        A page of it that still waits would be read from the wrong place, and match its own fingerprint.
        """
        for index, local in enumerate(local_ids, start=first):
            if self.source.get(index, local) != local:
                return f"prompt block {index} was pushed from block {self.source[index]}, and now from {local}"
        return ""

    def push(self, first: int, local_ids: Sequence[int], layers: range) -> int:
        """Take local prompt blocks first, first + 1, ... in these layers; the number of pages to write that complete.

        Pages before `first_block` are ignored. Raises ValueError, and takes nothing, out of range.
        """
        blocks = range(first, first + len(local_ids))
        if blocks.start < 0 or blocks.stop > self.num_local_blocks:
            raise ValueError(
                f"blocks {first}..{blocks.stop - 1} are not a run of the prompt's {self.num_local_blocks} blocks"
            )
        if layers.step != 1 or layers.start < 0 or layers.stop > self.layout.num_layers:
            raise ValueError(f"{layers} is not a run of the model's {self.layout.num_layers} layers")
        if not blocks or not layers:
            return 0
        self.source.update(zip(blocks, local_ids, strict=True))
        runs = self._completed(PageRun(blocks, layers))
        for run in runs:
            self._mark(self.pushed, run)
            joined = self._runs[-1].joined(run) if self._runs else None
            if joined is None:
                self._runs.append(run)
            else:
                self._runs[-1] = joined
        return sum(run.num_pages for run in runs)

    def next_piece(self) -> PageRun | None:
        """The next pages to write, at most one write's worth; None when all that was pushed has been taken."""
        if not self._pieces and self._runs:
            run = self._runs.popleft()
            while self._runs and (longer := run.joined(self._runs[0])) is not None:
                run = longer
                self._runs.popleft()
            self._pieces.extend(split(run, self.wire, self.write_bytes))
        return self._pieces.popleft() if self._pieces else None

    def mark_written(self, run: PageRun, now: float) -> None:
        """Note that these pages are on their way in order, or in the peer's pool."""
        self._mark(self.written, run)
        self._written_bytes += run.num_pages * self.wire.page_bytes
        self.last_write_at = now

    def note_fingerprints(self, run: PageRun, found: npt.NDArray[np.uint64]) -> None:
        """Those of the pages of a run, block by block, as they are to arrive."""
        first = run.blocks.start - self.first_block
        by_block = self.fingerprints.reshape(-1, self.layout.num_layers)
        rows = by_block[first : first + len(run.blocks)]
        rows[:, run.layers.start : run.layers.stop] = found.reshape(len(run.blocks), -1)

    def page_number(self, block_index: int, layer: int) -> int:
        """Index of a page in `fingerprints`."""
        return (block_index - self.first_block) * self.layout.num_layers + layer

    def sources_of(self, block_index: int) -> range:
        """The local prompt blocks that the receiver's prompt block `block_index` covers."""
        size = self.layout.block_size
        tokens = range(block_index * size, min((block_index + 1) * size, self.length))
        return _blocks_of(tokens, self._local.block_size)

    def stats(self, transport: str, acknowledged_at: float, *, detail: str = "", expected: str = "") -> SendStats:
        """What it cost, for the receipt."""
        return SendStats(
            transport=transport,
            num_blocks=len(self.block_ids),
            size_bytes=self._written_bytes,
            first_write_at=self.first_write_at,
            last_write_at=self.last_write_at,
            acknowledged_at=acknowledged_at,
            digest=self.digest,
            transport_detail=detail,
            expected_transport=expected,
            conversion=describe(self._local, self.wire, self.layout),
        )

    def _completed(self, arrived: PageRun) -> list[PageRun]:
        """The wanted pages of the receiver that these local ones complete, in order."""
        size = self._local.block_size
        tokens = range(arrived.blocks.start * size, min(arrived.blocks.stop * size, self.length))
        touched = _blocks_of(tokens, self.layout.block_size)
        wanted = range(max(touched.start, self.first_block), touched.stop)
        if not wanted:
            return []
        if not self._arrived:
            return [PageRun(wanted, arrived.layers)]
        self._note_arrived(arrived)
        # Only the first and the last block can have a part that did not come with this push.
        edges = {block for block in (wanted[0], wanted[-1]) if not self._lies_within(block, arrived.blocks)}
        inner = range(wanted.start + (wanted[0] in edges), wanted.stop - (wanted[-1] in edges))
        runs = [PageRun(inner, arrived.layers)] if inner else []
        for edge in sorted(edges):
            ready = [
                PageRun(range(edge, edge + 1), range(layer, layer + 1))
                for layer in arrived.layers
                if self._has_arrived(edge, layer)
            ]
            runs = [*ready, *runs] if edge < inner.start else [*runs, *ready]
        return runs

    def _lies_within(self, block_index: int, local: range) -> bool:
        sources = self.sources_of(block_index)
        return local.start <= sources.start and sources.stop <= local.stop

    def _has_arrived(self, block_index: int, layer: int) -> bool:
        num_layers = self.layout.num_layers
        return all(self._arrived[index * num_layers + layer] for index in self.sources_of(block_index))

    def _note_arrived(self, run: PageRun) -> None:
        for block in run.blocks:
            start = block * self.layout.num_layers + run.layers.start
            self._arrived[start : start + len(run.layers)] = b"\1" * len(run.layers)

    def _mark(self, pages: bytearray, run: PageRun) -> None:
        if len(run.layers) == self.layout.num_layers:
            start = self.page_number(run.blocks.start, 0)
            pages[start : start + run.num_pages] = b"\1" * run.num_pages
            return
        for block_index in run.blocks:
            start = self.page_number(block_index, run.layers.start)
            pages[start : start + len(run.layers)] = b"\1" * len(run.layers)


def _blocks_of(tokens: range, block_size: int) -> range:
    """The blocks that hold these tokens."""
    return range(tokens.start // block_size, -(-tokens.stop // block_size))
