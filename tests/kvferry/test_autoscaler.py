"""The autoscaler's loop: what it does with a decision, and what it writes down."""

import asyncio
import json
from typing import Any, cast

import pytest

from kvferry.launchers.launcher import Launcher
from kvferry.scaling import fleet as fleet_module
from kvferry.scaling.autoscaler import DEFAULT_POLICY, Attainment, Autoscaler, load_policy
from kvferry.scaling.fleet import Fleet
from kvferry.scaling.fleet_admin import FleetAdmin
from kvferry.scaling.scaling_policy import Action, Decision, Observation, ScalingLimits, ThresholdPolicy
from runtime.clock import ManualClock
from tests.support.fake_fleet import FakeFleet


@pytest.fixture(autouse=True)
def looks_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_POLL_S", 0.001)


class Script:
    """A policy that says what it is told to, and remembers what it saw."""

    def __init__(self, *decisions: Decision | Exception) -> None:
        self.decisions = list(decisions)
        self.seen: list[Observation] = []

    def decide(self, seen: Observation, now: float) -> Decision:
        self.seen.append(seen)
        decision = self.decisions.pop(0) if self.decisions else Decision(Action.HOLD, "nothing left")
        if isinstance(decision, Exception):
            raise decision
        return decision


class Loop:
    """An autoscaler on a fake fleet, and its records."""

    def __init__(self, fake: FakeFleet, *decisions: Decision | Exception, dry_run: bool = False) -> None:
        self.clock = ManualClock()
        self.records: list[dict[str, Any]] = []
        self.policy = Script(*decisions)
        self.fleet = Fleet(cast(Launcher, fake), cast(FleetAdmin, fake))
        self.autoscaler = Autoscaler(
            self.fleet, self.policy, self.records.append, dry_run=dry_run, clock=self.clock, interval_s=0.001
        )

    @property
    def said(self) -> list[tuple[str, str]]:
        return [(record["event"], record.get("outcome", record["reason"])) for record in self.records]


ADD = Decision(Action.ADD, "decode is short", "decode", numbers={"decode_pressure": 1.5})
FLIP = Decision(Action.FLIP, "prefill can spare one", "decode", "prefill-1")
REMOVE = Decision(Action.REMOVE, "decode is ample", "decode", "decode-1")


def fleet() -> FakeFleet:
    return FakeFleet().start("prefill-0", "prefill-1", "decode-0", "decode-1")


async def test_each_kind_of_change_is_carried_out_and_written_down_with_its_numbers() -> None:
    fake = fleet()
    loop = Loop(fake, ADD, FLIP, REMOVE)
    for _ in range(3):
        await loop.autoscaler.step()
    assert fake.told == ["add decode-2", "prefill-1 to decode", "drain decode-1", "remove decode-1"]
    assert loop.said[:2] == [("autoscale", "decode is short"), ("autoscaled", "decode-2 was added")]
    assert [event for event, _ in loop.said] == ["autoscale", "autoscaled"] * 3
    assert loop.records[0]["decode_pressure"] == 1.5
    assert loop.records[0]["dry_run"] is False
    assert all(json.loads(json.dumps(record)) == record for record in loop.records)


async def test_a_dry_run_only_advises() -> None:
    fake = fleet()
    loop = Loop(fake, ADD, REMOVE, dry_run=True)
    assert (await loop.autoscaler.step()).action is Action.ADD
    assert (await loop.autoscaler.step()).action is Action.REMOVE
    assert fake.told == []
    assert [record["dry_run"] for record in loop.records] == [True, True]


async def test_a_reason_to_hold_still_is_written_down_once() -> None:
    hold, other = Decision(Action.HOLD, "all is well"), Decision(Action.HOLD, "a worker drains")
    loop = Loop(fleet(), hold, hold, other, other, hold)
    for _ in range(5):
        await loop.autoscaler.step()
    assert [reason for _, reason in loop.said] == ["all is well", "a worker drains", "all is well"]


async def test_a_change_that_fails_is_written_down_and_the_loop_goes_on() -> None:
    fake = fleet()
    fake.can_start = False
    loop = Loop(fake, ADD, REMOVE)
    await loop.autoscaler.step()
    assert loop.said[-1] == ("autoscaled", "failed: no memory for the pool")
    await loop.autoscaler.step()
    assert loop.said[-1] == ("autoscaled", "done")


async def test_where_no_router_answers_nothing_is_decided() -> None:
    fake = fleet()
    fake.away = 1
    loop = Loop(fake)
    decision = await loop.autoscaler.step()
    assert decision == Decision(Action.HOLD, "no router was heard: unavailable")
    assert loop.policy.seen == []


async def test_a_change_by_hand_goes_before_the_autoscaler() -> None:
    fake = fleet()
    fake.busy = {"decode-1"}
    loop = Loop(fake, ADD)
    by_hand = asyncio.create_task(loop.fleet.remove("decode-1"))
    await asyncio.sleep(0)
    assert (await loop.autoscaler.step()).reason == "somebody else changes the cluster"
    by_hand.cancel()
    await asyncio.gather(by_hand, return_exceptions=True)
    assert fake.told == ["drain decode-1", "lift decode-1"]


async def test_a_policy_that_fails_does_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    fake = fleet()
    loop = Loop(fake, RuntimeError("scripted"), ADD)
    running = asyncio.create_task(loop.autoscaler.run())
    async with asyncio.timeout(20):
        while len(loop.records) < 2:  # noqa: ASYNC110 - nothing tells of a record
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert fake.told == ["add decode-2"]
    assert "the autoscaler could not decide" in caplog.text


async def test_the_policy_sees_workers_that_are_on_their_way_and_the_share_of_targets_met() -> None:
    fake = fleet()
    del fake.facts["decode-1"]
    loop = Loop(fake)
    fake.slo = (10, 0)
    await loop.autoscaler.step()
    fake.slo = (13, 1)
    loop.clock.advance(1)
    await loop.autoscaler.step()
    first, second = loop.policy.seen
    assert (len(first.view.workers), first.expected) == (3, 4)
    assert (first.slo_attainment, second.slo_attainment) == (None, 0.75)


def test_attainment_is_of_the_last_while_and_begins_anew_after_a_restart() -> None:
    attainment = Attainment(window_s=10)
    assert attainment.note(0, 100, 100) is None
    assert attainment.note(5, 104, 100) == 1.0
    assert attainment.note(12, 104, 104) == 0.5
    assert attainment.note(16, 104, 108) == 0.0
    assert attainment.note(17, 1, 0) is None
    assert attainment.note(18, 2, 1) == 0.5


def test_another_policy_takes_the_place_of_the_usual_one() -> None:
    assert isinstance(load_policy(DEFAULT_POLICY, ScalingLimits()), ThresholdPolicy)
    for name in (
        "kvferry.scaling.scaling_policy",
        "kvferry.scaling.scaling_policy:Nothing",
        "no.such.module:Class",
        "",
    ):
        with pytest.raises(ValueError, match="--autoscale-policy must be module:Class"):
            load_policy(name, ScalingLimits())
