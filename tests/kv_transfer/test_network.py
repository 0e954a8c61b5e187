"""Which transports a worker's network has, and how it says what is missing."""

import sys

import pytest

from kv_transfer.network import build_network
from kv_transfer.transport import Transport, close_transports
from kv_transfer.transport_inband import InBandTransport
from kv_transfer.transport_tcp import TcpNetwork

HOST = "127.0.0.1"


def test_a_network_has_the_transports_that_it_was_told_to_have_in_this_order() -> None:
    network = build_network(("tcp", "shm"), HOST)
    assert list(network.transports) == ["tcp", "shm"]
    network.close()
    network.close()
    assert list(TcpNetwork().transports) == ["shm", "tcp"]


@pytest.mark.parametrize("names", [(), ("tcp", "tcp"), ("tcp", "rdma")])
def test_names_that_make_no_sense_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"must be named, each once|is not one of shm, nixl, ucx, tcp"):
        build_network(names, HOST)


@pytest.mark.parametrize("name", ["ucx", "nixl"])
def test_a_transport_without_its_library_names_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, f"kv_transfer.transport_{name}", None)
    with pytest.raises(ValueError, match=rf"pip install 'kvferry\[{name}\]'"):
        build_network(("tcp", name), HOST)


def test_a_network_that_cannot_be_built_closes_the_transports_that_it_has_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(InBandTransport, "close", lambda self: closed.append(self.name))
    monkeypatch.setitem(sys.modules, "kv_transfer.transport_ucx", None)
    with pytest.raises(ValueError, match="transport ucx needs a library"):
        build_network(("tcp", "ucx"), HOST)
    assert closed == ["tcp"]
    build_network(("tcp",), HOST)
    assert closed == ["tcp"], "one that was built stays open"


def test_closing_a_network_closes_every_transport_whatever_one_of_them_does() -> None:
    closed: list[str] = []

    class Noted(InBandTransport):
        def close(self) -> None:
            closed.append(self.name)
            if self.name == "b":
                raise RuntimeError("a defect")

    transports: dict[str, Transport] = {name: Noted(name) for name in "abc"}
    with pytest.raises(RuntimeError, match="a defect"):
        close_transports(transports)
    assert sorted(closed) == ["a", "b", "c"]
