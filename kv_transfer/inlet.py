"""What a receiver keeps for one sender: the link, and the way its payload comes into the pool and is looked at."""

from kv_transfer.attachment import Attachment
from kv_transfer.convert import requantise
from kv_transfer.fingerprint import Fingerprints
from kv_transfer.fingerprinter import Fingerprinter
from kv_transfer.identity import Identity
from kv_transfer.link import Link
from kv_transfer.messages import Write
from kv_transfer.pages import PagesAt, max_write_bytes, run_of
from kv_transfer.region import MemoryRegion, RegionError
from kv_transfer.transport import FingerprintingReader, LinkError


class Inlet:
    """The link from one sender. Its receiver owns the thread that reads it, which alone calls the methods here."""

    def __init__(
        self, attachment: Attachment, identity: Identity, io_timeout_s: float, fingerprinter: Fingerprinter | None
    ) -> None:
        """`fingerprinter`: None to take no fingerprints."""
        self.transport = attachment.transport.name
        self.one_sided = attachment.transport.one_sided
        self.link = Link(sends_payload=False, io_timeout_s=io_timeout_s, on_break=attachment.reader.stop)
        # Only the peer's own close tells that a one-sided writer has stopped.
        self.link.one_sided = self.one_sided
        self.max_payload_bytes = max_write_bytes(attachment.wire)
        self._reader = attachment.reader
        self._wire = attachment.wire
        self._layout = identity.layout
        self._pool = identity.pool.buffer
        self._io_timeout_s = io_timeout_s
        self._fingerprinter = fingerprinter
        self._staging: MemoryRegion | None = None

    def receive(self, message: Write, announced_bytes: int, seed: int) -> Fingerprints:
        """Take the payload of a Write that the table allows into the pool.

        The fingerprints of its pages as they came, block by block; none if none are to be taken. Raises LinkError; then
        nothing lands any more, unless the transport is one-sided.
        """
        size = self._size_of(message)
        run = run_of(message)
        pages = landing = PagesAt.in_pool(run, self._layout, self._pool, message.block_ids)
        if self._wire != self._layout:
            landing = PagesAt.in_order(run, self._wire, self._staged(size))
        found = self._read(announced_bytes, landing, seed)
        if landing is not pages:
            requantise(self._wire, self._layout, landing.memory, pages.views())
        return found

    def _read(self, announced_bytes: int, into: PagesAt, seed: int) -> Fingerprints:
        if self._fingerprinter is not None and isinstance(self._reader, FingerprintingReader):
            return self._reader.read_pages(announced_bytes, into, seed, self._fingerprinter, self._io_timeout_s)
        self._reader.read(into.size_bytes, announced_bytes, into.views(), self._io_timeout_s)
        return () if self._fingerprinter is None else self._fingerprinter.fingerprints(into, seed)

    def skip(self, message: Write, announced_bytes: int) -> None:
        """Throw the payload of a Write away. Raises LinkError."""
        self._reader.skip(self._size_of(message), announced_bytes, self._io_timeout_s)

    def close(self) -> None:
        """On return nothing that this end asked for can land any more. When no thread is inside."""
        self._reader.close()
        if self._staging is not None:
            self._staging.close()

    def _size_of(self, message: Write) -> int:
        size = len(message.block_ids) * message.num_layers * self._wire.page_bytes
        if not 0 < size <= self.max_payload_bytes:
            raise LinkError(f"a write of {size} bytes; the limit is {self.max_payload_bytes}")
        return size

    def _staged(self, size: int) -> memoryview:
        """Memory for pages of the wire's layout, of one write at most."""
        if self._staging is None:
            try:
                self._staging = MemoryRegion.allocate(self.max_payload_bytes, shared=False, name="kv-staging")
            except RegionError as error:
                raise LinkError(str(error)) from error
        return self._staging.buffer[:size]
