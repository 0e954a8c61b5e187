"""The sender's way from local pages to a peer's pool: convert if need be, fingerprint, write what was fingerprinted."""

from collections.abc import Sequence

from kv_cache.layout import KVCacheLayout
from kv_transfer import fingerprint
from kv_transfer.convert import PageConverter
from kv_transfer.faults import PayloadFaults
from kv_transfer.fingerprinter import Fingerprinter, best_fingerprinter
from kv_transfer.identity import Identity
from kv_transfer.messages import Write
from kv_transfer.outbound import OutboundHandoff
from kv_transfer.pages import PageRun, PagesAt, max_write_bytes
from kv_transfer.region import MemoryRegion, RegionError
from kv_transfer.transport import FingerprintingWriter, LinkError, PayloadWriter


class PagePusher:
    """Reads the local pool for all links of a sender. Each link's writer thread calls for its own link.

    Pages that go out as they lie in the pool are written from there; others from the link's staging memory, one write
    long, where they are made.
    """

    def __init__(
        self,
        identity: Identity,
        faults: PayloadFaults,
        io_timeout_s: float,
        fingerprinter: Fingerprinter | None = None,
    ) -> None:
        """`fingerprinter`: the best there is unless given."""
        self._memory = identity.pool
        self._layout = identity.layout
        self._faults = faults
        self._io_timeout_s = io_timeout_s
        self._fingerprinter = fingerprinter or best_fingerprinter()
        self._staging: dict[int, MemoryRegion] = {}

    def memory(self, link: int, target: KVCacheLayout, wire: KVCacheLayout) -> Sequence[MemoryRegion]:
        """Where payload of this link will come from, its pages having one of these layouts. Raises LinkError.

        Before the first write; `release` must follow the last.
        """
        if target == wire == self._layout:
            return [self._memory]
        size = max(max_write_bytes(target), max_write_bytes(wire))
        try:
            staging = self._staging[link] = MemoryRegion.allocate(size, shared=False, name="kv-staging")
        except RegionError as error:
            raise LinkError(str(error)) from error
        return [self._memory, staging]

    def release(self, link: int) -> None:
        """Nobody reads the link's staging memory any more. Idempotent."""
        staging = self._staging.pop(link, None)
        if staging is not None:
            staging.close()

    def write(self, writer: PayloadWriter, handoff: OutboundHandoff, run: PageRun, written: list[PageRun]) -> None:
        """Write one run, noting the fingerprints in `handoff` and in `written` what is out.

        Raises LinkError or TransportError; then the rest is not written.
        """
        pages = self._pages(handoff, run, run.blocks)
        seed = fingerprint.seed(handoff.handoff_id, handoff.attempt)
        if isinstance(writer, FingerprintingWriter) and not self._faults.change_content:
            self._faults.post(pages.size_bytes)
            found = writer.write_pages(_message(handoff, run), pages, seed, self._fingerprinter, self._io_timeout_s)
            handoff.note_fingerprints(run, found)
            written.append(run)
            return
        handoff.note_fingerprints(run, self._fingerprinter.fingerprints(pages, seed))
        for part in self._faults.parts(run):
            sources = [self._instead_of(handoff, index) for index in part.blocks]
            if sources != list(run.blocks):
                pages = self._pages(handoff, part, sources)
            content = self._faults.payload(self._faults.post(pages.size_bytes), pages.views())
            writer.write(_message(handoff, part), content, self._io_timeout_s)
            written.append(part)

    def fold(self, handoff: OutboundHandoff) -> tuple[tuple[int, ...], bytes]:
        """(checksum of each block, digest of all) of what was written."""
        base_seed = fingerprint.seed(handoff.handoff_id, handoff.attempt)
        checksums = fingerprint.fold_blocks(handoff.fingerprints, self._layout.num_layers, base_seed)
        return checksums, fingerprint.digest(checksums)

    def _pages(self, handoff: OutboundHandoff, run: PageRun, sources: Sequence[int]) -> PagesAt:
        """What goes out as the pages of `run`, taken from prompt blocks `sources`. Valid until the link's next call."""
        if not handoff.converts:
            local = [handoff.source[index] for index in sources]
            return PagesAt.in_pool(run, self._layout, self._memory.buffer, local)
        into = self._staging[handoff.link].buffer[: run.num_pages * handoff.wire.page_bytes]
        converter = PageConverter(self._layout, handoff.wire)
        converter.fill(self._memory.buffer, handoff.source, sources, run.layers, handoff.length, into)
        return PagesAt.in_order(run, handoff.wire, into)

    def _instead_of(self, handoff: OutboundHandoff, block_index: int) -> int:
        """The block whose content goes where that of `block_index` belongs: another one only by a planned fault."""
        other = self._faults.source_of(block_index)
        sources = handoff.sources_of(other)
        return other if sources and all(index in handoff.source for index in sources) else block_index


def _message(handoff: OutboundHandoff, run: PageRun) -> Write:
    first = run.blocks.start - handoff.first_block
    return Write(
        handoff_id=handoff.handoff_id,
        block_index=run.blocks.start,
        block_ids=handoff.block_ids[first : first + len(run.blocks)],
        layer=run.layers.start,
        num_layers=len(run.layers),
    )
