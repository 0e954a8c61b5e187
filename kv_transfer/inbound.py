"""One place held in a decode pool, and what can be known about a write or a commit before believing it. Pure."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kv_transfer import fingerprint
from kv_transfer.fingerprint import Fingerprints
from kv_transfer.handoff import HandoffState
from kv_transfer.messages import Commit, Write
from kv_transfer.records import MAX_FIRST_TOKEN_BYTES, CommitRecord, ReceiveStats


@dataclass(slots=True)
class InboundHandoff:
    """One inbound hand-off.

    `number`: of the Open that bound it to its link. `seed`: of its fingerprints. `written` and `fingerprints` (bool and
    uint64, [block, layer]): which pages lie in the pool, whole, and what they were when they had landed. `receiving`: a
    payload is landing, or being looked at, right now. `sealed`: the commit that ended all writing.
    """

    handoff_id: str
    attempt: int
    secret: bytes
    first_block: int
    block_ids: tuple[int, ...]
    num_tokens: int
    num_layers: int
    lease_expires_at: float
    state: HandoffState = HandoffState.RESERVED
    link: int | None = None
    transport: str = ""
    number: int = 0
    one_sided: bool = False
    receiving: bool = False
    sealed: Commit | None = None
    commit_received_at: float = 0.0
    first_write_at: float | None = None
    last_write_at: float | None = None
    seed: int = field(init=False)
    written: npt.NDArray[np.bool_] = field(init=False)
    fingerprints: npt.NDArray[np.uint64] = field(init=False)

    def __post_init__(self) -> None:
        shape = len(self.block_ids), self.num_layers
        self.seed = fingerprint.seed(self.handoff_id, self.attempt)
        self.written, self.fingerprints = np.zeros(shape, np.bool_), np.zeros(shape, np.uint64)

    @property
    def open_to_writes(self) -> bool:
        """Whether its sender may still write, by the protocol."""
        return self.state is HandoffState.TRANSFERRING

    @property
    def writable(self) -> bool:
        """Whether a byte may land now, or could without our being asked. A sender that committed writes no more."""
        if self.link is None or self.sealed is not None:
            return False
        return self.one_sided or self.receiving

    def fault_of_write(self, message: Write) -> str:
        """Why this payload must not land, or nothing."""
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

    def begin_write(self, message: Write) -> None:
        """Forget these pages: they are not what they were, and not yet what they will be."""
        self.written[self._place(message)] = False

    def end_write(self, message: Write, fingerprints: Fingerprints) -> None:
        """Note that every page of this payload is in the pool. Without fingerprints, nothing is known of its content.

        A page written again counts as the last write left it.
        """
        place = self._place(message)
        self.written[place] = True
        if len(fingerprints):
            shape = len(message.block_ids), message.num_layers
            self.fingerprints[place] = np.asarray(fingerprints, np.uint64).reshape(shape)

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
        """Which page was not written, or nothing."""
        if message.num_pages != self.written.size:
            return f"the sender wrote {message.num_pages} pages of {self.written.size}"
        if self.written.all():
            return ""
        block, layer = divmod(int(self.written.argmin()), self.num_layers)
        return f"prompt block {self.first_block + block}, layer {layer} was never received"

    def mismatch(self, message: Commit) -> str:
        """The first block that is not what the sender says it sent, or nothing."""
        folded = fingerprint.fold_blocks(self.fingerprints, self.num_layers, self.seed)
        for index, (found, claim) in enumerate(zip(folded, message.checksums, strict=True), start=self.first_block):
            if found != claim:
                return f"prompt block {index} does not hold what was sent (checksum {found:016x}, not {claim:016x})"
        return ""

    def record(self) -> CommitRecord:
        """What the sender committed. Only once sealed."""
        assert self.sealed is not None
        return CommitRecord(self.sealed.num_tokens, self.sealed.first_token, self.sealed.checksums)

    def stats(self, *, page_bytes: int, verified_at: float, verified: bool) -> ReceiveStats:
        """What it cost, for the receipt."""
        assert self.sealed is not None
        return ReceiveStats(
            transport=self.transport,
            num_blocks=len(self.block_ids),
            size_bytes=self.written.size * page_bytes,
            first_write_at=self.first_write_at,
            last_write_at=self.last_write_at,
            commit_received_at=self.commit_received_at,
            verified_at=verified_at,
            digest=fingerprint.digest(self.sealed.checksums) if verified else b"",
            verified=verified,
        )

    def _place(self, message: Write) -> tuple[slice, slice]:
        first = message.block_index - self.first_block
        blocks = slice(first, first + len(message.block_ids))
        return blocks, slice(message.layer, message.layer + message.num_layers)
