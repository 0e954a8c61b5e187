"""Ends of ucx links without hand-offs above them: two in one process, or one here and one in another process."""

import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer.messages import Write
from kv_transfer.pages import views
from kv_transfer.region import MemoryRegion
from kv_transfer.transport import Channel, LinkError
from kv_transfer.transport_tcp import TcpChannel
from kv_transfer.transport_ucx import UcxReader, UcxTransport, UcxWriter
from kv_transfer.wire import decode_from_sender

LAYOUT = KVCacheLayout(
    model_id="tiny", model_revision="1", num_layers=3, num_kv_heads=2, head_dim=16, block_size=8, dtype=KVDtype.FP32
)
LARGE = KVCacheLayout(
    model_id="large",
    model_revision="1",
    num_layers=2,
    num_kv_heads=16,
    head_dim=256,
    block_size=128,
    dtype=KVDtype.FP32,
)
"""One page is 4 MiB: more than TCP takes while nobody reads."""

OFFER = b"ucx 1"
WAIT_S = 30.0  # Only ever reached by a test that fails.
MARK = 0xA5
_LIMITS = {"max_message_bytes": 1 << 20, "max_payload_bytes": 1 << 22}


@dataclass
class Pools:
    """A pool to read from, of random content, and one to write to, marked all over."""

    layout: KVCacheLayout
    num_blocks: int

    def __post_init__(self) -> None:
        size = self.layout.pool_bytes(self.num_blocks)
        self.source = MemoryRegion.allocate(size, shared=False)
        self.target = MemoryRegion.allocate(size, shared=False)
        np.frombuffer(self.source.buffer, np.uint8)[:] = np.random.default_rng(7).integers(0, 256, size, dtype=np.uint8)
        self.mark()

    def mark(self) -> None:
        np.frombuffer(self.target.buffer, np.uint8)[:] = MARK

    def landed(self) -> set[int]:
        """Blocks of the target with anything in them."""
        blocks = np.frombuffer(self.target.buffer, np.uint8).reshape(self.num_blocks, -1)
        return {block for block in range(self.num_blocks) if (blocks[block] != MARK).any()}

    def from_source(self, ids: Sequence[int], layers: range) -> list[memoryview]:
        return views(self.source.buffer, self.layout, ids, layers)

    def in_target(self, ids: Sequence[int], layers: range) -> list[memoryview]:
        return views(self.target.buffer, self.layout, ids, layers)

    def close(self) -> None:
        self.source.close()
        self.target.close()


def write_of(ids: Sequence[int], layers: range) -> Write:
    return Write("h", 0, tuple(ids), layers.start, len(layers))


def channels() -> tuple[TcpChannel, TcpChannel]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return TcpChannel(near), TcpChannel(server.accept()[0])


def take(reader: UcxReader, channel: Channel, pools: Pools, timeout_s: float) -> Write:
    """Receive one write into the target. Raises LinkError."""
    message, size = next_write(channel, pools)
    layers = range(message.layer, message.layer + message.num_layers)
    into = pools.in_target(message.block_ids, layers)
    reader.read(sum(view.nbytes for view in into), size, into, timeout_s)
    return message


def next_write(channel: Channel, pools: Pools) -> tuple[Write, int]:
    data, size = channel.receive(**_LIMITS, timeout_s=WAIT_S)
    message = decode_from_sender(data)
    assert isinstance(message, Write)
    return message, size


class Link:
    """Both ends in this process."""

    def __init__(self, transport: UcxTransport, pools: Pools) -> None:
        self.pools = pools
        self.sending, self.receiving = channels()
        readers: list[Any] = []

        def ask(data: bytes) -> bytes:
            answer, reader = transport.accept(data, self.receiving, pools.layout, pools.target)
            readers.append(reader)
            return answer

        writer = transport.connect(OFFER, self.sending, pools.layout, [pools.source], ask)
        assert isinstance(writer, UcxWriter)
        assert isinstance(readers[0], UcxReader)
        self.writer, self.reader = writer, readers[0]

    def move(self, source: Sequence[int], target: Sequence[int], layers: range) -> None:
        """One write, from one thread to another."""
        reading = in_thread(lambda: take(self.reader, self.receiving, self.pools, WAIT_S))
        self.writer.write(write_of(target, layers), self.pools.from_source(source, layers), WAIT_S)
        reading()

    def close(self) -> None:
        self.writer.close()
        self.reader.close()
        self.sending.close()
        self.receiving.close()


