"""What a worker and the processes of its other ranks tell each other besides tensors: framed bytes on a socket pair.

worker -> rank     its setup; then a batch for each step; the end of the stream: exit
rank -> worker     one answer: ready, or why not
"""

import socket
import struct

import msgspec

from engine.options import EngineOptions

_LENGTH = struct.Struct("<Q")


class PoolFile(msgspec.Struct, frozen=True):
    """The memory file of a worker's KV pool: an open descriptor, and where in it the pool begins (a page border)."""

    fd: int
    offset_bytes: int


class FollowerSetup(msgspec.Struct, frozen=True):
    """Everything that one rank needs to build its part of the engine. `options` name the prepared model and the number
    of blocks, so that planning gives what the worker has planned."""

    rank: int
    size: int
    store_port: int
    parent_pid: int
    pool: PoolFile
    pool_bytes: int
    options: EngineOptions
    log_level: str


class FollowerAnswer(msgspec.Struct, frozen=True):
    """`error` empty = ready to compute."""

    error: str = ""


def encode(message: FollowerSetup | FollowerAnswer) -> bytes:
    """As JSON; paths become strings."""
    return msgspec.json.encode(message, enc_hook=str)


def decode_setup(data: bytes | bytearray) -> FollowerSetup:
    """Raises msgspec.ValidationError for something else."""
    return msgspec.json.decode(data, type=FollowerSetup, dec_hook=lambda kind, value: kind(value))


def decode_answer(data: bytes | bytearray) -> FollowerAnswer:
    """Raises msgspec.ValidationError for something else."""
    return msgspec.json.decode(data, type=FollowerAnswer)


def send_frame(end: socket.socket, data: bytes) -> None:
    """Send one frame, whole. Raises OSError when the other end is gone, TimeoutError by the socket's timeout."""
    end.sendall(_LENGTH.pack(len(data)) + data)


def receive_frame(end: socket.socket) -> bytearray | None:
    """The next frame; None when the other end has closed. Raises TimeoutError by the socket's timeout."""
    head = _receive(end, _LENGTH.size)
    return None if head is None else _receive(end, _LENGTH.unpack(head)[0])


def _receive(end: socket.socket, size_bytes: int) -> bytearray | None:
    data = bytearray(size_bytes)
    rest = memoryview(data)
    while rest:
        try:
            received = end.recv_into(rest)
        except ConnectionError:
            return None
        if not received:
            return None
        rest = rest[received:]
    return data
