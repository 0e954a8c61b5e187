"""Messages as bytes. A frame is an 8-byte header (sizes of message and payload), the message, and then the payload."""

import struct
from typing import TypeVar

import msgspec

from kv_transfer.messages import Greeting, Message, ReceiverMessage, SenderMessage
from kv_transfer.transport import LinkError

HEADER = struct.Struct("!II")

_encoder = msgspec.msgpack.Encoder()
_greetings = msgspec.msgpack.Decoder(Greeting)
_from_sender = msgspec.msgpack.Decoder(SenderMessage)
_from_receiver = msgspec.msgpack.Decoder(ReceiverMessage)

T = TypeVar("T")


def encode(message: Message) -> bytes:
    """MessagePack of the message."""
    return _encoder.encode(message)


def decode_greeting(data: bytes) -> Greeting:
    """A message of the greeting. Raises LinkError for anything else."""
    return _decode(_greetings, data)


def decode_from_sender(data: bytes) -> SenderMessage:
    """What a sender says after the greeting. Raises LinkError for anything else."""
    return _decode(_from_sender, data)


def decode_from_receiver(data: bytes) -> ReceiverMessage:
    """What a receiver says after the greeting. Raises LinkError for anything else."""
    return _decode(_from_receiver, data)


def check_sizes(message_bytes: int, payload_bytes: int, *, max_message_bytes: int, max_payload_bytes: int) -> None:
    """Raises LinkError for a header that promises more than is allowed, before anything is read or held."""
    if not 0 < message_bytes <= max_message_bytes:
        raise LinkError(f"a frame with a message of {message_bytes} bytes; the limit is {max_message_bytes}")
    if payload_bytes > max_payload_bytes:
        raise LinkError(f"a frame with a payload of {payload_bytes} bytes; the limit is {max_payload_bytes}")


def _decode(decoder: "msgspec.msgpack.Decoder[T]", data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LinkError(f"a malformed message: {error}") from error
