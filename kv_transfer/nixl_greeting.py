"""What the ends of a nixl link tell each other before the first write: MessagePack, in an Attach and its Attached."""

import hashlib
import secrets
from typing import Annotated, TypeVar

import msgspec

from kv_transfer.transport import TransportUnavailable

OFFER = b"nixl 1 DRAM"
"""On tickets: that there is such a thing here. What it takes to reach a pool differs from link to link."""

MAX_METADATA_BYTES = 56 * 1024
"""What goes into a greeting with room for the rest. An agent's metadata grows with the machine's network devices."""

TOKEN_BYTES = 16

_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**62)]


class Proposal(msgspec.Struct, frozen=True):
    """How the receiver's agent reaches the sender's, for notes only."""

    agent: str
    metadata: bytes
    digest: bytes

    @classmethod
    def of(cls, agent: str, metadata: bytes) -> "Proposal":
        """With the digest that belongs to it."""
        return cls(agent, metadata, _digest(metadata))


class Answer(msgspec.Struct, frozen=True):
    """How the sender's agent reaches the pool: `size_bytes` at `address`. The notes of writes begin with `token`."""

    agent: str
    metadata: bytes
    digest: bytes
    address: _Positive
    size_bytes: _Positive
    token: bytes

    @classmethod
    def of(cls, agent: str, metadata: bytes, address: int, size_bytes: int, token: bytes) -> "Answer":
        """With the digest that belongs to it."""
        return cls(agent, metadata, _digest(metadata), address, size_bytes, token)


G = TypeVar("G", Proposal, Answer)


def packed(greeting: Proposal | Answer) -> bytes:
    """As bytes for the peer. Raises TransportUnavailable when they are too many."""
    _check_size(greeting.metadata)
    return msgspec.msgpack.encode(greeting)


def parse(data: bytes, kind: type[G]) -> G:
    """What the peer said. Raises TransportUnavailable for what no peer of ours says.

    The digest is against accidents: UCX aborts the process over an address that is garbled. The peer itself has proven
    that it belongs to the cluster before any of this is read.
    """
    try:
        greeting = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TransportUnavailable(f"a malformed nixl greeting: {error}") from error
    _check_size(greeting.metadata)
    if not secrets.compare_digest(greeting.digest, _digest(greeting.metadata)):
        raise TransportUnavailable("garbled nixl metadata")
    return greeting


def _check_size(metadata: bytes) -> None:
    if not 0 < len(metadata) <= MAX_METADATA_BYTES:
        raise TransportUnavailable(f"nixl metadata of {len(metadata)} bytes; at most {MAX_METADATA_BYTES} are allowed")


def _digest(metadata: bytes) -> bytes:
    return hashlib.sha256(metadata).digest()
