"""The second part of a greeting: the ends agree how the payload of their link travels.

The sender proposes one transport after another until one is up at both ends. Under the deadline of the greeting.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kv_cache.layout import KVCacheLayout
from kv_transfer.convert import check_wire
from kv_transfer.handshake import parse_layout
from kv_transfer.identity import Identity
from kv_transfer.messages import MAX_REASON_CHARACTERS, Attach, Attached, Declined, Settled
from kv_transfer.talk import GreetingRefused, Talk
from kv_transfer.transport import Ask, LinkError, PayloadReader, Transport, TransportUnavailable

MAX_PROPOSALS = 8


@dataclass(frozen=True, slots=True)
class Attachment:
    """What was agreed, at the receiver's end. `wire` is the layout of the pages that come in."""

    transport: Transport
    reader: PayloadReader
    wire: KVCacheLayout


def asking(talk: Talk, transport: str, wire: bytes) -> Ask:
    """Sender: how a transport proposes itself. `wire`: see Attach."""

    def ask(data: bytes) -> bytes:
        talk.say(Attach(transport, data, wire))
        answer = talk.hear()
        if isinstance(answer, Attached):
            return answer.data
        if isinstance(answer, Declined):
            raise TransportUnavailable(f"the peer declined: {answer.reason[:MAX_REASON_CHARACTERS]}")
        raise LinkError("the peer answered the greeting out of turn")

    return ask


def agree(talk: Talk, transports: Mapping[str, Transport], identity: Identity) -> Attachment:
    """Receiver: answer proposals until one is settled. The caller closes its reader. Raises LinkError."""
    current: Attachment | None = None
    try:
        for _ in range(MAX_PROPOSALS + 1):
            message = talk.hear()
            if isinstance(message, Settled) and current is not None:
                settled, current = current, None
                return settled
            if not isinstance(message, Attach):
                raise LinkError("the peer attached out of turn")
            if current is not None:  # Agreed, but it did not come up at the sender's end.
                _drop(current)
                current = None
            current = _answer(talk, message, transports, identity)
        raise LinkError(f"the peer proposed more than {MAX_PROPOSALS} transports")
    finally:
        if current is not None:
            _drop(current)


def _answer(talk: Talk, proposal: Attach, transports: Mapping[str, Transport], identity: Identity) -> Attachment | None:
    transport = transports.get(proposal.transport)
    try:
        if transport is None:
            raise TransportUnavailable(f"{proposal.transport} is not offered here")
        wire = _wire_layout(proposal, transport, identity.layout)
        data, reader = transport.accept(proposal.data, talk.channel, identity.layout, identity.pool)
    except TransportUnavailable as error:
        talk.say(Declined(str(error)[:MAX_REASON_CHARACTERS]))
        return None
    attachment = Attachment(transport, reader, wire)
    try:
        talk.say(Attached(data))
    except LinkError:
        _drop(attachment)
        raise
    return attachment


def _wire_layout(proposal: Attach, transport: Transport, pool: KVCacheLayout) -> KVCacheLayout:
    """The layout of the pages that would come in. Raises TransportUnavailable for one that cannot be taken."""
    if not proposal.wire_layout:
        return pool
    try:
        wire = parse_layout(proposal.wire_layout)
    except GreetingRefused as error:
        raise TransportUnavailable(str(error)) from error
    if wire == pool:
        return pool
    if transport.one_sided:
        raise TransportUnavailable(f"{transport.name} writes pages of the pool's own layout only")
    refusal = check_wire(wire, pool)
    if refusal:
        raise TransportUnavailable(refusal)
    return wire


def _drop(attachment: Attachment) -> None:
    attachment.reader.stop()
    attachment.reader.close()
