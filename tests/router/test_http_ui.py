"""The live page over HTTP: its files, who gets its data, and that it needs nothing from elsewhere."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from router.http.ui import read_assets
from router.observation.live_page import LivePage
from router.observation.live_requests import LiveRequests
from router.tenants import TenantDirectory
from router.workers.worker_registry import WorkerRegistry
from runtime.clock import ManualClock
from tests.support.api_keys import everybody, tenant_with_key
from tests.support.http_door import AsgiCall, Door, says
from tests.support.registry_parts import attach

SOURCES = Path(__file__).parents[2] / "router" / "ui"
KEY = "kvf-key-of-a-test"


def live_door(tenants: TenantDirectory | None = None) -> tuple[Door, LivePage]:
    """A door, and the page behind it with one worker on it. The test ticks."""
    clock = ManualClock(100.0)
    registry = WorkerRegistry(clock)
    attach(registry, "d0")
    page = LivePage(registry, LiveRequests(clock, dict, model="tiny"), clock, "router-1")
    return Door(says("x"), live_page=page, tenants=tenants or everybody()), page


async def test_every_file_of_the_page_is_served_with_its_type_and_a_strict_policy() -> None:
    door, _ = live_door()
    types = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    assert {path.name for path in SOURCES.iterdir()} == set(read_assets())
    async with door.client() as client:
        for path in SOURCES.iterdir():
            answer = await client.get("/ui" if path.name == "index.html" else f"/ui/{path.name}")
            assert (answer.status_code, answer.content) == (200, path.read_bytes())
            assert answer.headers["content-type"].startswith(types[path.suffix])
            assert answer.headers["content-security-policy"].startswith("default-src 'self';")
            assert answer.headers["x-content-type-options"] == "nosniff"


async def test_a_file_that_the_browser_has_is_not_sent_again() -> None:
    door, _ = live_door()
    async with door.client() as client:
        first = await client.get("/ui/style.css")
        again = await client.get("/ui/style.css", headers={"if-none-match": first.headers["etag"]})
        other = await client.get("/ui/style.css", headers={"if-none-match": '"something-else"'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    assert (other.status_code, other.content) == (200, first.content)


@pytest.mark.parametrize(
    "path",
    ["/ui/", "/ui/nothing.js", "/ui/..%2fserver.py", "/ui/%2e%2e/service.py", "/ui//etc/passwd", "/ui/ui/style.css"],
)
async def test_nothing_but_the_files_of_the_page_can_be_named(path: str) -> None:
    door, _ = live_door()
    async with door.client() as client:
        answer = await client.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_the_files_are_for_everybody_and_the_data_for_those_with_a_key(tmp_path: Path) -> None:
    door, _ = live_door(tenant_with_key(tmp_path, KEY))
    async with door.client() as client:
        assert [(await client.get(path)).status_code for path in ("/ui", "/ui/main.js")] == [200, 200]
        assert [(await client.get(path)).status_code for path in ("/ui/state", "/ui/events")] == [401, 401]
        answer = await client.get("/ui/state", headers={"authorization": f"Bearer {KEY}"})
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
    assert [worker["id"] for worker in answer.json()["workers"]] == ["d0"]


async def test_without_a_page_behind_it_a_door_has_no_data() -> None:
    async with Door(says("x")).client() as client:
        assert [(await client.get(path)).status_code for path in ("/ui", "/ui/state")] == [200, 404]


async def test_states_are_streamed_at_each_tick_until_the_router_stops() -> None:
    door, page = live_door()
    call = AsgiCall(door.app, "/ui/events", b"", "GET")
    assert dict((await call.start())["headers"])[b"content-type"].startswith(b"text/event-stream")
    first = await call.body()
    assert json.loads(first.removeprefix(b"data: "))["workers"][0]["id"] == "d0"
    page.tick()
    assert (await call.body()).startswith(b"data: {")
    await page.close()
    assert await call.body() == b"data: [DONE]\n\n"
    await asyncio.wait_for(call.task, 5)
    async with door.client() as client:
        assert (await client.get("/ui/events")).status_code == 503


async def test_who_leaves_watches_no_more() -> None:
    door, page = live_door()
    call = AsgiCall(door.app, "/ui/events", b"", "GET")
    await call.start()
    await call.body()
    assert page.watchers == 1
    call.disconnect()
    await asyncio.wait_for(call.task, 5)
    assert page.watchers == 0


def test_the_page_names_no_other_host_and_makes_no_markup_of_text() -> None:
    """The content policy forbids both; this says so before a browser does."""
    for path in SOURCES.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|[\"'(]//", text), path.name
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style="):
            assert forbidden not in text, (path.name, forbidden)


def _luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, WCAG 2.2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_words_and_signs_stand_out_in_light_and_in_dark() -> None:
    """4.5 for text, 3 for what is no text (WCAG 2.2, 1.4.3 and 1.4.11)."""
    themes = re.findall(r":root \{(.*?)\}", (SOURCES / "style.css").read_text(), re.DOTALL)
    assert len(themes) == 2
    for theme in themes:
        colour = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", theme))
        for ink in ("ink", "soft", "accent", "bad", "good"):
            assert _contrast(colour[ink], colour["panel"]) >= 4.5, ink
        for ink in ("ink", "soft", "accent", "bad"):
            assert _contrast(colour[ink], colour["page"]) >= 4.5, ink
        assert _contrast(colour["on-accent"], colour["accent"]) >= 4.5
        assert _contrast(colour["bad"], colour["bad-wash"]) >= 4.5
        assert _contrast(colour["soft"], colour["bad-wash"]) >= 4.5
        for sign in ("edge", "queued", "used", "quarantined", "prefill", "transfer", "commit", "decode"):
            assert _contrast(colour[sign], colour["panel"]) >= 3, sign
