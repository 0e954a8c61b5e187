"""Routers that are found by a name: `--routers dns+NAME:PORT`."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvferry_rpc.internal_pb2 import DECODE, LoadReport, Register
from runtime.kv_event_log import KVEventLog
from runtime.membership import MembershipClient, RetryTimes
from runtime.router_names import DnsName, Lookup, RouterNames, parse_routers
from tests.runtime.test_membership import SECRET, FakeRouter

QUICK = RetryTimes(first_s=0.02, longest_s=0.1, after_refusal_s=0.02, lookup_s=0.02)


class Scripted(RouterNames):
    """A name whose addresses are set; None: it cannot be looked up."""

    def __init__(self, *addresses: str) -> None:
        self.now: frozenset[str] | None = frozenset(addresses)
        self.asked = 0
        self._changed = asyncio.Condition()

    async def addresses(self) -> frozenset[str]:
        async with self._changed:
            self.asked += 1
            self._changed.notify_all()
        if self.now is None:
            raise socket.gaierror("no such name")
        return self.now

    async def asked_again(self, times: int = 2) -> None:
        """Return when it has been asked that often from now on: what was found before has been acted on then."""
        last = self.asked + times
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: self.asked >= last)


@asynccontextmanager
async def member(*routers: str | RouterNames) -> AsyncIterator[MembershipClient]:
    register = Register(worker_id="decode-0", incarnation=b"i" * 16, role=DECODE, address="127.0.0.1:1")
    client = MembershipClient(
        routers, SECRET, register, LoadReport, KVEventLog(), lambda order: None, report_interval_s=0.02, retry=QUICK
    )
    client.start()
    try:
        yield client
    finally:
        await client.stop()


@asynccontextmanager
async def fake_routers(count: int) -> AsyncIterator[list[tuple[FakeRouter, str]]]:
    routers = [FakeRouter() for _ in range(count)]
    try:
        yield [(router, await router.start()) for router in routers]
    finally:
        for router in routers:
            await router.stop()


async def test_a_worker_attaches_to_every_address_of_a_name_also_to_one_that_comes_later() -> None:
    async with fake_routers(3) as ((first, a), (second, b), (third, c)):
        names = Scripted(a, b)
        async with member(names) as client:
            async with asyncio.timeout(20):
                await client.wait_attached()
            assert client.num_attached == 2
            names.now = frozenset((a, b, c))
            await third.until(lambda: third.loads >= 1)
            assert (first.attached, second.attached) == (1, 1)


async def test_a_name_and_addresses_go_together() -> None:
    async with fake_routers(2) as ((_, a), (_, b)), member(a, Scripted(b, a)) as client:
        async with asyncio.timeout(20):
            await client.wait_attached()
        assert client.num_attached == 2


async def test_an_outage_of_the_name_service_changes_nothing() -> None:
    # H001
    async with fake_routers(2) as ((first, a), (second, b)):
        names = Scripted(a)
        async with member(names) as client:
            await first.until(lambda: first.attached == 1)
            names.now = None
            await names.asked_again()
            before = first.loads
            await first.until(lambda: first.loads > before)
            names.now = frozenset((a, b))
            await second.until(lambda: second.loads >= 1)
            assert client.num_attached == 2


async def test_a_router_that_the_name_has_no_more_is_kept_while_its_stream_lives_and_forgotten_after() -> None:
    async with fake_routers(2) as ((first, a), (second, b)):
        names = Scripted(a, b)
        async with member(names) as client:
            async with asyncio.timeout(20):
                await client.wait_attached()
            names.now = frozenset((b,))
            await names.asked_again()
            before = first.loads
            await first.until(lambda: first.loads > before)
            await first.stop()
            async with asyncio.timeout(20):
                while client.num_attached == 2:
                    await names.asked_again(1)
            await names.asked_again()
            again = FakeRouter()
            await again.start(int(a.rpartition(":")[2]))
            await names.asked_again(10)
            assert again.attached == 0
            assert client.num_attached == 1
            assert second.attached == 1
            await again.stop()


async def test_nobody_waits_for_a_router_that_never_came_and_is_named_no_more() -> None:
    async with fake_routers(1) as ((_, a),):
        names = Scripted(a, "127.0.0.1:1")
        async with member(names) as client:
            waits = asyncio.create_task(client.wait_attached())
            await names.asked_again()
            assert not waits.done()
            names.now = frozenset((a,))
            async with asyncio.timeout(20):
                await waits


async def test_who_is_attached_is_not_known_before_the_first_answer() -> None:
    names = Scripted()
    names.now = None
    async with member(names) as client:
        waits = asyncio.create_task(client.wait_attached())
        await names.asked_again()
        assert not waits.done()
        waits.cancel()


async def test_a_draining_worker_says_so_to_a_router_that_comes_later() -> None:
    async with fake_routers(2) as ((first, a), (second, b)):
        names = Scripted(a)
        async with member(names) as client:
            await first.until(lambda: first.attached == 1)
            client.announce_draining()
            names.now = frozenset((a, b))
            await second.until(lambda: second.drainings == 1)


async def test_one_line_is_logged_for_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    names = Scripted("127.0.0.1:1")
    lookup = Lookup(names)
    names.now = None
    assert [await lookup.once() for _ in range(3)] == [False, False, False]
    names.now = frozenset(("127.0.0.1:1",))
    assert await lookup.once()
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


async def test_a_name_is_all_its_addresses_of_one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 8002, 0, 0)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::2", 8002, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 8002)),
    ]

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("routers", 8002)
        return found

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    assert await DnsName("routers", 8002).addresses() == {"[fd00::1]:8002", "[fd00::2]:8002"}


async def test_an_address_is_a_name_of_itself() -> None:
    assert await DnsName("127.0.0.1", 8002).addresses() == {"127.0.0.1:8002"}


def test_the_flag_takes_addresses_and_names() -> None:
    assert parse_routers(["10.0.0.1:8002", "dns+routers.ns:8003"]) == ["10.0.0.1:8002", DnsName("routers.ns", 8003)]
    assert str(DnsName("routers.ns", 8003)) == "dns+routers.ns:8003"


@pytest.mark.parametrize("text", ["dns+", "dns+routers", "dns+:8002", "dns+routers:", "dns+routers:0", "dns+r:65536"])
def test_a_name_without_host_or_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--routers"):
        parse_routers([text])
