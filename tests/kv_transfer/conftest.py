"""Ends of links over the libraries, for tests of one transport by itself. Each module has a transport of its own."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from kv_transfer.region import MemoryRegion
from kv_transfer.transport_nixl import NixlTransport
from kv_transfer.transport_ucx import UcxTransport
from tests.support import nixl_peer, ucx_ends


@pytest.fixture(scope="module")
def nixl_transport() -> NixlTransport:
    return NixlTransport("127.0.0.1")


@pytest.fixture
def open_link(nixl_transport: NixlTransport) -> Iterator[Callable[..., nixl_peer.Link]]:
    """Makes nixl links within this process; they end with the test."""
    with contextlib.ExitStack() as stack:

        def build(target: MemoryRegion | None = None, source: MemoryRegion | None = None) -> nixl_peer.Link:
            target, source = target or nixl_peer.pool(nixl_peer.POISON), source or nixl_peer.pool()
            link = nixl_peer.Link(nixl_transport, target, source)
            stack.callback(link.close)
            return link

        yield build


@pytest.fixture
def start_peer() -> Iterator[Callable[..., nixl_peer.Peer]]:
    """Starts processes that are the other end of a nixl link; they end with the test."""
    with contextlib.ExitStack() as stack:

        def build(*arguments: str, environment: dict[str, str] | None = None) -> nixl_peer.Peer:
            peer = nixl_peer.Peer(*arguments, environment=environment)
            stack.callback(peer.close)
            return peer

        yield build


@pytest.fixture(scope="module")
def ucx_transport() -> Iterator[UcxTransport]:
    made = UcxTransport("127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def pools() -> Iterator[ucx_ends.Pools]:
    """Small blocks."""
    made = ucx_ends.Pools(ucx_ends.LAYOUT, 16)
    yield made
    made.close()


@pytest.fixture
def large() -> Iterator[ucx_ends.Pools]:
    """Blocks of more than the sockets between two ends hold."""
    made = ucx_ends.Pools(ucx_ends.LARGE, 2)
    yield made
    made.close()
