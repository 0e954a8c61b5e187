"""Only transports that have just moved a block are offered, as far as hand-offs would take them."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kv_transfer.options
from kv_transfer.network import build_network
from kv_transfer.options import TRANSPORTS, SendOptions, TransferOptions
from kv_transfer.self_probe import drop_broken, likely_transports, move_a_block
from kv_transfer.transport import Network
from runtime.clock import SystemClock

NAMES = st.lists(st.sampled_from(TRANSPORTS), min_size=1, unique=True)


@pytest.fixture
def network() -> Iterator[Network]:
    built = build_network(("shm", "tcp"), "127.0.0.1")
    yield built
    built.close()


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_transport_that_works_moves_a_block(network: Network, name: str) -> None:
    assert move_a_block(name, network, "127.0.0.1", SystemClock()) == ""


def test_an_address_that_is_not_this_hosts_is_found_out(network: Network) -> None:
    # 192.0.2.0/24 is nobody's.
    assert "192.0.2.1" in move_a_block("tcp", network, "192.0.2.1", SystemClock())


def test_what_is_likely_depends_on_where_the_peer_is_and_on_rdma() -> None:
    assert likely_transports(("shm", "tcp", "ucx", "nixl"), ()) == ("shm", "tcp")
    assert likely_transports(("shm", "nixl", "ucx", "tcp"), ("nixl", "ucx")) == ("shm", "nixl")
    assert likely_transports(("tcp",), ()) == ("tcp",)


@given(names=NAMES, broken=st.sets(st.sampled_from(TRANSPORTS)), rdma=st.sets(st.sampled_from(["nixl", "ucx"])))
@settings(max_examples=200, deadline=None)
def test_whatever_is_broken_what_would_be_taken_of_the_rest_works(
    names: list[str], broken: set[str], rdma: set[str]
) -> None:
    tried: list[str] = []

    def move(name: str) -> str:
        tried.append(name)
        return "it is broken" if name in broken else ""

    left, failures = drop_broken(names, sorted(rdma), move)
    assert len(tried) == len(set(tried)), "each is tried once"
    assert set(likely_transports(left, sorted(rdma))) <= set(tried) - broken
    assert set(failures) == set(tried) & broken == set(names) - set(left)
    assert [name for name in names if name in left] == list(left), "in the order that they had"


def _broken(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def move(name: str, *_: object) -> str:
        return "no memory can be pinned" if name in names else ""

    monkeypatch.setattr(kv_transfer.options, "move_a_block", move)


def test_under_auto_a_broken_transport_is_left_out_with_a_warning(
    network: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _broken(monkeypatch, "shm")
    with caplog.at_level(logging.WARNING):
        assert TransferOptions().working(network, "127.0.0.1", SystemClock()) == ("tcp",)
    assert "shm moves no block on this host and is not used: no memory can be pinned" in caplog.text


def test_a_broken_transport_that_was_asked_for_by_name_fails_the_start(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    _broken(monkeypatch, "tcp")
    options = TransferOptions(transports=("shm", "tcp"))
    with pytest.raises(ValueError, match="--transports names tcp, which moves no block"):
        options.working(network, "127.0.0.1", SystemClock())


def test_where_none_works_the_worker_does_not_start(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    _broken(monkeypatch, "shm", "tcp")
    with pytest.raises(ValueError, match=r"no KV transport works on this host \(shm, tcp\)"):
        TransferOptions().working(network, "127.0.0.1", SystemClock())


def test_the_transport_that_is_forced_is_tried_too(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    _broken(monkeypatch, "ucx")
    options = SendOptions(force_transport="ucx")
    with pytest.raises(ValueError, match="--force-transport ucx: it moves no block"):
        options.working(network, "127.0.0.1", SystemClock())
