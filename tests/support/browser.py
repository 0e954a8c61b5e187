"""A headless Chromium for tests of the live page, and a page in it that tolerates no error and no foreign host."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

WAIT_MS = 60_000
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """The machine's Chromium with a fresh profile. Skips the test where there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine: the live page is not tried in a browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_FLAGS), timeout=WAIT_MS)
        yield browser
        browser.close()


@contextmanager
def open_page(browser: Browser, url: str, *, refusals: int | None = 0, **context: Any) -> Iterator[Page]:
    """A page at `url`. At the end, insists that it made no mistake and asked nobody but its own server.

    `refusals`: answers of 400 and more that are expected, and requests that fail; browsers write each to the console as
    an error. None: any number.
    """
    tab = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context})
    page = tab.new_page()
    page.set_default_timeout(WAIT_MS)
    problems: list[str] = []
    refused: list[str] = []
    hosts: set[str] = set()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))

    def wrote(kind: str, text: str) -> None:
        if kind == "error":
            (refused if "Failed to load resource" in text else problems).append(text)

    page.on("console", lambda message: wrote(message.type, message.text))
    page.goto(url)
    yield page
    assert problems == []
    assert refusals is None or len(refused) == refusals, refused
    assert hosts == {urlsplit(url).netloc}
    tab.close()
