"""How far apart a router and its workers may be while a cluster is updated."""

import asyncio
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_rpc.internal_pb2 import Registered, RouterMessage
from runtime.protocol_version import CONTROL_VERSION, FIRST_CONTROL_VERSION, ProtocolVersion, control_version
from tests.support.membership_router import FakeRouter, Harness

OURS = CONTROL_VERSION
VERSIONS = st.builds(ProtocolVersion, st.integers(1, 4), st.integers(0, 6))


@given(ours=VERSIONS, theirs=VERSIONS)
@settings(max_examples=200, deadline=None)
def test_both_ends_judge_alike_and_one_minor_version_is_tolerated(
    ours: ProtocolVersion, theirs: ProtocolVersion
) -> None:
    near = ours.major == theirs.major and abs(ours.minor - theirs.minor) <= 1
    assert (ours.refusal(theirs, "it") == "") is near
    assert (theirs.refusal(ours, "it") == "") is near


def test_a_refusal_names_both_versions_and_what_to_do() -> None:
    refusal = ProtocolVersion(1, 4).refusal(ProtocolVersion(1, 2), "the protocol")
    assert "1.2 of the protocol is spoken there and 1.4 here" in refusal
    assert "update the processes that speak 1.2 first" in refusal


def test_a_message_without_a_version_is_of_the_first_one() -> None:
    assert control_version(0, 0) == FIRST_CONTROL_VERSION == ProtocolVersion(1, 0)
    assert control_version(2, 3) == ProtocolVersion(2, 3)


@pytest.mark.parametrize(
    ("registered", "is_attached"),
    [
        (Registered(router_id="of this version", protocol_version=OURS.major, protocol_minor=OURS.minor), True),
        (Registered(router_id="one older: it knows no minor versions"), True),
        (Registered(router_id="one newer", protocol_version=OURS.major, protocol_minor=OURS.minor + 1), True),
        (Registered(router_id="two newer", protocol_version=OURS.major, protocol_minor=OURS.minor + 2), False),
        (Registered(router_id="a new major", protocol_version=OURS.major + 1), False),
    ],
    ids=lambda value: value.router_id if isinstance(value, Registered) else "",
)
async def test_a_worker_attaches_to_routers_that_are_one_minor_version_away_at_most(
    registered: Registered, is_attached: bool, caplog: pytest.LogCaptureFixture
) -> None:
    router, harness = FakeRouter(), Harness()
    router.registered = registered
    client = harness.client(await router.start())
    with caplog.at_level(logging.ERROR):
        client.start()
        try:
            async with asyncio.timeout(20):
                if is_attached:
                    await client.wait_attached()
                    await router.until(lambda: router.loads >= 2)
                else:
                    await router.until(lambda: len(router.registers) >= 2)  # it tries again, slowly
                    assert client.num_attached == 0
                    assert "does not attach to router" in caplog.text
                    assert f"is spoken there and {OURS} here" in caplog.text
        finally:
            await client.stop()
            await router.stop()


async def test_what_a_newer_router_says_and_this_worker_does_not_know_is_overlooked() -> None:
    router, harness = FakeRouter(), Harness()
    client = harness.client(await router.start())
    client.start()
    try:
        async with asyncio.timeout(20):
            await client.wait_attached()
        # Field 99 of the message, with another inside: a kind of order that nobody here has heard of.
        router.outgoing.put_nowait(RouterMessage.FromString(b"\x9a\x06\x02\x08\x01"))
        loads = router.loads
        await router.until(lambda: router.loads > loads + 2)
        assert client.num_attached == 1
        assert len(router.registers) == 1
    finally:
        await client.stop()
        await router.stop()
