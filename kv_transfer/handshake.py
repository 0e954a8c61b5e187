"""The greeting of a link: both ends prove the cluster secret and compare layouts before anything else is believed.

Four bounded messages under one deadline. The receiver tells a stranger nothing, not even its name: the sender proves
itself first. Proofs cover both nonces and everything that the prover claims, so none can be replayed or edited.
"""

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass

import msgspec
from google.protobuf.message import DecodeError

from kv_cache.layout import KVCacheLayout, LayoutVerdict
from kv_transfer.identity import Identity
from kv_transfer.messages import (
    MAX_GREETING_BYTES,
    PROTOCOL_VERSION,
    Challenge,
    Goodbye,
    Greeting,
    Hello,
    Introduction,
    Message,
    Welcome,
)
from kv_transfer.transport import Channel, LinkError
from kv_transfer.wire import decode_greeting, encode
from kvferry_rpc import common_pb2
from kvferry_rpc.common_pb2 import ErrorCode

_MAGIC = b"kvferry"
_NONCE_BYTES = 16
_SENDER, _RECEIVER = b"kvferry sender", b"kvferry receiver"


class GreetingRefused(LinkError):
    """One end will not deal with the other; `code` says of what kind the reason is."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, proven."""

    worker_id: str
    incarnation: bytes


def greet(channel: Channel, identity: Identity, timeout_s: float) -> Peer:
    """The sender's part. Raises GreetingRefused, or LinkError when the peer is silent or talks nonsense."""
    talk = _Talk(channel, timeout_s)
    ours = secrets.token_bytes(_NONCE_BYTES)
    talk.say(Hello(_MAGIC, PROTOCOL_VERSION, ours))
    challenge = talk.hear()
    if not isinstance(challenge, Challenge):
        raise LinkError("the peer answered the greeting out of turn")
    _check_version(challenge.version)
    nonces = ours + challenge.nonce
    layout = identity.layout.to_proto().SerializeToString()
    proof = _proof(identity, _SENDER, nonces, identity.worker_id, identity.incarnation, layout)
    talk.say(Introduction(proof, identity.worker_id, identity.incarnation, layout))
    welcome = talk.hear()
    if not isinstance(welcome, Welcome):
        raise LinkError("the peer answered the greeting out of turn")
    _check_proof(identity, _RECEIVER, nonces, welcome)
    refusal = layout_refusal(identity.layout, welcome.layout)
    if refusal:
        raise GreetingRefused(ErrorCode.HANDOFF_FAILED, refusal)
    return Peer(welcome.worker_id, welcome.incarnation)


def welcome(channel: Channel, identity: Identity, timeout_s: float) -> Peer:
    """The receiver's part. Raises as `greet` does; the peer has been told why, if it got as far as being a peer."""
    talk = _Talk(channel, timeout_s)
    hello = talk.hear()
    if not isinstance(hello, Hello) or hello.magic != _MAGIC or len(hello.nonce) != _NONCE_BYTES:
        raise LinkError("not a greeting")
    ours = secrets.token_bytes(_NONCE_BYTES)
    talk.say(Challenge(PROTOCOL_VERSION, ours))
    _check_version(hello.version)
    nonces = hello.nonce + ours
    introduction = talk.hear()
    if not isinstance(introduction, Introduction):
        raise LinkError("the peer answered the greeting out of turn")
    try:
        _check_proof(identity, _SENDER, nonces, introduction)
        refusal = layout_refusal(identity.layout, introduction.layout)
        if refusal:
            raise GreetingRefused(ErrorCode.HANDOFF_FAILED, refusal)
    except GreetingRefused as error:
        talk.say(Goodbye(error.code, str(error)))
        raise
    layout = identity.layout.to_proto().SerializeToString()
    proof = _proof(identity, _RECEIVER, nonces, identity.worker_id, identity.incarnation, layout)
    talk.say(Welcome(proof, identity.worker_id, identity.incarnation, layout))
    return Peer(introduction.worker_id, introduction.incarnation)


def layout_refusal(here: KVCacheLayout, there: bytes) -> str:
    """Why blocks cannot move between this layout and a peer's serialised one, naming both values; empty if they can."""
    try:
        theirs = KVCacheLayout.from_proto(common_pb2.KVCacheLayout.FromString(there))
    except (DecodeError, ValueError) as error:
        return f"the peer's KV layout makes no sense: {error}"
    match = here.compare(theirs)
    if match.verdict is LayoutVerdict.IDENTICAL:
        return ""
    return f"the KV layouts differ: {'; '.join(match.reasons)}"


class _Talk:
    """The messages of one greeting, all of them under one deadline."""

    def __init__(self, channel: Channel, timeout_s: float) -> None:
        self._channel = channel
        self._deadline = time.monotonic() + timeout_s

    def say(self, message: Message) -> None:
        self._channel.send(encode(message), (), self._left_s())

    def hear(self) -> Greeting:
        data, _ = self._channel.receive(
            max_message_bytes=MAX_GREETING_BYTES, max_payload_bytes=0, timeout_s=self._left_s()
        )
        message = decode_greeting(data)
        if isinstance(message, Goodbye):
            raise GreetingRefused(message.code, f"the peer refused the link: {message.reason[:1000]}")
        return message

    def _left_s(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise LinkError("the greeting took too long")
        return left


def _check_version(theirs: int) -> None:
    if theirs != PROTOCOL_VERSION:
        reason = f"the peer speaks version {theirs} of the hand-off protocol, this worker version {PROTOCOL_VERSION}"
        raise GreetingRefused(ErrorCode.HANDOFF_FAILED, reason)


def _check_proof(identity: Identity, role: bytes, nonces: bytes, claim: Introduction | Welcome) -> None:
    expected = _proof(identity, role, nonces, claim.worker_id, claim.incarnation, claim.layout)
    if not hmac.compare_digest(expected, claim.proof):
        raise GreetingRefused(ErrorCode.UNAUTHENTICATED, "the peer does not know the cluster secret")


def _proof(identity: Identity, role: bytes, nonces: bytes, worker_id: str, incarnation: bytes, layout: bytes) -> bytes:
    # MessagePack of the tuple says where each part ends, so no two different claims have the same bytes.
    claim = msgspec.msgpack.encode((role, nonces, worker_id, incarnation, layout))
    return hmac.new(identity.cluster_secret, claim, hashlib.sha256).digest()
