"""Network interfaces and RDMA ports of this host, and the settings of UCX that `ucx` and `nixl` share.

UCX reads the environment once, when it is loaded.
"""

import fcntl
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

_SETTINGS: Mapping[str, str] = {
    # UCX keeps the registrations of memory that is gone, up to so many; without a bound they grow for days.
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    # Its log goes to stdout otherwise, where a worker's first line and the output of commands belong.
    "UCX_LOG_FILE": "stderr",
    # A variable that only one of the two UCX in a process knows is no mistake of the user's.
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
_INFINIBAND = Path("/sys/class/infiniband")
_INET6 = Path("/proc/net/if_inet6")
_SIOCGIFADDR = 0x8915

_log = logging.getLogger(__name__)


def ucx_settings() -> dict[str, str]:
    """What is set before UCX is loaded, unless the user has."""
    settings = dict(_SETTINGS)
    if not rdma_ports():
        # The verbs modules find no device; but where libibverbs is installed they crash the process at its exit.
        settings["UCX_MODULES"] = "^ib"
    return settings


def set_unless_set(settings: Mapping[str, str]) -> None:
    """Put these variables into the environment, except those that are there; log both. Before a library is loaded."""
    for variable, value in settings.items():
        if variable in os.environ:
            _log.info("%s=%s is set already, and kept", variable, os.environ[variable])
        else:
            os.environ[variable] = value
            _log.info("set %s=%s", variable, value)


def ucx_devices(host: str) -> str | None:
    """As in UCX_NET_DEVICES: the interface with this address, and the active RDMA ports unless it is loopback.

    None for all addresses, or when no interface has it. UCX listens at every interface that it may use.
    """
    interface = interface_of(host)
    if interface is None:
        return None
    return ",".join([interface] if interface == "lo" else [interface, *rdma_ports()])


def rdma_ports() -> list[str]:
    """The active RDMA ports of this machine, as UCX names them ("mlx5_0:1")."""
    states = sorted(_INFINIBAND.glob("*/ports/*/state"))
    return [f"{state.parts[-4]}:{state.parts[-2]}" for state in states if "ACTIVE" in _text(state)]


def interface_of(host: str) -> str | None:
    """The network interface with this address; None for all addresses, or when no interface has it."""
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    addresses = {ipaddress.ip_address(entry[4][0]) for entry in found}
    if any(address.is_loopback for address in addresses):
        return "lo"
    for _, name in socket.if_nameindex():
        if addresses & _addresses_of(name):
            return name
    return None


def _addresses_of(interface: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            reply = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            found.add(ipaddress.IPv4Address(reply[20:24]))
        except OSError:  # It has no IPv4 address.
            pass
    for fields in map(str.split, _text(_INET6).splitlines()):
        if fields[-1] == interface:
            found.add(ipaddress.IPv6Address(bytes.fromhex(fields[0])))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
