"""The network of a worker process: TCP for control, and whichever transports for payload it was told to have."""

import contextlib
from collections.abc import Callable, Sequence

from kv_transfer.transport import Network, Transport
from kv_transfer.transport_inband import InBandTransport
from kv_transfer.transport_shm import ShmTransport
from kv_transfer.transport_tcp import TcpNetwork


def build_network(names: Sequence[str], bind_host: str) -> Network:
    """A network with these transports, in this order; whoever builds it closes it, after the last link.

    `bind_host` is the address that transports with ports of their own listen at. Raises ValueError for a name that is
    unknown or given twice, and, with the command that installs it, for one whose library is missing.
    """
    if not names or len(set(names)) != len(names):
        raise ValueError(f"transports must be named, each once, not {', '.join(names) or 'none'}")
    transports: list[Transport] = []
    with contextlib.ExitStack() as unless_all_are_built:
        for name in names:
            transports.append(_build(name, bind_host))
            unless_all_are_built.callback(transports[-1].close)
        unless_all_are_built.pop_all()
    return TcpNetwork(transports)


def _build(name: str, bind_host: str) -> Transport:
    if name not in _BUILDERS:
        raise ValueError(f"transport {name} is not one of {', '.join(_BUILDERS)}")
    try:
        return _BUILDERS[name](bind_host)
    except ImportError as error:
        raise ValueError(f"transport {name} needs a library ({error}): pip install 'kvferry[{name}]'") from error


def _ucx(bind_host: str) -> Transport:
    from kv_transfer.transport_ucx import UcxTransport

    return UcxTransport(bind_host)


def _nixl(bind_host: str) -> Transport:
    from kv_transfer.transport_nixl import NixlTransport

    return NixlTransport(bind_host)


_BUILDERS: dict[str, Callable[[str], Transport]] = {
    "shm": lambda bind_host: ShmTransport(),
    "nixl": _nixl,
    "ucx": _ucx,
    "tcp": lambda bind_host: InBandTransport("tcp"),
}
