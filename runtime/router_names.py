"""Routers that come and go behind one name.

`--routers dns+NAME:PORT` stands for every address that NAME has at the time, as the pods behind a headless Kubernetes
Service have one name between them; `--routers file+PATH` for every address in a file, which a launcher on the same host
keeps up. Both are asked for again and again, by `runtime.membership`; an answer that does not come changes nothing.
"""

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from runtime.grpc_life import join_host_port

_LOOKUP_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)

DNS_PREFIX = "dns+"
"""What a name begins with that is to be resolved to all its addresses; the same is usual among Prometheus' tools."""


FILE_PREFIX = "file+"
"""What the path of a file of addresses begins with."""

_MAX_FILE_BYTES = 64 * 1024


class RouterNames(Protocol):
    """A set of routers that changes."""

    async def addresses(self) -> frozenset[str]:
        """host:port of each router there is now, at least one. Raises OSError when that cannot be found out."""
        ...


@dataclass(frozen=True, slots=True)
class DnsName:
    """All addresses of one name, with one port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{DNS_PREFIX}{self.host}:{self.port}"

    async def addresses(self) -> frozenset[str]:
        """As the protocol says. Where a name has addresses of both families, those of the family that the system puts
        first: the others are the same routers once more. Event-loop thread only."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        family = found[0][0]
        return frozenset(join_host_port(str(address[0]), self.port) for kind, *_, address in found if kind == family)


@dataclass(frozen=True, slots=True)
class RoutersFile:
    """The addresses in a file, one a line. Whoever writes it replaces it whole, by renaming another one to it."""

    path: Path

    def __str__(self) -> str:
        return f"{FILE_PREFIX}{self.path}"

    async def addresses(self) -> frozenset[str]:
        """As the protocol says."""
        with self.path.open(encoding="utf-8", errors="replace") as file:
            lines = file.read(_MAX_FILE_BYTES).split()
        if not lines:
            raise OSError("it names no router")
        return frozenset(lines)


def write_routers_file(path: Path, addresses: Sequence[str]) -> None:
    """Have a file name these routers, host:port, from one moment to the next. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text("".join(f"{address}\n" for address in addresses), encoding="utf-8")
    temporary.rename(path)


class Lookup:
    """The addresses that some routers had when they could last be looked up. Event-loop thread only."""

    def __init__(self, names: RouterNames) -> None:
        self.names = names
        self.found: frozenset[str] = frozenset()
        self.answered = asyncio.Event()
        self._failing = False

    async def once(self) -> bool:
        """Look again, for ten seconds at most; whether there was an answer."""
        try:
            async with asyncio.timeout(_LOOKUP_TIMEOUT_S):
                self.found = await self.names.addresses()
        except (OSError, TimeoutError) as error:
            # One line an outage, not one a lookup.
            level = logging.DEBUG if self._failing else logging.WARNING
            _log.log(level, "cannot look up %s (%s); keeping to the routers known", self.names, error or "no answer")
            self._failing = True
            return False
        self._failing = False
        self.answered.set()
        return True


def parse_routers(texts: Sequence[str]) -> list[str | RouterNames]:
    """The entries of `--routers`: host:port stays as it is, dns+host:port becomes a name, file+path a file. Raises
    ValueError."""
    return [_entry(text) for text in texts]


def _entry(text: str) -> str | RouterNames:
    if text.startswith(FILE_PREFIX):
        return RoutersFile(Path(text.removeprefix(FILE_PREFIX)))
    return _dns_name(text) if text.startswith(DNS_PREFIX) else text


def _dns_name(text: str) -> DnsName:
    host, _, port = text.removeprefix(DNS_PREFIX).rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(f"--routers: {text} must be {DNS_PREFIX}NAME:PORT")
    return DnsName(host, int(port))
