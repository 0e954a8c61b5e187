"""Routers that a file names: whoever keeps it up changes it whole, and who cannot read it keeps to what there was."""

import asyncio
import os
from pathlib import Path

import pytest

from kvferry_rpc.internal_pb2 import Register
from runtime.membership import MembershipClient, RetryTimes
from runtime.router_names import Lookup, RoutersFile, parse_routers, write_routers_file
from tests.support.membership_router import SECRET, FakeRouter, Harness


async def test_a_file_names_routers_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "routers"
    write_routers_file(path, ["127.0.0.1:1", "[::1]:2"])
    assert await RoutersFile(path).addresses() == {"127.0.0.1:1", "[::1]:2"}
    write_routers_file(path, ["127.0.0.1:3"])
    assert await RoutersFile(path).addresses() == {"127.0.0.1:3"}
    assert os.listdir(tmp_path) == ["routers"]


async def test_a_file_that_is_away_or_empty_or_no_text_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "routers"
    lookup = Lookup(RoutersFile(path))
    assert not await lookup.once()
    write_routers_file(path, ["127.0.0.1:1"])
    assert await lookup.once()
    path.write_text("")
    assert not await lookup.once()
    path.unlink()
    assert not await lookup.once()
    assert lookup.found == {"127.0.0.1:1"}
    path.write_bytes(b"\xff\xfe")
    assert await lookup.once()
    assert f"cannot look up file+{path}" in caplog.text


def test_entries_of_the_flag_say_what_they_are() -> None:
    assert parse_routers(["file+/run/routers", "10.0.0.1:8002"]) == [RoutersFile(Path("/run/routers")), "10.0.0.1:8002"]


async def test_a_worker_attaches_to_a_router_that_is_added_and_leaves_one_that_is_not_named_any_more(
    tmp_path: Path,
) -> None:
    old, new, harness = FakeRouter(), FakeRouter(), Harness()
    addresses = [await old.start(), await new.start()]
    path = tmp_path / "routers"
    write_routers_file(path, addresses[:1])
    quick = RetryTimes(first_s=0.02, longest_s=0.1, after_refusal_s=0.02, lookup_s=0.02)
    client = MembershipClient(
        [RoutersFile(path)], SECRET, Register(worker_id="w", incarnation=b"i" * 16), lambda: harness.load, harness.log,
        harness.on_order, report_interval_s=0.02, retry=quick,
    )  # fmt: skip
    client.start()
    try:
        async with asyncio.timeout(20):
            await client.wait_attached()
        write_routers_file(path, addresses)
        await new.until(lambda: new.loads >= 2)
        assert client.num_attached == 2
        write_routers_file(path, addresses[1:])
        loads = old.loads
        await old.until(lambda: old.loads > loads + 1)  # It holds its stream up for as long as it likes.
        old.outgoing.put_nowait(None)
        await old.until(lambda: old.attached == 0)
        loads = new.loads
        await new.until(lambda: new.loads > loads + 2)
        assert client.num_attached == 1
    finally:
        await client.stop()
        await old.stop()
        await new.stop()
