"""How commands reach the launcher of a running local cluster: a Unix socket in its run directory.

One connection is one order: a line of JSON, `{"order": "scale", ...}`, then lines back: any number of `{"say": text}`,
and last `{"done": result}` or `{"error": {"code", "message"}}`. A caller that goes away does not stop what it began.
Only the user who started the cluster can open the socket, and both sides look who is at the other end.
"""

import asyncio
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvferry_rpc.common_pb2 import ErrorCode
from runtime.child_process import LaunchError
from runtime.errors import KvferryError, invalid

MAX_LINE_BYTES = 64 * 1024
_MAX_CONNECTIONS = 16
_ORDER_TIMEOUT_S = 10.0
_CREDENTIALS = struct.Struct("3i")

Say = Callable[[str], None]
Handler = Callable[[dict[str, Any], Say], Awaitable[dict[str, Any]]]
"""Carries out one order. Its errors, KvferryError, LaunchError and ValueError, are told to the caller."""


class ControlServer:
    """Event-loop thread only."""

    def __init__(self, path: Path, handlers: Mapping[str, Handler]) -> None:
        """`path`: of the socket, in a directory of our own. `handlers`, by the name of the order."""
        self._path = path
        self._handlers = handlers
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Raises OSError when the socket cannot be made."""
        listening = _bound(self._path)
        self._server = await asyncio.start_unix_server(self._connected, sock=listening, limit=MAX_LINE_BYTES)

    async def close(self) -> None:
        """Take no more orders; those under way are cancelled. Idempotent."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= _MAX_CONNECTIONS or not _is_ours(writer.get_extra_info("socket")):
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def answer(message: dict[str, Any]) -> None:
            # What nobody reads any more goes nowhere; the order is carried out all the same.
            if not writer.is_closing():
                writer.write(json.dumps(message).encode() + b"\n")

        try:
            answer({"done": await self._carry_out(reader, lambda text: answer({"say": text}))})
        except KvferryError as error:
            answer({"error": {"code": error.code_name, "message": error.message}})
        except LaunchError as error:
            answer({"error": {"code": "launch_failed", "message": str(error)}})
        except (ValueError, TimeoutError) as error:
            answer({"error": {"code": "invalid_request", "message": str(error) or "no order came"}})
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _carry_out(self, reader: asyncio.StreamReader, say: Say) -> dict[str, Any]:
        async with asyncio.timeout(_ORDER_TIMEOUT_S):
            order = json.loads(await reader.readline())
        if not isinstance(order, dict) or (handler := self._handlers.get(str(order.get("order")))) is None:
            raise invalid("order", f"must be one of {', '.join(self._handlers)}")
        return await handler(order, say)


async def send_order(path: Path, order: dict[str, Any], say: Say) -> dict[str, Any]:
    """Have an order carried out; `say` is told of each step. Returns the result.

    Raises KvferryError: UNAVAILABLE when no launcher listens there or it went away, otherwise what it answers.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(sock=_connected_to(path), limit=MAX_LINE_BYTES)
    except OSError as error:
        raise KvferryError(ErrorCode.UNAVAILABLE, f"no launcher takes orders at {path}: {error}") from None
    try:
        writer.write(json.dumps(order).encode() + b"\n")
        await writer.drain()
        while line := await reader.readline():
            answer = json.loads(line)
            if "say" in answer:
                say(str(answer["say"]))
            elif "error" in answer:
                raise _error(answer["error"])
            else:
                done: dict[str, Any] = answer["done"]
                return done
    except OSError as error:
        raise KvferryError(ErrorCode.UNAVAILABLE, f"the launcher went away: {error}") from None
    finally:
        writer.close()
    raise KvferryError(ErrorCode.UNAVAILABLE, "the launcher went away without an answer")


def _bound(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _Directory(path.parent) as directory:
            listening.bind(f"{directory}/{path.name}")
        path.chmod(0o600)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


def _connected_to(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _Directory(path.parent) as directory:
            connection.connect(f"{directory}/{path.name}")
        if not _is_ours(connection):
            raise PermissionError(f"{path} belongs to another user's process")
        connection.setblocking(False)
    except BaseException:
        connection.close()
        raise
    return connection


class _Directory:
    """A directory under a short name: that of a socket may have 107 bytes, wherever the directory is."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_PATH | os.O_DIRECTORY)

    def __enter__(self) -> str:
        return f"/proc/self/fd/{self._fd}"

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _is_ours(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.getuid())


def _error(answer: Any) -> KvferryError:
    code = str(answer.get("code", "internal")).upper()
    known = ErrorCode.Value(code) if code in ErrorCode.keys() else ErrorCode.INTERNAL  # noqa: SIM118
    return KvferryError(known, str(answer.get("message", "the launcher failed")))
