"""What an end finds out about its host, looked for in a made-up /sys and /dev."""

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from kv_transfer import end_facts as module
from kv_transfer.end_facts import (
    HostPaths,
    end_facts,
    has_library,
    host_id,
    importable_transports,
    rdma_devices,
    rdma_transports,
    ucx_allows_rdma,
    why_no_rdma,
)

BOTH = ("shm", "nixl", "ucx", "tcp")


@pytest.fixture
def host(tmp_path: Path) -> HostPaths:
    """A host with one live InfiniBand port and its device node."""
    port = tmp_path / "sys/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    nodes = tmp_path / "dev"
    nodes.mkdir()
    (nodes / "uverbs0").touch()
    (tmp_path / "boot_id").write_text("0f1e-2d3c\n")
    (tmp_path / "pid").symlink_to("pid:[4026531836]")
    return HostPaths(tmp_path / "sys", nodes, tmp_path / "boot_id", tmp_path / "pid")


@pytest.fixture(autouse=True)
def wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    """Both libraries are installed as wheels, ucx without verbs, and none in the system."""
    installed = {"libucx", "nixl_cu12"}
    real = importlib.util.find_spec

    def find_spec(name: str) -> ModuleSpec | None:
        if name not in ("libucx", "nixl_cu12", "nixl_cu13"):
            return real(name)
        if name not in installed:
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(tmp_path / "wheel" / name)]
        return spec

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(module, "_SYSTEM_LIBRARY_DIRS", (str(tmp_path / "usr/lib"),))
    return installed


def test_nixl_finds_rdma_where_there_is_a_live_device_with_its_node(host: HostPaths) -> None:
    assert rdma_devices(host) == ("mlx5_0",)
    assert rdma_transports(BOTH, host, {}) == ("nixl",)
    assert why_no_rdma(BOTH, host, {}) == ""
    assert end_facts(BOTH, host, {}).rdma == ("nixl",)


def test_ucx_finds_rdma_only_with_a_library_that_was_built_with_verbs(
    host: HostPaths, tmp_path: Path, wheels: set[str]
) -> None:
    (tmp_path / "usr/lib/ucx").mkdir(parents=True)
    (tmp_path / "usr/lib/libucp.so.0").touch()
    (tmp_path / "usr/lib/ucx/libuct_ib.so.0").touch()
    # The wheel's library comes first, and has no verbs.
    assert rdma_transports(("ucx", "tcp"), host, {}) == ()
    assert "without verbs" in why_no_rdma(("ucx", "tcp"), host, {})
    assert rdma_transports(("ucx", "tcp"), host, {"RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY": "true"}) == ("ucx",)
    assert rdma_transports(("ucx", "tcp"), host, {"RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY": "False"}) == ()
    wheels.clear()
    assert rdma_transports(("ucx", "tcp"), host, {}) == ("ucx",)
    (tmp_path / "usr/lib/ucx/libuct_ib.so.0").unlink()
    assert rdma_transports(("ucx", "tcp"), host, {}) == ()


def test_the_library_of_ucx_may_be_the_systems_own(tmp_path: Path, wheels: set[str]) -> None:
    wheels.clear()
    assert importable_transports() == ("shm", "tcp")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/libucp.so.0").touch()
    assert has_library("ucx", {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path / 'elsewhere'}"})
    assert not has_library("nixl", {"LD_LIBRARY_PATH": str(tmp_path / "elsewhere")})


def test_either_build_of_nixl_will_do(wheels: set[str]) -> None:
    assert importable_transports() == ("shm", "tcp", "ucx", "nixl")
    wheels.remove("nixl_cu12")
    assert importable_transports() == ("shm", "tcp", "ucx")
    wheels.add("nixl_cu13")
    assert importable_transports() == ("shm", "tcp", "ucx", "nixl")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("no device", "no RDMA device"),
        ("port down", "live port"),
        ("no node", "no device node"),
        ("no library", "neither nixl nor ucx"),
    ],
)
def test_what_is_missing_for_rdma_is_named(host: HostPaths, damage: str, said: str) -> None:
    names = BOTH
    if damage == "no device":
        host = HostPaths(host.infiniband / "nothing", host.uverbs, host.boot_id, host.pid_namespace)
    elif damage == "port down":
        (host.infiniband / "mlx5_0/ports/1/state").write_text("1: DOWN\n")
    elif damage == "no node":
        (host.uverbs / "uverbs0").unlink()
    else:
        names = ("shm", "tcp")
    assert rdma_transports(names, host, {}) == ()
    assert said in why_no_rdma(names, host, {})


@pytest.mark.parametrize(
    ("environ", "allowed"),
    [
        ({}, True),
        ({"UCX_TLS": "all"}, True),
        ({"UCX_TLS": "rc,sm,self"}, True),
        ({"UCX_TLS": "rc_mlx5,tcp"}, True),
        ({"UCX_TLS": "\\rc_x"}, True),
        ({"UCX_TLS": "ib"}, True),
        ({"UCX_TLS": "srd"}, True),
        ({"UCX_TLS": "tcp"}, False),
        ({"UCX_TLS": "sm,self,tcp,cuda"}, False),
        ({"UCX_TLS": ""}, False),
        ({"UCX_TLS": "^tcp"}, True),
        ({"UCX_TLS": "^rc"}, True),
        ({"UCX_TLS": "^ib"}, False),
        ({"UCX_TLS": "^rc,dc,ud,srd"}, False),
        ({"UCX_NET_DEVICES": "all"}, True),
        ({"UCX_NET_DEVICES": "mlx5_0:1"}, True),
        ({"UCX_NET_DEVICES": "mlx5_0"}, True),
        ({"UCX_NET_DEVICES": "eth0"}, False),
        ({"UCX_NET_DEVICES": ""}, False),
        ({"UCX_NET_DEVICES": "^mlx5_0:1"}, False),
        ({"UCX_NET_DEVICES": "^eth0"}, True),
        ({"UCX_TLS": "rc", "UCX_NET_DEVICES": "eth0"}, False),
        ({"UCX_TLS": "tcp", "UCX_NET_DEVICES": "mlx5_0:1"}, False),
        ({"UCX_TLS": "rc,tcp", "UCX_NET_DEVICES": "eth0,mlx5_0:1"}, True),
    ],
)
def test_what_the_user_told_ucx_decides_whether_rdma_is_expected(
    host: HostPaths, environ: dict[str, str], allowed: bool
) -> None:
    assert ucx_allows_rdma(environ, ("mlx5_0",)) is allowed
    assert bool(rdma_transports(BOTH, host, environ)) is allowed
    assert ("UCX_TLS or UCX_NET_DEVICES" in why_no_rdma(BOTH, host, environ)) is not allowed


def test_the_same_boot_in_another_pid_namespace_is_another_host(host: HostPaths, tmp_path: Path) -> None:
    assert host_id(host) == "0f1e-2d3c pid:[4026531836]"
    (tmp_path / "other").symlink_to("pid:[4026532000]")
    assert host_id(HostPaths(host.infiniband, host.uverbs, host.boot_id, tmp_path / "other")) != host_id(host)


def test_an_unknown_host_has_no_id(host: HostPaths) -> None:
    assert host_id(HostPaths(host.infiniband, host.uverbs, host.boot_id / "gone", host.pid_namespace)) == ""


def test_this_host_has_an_id() -> None:
    assert host_id() == host_id() != ""
