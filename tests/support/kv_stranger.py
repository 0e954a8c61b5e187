"""A stranger at a receiver's door: raw sockets before the greeting, hand-made messages after it."""

import socket

from kv_transfer import handshake
from kv_transfer.attachment import asking
from kv_transfer.events import Committed
from kv_transfer.identity import Identity
from kv_transfer.messages import MAX_MESSAGE_BYTES, Message, Settled
from kv_transfer.talk import Talk
from kv_transfer.transport import Channel
from kv_transfer.transport_tcp import TcpNetwork
from kv_transfer.wire import HEADER, decode_from_receiver, encode
from tests.support.kv_pair import Pair

TIMEOUT_S = 10.0


def dial(pair: Pair) -> socket.socket:
    host, port = pair.receiver.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def frame(message: bytes, payload: bytes = b"") -> bytes:
    return HEADER.pack(len(message), len(payload)) + message + payload


def heard_to_the_end(sock: socket.socket) -> bytes:
    """Everything the receiver says until it closes."""
    said = bytearray()
    try:
        while data := sock.recv(65536):
            said += data
    except ConnectionResetError:
        pass
    return bytes(said)


def still_works(pair: Pair) -> bool:
    ticket = pair.reserve([0])
    pair.send(ticket, [5])
    received, _ = pair.outcome(ticket)
    pair.receiver.release(ticket.handoff_id)
    return isinstance(received, Committed) and pair.equal(ticket, [5])


def introduced(pair: Pair, identity: Identity | None = None) -> Talk:
    """The greeting of a stranger who knows the secret, before anything is attached."""
    talk = Talk(TcpNetwork().connect(pair.receiver.address, TIMEOUT_S), TIMEOUT_S)
    handshake.greet(talk, identity or pair.prefill)
    return talk


def greeted(pair: Pair, identity: Identity | None = None, *, transport: str = "tcp") -> Channel:
    """A link of a stranger who knows the secret, to misuse."""
    return settled(introduced(pair, identity), transport)


def settled(talk: Talk, transport: str = "tcp") -> Channel:
    """The same link, once it is agreed how payload travels."""
    asking(talk, transport, b"")(b"")
    talk.say(Settled())
    return talk.channel


def answer(channel: Channel) -> Message:
    data, _ = channel.receive(max_message_bytes=MAX_MESSAGE_BYTES, max_payload_bytes=0, timeout_s=TIMEOUT_S)
    return decode_from_receiver(data)


def say(channel: Channel, message: Message, payload: bytes = b"") -> None:
    channel.send(encode(message), [memoryview(payload)] if payload else [], TIMEOUT_S)