def in_thread(act: Callable[[], object]) -> Callable[[], None]:
    """Run it on a thread; call the result to wait for it, and get what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> None:
        thread.join(WAIT_S)
        assert not thread.is_alive()
        if raised:
            raise raised[0]

    return join


class Peer:
    """The other end, in a process of its own; `writer` or `reader` is the end here."""

    def __init__(self, role: str, transport: UcxTransport, pools: Pools) -> None:
        context = multiprocessing.get_context("spawn")
        self._commands, theirs = context.Pipe()
        self.channel, far = channels()
        self.process = context.Process(target=_run, args=(role, pools.layout, pools.num_blocks, theirs, far._sock))
        self.process.start()
        theirs.close()
        far.close()
        if role == "sender":
            data, _ = self.channel.receive(**_LIMITS, timeout_s=WAIT_S)
            answer, reader = transport.accept(data, self.channel, pools.layout, pools.target)
            assert isinstance(reader, UcxReader)
            self.reader = reader
            self.channel.send(answer, (), WAIT_S)
        else:
            writer = transport.connect(OFFER, self.channel, pools.layout, [pools.source], _asking(self.channel))
            assert isinstance(writer, UcxWriter)
            self.writer = writer

    def do(self, *command: Any) -> None:
        self._commands.send(command)

    def answer(self) -> Any:
        assert self._commands.poll(WAIT_S)
        return self._commands.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)
        self.process.close()
        self._commands.close()
        self.channel.close()


def _asking(channel: Channel) -> Callable[[bytes], bytes]:
    def ask(data: bytes) -> bytes:
        channel.send(data, (), WAIT_S)
        return channel.receive(**_LIMITS, timeout_s=WAIT_S)[0]

    return ask


def _run(role: str, layout: KVCacheLayout, num_blocks: int, commands: "Connection[Any, Any]", sock: Any) -> None:
    """The other process: do as told, answer "done" or why not."""
    channel, pools, transport = TcpChannel(sock), Pools(layout, num_blocks), UcxTransport("127.0.0.1")
    if role == "sender":
        writer = transport.connect(OFFER, channel, layout, [pools.source], _asking(channel))
        assert isinstance(writer, UcxWriter)
        act = {"write": _write, "half": _half}
        end: Any = writer
    else:
        data, _ = channel.receive(**_LIMITS, timeout_s=WAIT_S)
        answer, end = transport.accept(data, channel, layout, pools.target)
        channel.send(answer, (), WAIT_S)
        act = {"read": _read, "look": _look}
    while True:
        name, *arguments = commands.recv()
        try:
            commands.send(act[name](end, channel, pools, *arguments))
        except LinkError as error:
            commands.send(str(error))


def _write(
    writer: UcxWriter, channel: Channel, pools: Pools, source: Sequence[int], target: Sequence[int], timeout_s: float
) -> str:
    layers = range(pools.layout.num_layers)
    writer.write(write_of(target, layers), pools.from_source(source, layers), timeout_s)
    return "done"


def _half(writer: UcxWriter, channel: Channel, pools: Pools, source: Sequence[int], target: Sequence[int]) -> str:
    """Announce a write, and leave out all but its first piece."""
    layers = range(pools.layout.num_layers)
    sent: list[Any] = []
    send = writer._port.send
    writer._port.send = lambda spans, tag: (sent.append((spans[1:], tag)), send(spans[:1], tag))[1]  # type: ignore[method-assign,func-returns-value]
    writer.write(write_of(target, layers), pools.from_source(source, layers), WAIT_S)
    writer._port.send = send  # type: ignore[method-assign]
    return "done"


def _read(reader: UcxReader, channel: Channel, pools: Pools, timeout_s: float) -> bytes:
    message = take(reader, channel, pools, timeout_s)
    return b"".join(pools.in_target(message.block_ids, range(message.layer, message.layer + message.num_layers)))


def _look(reader: UcxReader, channel: Channel, pools: Pools) -> str:
    """Take the announcement of a write, and go no further."""
    next_write(channel, pools)
    return "done"
