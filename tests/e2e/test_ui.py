"""The live page in a real browser: what a person does there with a mouse, with keys alone, and on a phone."""

import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.support.api_keys import everybody, tenant_with_key
from tests.support.browser import WAIT_MS, chromium, open_page
from tests.support.http_door import says
from tests.support.live_cluster import LiveCluster
from tests.support.ui_door import ui_door

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
KEY = "kvf-key-of-a-person"
FIXED = {"seed": 11, "ignore_eos": True}  # The page leaves these to chance.
expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def wait_live(page: Page) -> None:
    expect(page.locator("#link")).to_have_attribute("data-state", "live")


def say(page: Page, text: str, max_tokens: int) -> None:
    page.get_by_label("At most").fill(str(max_tokens))
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def last_answer(page: Page) -> Locator:
    return page.locator(".answer").last


def wait_complete(page: Page) -> None:
    expect(last_answer(page)).to_have_attribute("aria-busy", "false")


def press_until(page: Page, key: str, selector: str) -> None:
    """Move the focus, as often as it takes; each stop on the way must show where it is."""
    for _ in range(40):
        page.keyboard.press(key)
        if page.evaluate("document.activeElement === document.body"):
            continue
        style = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(style) not in ("none", ""), page.evaluate("document.activeElement.outerHTML")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"{key} does not lead to {selector}")


# ---- with a scripted router ----


def test_where_keys_are_needed_the_page_asks_for_one_and_keeps_it_in_its_tab(browser: Browser, tmp_path: Path) -> None:
    with (
        ui_door(
            says("Hello you."), tenant_with_key(tmp_path, KEY), workers=["decode-0"], waiting=["of another"]
        ) as url,
        open_page(browser, f"{url}/ui", refusals=2) as page,
    ):
        field = page.get_by_label("API key")
        expect(field).to_be_focused()
        field.fill("wrong")
        field.press("Enter")
        expect(page.locator("#key-note")).to_contain_text("does not know this key")
        field.fill(KEY)
        page.get_by_role("button", name="Use this key").click()
        wait_live(page)
        expect(field).to_be_hidden()
        page.reload()
        wait_live(page)
        expect(page.locator(".worker")).to_have_count(1)
        expect(page.locator("#request-rows tr")).to_have_count(0)
        say(page, "Hi", 9)
        expect(last_answer(page).locator(".text")).to_have_text("Hello you.")
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]


def test_what_models_and_workers_say_stays_text(browser: Browser) -> None:
    evil = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>"
    scripted = ui_door(says(evil), everybody(), workers=[evil], waiting=[evil])
    with scripted as url, open_page(browser, f"{url}/ui") as page:
        wait_live(page)
        say(page, evil, 99)
        expect(last_answer(page).locator(".text")).to_have_text(evil)
        expect(page.locator(".person p")).to_have_text(evil)
        expect(page.locator(".worker h3")).to_have_text(evil)
        expect(page.locator("#request-rows th")).to_have_text(evil)
        page.locator(".receipt summary").click()
        expect(page.locator(".receipt dl")).to_be_visible()
        assert page.evaluate("window.hacked") is None
        assert page.locator("main script, main img").count() == 0


def test_the_page_says_when_its_router_is_gone(browser: Browser) -> None:
    with ExitStack() as door:
        url = door.enter_context(ui_door(says("x"), everybody()))
        with open_page(browser, f"{url}/ui", refusals=None) as page:
            wait_live(page)
            expect(page.locator("#no-workers")).to_be_visible()
            door.close()
            expect(page.locator("#link")).to_have_attribute("data-state", "lost")


# ---- with a real cluster ----


