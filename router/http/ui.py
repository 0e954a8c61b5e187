"""The live page: a few files from the wheel, and the data that they show.

    GET /ui           the page
    GET /ui/{name}    one of its files
    GET /ui/state     a snapshot of the cluster (needs a key where there are keys, as the next)
    GET /ui/events    the same twice a second, as server-sent events

The files are read once and are no secret; nothing outside their list can be named. The page loads nothing from
elsewhere, and its content policy forbids it to.
"""

import asyncio
import hashlib
from contextlib import aclosing
from dataclasses import dataclass
from importlib import resources

from starlette.datastructures import Headers

from router.http.asgi import RawHeaders, Receive, Scope, Send, send_body, tenant_of
from router.http.errors import HttpError
from router.http.sse import ClientWatch, EventStream, event
from router.observation.live_page import LivePage

# A watcher comes back after that time, with its key: who has none any more stops watching.
MAX_WATCH_S = 600.0
_QUIET_S = 10.0
_INDEX = "index.html"
_CONTENT_TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
_POLICY = b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
_FIXED_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page. `etag` is of its content."""

    content: bytes
    content_type: bytes
    etag: str


def read_assets() -> dict[str, Asset]:
    """All files of the page, by name. Raises OSError when the installation lacks them."""
    assets = {}
    for path in (resources.files("router") / "ui").iterdir():
        content_type = _CONTENT_TYPES.get(path.name.rpartition(".")[2])
        if content_type is not None:
            content = path.read_bytes()
            assets[path.name] = Asset(content, content_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return assets


class LiveUi:
    """The endpoints. Without `page` there is no data, and only the files are served."""

    def __init__(self, page: LivePage | None) -> None:
        self._page = page
        self._assets = read_assets()

    async def index(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._send_asset(_INDEX, scope, send)

    async def asset(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._send_asset(scope["path_params"]["name"], scope, send)

    async def state(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self._data().state(tenant_of(scope))
        await send_body(send, 200, body, headers=((b"cache-control", b"no-store"),))

    async def events(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        end_at = loop.time() + MAX_WATCH_S
        with ClientWatch(receive):
            async with (
                aclosing(self._data().states(tenant_of(scope))) as states,
                EventStream(send, headers=(), quiet_s=_QUIET_S) as stream,
            ):
                async for state in states:
                    if not stream.push(event(state)):
                        await stream.flush()
                    if loop.time() > end_at:
                        break
                await stream.close()

    def _data(self) -> LivePage:
        if self._page is None:
            raise HttpError(404, "There is nothing at this path.", code="not_found")
        return self._page

    async def _send_asset(self, name: str, scope: Scope, send: Send) -> None:
        asset = self._assets.get(name)
        if asset is None:
            raise HttpError(404, "There is nothing at this path.", code="not_found")
        headers: RawHeaders = (*_FIXED_HEADERS, (b"etag", asset.etag.encode()))
        if asset.etag in Headers(scope=scope).get("if-none-match", ""):
            await send({"type": "http.response.start", "status": 304, "headers": headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        await send_body(send, 200, asset.content, headers=headers, content_type=asset.content_type)
