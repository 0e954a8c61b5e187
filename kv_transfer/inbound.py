"""One place held in a decode pool, and what can be known about a write or a commit before believing it. Pure."""

from dataclasses import dataclass

from kv_transfer.handoff import HandoffState
from kv_transfer.messages import Commit, Write
from kv_transfer.records import MAX_FIRST_TOKEN_BYTES, CommitRecord, ReceiveStats


@dataclass(slots=True)
class InboundHandoff:
    """One inbound hand-off. `written` has one byte a page, block by block: exact for in-band transports.

    `receiving`: a payload is landing right now. `sealed`: the commit that ended all writing.
    """

    handoff_id: str
    attempt: int
    secret: bytes
    first_block: int
    block_ids: tuple[int, ...]
    num_tokens: int
    num_layers: int
    lease_expires_at: float
    written: bytearray
    state: HandoffState = HandoffState.RESERVED
    link: int | None = None
    transport: str = ""
    one_sided: bool = False
    receiving: bool = False
    sealed: Commit | None = None
    commit_received_at: float = 0.0
    first_write_at: float | None = None
    last_write_at: float | None = None

    @property
    def open_to_writes(self) -> bool:
        """Whether its sender may still write, by the protocol."""
        return self.state is HandoffState.TRANSFERRING and self.sealed is None

    @property
    def writable(self) -> bool:
        """Whether a byte may land now, or could without our being asked. A sender that committed writes no more."""
        if self.link is None or self.sealed is not None:
            return False
        return self.one_sided or self.receiving

    def fault_of_write(self, message: Write) -> str:
        """Why this payload must not land, or nothing."""
        if self.one_sided:
            return f"transport {self.transport} writes without announcing it"
        if message.layer < 0 or message.num_layers < 1 or message.layer + message.num_layers > self.num_layers:
            last = message.layer + message.num_layers - 1
            return f"layers {message.layer}..{last} are not within the model's {self.num_layers}"
        start = message.block_index - self.first_block
        stop = start + len(message.block_ids)
        if start < 0 or stop > len(self.block_ids) or start == stop:
            return f"prompt blocks from {message.block_index} on are not within the ticket"
        if self.block_ids[start:stop] != message.block_ids:
            return "the blocks named are not those of the ticket"
        return ""

    def mark_written(self, message: Write) -> None:
        """Note that every page of this payload is in the pool."""
        first = message.block_index - self.first_block
        for block in range(first, first + len(message.block_ids)):
            start = block * self.num_layers + message.layer
            self.written[start : start + message.num_layers] = b"\1" * message.num_layers

    def fault_of_commit(self, message: Commit) -> str:
        """Why this commit cannot be for this place, or nothing."""
        if message.num_tokens != self.num_tokens:
            return f"the commit is of {message.num_tokens} tokens, the ticket of {self.num_tokens}"
        if len(message.first_token) > MAX_FIRST_TOKEN_BYTES:
            return f"the first token has {len(message.first_token)} bytes, more than {MAX_FIRST_TOKEN_BYTES}"
        if len(message.checksums) != len(self.block_ids):
            return f"the commit has {len(message.checksums)} checksums for {len(self.block_ids)} blocks"
        return ""

    def missing_page(self, message: Commit) -> str:
        """Which page is known not to have been written, or nothing. One-sided writers can only be asked."""
        if message.num_pages != len(self.written):
            return f"the sender wrote {message.num_pages} pages of {len(self.written)}"
        missing = -1 if self.one_sided else self.written.find(0)
        if missing < 0:
            return ""
        block, layer = divmod(missing, self.num_layers)
        return f"prompt block {self.first_block + block}, layer {layer} was never received"

    def record(self) -> CommitRecord:
        """What the sender committed. Only once sealed."""
        assert self.sealed is not None
        return CommitRecord(self.sealed.num_tokens, self.sealed.first_token, self.sealed.checksums)

    def stats(self, *, page_bytes: int, verified_at: float, digest: bytes, verified: bool) -> ReceiveStats:
        """What it cost, for the receipt."""
        return ReceiveStats(
            transport=self.transport,
            num_blocks=len(self.block_ids),
            size_bytes=len(self.written) * page_bytes,
            first_write_at=self.first_write_at,
            last_write_at=self.last_write_at,
            commit_received_at=self.commit_received_at,
            verified_at=verified_at,
            digest=digest,
            verified=verified,
        )
