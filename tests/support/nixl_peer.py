"""One end of a nixl link, without the hand-offs around it: here as an object, or in a process of its own.

`python -m tests.support.nixl_peer receive` prints {"address"}, takes one link and then does what lines on stdin say:
"read N" (take N writes), "settle", "frame" (read one, and not its payload), "digest" (of the pool), "close" (its end of
the link), "quit".
`python -m tests.support.nixl_peer send ADDRESS` connects, prints {"connected"} and writes the blocks of each line.
"""

import hashlib
import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kv_cache.layout import KVCacheLayout, KVDtype
from kv_transfer.messages import Attach, Attached, Write
from kv_transfer.nixl_link import NixlReader, NixlWriter
from kv_transfer.pages import views
from kv_transfer.region import MemoryRegion
from kv_transfer.transport import Channel, LinkError, Listener
from kv_transfer.transport_nixl import NixlTransport
from kv_transfer.transport_tcp import TcpNetwork
from kv_transfer.wire import decode_from_sender, decode_greeting, encode
from tests.support.json_process import JsonProcess

LAYOUT = KVCacheLayout(
    model_id="tiny",
    model_revision="abc123",
    num_layers=4,
    num_kv_heads=2,
    head_dim=64,
    block_size=16,
    dtype=KVDtype.FP32,
)
NUM_BLOCKS = 512
POISON = 0xA5
LONG_S = 30.0  # Only ever reached by a test that fails.
ROOT = Path(__file__).parents[2]


