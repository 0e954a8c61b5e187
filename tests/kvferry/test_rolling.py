"""A rolling restart: the stand-in first, one process at a time, the router last."""

import argparse
from pathlib import Path
from typing import Any, cast

import pytest

from kvferry.commands import restart
from kvferry.console import Console
from kvferry.control import send_order
from kvferry.launchers.launcher import Launcher
from kvferry.scaling import elasticity
from kvferry.scaling import fleet as fleet_module
from kvferry.scaling.autoscaler import AutoscaleOptions
from kvferry.scaling.elasticity import Elasticity
from kvferry.scaling.fleet import Fleet
from kvferry.scaling.fleet_admin import FleetAdmin
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.child_process import LaunchError
from runtime.errors import KvferryError
from tests.support.fake_fleet import FakeFleet


@pytest.fixture(autouse=True)
def looks_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_POLL_S", 0.001)


class Cluster(FakeFleet):
    """Has a router that can be replaced."""

    internal_addresses = ("127.0.0.1:1",)

    async def replace_router(self) -> None:
        self.told.append("replace router")
        self.internal_addresses = ("127.0.0.1:2",)

    async def follow(self, addresses: tuple[str, ...]) -> None:
        self.told.append(f"follow to {', '.join(addresses)}")


def fleet_of(fake: Cluster) -> Fleet:
    return Fleet(cast(Launcher, fake), cast(FleetAdmin, fake), patience_s=20.0)


async def test_the_stand_in_is_ready_before_the_worker_drains() -> None:
    fake = Cluster()
    fake.start("prefill-0", "decode-0")
    assert await fleet_of(fake).replace("decode-0") == "decode-1"
    assert fake.told == ["add decode-1", "drain decode-0", "remove decode-0"]


async def test_the_stand_in_of_a_worker_that_was_flipped_has_its_role_of_now() -> None:
    fake = Cluster()
    fake.start("prefill-0", "prefill-1", "decode-0").change("prefill-1", role="decode")
    assert await fleet_of(fake).replace("prefill-1") == "decode-1"


async def test_a_worker_whose_stand_in_does_not_start_stays() -> None:
    fake = Cluster(can_start=False)
    fake.start("decode-0")
    with pytest.raises(LaunchError):
        await fleet_of(fake).replace("decode-0")
    with pytest.raises(KvferryError, match="z is none of this launcher's workers"):
        await fleet_of(fake).replace("z")
    assert fake.told == []


async def _order(fake: Cluster, path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, Any]:
    """What a launcher answers to the order to restart."""
    monkeypatch.setattr(elasticity, "open_admin", lambda launcher: launcher)
    changing = Elasticity(
        cast(Launcher, fake), AutoscaleOptions(), control_path=path / "control.sock", record_path=path / "record",
        say=lambda text: None, emit=lambda record: None, **options,
    )  # fmt: skip
    async with changing:
        return await send_order(path / "control.sock", {"order": "restart"}, lambda text: None)


async def test_an_order_replaces_every_worker_and_then_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Cluster()
    fake.start("prefill-0", "decode-0")
    done = await _order(fake, tmp_path, monkeypatch, replace_router=fake.replace_router)
    assert done == {"replaced": {"prefill-0": "prefill-1", "decode-0": "decode-1"}}
    assert fake.told == [
        *("add prefill-1", "drain prefill-0", "remove prefill-0"),
        *("add decode-1", "drain decode-0", "remove decode-0"),
        *("replace router", "follow to 127.0.0.1:2"),
    ]


async def test_a_restart_that_fails_says_so_and_goes_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Cluster(can_start=False)
    fake.start("decode-0")
    with pytest.raises(KvferryError, match="no memory for the pool"):
        await _order(fake, tmp_path, monkeypatch, replace_router=fake.replace_router)
    assert fake.told == []


async def test_without_a_launcher_of_its_own_the_workers_alone_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Cluster()
    fake.start("prefill-0", "decode-0")
    monkeypatch.setattr(elasticity, "open_admin", lambda launcher: launcher)
    replaced = await elasticity.replace_workers(cast(Launcher, fake), lambda text: None)
    assert replaced == {"prefill-0": "prefill-1", "decode-0": "decode-1"}
    assert fake.told == [
        *("add prefill-1", "drain prefill-0", "remove prefill-0"),
        *("add decode-1", "drain decode-0", "remove decode-0"),
    ]


async def test_a_launcher_that_cannot_replace_its_router_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Cluster()
    with pytest.raises(KvferryError, match="restart is for clusters of one machine"):
        await _order(fake, tmp_path, monkeypatch)
    assert fake.told == []


def test_without_a_cluster_there_is_nothing_to_restart(tmp_path: Path) -> None:
    with pytest.raises(KvferryError, match="no running cluster found") as failure:
        restart.COMMAND.run(argparse.Namespace(state_dir=tmp_path, ray=False), Console(as_json=True))
    assert failure.value.code == ErrorCode.UNAVAILABLE
