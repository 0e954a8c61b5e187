"""One hand-off on its way out of a prefill pool: what was pushed, what was written, what is left. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_cache.layout import KVCacheLayout
from kv_transfer.handoff import HandoffState
from kv_transfer.pages import PageRun, split
from kv_transfer.records import CommitRecord, SendStats


@dataclass(slots=True)
class OutboundHandoff:
    """One outbound hand-off. Block indices count from the start of the prompt; pages are kept block by block.

    `source`: the local block of each prompt block pushed so far. `asked`: the Open has been posted.
    `writing`: the link's writer thread is using this hand-off and the local pool.
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
    state: HandoffState = HandoffState.RESERVED
    asked: bool = False
    queued: bool = False
    writing: bool = False
    record: CommitRecord | None = None
    commit_taken: bool = False
    commit_sent: bool = False
    renew_at: float = 0.0
    first_write_at: float | None = None
    last_write_at: float | None = None
    digest: bytes = b""
    source: dict[int, int] = field(default_factory=dict, init=False)
    pushed: bytearray = field(init=False)
    written: bytearray = field(init=False)
    fingerprints: list[int] = field(init=False)
    _runs: deque[PageRun] = field(default_factory=deque, init=False)
    _pieces: deque[PageRun] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        num_pages = len(self.block_ids) * self.layout.num_layers
        self.pushed, self.written = bytearray(num_pages), bytearray(num_pages)
        self.fingerprints = [0] * num_pages

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

    def push(self, first: int, local_ids: Sequence[int], layers: range) -> None:
        """Take pages of prompt blocks first, first + 1, ... to write. Blocks before `first_block` are ignored.

        Raises ValueError, and takes nothing, out of range.
        """
        blocks, end = range(first, first + len(local_ids)), self.first_block + len(self.block_ids)
        if blocks.start < 0 or blocks.stop > end:
            raise ValueError(f"blocks {first}..{blocks.stop - 1} are not a run of the prompt's {end} blocks")
        if layers.step != 1 or layers.start < 0 or layers.stop > self.layout.num_layers:
            raise ValueError(f"{layers} is not a run of the model's {self.layout.num_layers} layers")
        run = PageRun(range(max(blocks.start, self.first_block), blocks.stop), layers)
        if run.num_pages == 0:
            return
        self.source.update(zip(blocks, local_ids, strict=True))
        self._mark(self.pushed, run)
        previous = self._runs[-1].joined(run) if self._runs else None
        if previous is None:
            self._runs.append(run)
        else:
            self._runs[-1] = previous

    def next_piece(self) -> PageRun | None:
        """The next pages to write, at most one write's worth; None when all that was pushed has been taken."""
        if not self._pieces and self._runs:
            run = self._runs.popleft()
            while self._runs and (longer := run.joined(self._runs[0])) is not None:
                run = longer
                self._runs.popleft()
            self._pieces.extend(split(run, self.layout))
        return self._pieces.popleft() if self._pieces else None

    def mark_written(self, run: PageRun, now: float) -> None:
        """Note that these pages are on their way in order, or in the peer's pool."""
        self._mark(self.written, run)
        self.last_write_at = now

    def page_number(self, block_index: int, layer: int) -> int:
        """Index of a page in `fingerprints`."""
        return (block_index - self.first_block) * self.layout.num_layers + layer

    def stats(self, transport: str, acknowledged_at: float) -> SendStats:
        """What it cost, for the receipt."""
        return SendStats(
            transport=transport,
            num_blocks=len(self.block_ids),
            size_bytes=self.written.count(1) * self.layout.page_bytes,
            first_write_at=self.first_write_at,
            last_write_at=self.last_write_at,
            acknowledged_at=acknowledged_at,
            digest=self.digest,
        )

    def _mark(self, pages: bytearray, run: PageRun) -> None:
        for block_index in run.blocks:
            start = self.page_number(block_index, run.layers.start)
            pages[start : start + len(run.layers)] = b"\1" * len(run.layers)
