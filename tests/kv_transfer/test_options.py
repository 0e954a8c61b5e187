"""The flags about transports: what they come to on a host, and what makes a start fail."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from kv_cache.layout import KVDtype
from kv_transfer import options as module
from kv_transfer.options import SendOptions, TransferOptions
from kv_transfer.transport import Network
from kv_transfer.transport_inband import InBandTransport
from kv_transfer.transport_tcp import TcpNetwork


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host where ucx is installed and nixl is not, without RDMA."""
    _set_host(monkeypatch, installed=("ucx",))


def _set_host(
    monkeypatch: pytest.MonkeyPatch,
    *,
    installed: Sequence[str] = (),
    rdma: Sequence[str] = (),
    devices: Sequence[str] = (),
    broken: Sequence[str] = (),
    broken_with: type[Exception] = ValueError,
) -> None:
    def build(names: Sequence[str], bind_host: str) -> Network:
        bad = [name for name in names if name in broken]
        if bad:
            raise broken_with(f"{bad[0]} does not load")
        return TcpNetwork([InBandTransport(name) for name in names])

    monkeypatch.setattr(module, "importable_transports", lambda: ("shm", "tcp", *installed))
    monkeypatch.setattr(module, "has_library", lambda name: name in ("shm", "tcp", *installed))
    monkeypatch.setattr(module, "rdma_transports", lambda names: tuple(name for name in rdma if name in names))
    monkeypatch.setattr(module, "rdma_devices", lambda: tuple(devices))
    monkeypatch.setattr(
        module, "why_no_rdma", lambda names: "" if any(name in names for name in rdma) else "nothing does RDMA"
    )
    monkeypatch.setattr(module, "build_network", build)


def _in_use(options: TransferOptions) -> tuple[str, ...]:
    options.validate()
    return tuple(options.network("127.0.0.1").transports)


def test_auto_takes_everything_installed_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _in_use(TransferOptions()) == ("shm", "tcp", "ucx")
    _set_host(monkeypatch, installed=("ucx", "nixl"), rdma=("nixl",))
    assert _in_use(TransferOptions()) == ("shm", "nixl", "tcp", "ucx")


def test_a_list_takes_exactly_these() -> None:
    assert _in_use(TransferOptions(transports=("ucx", "tcp"))) == ("tcp", "ucx")
    assert _in_use(TransferOptions(transports=("tcp", "tcp"))) == ("tcp",)


def test_a_transport_named_whose_library_is_missing_fails_with_the_command() -> None:
    with pytest.raises(ValueError, match=r"nixl.*pip install 'kvferry\[nixl\]'"):
        _in_use(TransferOptions(transports=("tcp", "nixl")))


def test_what_is_forbidden_is_never_used() -> None:
    assert _in_use(TransferOptions(forbid_transports=("shm", "ucx"))) == ("tcp",)
    assert _in_use(TransferOptions(transports=("shm", "tcp"), forbid_transports=("shm", "nixl"))) == ("tcp",)


def test_to_forbid_everything_fails() -> None:
    with pytest.raises(ValueError, match="--forbid-transports leaves nothing"):
        TransferOptions(transports=("tcp",), forbid_transports=("tcp",)).validate()
    with pytest.raises(ValueError, match="--forbid-transports leaves no"):
        _in_use(TransferOptions(forbid_transports=("shm", "tcp", "ucx")))


@pytest.mark.parametrize("kind", [ValueError, OSError, RuntimeError])
def test_an_installed_library_that_does_not_load_is_a_warning_under_auto_and_an_error_when_named(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _set_host(monkeypatch, installed=("ucx", "nixl"), broken=("nixl",), broken_with=kind)
    assert _in_use(TransferOptions()) == ("shm", "tcp", "ucx")
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "nixl is installed but cannot be used" in warning
    assert "nixl does not load" in warning
    with pytest.raises(ValueError, match="nixl does not load"):
        _in_use(TransferOptions(transports=("nixl", "tcp")))


def test_rdma_required_where_there_is_none_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--require-rdma: nothing does RDMA"):
        _in_use(TransferOptions(require_rdma=True))
    _set_host(monkeypatch, installed=("nixl",), rdma=("nixl",), devices=("mlx5_0",))
    assert "nixl" in _in_use(TransferOptions(require_rdma=True))
    with pytest.raises(ValueError, match="--require-rdma"):
        _in_use(TransferOptions(require_rdma=True, forbid_transports=("nixl",)))


@pytest.mark.parametrize(
    ("host", "devices", "warned"),
    [
        ("10.0.0.7", ("mlx5_0",), True),
        ("10.0.0.7", (), False),
        ("127.0.0.1", ("mlx5_0",), False),  # A cluster on one host has no use for them.
        ("localhost", ("mlx5_0",), False),
    ],
)
def test_rdma_devices_left_unused_are_a_warning(
    host: str, devices: tuple[str, ...], warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _set_host(monkeypatch, devices=devices)
    TransferOptions().network(host)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert ["KV will not use them" in message for message in warnings] == [True] * warned


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"transports": ("pigeon",)}, "--transports .*pigeon"),
        ({"transports": ("memory",)}, "--transports .*memory"),
        ({"transports": ()}, "--transports"),
        ({"transports": ("auto", "tcp")}, "--transports"),
        ({"forbid_transports": ("auto",)}, "--forbid-transports"),
        ({"max_backlog_mb": 0}, "--max-backlog-mb"),
        ({"data_port": 65536}, "--data-port"),
        ({"lease_s": 0.0}, "--lease-s"),
        ({"force_transport": "tcp", "forbid_transports": ("tcp",)}, "--force-transport"),
        ({"force_transport": "ucx", "transports": ("tcp",)}, "--force-transport"),
    ],
)
def test_nonsense_is_refused_by_the_name_of_the_flag(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SendOptions(**values).validate()


def test_a_forced_transport_must_be_installed() -> None:
    options = SendOptions(force_transport="nixl")
    options.validate()
    with pytest.raises(ValueError, match=r"--force-transport nixl.*pip install 'kvferry\[nixl\]'"):
        options.network("127.0.0.1")
    assert SendOptions(force_transport="ucx").forced == "ucx"
    assert SendOptions().forced is None


def test_the_rest_of_the_flags_as_the_sender_wants_them() -> None:
    options = SendOptions(max_backlog_mb=3, kv_wire_dtype="fp8_e4m3")
    options.validate()
    assert options.max_backlog_bytes == 3_000_000
    assert options.wire_dtype is KVDtype.FP8_E4M3
    assert SendOptions().wire_dtype is None
