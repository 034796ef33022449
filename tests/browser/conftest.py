"""Real Chromium on the real dashboard. Without Chromium these tests are skipped, and say so."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.browser import chromium
from tests.browser.stage import Stage
from tests.rules.web.conftest import patient  # noqa: F401 - a fixture of all tests here, too
from tests.waiting import PATIENCE

Visit = Callable[..., Page]

expect.set_options(timeout=PATIENCE * 1000)


# Not for the whole session: while it is there an event loop runs, and other tests run their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if chromium.find() is None:
        pytest.skip("chromium is missing: sudo apt-get install chromium")
    with sync_playwright() as playwright:
        browser = chromium.launch(playwright)
        yield browser
        browser.close()


@pytest.fixture
def stage(redis_url: str) -> Iterator[Stage]:
    stage = Stage(redis_url)
    yield stage
    stage.close()


class Watched:
    """Contexts of a test's own, and everything in them that should not have happened."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self.complaints: list[str] = []
        #: Answers with these statuses are expected: browsers write them to the console.
        self.expected: set[int] = set()

    def page(self, address: str, **options: Any) -> Page:
        """A page in a fresh context that may talk to this address only."""
        context = self._browser.new_context(**options)
        context.set_default_timeout(PATIENCE * 1000)
        self._contexts.append(context)
        own = urlsplit(address).netloc
        page = context.new_page()

        def on_console(message: Any) -> None:
            if message.type in ("error", "warning") and not any(
                f"status of {status}" in message.text for status in self.expected
            ):
                self.complaints.append(f"console: {message.text}")

        def on_request(request: Any) -> None:
            if urlsplit(request.url).netloc not in (own, ""):
                self.complaints.append(f"a request to another host: {request.url}")

        page.on("console", on_console)
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("request", on_request)
        page.goto(address)
        return page

    def close(self) -> None:
        """Before the server that they talk to ends: open pages would complain."""
        while self._contexts:
            self._contexts.pop().close()


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    """At the end: no console errors, no request to another host."""
    watched = Watched(browser)
    yield watched
    watched.close()
    assert watched.complaints == []


@pytest.fixture
def address(stage: Stage) -> Iterator[str]:
    """Of the dashboard, without authentication."""
    with ExitStack() as stack:
        yield stack.enter_context(stage.serving())