def test_keys_alone_are_enough(browser: Browser, mortal: LiveCluster) -> None:
    with open_page(browser, f"{mortal.base_url}/ui") as page:
        wait_live(page)
        press_until(page, "Tab", ".to-chat")
        page.keyboard.press("Enter")
        expect(page.get_by_label("Message")).to_be_focused()
        page.keyboard.type("Tell me a story")
        press_until(page, "Tab", "#max-tokens")
        page.keyboard.type("12")
        press_until(page, "Shift+Tab", "#message")
        page.keyboard.press("Enter")
        wait_complete(page)
        expect(page.get_by_label("Message")).to_be_focused()
        press_until(page, "Shift+Tab", ".receipt summary")
        page.keyboard.press("Enter")
        expect(page.locator(".receipt dl")).to_be_visible()
        press_until(page, "Shift+Tab", ".table summary")
        page.keyboard.press("Enter")
        expect(page.locator("#request-rows tr").first).to_contain_text("finished")
        press_until(page, "Tab", "#new-chat")
        page.keyboard.press("Enter")
        expect(page.locator(".turn")).to_have_count(0)


def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Browser, mortal: LiveCluster) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    with open_page(browser, f"{mortal.base_url}/ui", **phone) as page:
        wait_live(page)
        say(page, "a" * 300, 24)
        wait_complete(page)
        page.locator(".receipt summary").tap()
        page.locator(".table summary").tap()
        expect(page.locator("#request-rows tr").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        for element in page.locator("main > *, .panel, .worker, button:visible, textarea").all():
            box = element.bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 390


def _with_fixed_fields(route: Route) -> None:
    body: dict[str, Any] = {**json.loads(route.request.post_data or ""), **FIXED}
    route.continue_(post_data=json.dumps(body))


def _stop_in_the_middle(mortal: LiveCluster) -> tuple[str, int] | None:
    """Hold the worker that decodes the only request: its name, and the answer's length in tokens. None: too late."""
    in_flight = httpx.get(f"{mortal.base_url}/debug/requests").json()["in_flight"]
    workers = [request["decode_worker"] for request in in_flight]
    for worker in workers:
        mortal.kill(worker, signal.SIGSTOP)
        still = httpx.get(f"{mortal.base_url}/debug/requests").json()["in_flight"]
        if any(request["phase"] == "decode" for request in still):
            return worker, still[0]["max_tokens"]
        mortal.kill(worker, signal.SIGCONT)
    return None


def test_a_person_chats_and_loses_no_word_when_a_decode_worker_dies(browser: Browser, mortal: LiveCluster) -> None:
    with open_page(browser, f"{mortal.base_url}/ui") as page:
        page.route("**/v1/chat/completions", _with_fixed_fields)
        wait_live(page)
        expect(page.locator('.worker[data-state="ready"]')).to_have_count(4)
        held = None
        # However fast the machine is, one of these is long enough to be caught in the middle.
        for max_tokens in (150, 600, 2400):
            page.get_by_role("button", name="New chat").click()
            say(page, "Tell me a story", max_tokens)
            expect(last_answer(page).locator(".text")).to_have_text(re.compile("[a-z]{3}"))
            if (held := _stop_in_the_middle(mortal)) is not None:
                break
            wait_complete(page)
        assert held is not None
        victim, max_tokens = held
        shown = last_answer(page).locator(".text").text_content()
        expect(last_answer(page)).to_have_attribute("aria-busy", "true")
        with mortal.launcher_asleep():
            mortal.kill(victim)
            card = page.locator(f'.worker[data-worker="{victim}"]')
            expect(card).to_have_attribute("data-state", "lost")
            expect(card.locator(".state")).to_have_css("color", "rgb(179, 38, 30)")
        wait_complete(page)
        text = last_answer(page).locator(".text").text_content()
        assert text.startswith(shown)
        page.locator(".receipt summary").click()
        receipt = page.locator(".receipt")
        expect(receipt).to_contain_text("it went on after a failure")
        expect(receipt).to_contain_text("verified")
        expect(receipt.locator("dl")).not_to_contain_text(f"Decoded on {victim}")
        expect(page.locator(".person")).to_have_count(1)
    undisturbed = {
        "model": "tiny-real",
        "messages": [{"role": "user", "content": "Tell me a story"}],
        "max_tokens": max_tokens,
        **FIXED,
    }
    answer = httpx.post(f"{mortal.base_url}/v1/chat/completions", json=undisturbed, timeout=120).json()
    assert text == answer["choices"][0]["message"]["content"]
