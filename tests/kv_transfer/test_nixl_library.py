"""What is set before NIXL's library is loaded, and how bytes are laid out for it."""

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer import interfaces, nixl_library
from kv_transfer.nixl_agent import pair
from kv_transfer.nixl_library import load


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'kvferry\[nixl\]'"):
        load("127.0.0.1")


def test_settings_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl_cu12")
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    monkeypatch.setenv("UCX_RCACHE_MAX_UNRELEASED", "7")
    monkeypatch.setenv("UCX_MODULES", "all")
    assert load("127.0.0.1").devices == "eth7"
    assert os.environ["UCX_RCACHE_MAX_UNRELEASED"] == "7"
    assert os.environ["UCX_MODULES"] == "all"


def test_settings_that_nobody_made_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("nixl_cu12")
    monkeypatch.setattr(interfaces, "_INFINIBAND", tmp_path)
    for variable in ("UCX_NET_DEVICES", *interfaces.ucx_settings()):
        monkeypatch.setenv(variable, "to be put back")
        monkeypatch.delenv(variable)
    assert load("127.0.0.1").devices == "lo"
    assert os.environ["UCX_RCACHE_MAX_UNRELEASED"] == "1024"
    assert os.environ["UCX_LOG_FILE"] == "stderr"
    assert os.environ["UCX_MODULES"] == "^ib"


def test_rdma_devices_are_used_beside_the_interface_but_not_beside_loopback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for port, state in [
        ("mlx5_0/ports/1", "4: ACTIVE"),
        ("mlx5_1/ports/1", "1: DOWN"),
        ("mlx5_1/ports/2", "4: ACTIVE"),
    ]:
        (tmp_path / port).mkdir(parents=True)
        (tmp_path / port / "state").write_text(state + "\n", encoding="ascii")
    monkeypatch.setattr(interfaces, "_INFINIBAND", tmp_path)
    assert interfaces.rdma_ports() == ["mlx5_0:1", "mlx5_1:2"]
    monkeypatch.setattr(interfaces, "interface_of", lambda host: {"127.0.0.1": "lo", "10.0.0.1": "eth0"}.get(host))
    assert nixl_library._settings("10.0.0.1")["UCX_NET_DEVICES"] == "eth0,mlx5_0:1,mlx5_1:2"
    assert nixl_library._settings("127.0.0.1")["UCX_NET_DEVICES"] == "lo"
    assert "UCX_NET_DEVICES" not in nixl_library._settings("0.0.0.0")
    assert "UCX_MODULES" not in nixl_library._settings("10.0.0.1")


_RUNS = st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 50)), min_size=1, max_size=8)


@given(here=_RUNS, there=_RUNS)
@settings(deadline=None, max_examples=200)
def test_pieces_carry_every_byte_to_its_place(here: list[tuple[int, int]], there: list[tuple[int, int]]) -> None:
    def each(runs: list[tuple[int, int]]) -> list[int]:
        return [address + offset for address, size in runs for offset in range(size)]

    size = min(len(each(here)), len(each(there)))

    def cut(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        kept, left = [], size
        for address, length in runs:
            if left:
                kept.append((address, min(length, left)))
                left -= kept[-1][1]
        return kept

    pieces = pair(cut(here), cut(there))
    assert [p + i for p, _, s in pieces for i in range(s)] == each(here)[:size]
    assert [p + i for _, p, s in pieces for i in range(s)] == each(there)[:size]


def test_neighbours_on_both_sides_are_one_piece() -> None:
    assert pair([(0, 10), (10, 10)], [(100, 5), (105, 15)]) == [(0, 100, 20)]
    assert pair([(0, 10), (20, 10)], [(100, 20)]) == [(0, 100, 10), (20, 110, 10)]


def test_runs_of_different_lengths_are_refused() -> None:
    for here, there in [([(0, 10)], [(0, 9)]), ([], []), ([], [(0, 1)])]:
        with pytest.raises(ValueError, match="not as long"):
            pair(here, there)
