"""Ports that are chosen, or held, before the process that will listen on them has started."""

import socket
from contextlib import closing

_TRIES = 64


def hold_port(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket that is bound to the port (0: a free one) and does not listen: processes that share ports can, others
    cannot. Raises OSError when somebody listens there already, even one that shares, unless that is wanted (`shared`).
    """
    if not shared:
        with closing(_bound(host, port, shared=False)) as probe:
            port = port_of(probe)
    return _bound(host, port, shared=True)


def free_run(host: str, count: int) -> int:
    """The first of `count` ports in a row that nobody has now. Raises OSError when there is no such run."""
    for _ in range(_TRIES):
        sockets: list[socket.socket] = []
        try:
            sockets.append(_bound(host, 0, shared=False))
            first = port_of(sockets[0])
            # One by one, so that those before one that fails are closed too.
            sockets.extend(_bound(host, port, shared=False) for port in range(first + 1, first + count))
            return first
        except (OSError, OverflowError):
            continue
        finally:
            for one in sockets:
                one.close()
    raise OSError(f"no {count} free ports in a row on {host}")


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        # As servers do: connections that have ended a moment ago are in nobody's way.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def port_of(bound: socket.socket) -> int:
    """Of a socket that is bound."""
    return int(bound.getsockname()[1])
