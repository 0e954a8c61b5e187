"""What the two ends of `kvferry doctor --peer` say to each other, and the small KV pool that they move blocks with.

The control goes over one gRPC service of bytes, behind the cluster secret; messages are MessagePack. The blocks go the
way they go between workers: a ticket, a HandoffSender on the asking end, a HandoffReceiver on the listening one.
"""

from typing import TypeVar

import msgspec

from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer.choice import EndFacts
from kv_transfer.messages import HANDOFF_VERSION

DEFAULT_PORT = 8765
SERVICE = "kvferry.internal.v1.PeerProbe"
MAX_MESSAGE_BYTES = 64 * 1024
PROBE_VERSION = 1

# 64 KiB pages, 512 KiB blocks: like those of a model with 8 KV heads of 128, but few of them.
LAYOUT = KVCacheLayout(
    model_id="kvferry-doctor",
    model_revision="1",
    num_layers=8,
    num_kv_heads=8,
    head_dim=128,
    block_size=16,
    dtype=KVDtype.FP16,
)
LARGE_BLOCKS = 32
"""Blocks of the timed hand-off: 16 MiB."""

T = TypeVar("T")


class EndReport(msgspec.Struct, frozen=True):
    """What one end is and has. `unusable` says for each transport that it lacks why."""

    probe_version: int
    protocol_version: int
    kvferry_version: str
    host_name: str
    transports: tuple[str, ...]
    unusable: dict[str, str]
    facts: EndFacts


class TicketRequest(msgspec.Struct, frozen=True):
    """A place for so many blocks, to be reached by this transport."""

    transport: str
    num_blocks: int


class TicketReply(msgspec.Struct, frozen=True):
    """`ticket`: proto bytes; empty when there is none, and then `refusal` says why."""

    ticket: bytes
    refusal: str = ""


class OutcomeRequest(msgspec.Struct, frozen=True):
    """How did it end at your side? Answered when it has ended."""

    handoff_id: str


class OutcomeReply(msgspec.Struct, frozen=True):
    """`failure` is empty when the blocks were received and their content verified."""

    failure: str


def versions() -> tuple[int, int]:
    """What both ends must have in common: of this exchange, and of hand-offs."""
    return PROBE_VERSION, HANDOFF_VERSION.major


def encode(message: msgspec.Struct) -> bytes:
    """MessagePack of the message."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """A message of this kind. Raises ValueError for anything else."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"a malformed message: {error}") from error
