"""The flags by which a worker's operator says how KV may travel. One place for both roles: each sends and receives."""

import ipaddress
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kv_cache.layout import KVDtype
from kv_transfer.choice import PREFERENCE, order
from kv_transfer.end_facts import (
    INSTALL,
    has_library,
    importable_transports,
    rdma_devices,
    rdma_transports,
    why_no_rdma,
)
from kv_transfer.network import build_network
from kv_transfer.self_probe import drop_broken, move_a_block
from kv_transfer.transport import Network
from runtime.clock import Clock
from runtime.config import flag

AUTO = "auto"
TRANSPORTS = tuple(name for name in PREFERENCE if name != "memory")
"""What a worker can be told to use. `memory` ends at the process and is for tests."""

WireDtype = Literal["", "fp8_e4m3", "int8", "bf16", "fp16"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """Flags of every worker that have to do with the transfer of KV."""

    transports: tuple[str, ...] = flag(
        (AUTO,), "KV transports: auto takes all whose library is installed; a list takes exactly these, or fails."
    )
    forbid_transports: tuple[str, ...] = flag((), "KV transports never to use, whatever --transports says.")
    require_rdma: bool = flag(False, "Fail to start when no transport here can use an RDMA device.")
    max_backlog_mb: int = flag(64, "Most megabytes of KV that wait to be sent or are on their way to one peer.")
    data_port: int = flag(0, "Port that accepts KV blocks; 0 takes a free one.")
    lease_s: float = flag(10.0, "How long a reserved place is held after the last sign of life of its writer.")

    def validate(self) -> None:
        """Raises ValueError naming the flag. What the host lacks is found out in `network`, at start."""
        check_names("--transports", self.transports, also=(AUTO,))
        check_names("--forbid-transports", self.forbid_transports)
        if not self.transports or (AUTO in self.transports and len(self.transports) > 1):
            raise ValueError(f"--transports must be {AUTO}, or some of {', '.join(TRANSPORTS)}")
        if self.transports != (AUTO,) and not set(self.transports) - set(self.forbid_transports):
            raise ValueError("--forbid-transports leaves nothing of --transports")
        if self.max_backlog_mb < 1:
            raise ValueError("--max-backlog-mb must be at least 1")
        if not 0 <= self.data_port <= 65535:
            raise ValueError("--data-port must be 0 to 65535")
        if not 0.1 <= self.lease_s <= 600:
            raise ValueError("--lease-s must be 0.1 to 600")

    @property
    def max_backlog_bytes(self) -> int:
        """`max_backlog_mb` in bytes."""
        return self.max_backlog_mb * 1_000_000

    def transport_names(self) -> tuple[str, ...]:
        """What the flags come to on this host, best first. Raises ValueError when nothing is left, or when a transport
        was asked for by name whose library is not installed."""
        asked = importable_transports() if self.transports == (AUTO,) else self.transports
        names = [name for name in dict.fromkeys(asked) if name not in self.forbid_transports]
        if not names:
            raise ValueError("--forbid-transports leaves no KV transport")
        for name in names:
            if not has_library(name):
                raise ValueError(f"--transports names {name}, whose library is not installed: {INSTALL[name]}")
        return order(names, rdma_transports(tuple(names)))

    def network(self, bind_host: str) -> Network:
        """Opens what these flags allow; at start, before anything large. The names in use are `network.transports`.

        An installed library that does not load is an error when named, a warning under `auto`. Raises ValueError.
        """
        build = _what_loads if self.transports == (AUTO,) else _all
        network = build(self.transport_names(), bind_host)
        names = tuple(network.transports)
        why = why_no_rdma(names)
        if why and self.require_rdma:
            raise ValueError(f"--require-rdma: {why}")
        _log.info("KV transports, best first: %s; RDMA: %s", ", ".join(names), why or ", ".join(rdma_transports(names)))
        if why and rdma_devices() and not _is_loopback(bind_host):
            _log.warning("this host has RDMA devices, and KV will not use them: %s", why)
        return network

    def working(self, network: Network, bind_host: str, clock: Clock) -> tuple[str, ...]:
        """The transports of the network to offer, best first, now that those which hand-offs will take have moved a
        block from here to here. Takes milliseconds; any thread. One that does not work is an error when named, and
        left out with a warning under `auto`. Raises ValueError.
        """
        names = tuple(network.transports)
        rdma = rdma_transports(names)
        left, failures = drop_broken(names, rdma, lambda name: move_a_block(name, network, bind_host, clock))
        for name, why in failures.items():
            if self.transports != (AUTO,):
                raise ValueError(f"--transports names {name}, which moves no block on this host: {why}")
            _log.warning("%s moves no block on this host and is not used: %s", name, why)
        if not left:
            raise ValueError(f"no KV transport works on this host ({', '.join(names)})")
        return left


@dataclass(frozen=True, kw_only=True)
class SendOptions(TransferOptions):
    """Flags of a worker that sends prompts."""

    force_transport: Literal["", "shm", "nixl", "ucx", "tcp"] = flag(
        "", "The one KV transport to use; hand-offs to workers that do not offer it fail."
    )
    kv_wire_dtype: WireDtype = flag("", "Element type of KV on the wire only; empty sends what the receiver keeps.")

    def validate(self) -> None:
        """Raises ValueError naming the flag."""
        super().validate()
        usable = TRANSPORTS if self.transports == (AUTO,) else self.transports
        if self.force_transport and (
            self.force_transport not in usable or self.force_transport in self.forbid_transports
        ):
            raise ValueError(f"--force-transport {self.force_transport} is not among the transports allowed")

    def transport_names(self) -> tuple[str, ...]:
        """As for every worker; the one forced must be there."""
        names = super().transport_names()
        if self.force_transport and self.force_transport not in names:
            raise ValueError(
                f"--force-transport {self.force_transport}: its library is not installed: "
                f"{INSTALL[self.force_transport]}"
            )
        return names

    def working(self, network: Network, bind_host: str, clock: Clock) -> tuple[str, ...]:
        """As for every worker; the one forced is tried too."""
        names = super().working(network, bind_host, clock)
        if self.force_transport and (why := move_a_block(self.force_transport, network, bind_host, clock)):
            raise ValueError(f"--force-transport {self.force_transport}: it moves no block on this host: {why}")
        return names

    @property
    def forced(self) -> str | None:
        """`force_transport`, or None."""
        return self.force_transport or None

    @property
    def wire_dtype(self) -> KVDtype | None:
        """`kv_wire_dtype`; None sends what the receiver keeps."""
        return KVDtype(self.kv_wire_dtype) if self.kv_wire_dtype else None


def check_names(flag_name: str, names: tuple[str, ...], *, also: tuple[str, ...] = ()) -> None:
    """Raises ValueError for a name that is no transport."""
    unknown = [name for name in names if name not in TRANSPORTS + also]
    if unknown:
        raise ValueError(f"{flag_name} must be some of {', '.join(also + TRANSPORTS)}, not {', '.join(unknown)}")


def _all(names: Sequence[str], bind_host: str) -> Network:
    try:
        return build_network(names, bind_host)
    except ValueError:
        raise
    except Exception as error:  # A library that cannot start may raise anything; whoever started us gets one line.
        raise ValueError(f"{', '.join(names)} cannot be used on this host: {error}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _what_loads(names: tuple[str, ...], bind_host: str) -> Network:
    """A network of those that work: a library that is installed may still not load (its own libraries missing)."""
    try:
        return _all(names, bind_host)
    except ValueError:
        usable = [name for name in names if _loads(name, bind_host)]
    if not usable:
        raise ValueError(f"none of {', '.join(names)} can be used on this host")
    return _all(usable, bind_host)


def _loads(name: str, bind_host: str) -> bool:
    try:
        network = _all((name,), bind_host)
    except ValueError as error:
        _log.warning("%s is installed but cannot be used: %s", name, error)
        return False
    network.close()
    return True
