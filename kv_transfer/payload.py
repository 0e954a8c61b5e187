"""The sender's way from local pages to a peer's pool: fingerprint first, then write what was fingerprinted."""

from kv_transfer import fingerprint
from kv_transfer.faults import PayloadFaults
from kv_transfer.identity import Identity
from kv_transfer.messages import Write
from kv_transfer.outbound import OutboundHandoff
from kv_transfer.pages import PageRun, views
from kv_transfer.transport import PayloadWriter


class PagePusher:
    """Reads the local pool for all links of a sender. Each link's writer thread calls for its own hand-offs."""

    def __init__(self, identity: Identity, faults: PayloadFaults, io_timeout_s: float) -> None:
        self._pool = identity.pool.buffer
        self._layout = identity.layout
        self._faults = faults
        self._io_timeout_s = io_timeout_s

    def write(self, writer: PayloadWriter, handoff: OutboundHandoff, run: PageRun, written: list[PageRun]) -> None:
        """Write one run, noting the fingerprints in `handoff` and in `written` what is out.

        Raises LinkError or TransportError; then the rest is not written.
        """
        self._fingerprint(handoff, run)
        for part in self._faults.parts(run):
            ids = [handoff.source.get(self._faults.source_of(index), handoff.source[index]) for index in part.blocks]
            source = self._faults.payload(self._faults.post(), views(self._pool, self._layout, ids, part.layers))
            first = part.blocks.start - handoff.first_block
            message = Write(
                handoff_id=handoff.handoff_id,
                block_index=part.blocks.start,
                block_ids=handoff.block_ids[first : first + len(part.blocks)],
                layer=part.layers.start,
                num_layers=len(part.layers),
            )
            writer.write(message, source, self._io_timeout_s)
            written.append(part)

    def fold(self, handoff: OutboundHandoff) -> tuple[tuple[int, ...], bytes]:
        """(checksum of each block, digest of all) of what was written."""
        base_seed = fingerprint.seed(handoff.handoff_id, handoff.attempt)
        checksums = fingerprint.fold_blocks(handoff.fingerprints, self._layout.num_layers, base_seed)
        return checksums, fingerprint.digest(checksums)

    def _fingerprint(self, handoff: OutboundHandoff, run: PageRun) -> None:
        base_seed = fingerprint.seed(handoff.handoff_id, handoff.attempt)
        size = self._layout.page_bytes
        for block_index in run.blocks:
            start = self._layout.page_offset(handoff.source[block_index], run.layers.start)
            number = handoff.page_number(block_index, run.layers.start)
            for layer in run.layers:
                content = self._pool[start : start + size]
                handoff.fingerprints[number] = fingerprint.page(content, base_seed, block_index, layer)
                start, number = start + size, number + 1