def pool(fill: int | None = None) -> MemoryRegion:
    """A pool of NUM_BLOCKS, every byte `fill`, or every block different."""
    region = MemoryRegion.allocate(NUM_BLOCKS * LAYOUT.block_bytes, shared=False)
    whole = np.frombuffer(region.buffer, np.uint8)
    if fill is None:
        whole.view(np.uint32)[:] = np.arange(whole.nbytes // 4, dtype=np.uint32) * np.uint32(2654435761)
    else:
        whole[:] = fill
    return region


def write_of(block_ids: Sequence[int], layers: range = range(LAYOUT.num_layers)) -> Write:
    return Write("handoff", 0, tuple(block_ids), layers.start, len(layers))


def pages(region: MemoryRegion, block_ids: Sequence[int], layers: range = range(LAYOUT.num_layers)) -> list[memoryview]:
    return views(region.buffer, LAYOUT, block_ids, layers)


class ReceiverEnd:
    """Accepts one link; its frames are taken one by one."""

    def __init__(self, transport: NixlTransport, region: MemoryRegion) -> None:
        self.region = region
        self._transport = transport
        self._listener: Listener = TcpNetwork().listen("127.0.0.1", 0)
        self.address = self._listener.address
        self.channel: Channel
        self.reader: NixlReader

    def accept(self) -> None:
        self.channel = self._listener.accept()
        self._listener.close()
        data, _ = self.channel.receive(max_message_bytes=65536, max_payload_bytes=0, timeout_s=LONG_S)
        attach = decode_greeting(data)
        assert isinstance(attach, Attach)
        answer, reader = self._transport.accept(attach.data, self.channel, LAYOUT, self.region)
        assert isinstance(reader, NixlReader)
        self.reader = reader
        self.channel.send(encode(Attached(answer)), (), LONG_S)

    def settle(self) -> None:
        """Until nobody drives the agent any more, after the greeting."""
        self.reader._greeter.join(LONG_S)

    def frame(self) -> Write:
        """The next frame of the sender."""
        data, size = self.channel.receive(max_message_bytes=65536, max_payload_bytes=0, timeout_s=LONG_S)
        message = decode_from_sender(data)
        assert isinstance(message, Write)
        assert size == 0
        return message

    def take(self, timeout_s: float = LONG_S) -> Write:
        """The next frame, and what it announces."""
        message = self.frame()
        layers = range(message.layer, message.layer + message.num_layers)
        into = pages(self.region, message.block_ids, layers)
        self.reader.read(sum(view.nbytes for view in into), 0, into, timeout_s)
        return message

    def close(self) -> None:
        self.reader.stop()
        self.reader.close()
        self.channel.close()


class SenderEnd:
    """A link to a ReceiverEnd, writing from `region`."""

    def __init__(self, transport: NixlTransport, region: MemoryRegion, address: str) -> None:
        self.region = region
        self.channel = TcpNetwork().connect(address, LONG_S)
        writer = transport.connect(transport.offer(region) or b"", self.channel, LAYOUT, [region], self._ask)
        assert isinstance(writer, NixlWriter)
        self.writer = writer

    def _ask(self, data: bytes) -> bytes:
        self.channel.send(encode(Attach("nixl", data, b"")), (), LONG_S)
        answer, _ = self.channel.receive(max_message_bytes=65536, max_payload_bytes=0, timeout_s=LONG_S)
        attached = decode_greeting(answer)
        assert isinstance(attached, Attached)
        return attached.data

    def write(self, block_ids: Sequence[int], source: Sequence[int] = (), timeout_s: float = LONG_S) -> None:
        """Write blocks of ours, the same ids if not told otherwise, to these of the peer's."""
        self.writer.write(write_of(block_ids), pages(self.region, source or block_ids), timeout_s)

    def close(self) -> None:
        self.writer.close()
        self.channel.close()


class Link:
    """Both ends in this process."""

    def __init__(self, transport: NixlTransport, target: MemoryRegion, source: MemoryRegion) -> None:
        self.receiver = ReceiverEnd(transport, target)
        accepting = threading.Thread(target=self.receiver.accept)
        accepting.start()
        self.sender = SenderEnd(transport, source, self.receiver.address)
        accepting.join(LONG_S)

    def send(self, block_ids: list[int], source: list[int] | None = None) -> None:
        """Write and take one write."""
        taking = threading.Thread(target=self.receiver.take)
        taking.start()
        self.sender.write(block_ids, source or ())
        taking.join(LONG_S)
        assert not taking.is_alive()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


class Peer(JsonProcess):
    """The other process."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        super().__init__("tests.support.nixl_peer", *arguments, environment=environment)

    def hear(self) -> dict[str, Any]:
        return self.hear_within(LONG_S)

    def ask(self, line: str) -> dict[str, Any]:
        self.tell(line)
        return self.hear()

    def signal(self, number: int) -> None:
        super().signal(number)
        if number == signal.SIGSTOP:
            state = ""
            while state != "T":
                stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii")
                state = stat.rpartition(")")[2].split()[0]


def digest(region: MemoryRegion) -> str:
    return hashlib.sha256(region.buffer).hexdigest()


def _say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _receive() -> None:
    end = ReceiverEnd(NixlTransport("127.0.0.1"), pool(POISON))
    _say(address=end.address)
    end.accept()
    for line in sys.stdin:
        command, *arguments = line.split()
        try:
            if command == "read":
                for _ in range(int(arguments[0])):
                    end.take()
                _say(read=int(arguments[0]))
            elif command == "settle":
                end.settle()
                _say(settled=True)
            elif command == "frame":
                _say(frame=list(end.frame().block_ids))
            elif command == "digest":
                _say(digest=digest(end.region))
            elif command == "close":
                end.close()
                _say(closed=True)
            elif command == "quit":
                return
        except LinkError as error:
            _say(error=str(error))


def _send(address: str) -> None:
    end = SenderEnd(NixlTransport("127.0.0.1"), pool(), address)
    _say(connected=True, detail=end.writer.detail)
    for line in sys.stdin:
        try:
            began = time.monotonic()
            for block_ids in json.loads(line):
                end.write(block_ids)
            _say(written=True, seconds=time.monotonic() - began)
        except LinkError as error:
            _say(error=str(error))


if __name__ == "__main__":
    _receive() if sys.argv[1] == "receive" else _send(sys.argv[2])
