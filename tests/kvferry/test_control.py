"""Orders to the launcher of a running cluster, over its socket."""

import asyncio
import json
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvferry import control
from kvferry.control import ControlServer, Say, send_order
from kvferry_rpc.common_pb2 import ErrorCode
from runtime.child_process import LaunchError
from runtime.errors import KvferryError, invalid


async def scale(order: dict[str, Any], say: Say) -> dict[str, Any]:
    say(f"to {order['decode']}")
    say("nearly")
    return {"added": ["decode-1"]}


async def fail(order: dict[str, Any], say: Say) -> dict[str, Any]:
    raise {"launch": LaunchError("no memory"), "invalid": invalid("decode", "is wrong"), "value": ValueError("bad")}[
        order["how"]
    ]


@asynccontextmanager
async def listening(path: Path) -> AsyncIterator[ControlServer]:
    server = ControlServer(path, {"scale": scale, "fail": fail})
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def test_an_order_is_carried_out_and_its_steps_are_told(tmp_path: Path) -> None:
    said: list[str] = []
    async with listening(tmp_path / "control.sock"):
        done = await send_order(tmp_path / "control.sock", {"order": "scale", "decode": 2}, said.append)
    assert done == {"added": ["decode-1"]}
    assert said == ["to 2", "nearly"]
    assert not (tmp_path / "control.sock").exists()


async def test_only_the_owner_can_open_the_socket(tmp_path: Path) -> None:
    async with listening(tmp_path / "control.sock"):
        assert stat.S_IMODE((tmp_path / "control.sock").stat().st_mode) == 0o600


async def test_a_directory_with_a_long_name_will_do(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    async with listening(directory / "control.sock"):
        assert await send_order(directory / "control.sock", {"order": "scale", "decode": 1}, lambda _: None)


@pytest.mark.parametrize(
    ("order", "code", "words"),
    [
        ({"order": "fail", "how": "launch"}, ErrorCode.INTERNAL, "no memory"),
        ({"order": "fail", "how": "invalid"}, ErrorCode.INVALID_REQUEST, "decode is wrong"),
        ({"order": "fail", "how": "value"}, ErrorCode.INVALID_REQUEST, "bad"),
        ({"order": "dance"}, ErrorCode.INVALID_REQUEST, "order must be one of scale, fail"),
        ({}, ErrorCode.INVALID_REQUEST, "order must be one of"),
    ],
)
async def test_what_is_wrong_with_an_order_is_said(
    tmp_path: Path, order: dict[str, str], code: ErrorCode.ValueType, words: str
) -> None:
    async with listening(tmp_path / "control.sock"):
        with pytest.raises(KvferryError, match=words) as failure:
            await send_order(tmp_path / "control.sock", order, lambda _: None)
    assert failure.value.code == code


@pytest.mark.parametrize("line", [b"not json\n", b"[1]\n", b"\n", b"", b"x" * 70_000 + b"\n"])
async def test_what_is_no_order_does_no_harm(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "control.sock"
    async with listening(path):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(line)
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        assert b"invalid_request" in answer
        assert await send_order(path, {"order": "scale", "decode": 1}, lambda _: None)


async def test_another_users_process_gets_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "control.sock"
    async with listening(path):
        monkeypatch.setattr(os, "getuid", lambda: 54321)
        with pytest.raises(KvferryError, match="belongs to another user's process"):
            await send_order(path, {"order": "scale", "decode": 1}, lambda _: None)
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(json.dumps({"order": "scale", "decode": 1}).encode() + b"\n")
        # Closed with the order unread, which the kernel may call a reset.
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()


async def test_without_a_launcher_the_caller_hears_so(tmp_path: Path) -> None:
    with pytest.raises(KvferryError, match="no launcher takes orders") as failure:
        await send_order(tmp_path / "control.sock", {"order": "scale"}, lambda _: None)
    assert failure.value.code == ErrorCode.UNAVAILABLE


async def test_a_launcher_that_ends_meanwhile_leaves_nobody_waiting(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def never(order: dict[str, Any], say: Say) -> dict[str, Any]:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    server = ControlServer(tmp_path / "control.sock", {"never": never})
    await server.start()
    waiting = asyncio.create_task(send_order(tmp_path / "control.sock", {"order": "never"}, lambda _: None))
    async with asyncio.timeout(20):
        await begun.wait()
        await server.close()
        with pytest.raises(KvferryError, match="went away"):
            await waiting


async def test_more_callers_than_there_may_be_are_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_MAX_CONNECTIONS", 0)
    async with listening(tmp_path / "control.sock"):
        with pytest.raises(KvferryError, match="went away"):
            await send_order(tmp_path / "control.sock", {"order": "scale", "decode": 1}, lambda _: None)
