"""What the two ends of a link say to each other. MessagePack of tagged structs; nothing is ever unpickled.

             sender (prefill)                                     receiver (decode)
greeting     Hello(nonce)                     ->
                                              <-  Challenge(nonce, proof)        proof = HMAC(secret, both nonces)
             Introduction(proof, who, layout) ->
                                              <-  Welcome(who, layout)           or Goodbye(why)
transport    Attach(name, data)               ->                                 again with another name if Declined
                                              <-  Attached(data)                 or Declined(why)
             Settled                          ->                                 or Attach: it does not work here
hand-off     Open                             ->
                                              <-  Opened                         or Refused
             Write (+ payload) ...            ->
             Commit                           ->
                                              <-  Accepted                       or Rejected
lease        Renew                            ->
                                              <-  Renewed
giving up    Abort, then Fence                ->
                                              <-  Abort                          answered by Fence
"""

import msgspec

from kv_transfer.choice import EndFacts
from runtime.protocol_version import ProtocolVersion

HANDOFF_VERSION = ProtocolVersion(2, 1)
"""Of what is in this file. One minor apart, the ends understand each other: see `runtime.protocol_version`."""

MAX_GREETING_BYTES = 64 * 1024
MAX_MESSAGE_BYTES = 1024 * 1024
MAX_RENEW_IDS = 256
MAX_REASON_CHARACTERS = 1000
"""What is repeated, to logs and receipts, of a reason that a peer gives."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    """First word of a sender. `magic` keeps strangers' bytes from looking like a version."""

    magic: bytes
    version: int
    nonce: bytes
    minor: int = 0


class Challenge(Message, frozen=True):
    """The receiver asks for a proof of the cluster secret. It says nothing about itself to a stranger."""

    version: int
    nonce: bytes
    minor: int = 0


class Introduction(Message, frozen=True):
    """Who the sender is. `proof`: HMAC by the secret of role, nonces and the other fields; `layout`: proto bytes."""

    proof: bytes
    worker_id: str
    incarnation: bytes
    layout: bytes


class Welcome(Message, frozen=True):
    """The receiver accepts the sender and says who it is, with its own proof. `facts` are hints, and not proven."""

    proof: bytes
    worker_id: str
    incarnation: bytes
    layout: bytes
    facts: EndFacts = EndFacts()


class Goodbye(Message, frozen=True):
    """The greeting is refused. The link closes."""

    code: int
    reason: str


class Attach(Message, frozen=True):
    """The sender proposes how the payload of this link travels. `data` is the transport's own.

    `wire_layout`: proto bytes of the layout of the pages on the wire; empty when it is the receiver's own.
    """

    transport: str
    data: bytes
    wire_layout: bytes


class Attached(Message, frozen=True):
    """Agreed: the payload of this link travels that way. `data` is the transport's own."""

    data: bytes


class Declined(Message, frozen=True):
    """Not that way. Another may be proposed."""

    reason: str


class Settled(Message, frozen=True):
    """The sender's end of the way agreed on last is up too. The greeting is over."""


class Open(Message, frozen=True):
    """Bind a hand-off to this link. The fields repeat the ticket; `transport` is the one the bytes will take.

    `number` is another one in every Open of a sender.
    """

    handoff_id: str
    attempt: int
    incarnation: bytes
    secret: bytes
    transport: str
    number: int = 0


class Opened(Message, frozen=True):
    """The hand-off is bound to this link by the Open of that number: writes may begin."""

    handoff_id: str
    number: int = 0


class Refused(Message, frozen=True):
    """The hand-off cannot be opened; nothing has changed for whoever holds it."""

    handoff_id: str
    reason: str


class Write(Message, frozen=True):
    """A payload: for each of `block_ids`, the pages of layers layer .. layer + num_layers - 1.

    In band, the payload follows. `ucx` and `nixl` move it on their own way now; `shm` has moved it before.
    `block_index` is the index in the prompt of the first block; the ids are the receiver's, as on the ticket.
    """

    handoff_id: str
    block_index: int
    block_ids: tuple[int, ...]
    layer: int
    num_layers: int


class Commit(Message, frozen=True):
    """Everything is written: `num_pages` distinct pages. `checksums` as in CommitRecord. No write follows."""

    handoff_id: str
    num_tokens: int
    first_token: bytes
    checksums: tuple[int, ...]
    num_pages: int


class Accepted(Message, frozen=True):
    """The commit is verified: the decode worker owns the KV."""

    handoff_id: str


class Rejected(Message, frozen=True):
    """The commit is refused and the hand-off over."""

    handoff_id: str
    reason: str


class Renew(Message, frozen=True):
    """These hand-offs are still wanted. At most MAX_RENEW_IDS."""

    handoff_ids: tuple[str, ...]


class Renewed(Message, frozen=True):
    """All but `unknown` are held for another lease."""

    unknown: tuple[str, ...]


class Abort(Message, frozen=True):
    """This side gives the hand-off up. From the receiver it asks for a Fence."""

    handoff_id: str
    code: int
    reason: str


class Fence(Message, frozen=True):
    """From the sender: no write of this hand-off is under way and none will follow."""

    handoff_id: str


Greeting = Hello | Challenge | Introduction | Welcome | Attach | Attached | Declined | Settled | Goodbye
SenderMessage = Open | Write | Commit | Renew | Abort | Fence
ReceiverMessage = Opened | Refused | Accepted | Rejected | Renewed | Abort
HandoffMessage = SenderMessage | ReceiverMessage
