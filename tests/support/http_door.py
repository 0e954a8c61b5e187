"""The HTTP front door with a scripted cluster behind it, and a client that drives an ASGI application by hand."""

import asyncio
import functools
import json
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from router.http.server import HttpFrontDoor, build_app
from router.http.services import Services
from router.plans.generation_plan import ModelLimits
from router.text.tokenizer import AsyncTokenizer, Tokenizer
from runtime.clock import ManualClock
from tests.support.scripted_source import Finish, Script, ScriptedSource

MODEL = "tiny-real"
MODEL_DIR = Path(__file__).parents[1] / "data" / "tiny-real"
CONTEXT = 512


@functools.cache
def tokenizer() -> Tokenizer:
    """The real tokenizer of the test model, read once."""
    return Tokenizer.load(MODEL_DIR)


def ids_of(text: str) -> list[int]:
    """The tokens that a model would have to emit for this text."""
    return tokenizer().encode(text, add_special_tokens=False)


def one_by_one(text: str) -> list[list[int]]:
    """A script that emits `text` token by token."""
    return [[token] for token in ids_of(text)]


def says(text: str, **finish: Any) -> Script:
    """A script that emits `text` token by token and finishes, for every request."""
    return lambda _: [*one_by_one(text), Finish(**finish)]


class Door:
    """An application, its scripted source, and what was counted. Use inside a running event loop."""

    def __init__(self, script: Script, **changes: Any) -> None:
        self.source = ScriptedSource(script)
        self.refused: list[str] = []
        limits = ModelLimits(model=MODEL, vocab_size=tokenizer().vocab_size, max_context_tokens=CONTEXT)
        services = Services(
            source=self.source,
            tokenizer=AsyncTokenizer(tokenizer()),
            limits=lambda: limits,
            clock=ManualClock(100.0),
            unready_reason=lambda: None,
            draining=lambda: False,
            render_metrics=lambda: (b"up 1\n", "text/plain; version=0.0.4"),
            find_receipt=lambda request_id, tenant: None,
            refused_at_door=lambda error: self.refused.append(error.code_name),
        )
        self.services = services
        self.rebuild(**changes)

    def rebuild(self, **changes: Any) -> None:
        """Another application, with these services changed."""
        self.services = replace(self.services, **changes)
        self.app: HttpFrontDoor = build_app(self.services)

    def client(self) -> httpx.AsyncClient:
        """A client that calls the application in-process; answers come whole."""
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://door")

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """POST a body: bytes as they are, anything else as JSON (NaN included)."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        async with self.client() as client:
            return await client.post(path, content=content, headers=headers, **options)

    def call(self, path: str, body: Any) -> "AsgiCall":
        """A POST whose answer can be watched message by message."""
        return AsgiCall(self.app, path, json.dumps(body).encode())


class AsgiCall:
    """One request, driven by hand: read what the application sends as it sends it, and disconnect at will."""

    def __init__(self, app: HttpFrontDoor, path: str, body: bytes, method: str = "POST") -> None:
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self._sent: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self.may_write = asyncio.Event()
        self.may_write.set()
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
        }
        self.task = asyncio.create_task(app(scope, self._incoming.get, self._send))

    async def message(self, timeout_s: float = 5.0) -> MutableMapping[str, Any]:
        """The next message of the answer."""
        return await asyncio.wait_for(self._sent.get(), timeout_s)

    async def start(self) -> MutableMapping[str, Any]:
        """The status line and headers."""
        message = await self.message()
        assert message["type"] == "http.response.start"
        return message

    async def body(self) -> bytes:
        """The next piece of the body."""
        message = await self.message()
        assert message["type"] == "http.response.body"
        return bytes(message["body"])

    @property
    def unread(self) -> int:
        """Messages of the client that the application has not taken."""
        return self._incoming.qsize()

    def nothing_sent(self) -> bool:
        return self._sent.empty()

    def disconnect(self) -> None:
        """The client goes away."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        await self.may_write.wait()
        self._sent.put_nowait(message)


def events(body: bytes) -> list[Any]:
    """The data of each event of a stream; the last of a good one is the string [DONE]."""
    assert body.endswith(b"\n\n")
    found: list[Any] = []
    for block in body.decode().removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: ")
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def chat_body(**fields: Any) -> dict[str, Any]:
    """The smallest chat request, and what is to be added to it."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "Say something."}], **fields}


def completion_body(**fields: Any) -> dict[str, Any]:
    """The smallest completion request, and what is to be added to it."""
    return {"model": MODEL, "prompt": "Once upon", **fields}
