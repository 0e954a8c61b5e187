"""A client on a bare socket, for what no HTTP library does: leave in any way, at any moment, or send nonsense."""

import json
import socket
import struct
from typing import Any


class RawClient:
    """One connection. Every wait has a deadline, after which it raises TimeoutError."""

    def __init__(self, address: str, timeout_s: float = 30.0) -> None:
        """`address` is host:port."""
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=timeout_s)
        self._received = b""

    def post(self, path: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
        self.send(head.encode() + b"\r\n\r\n" + data)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def read_until(self, mark: bytes) -> bytes:
        """Everything received so far, once it holds `mark`. Raises ConnectionError when the connection ends first."""
        while mark not in self._received:
            data = self._socket.recv(65536)
            if not data:
                raise ConnectionError(f"the connection ended after {self._received[-500:]!r}")
            self._received += data
        return self._received

    def status(self) -> int:
        """The status of the answer, as soon as its head is here."""
        return int(self.read_until(b"\r\n\r\n").split()[1])

    def header(self, name: str) -> str | None:
        """A header of the answer; call `status` first."""
        for line in self._received.partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]:
            if line.lower().startswith(name + ":"):
                return line.partition(":")[2].strip()
        return None

    def leave(self, *, reset: bool = False) -> None:
        """Close the connection, with FIN or with RST."""
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()
