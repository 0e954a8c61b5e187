"""The first part of a greeting: both ends prove the cluster secret and compare layouts before anything is believed.

Four bounded messages; attachment.py has the rest. The receiver tells a stranger nothing, not even its name: the sender
proves itself first. Proofs cover both nonces and everything that the prover claims, so none can be replayed or edited.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass

import msgspec
from google.protobuf.message import DecodeError

from kv_cache.layout import KVCacheLayout
from kv_transfer.choice import EndFacts
from kv_transfer.convert import layout_refusal
from kv_transfer.identity import Identity
from kv_transfer.messages import HANDOFF_VERSION, Challenge, Goodbye, Hello, Introduction, Welcome
from kv_transfer.talk import GreetingRefused, Talk
from kv_transfer.transport import LinkError
from kvferry_rpc import common_pb2
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.protocol_version import ProtocolVersion

_MAGIC = b"kvferry"
_NONCE_BYTES = 16
_SENDER, _RECEIVER = b"kvferry sender", b"kvferry receiver"


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, proven, and the layout of its pool. `facts` (of a receiver only) are hints."""

    worker_id: str
    incarnation: bytes
    layout: KVCacheLayout
    facts: EndFacts


def greet(talk: Talk, identity: Identity) -> Peer:
    """The sender's part. Raises GreetingRefused, or LinkError when the peer is silent or talks nonsense."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    talk.say(Hello(_MAGIC, HANDOFF_VERSION.major, ours, HANDOFF_VERSION.minor))
    challenge = talk.hear()
    if not isinstance(challenge, Challenge):
        raise LinkError("the peer answered the greeting out of turn")
    _check_version(challenge)
    nonces = ours + challenge.nonce
    ours_laid_out = identity.layout.to_proto().SerializeToString()
    proof = _proof(identity, _SENDER, nonces, identity.worker_id, identity.incarnation, ours_laid_out)
    talk.say(Introduction(proof, identity.worker_id, identity.incarnation, ours_laid_out))
    welcome = talk.hear()
    if not isinstance(welcome, Welcome):
        raise LinkError("the peer answered the greeting out of turn")
    _check_proof(identity, _RECEIVER, nonces, welcome)
    layout = parse_layout(welcome.layout)
    _check_layouts(source=identity.layout, target=layout)
    return Peer(welcome.worker_id, welcome.incarnation, layout, welcome.facts)


def welcome(talk: Talk, identity: Identity, facts: EndFacts) -> Peer:
    """The receiver's part. Raises as `greet` does; the peer has been told why, if it got as far as being a peer."""
    hello = talk.hear()
    if not isinstance(hello, Hello) or hello.magic != _MAGIC or len(hello.nonce) != _NONCE_BYTES:
        raise LinkError("not a greeting")
    ours = secrets.token_bytes(_NONCE_BYTES)
    talk.say(Challenge(HANDOFF_VERSION.major, ours, HANDOFF_VERSION.minor))
    _check_version(hello)
    nonces = hello.nonce + ours
    introduction = talk.hear()
    if not isinstance(introduction, Introduction):
        raise LinkError("the peer answered the greeting out of turn")
    try:
        _check_proof(identity, _SENDER, nonces, introduction)
        theirs = parse_layout(introduction.layout)
        _check_layouts(source=theirs, target=identity.layout)
    except GreetingRefused as error:
        talk.say(Goodbye(error.code, str(error)))
        raise
    layout = identity.layout.to_proto().SerializeToString()
    proof = _proof(identity, _RECEIVER, nonces, identity.worker_id, identity.incarnation, layout)
    talk.say(Welcome(proof, identity.worker_id, identity.incarnation, layout, facts))
    return Peer(introduction.worker_id, introduction.incarnation, theirs, EndFacts())


def parse_layout(data: bytes) -> KVCacheLayout:
    """A layout as a peer serialised it. Raises GreetingRefused when it makes no sense."""
    try:
        return KVCacheLayout.from_proto(common_pb2.KVCacheLayout.FromString(data))
    except (DecodeError, ValueError) as error:
        raise GreetingRefused(ErrorCode.HANDOFF_FAILED, f"the peer's KV layout makes no sense: {error}") from error


def _check_layouts(*, source: KVCacheLayout, target: KVCacheLayout) -> None:
    refusal = layout_refusal(source, target)
    if refusal:
        raise GreetingRefused(ErrorCode.HANDOFF_FAILED, refusal)


def _check_version(said: Hello | Challenge) -> None:
    refusal = HANDOFF_VERSION.refusal(ProtocolVersion(said.version, said.minor), "the hand-off protocol")
    if refusal:
        raise GreetingRefused(ErrorCode.HANDOFF_FAILED, refusal)


def _check_proof(identity: Identity, role: bytes, nonces: bytes, claim: Introduction | Welcome) -> None:
    expected = _proof(identity, role, nonces, claim.worker_id, claim.incarnation, claim.layout)
    if not hmac.compare_digest(expected, claim.proof):
        raise GreetingRefused(ErrorCode.UNAUTHENTICATED, "the peer does not know the cluster secret")


def _proof(identity: Identity, role: bytes, nonces: bytes, worker_id: str, incarnation: bytes, layout: bytes) -> bytes:
    # MessagePack of the tuple says where each part ends, so no two different claims have the same bytes.
    claim = msgspec.msgpack.encode((role, nonces, worker_id, incarnation, layout))
    return hmac.new(identity.cluster_secret, claim, hashlib.sha256).digest()
