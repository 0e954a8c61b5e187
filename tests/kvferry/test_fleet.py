"""Changing the workers of a cluster: in which order, and what happens when one does not become free."""

from typing import Any, cast

import pytest

from kvferry.launchers.launcher import Launcher
from kvferry.scaling import fleet as fleet_module
from kvferry.scaling.fleet import Changes, Fleet
from kvferry.scaling.fleet_admin import FleetAdmin, fleet_view
from kvferry_rpc.common_pb2 import ErrorCode
from kvferry_rpc.internal_pb2 import FleetState, FleetWorker, LoadReport, Register, Role
from runtime.child_process import LaunchError
from runtime.errors import KvferryError
from tests.support.fake_fleet import FakeFleet


@pytest.fixture(autouse=True)
def looks_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_POLL_S", 0.001)


def fleet_of(fake: FakeFleet, patience_s: float = 20.0, said: list[str] | None = None) -> Fleet:
    say = (lambda text: None) if said is None else said.append
    return Fleet(cast(Launcher, fake), cast(FleetAdmin, fake), say, patience_s=patience_s)


async def test_a_worker_is_drained_before_its_process_is_ended() -> None:
    # H096
    fake = FakeFleet().start("prefill-0", "decode-0", "decode-1")
    said: list[str] = []
    await fleet_of(fake, said=said).remove("decode-1")
    assert fake.told == ["drain decode-1", "remove decode-1"]
    assert said == ["draining decode-1", "ending decode-1"]


async def test_a_worker_that_does_not_become_free_goes_on_working() -> None:
    fake = FakeFleet(busy={"decode-1"}).start("decode-0", "decode-1")
    with pytest.raises(KvferryError, match="decode-1 was not as far within") as failure:
        await fleet_of(fake, patience_s=0.05).remove("decode-1")
    assert failure.value.code == ErrorCode.DEADLINE_EXCEEDED
    assert fake.told == ["drain decode-1", "lift decode-1"]
    assert fake.facts["decode-1"].is_ready


async def test_a_worker_that_is_not_attached_is_ended_without_a_drain() -> None:
    fake = FakeFleet().start("decode-0", "decode-1")
    del fake.facts["decode-1"]
    await fleet_of(fake).remove("decode-1")
    assert fake.told == ["remove decode-1"]


async def test_a_worker_of_somebody_else_is_not_removed() -> None:
    with pytest.raises(KvferryError, match="z is none of this launcher's workers"):
        await fleet_of(FakeFleet().start("decode-0")).remove("z")


async def test_a_flip_is_over_when_the_worker_is_there_in_its_new_role() -> None:
    fake = FakeFleet().start("prefill-0", "prefill-1", "decode-0")
    fleet = fleet_of(fake)
    await fleet.flip("prefill-1", "decode")
    assert fake.told == ["prefill-1 to decode"]
    await fleet.flip("prefill-1", "decode")
    assert fake.told == ["prefill-1 to decode"]


async def test_a_worker_that_keeps_its_role_makes_the_flip_fail() -> None:
    fake = FakeFleet(stays={"prefill-1"}).start("prefill-0", "prefill-1", "decode-0")
    with pytest.raises(KvferryError, match="prefill-1 could not become free, and keeps its role"):
        await fleet_of(fake).flip("prefill-1", "decode")


async def test_a_flip_that_takes_too_long_is_called_off() -> None:
    fake = FakeFleet(busy={"prefill-1"}).start("prefill-0", "prefill-1", "decode-0")
    with pytest.raises(KvferryError, match="not as far"):
        await fleet_of(fake, patience_s=0.05).flip("prefill-1", "decode")
    assert fake.told == ["prefill-1 to decode", "lift prefill-1"]


@pytest.mark.parametrize(
    ("wanted", "told", "changes"),
    [
        ((1, 3), ["add decode-1", "add decode-2"], Changes(added=["decode-1", "decode-2"])),
        ((None, 2), ["add decode-1"], Changes(added=["decode-1"])),
        ((1, 1), [], Changes()),
        ((None, None), [], Changes()),
        ((0, 1), ["drain prefill-0 by force", "remove prefill-0"], Changes(removed=["prefill-0"])),
        ((0, 2), ["prefill-0 to decode by force"], Changes(flipped=["prefill-0"])),
    ],
)
async def test_scaling_does_what_is_missing_and_no_more(
    wanted: tuple[int | None, int | None], told: list[str], changes: Changes
) -> None:
    fake = FakeFleet().start("prefill-0", "decode-0")
    assert await fleet_of(fake).scale(*wanted) == changes
    assert fake.told == told


async def test_workers_are_counted_by_the_role_that_they_have_now() -> None:
    fake = FakeFleet().start("prefill-0", "prefill-1", "decode-0")
    fake.change("prefill-1", role="decode")
    await fleet_of(fake).scale(1, 2)
    assert fake.told == []
    await fleet_of(fake).scale(1, 1)
    assert fake.told == ["drain decode-0", "remove decode-0"]


async def test_the_worker_with_the_least_to_finish_goes() -> None:
    fake = FakeFleet().start("prefill-0", "decode-0", "decode-1", "decode-2")
    fake.change("decode-2", sequences=3)
    fake.change("decode-0", sequences=1)
    await fleet_of(fake).scale(None, 2)
    assert fake.told == ["drain decode-1", "remove decode-1"]


@pytest.mark.parametrize("wanted", [(1, 0), (-1, 1)])
async def test_a_cluster_that_could_not_serve_is_refused(wanted: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="--decode 1 or more"):
        await fleet_of(FakeFleet().start("decode-0")).scale(*wanted)


async def test_a_worker_that_does_not_start_ends_the_scaling() -> None:
    fake = FakeFleet(can_start=False).start("prefill-0", "decode-0")
    with pytest.raises(LaunchError):
        await fleet_of(fake).scale(1, 2)
    assert fake.told == []


def test_what_several_routers_know_is_one_view() -> None:
    def state(queued: int, **workers: Any) -> FleetState:
        return FleetState(
            requests_queued=queued, slo_met=2, slo_missed=1,
            workers=[
                FleetWorker(
                    register=Register(worker_id=name, role=Role.DECODE, num_blocks=9, token_budget=16, max_num_seqs=4),
                    load=LoadReport(blocks_used=3, sequences_running=2, sequences_waiting=1),
                    state="ready", requests_in_flight=requests,
                )
                for name, requests in workers.items()
            ],
        )  # fmt: skip

    view = fleet_view([state(1, b=1, a=2), state(4, b=5)], is_complete=False)
    assert [(one.name, one.requests, one.sequences) for one in view.workers] == [("a", 2, 3), ("b", 6, 3)]
    assert (view.requests_queued, view.slo_met, view.slo_missed, view.is_complete) == (5, 4, 2, False)
    assert not view.workers[0].is_at_rest
