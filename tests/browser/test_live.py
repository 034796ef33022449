"""Pages that are up to date while somebody sees them, and say so when they are not; what viewers choose."""

import re
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from playwright.sync_api import Page, expect

import lowq
from lowq import admin
from tests.browser.conftest import Watched
from tests.browser.stage import Stage
from tests.browser.test_journeys import history
from tests.waiting import until

#: Headless, every page counts as seen. With this a test says which ones are, and sees the streams that they have open.
HIDEABLE = """
Object.defineProperty(document, "hidden", { get: () => window.unseen === true });
window.streams = [];
window.EventSource = class extends EventSource {
  constructor(...args) {
    super(...args);
    window.streams.push(this);
  }
};
"""


def see(page: Page, seen: bool) -> None:
    page.evaluate("seen => { window.unseen = !seen; document.dispatchEvent(new Event('visibilitychange')) }", seen)


def streams(page: Page) -> int:
    found: int = page.evaluate("streams.filter(stream => stream.readyState !== EventSource.CLOSED).length")
    return found


def live_at(page: Page) -> str:
    return page.locator("body").get_attribute("data-live") or ""


def test_only_the_tab_that_is_seen_is_live_also_after_the_back_button(
    stage: Stage, address: str, watched: Watched
) -> None:
    stage.app.queue("Orders", 4).push({"id": 1, "delay": 3600})
    pages = [watched.page(address)]
    context = pages[0].context
    context.add_init_script(HIDEABLE)
    pages += [context.new_page() for _ in range(2)]
    for page in pages:
        page.goto(address)
        until(partial(live_at, page), "figures")
        assert streams(page) == 1
        see(page, False)
        assert streams(page) == 0
    first = pages[0]
    before = [live_at(page) for page in pages]
    see(first, True)
    until(lambda: live_at(first) != before[0], "figures in the tab that is seen again")
    assert [streams(page) for page in pages] == [1, 0, 0]
    assert [live_at(page) for page in pages[1:]] == before[1:]
    # As the browser does with a page that it keeps for the back button.
    first.evaluate("dispatchEvent(new PageTransitionEvent('pagehide', { persisted: true }))")
    assert streams(first) == 0
    kept = live_at(first)
    first.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', { persisted: true }))")
    until(lambda: live_at(first) != kept, "figures in a page from the back button")


@pytest.mark.slow
def test_it_says_since_when_it_is_not_live(stage: Stage, watched: Watched) -> None:
    with stage.serving() as address:
        page, nodes = watched.page(address), watched.page(f"{address}/nodes")
        until(lambda: live_at(page), "figures")
        expect(page.locator("#trouble")).to_be_hidden()
    for left in (page, nodes):
        expect(left.locator("#trouble")).to_contain_text("Not live since")
        expect(left.locator("#trouble a")).to_have_text("Load the page anew")
    watched.close()
    # The browser's own lines: refused, or cut off, if a page was just asking when the server ended.
    watched.complaints = [line for line in watched.complaints if "Failed to load resource: net::ERR_" not in line]


def test_the_page_of_an_id_goes_on_while_it_is_read(stage: Stage, address: str, watched: Watched) -> None:
    queue = stage.app.queue("Orders", 4)
    queue.push({"id": 42, "payload": {"n": 1}, "delay": 3600})
    page = watched.page(f"{address}/queues/Orders/job?id=42")
    expect(page.locator("h1 .badge")).to_have_text("scheduled")
    shard = page.locator(".why a").first
    shard.focus()
    page.evaluate("getSelection().selectAllChildren(document.querySelector('.payloads pre'))")
    node: Any = page.locator(".payloads pre").element_handle()
    queue.perform_now("42")
    expect(page.locator("h1 .badge")).to_have_text("due")
    expect(page.locator(".why .reason")).not_to_contain_text("due in")
    assert node.evaluate("node => node.isConnected")
    assert page.evaluate("getSelection().toString()").strip().startswith("{")
    expect(shard).to_be_focused()
    # What is gone is gone, and what is new is there.
    queue.bury("42", "out of stock")
    expect(page.locator("h1 .badge")).to_have_text("dead")
    expect(page.get_by_role("button", name="Retry now")).to_be_visible()
    expect(page.get_by_role("button", name="Bury")).to_have_count(0)


class Steps:
    """Stands for a bulk action that is one step further whenever the test says so."""

    def __init__(self) -> None:
        self.done = 1
        self.over = threading.Event()

    def bulk(self, *_: Any, **__: Any) -> Iterator[admin.Step]:
        while not self.over.wait(0.01):
            yield admin.Step(self.done, 10)
        yield admin.Step(10, 10)


START = """async () => (await (await fetch("/api/v1/queues/Orders/actions", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: '{"action": "delete", "all": {}}',
})).json()).id"""


@pytest.mark.parametrize("scripts", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_running_task_is_live(
    stage: Stage, address: str, watched: Watched, monkeypatch: pytest.MonkeyPatch, scripts: bool
) -> None:
    stage.app.queue("Orders", 1).push({"id": 1, "delay": 3600})
    steps = Steps()
    monkeypatch.setattr(lowq.Queue, "bulk", lambda _self, *some, **more: steps.bulk(*some, **more))
    task = watched.page(address).evaluate(START)
    page = watched.page(f"{address}/tasks/{task}", java_script_enabled=scripts)
    if scripts:
        page.clock.install()
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.resource_type))
    said, cancel = page.locator(".reason"), page.get_by_role("button", name="Cancel")
    expect(said).to_contain_text("1 of 10")
    if scripts:
        cancel.focus()
    steps.done = 4
    expect(said).to_contain_text("4 of 10")
    assert ("document" in fetched) is not scripts
    if scripts:
        expect(cancel).to_be_focused()  # a page that is loaded anew takes it away
    steps.over.set()
    expect(page.locator(".badge.accent")).to_have_count(0)
    expect(said).to_contain_text("10 of 10")
    expect(cancel).to_have_count(0)
    # Nothing more comes of it, and nothing more is asked.
    page.wait_for_load_state()  # without scripts it is a page of its own, which has asked for its style sheets
    if not scripts:
        expect(page.locator("meta[http-equiv]")).to_have_count(0)
        return
    fetched.clear()
    page.clock.fast_forward(60_000)
    assert fetched == []
    expect(page.locator("#trouble")).to_be_hidden()


# --- what viewers choose for themselves, and what is not live ---


def background(page: Page) -> str:
    found: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return found


def test_the_theme_is_chosen_and_kept_and_no_page_is_in_another_one_first(
    stage: Stage, address: str, watched: Watched
) -> None:
    stage.app.queue("Orders", 1).push({"id": 1, "delay": 3600})
    history(stage, "Orders", lag=500.0)
    page = watched.page(address, color_scheme="light")
    of_system = background(page)
    page.get_by_label("Theme").select_option("dark")
    chosen = background(page)
    assert chosen != of_system
    # It is there before anything of the body is parsed.
    page.add_init_script("""
        new MutationObserver((_, observer) => {
          if (!document.body) return;
          window.first = document.documentElement.dataset.theme;
          observer.disconnect();
        }).observe(document, { childList: true, subtree: true });
    """)
    page.goto(f"{address}/nodes")
    assert (page.evaluate("window.first"), background(page)) == ("dark", chosen)
    page.get_by_label("Theme").select_option("")
    page.goto(address)
    assert background(page) == of_system


def test_keys_are_explained(stage: Stage, address: str, watched: Watched) -> None:
    page = watched.page(address)
    help_, search = page.get_by_role("dialog", name="Keys"), page.get_by_role("searchbox")
    page.keyboard.press("Control+K")
    expect(search).to_be_focused()
    page.keyboard.type("?")
    expect(search).to_have_value("?")
    expect(help_).to_be_hidden()
    search.evaluate("element => element.blur()")
    page.keyboard.press("?")
    expect(help_).to_be_visible()
    page.keyboard.press("Escape")
    expect(help_).to_be_hidden()
    page.get_by_role("button", name="Keys").click()
    page.get_by_label("Keys without Ctrl").uncheck()
    page.get_by_role("button", name="Close").click()
    page.reload()
    page.keyboard.press("?")
    expect(help_).to_be_hidden()
    expect(page.get_by_role("button", name="Keys")).to_be_visible()


def test_refreshing_is_switched_off_and_on(stage: Stage, address: str, watched: Watched) -> None:
    queue = stage.app.queue("Orders", 1)
    queue.push({"id": 1, "delay": 3600})
    page = watched.page(address)
    page.clock.install()
    until(partial(live_at, page), "figures")
    page.get_by_label("Refresh").select_option("0")
    page.reload()
    expect(page.get_by_label("Refresh")).to_have_value("0")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    queue.push({"id": 2, "delay": 3600})
    page.clock.fast_forward(60_000)
    page.evaluate("fetch('/healthz')")  # whatever was asked before is here by then
    assert not [url for url in asked if "/live" in url or "/parts" in url]
    assert live_at(page) == ""
    page.get_by_label("Refresh").select_option("2")
    expect(page.locator("tr[data-queue=Orders] [data-field=length]")).to_have_text("2")


def test_tabs_and_facts_of_a_queue_are_live_and_its_list_says_what_it_lacks(
    stage: Stage, address: str, watched: Watched
) -> None:
    queue = stage.app.queue("Orders", 2)
    queue.push({"id": n, "delay": 3600} for n in range(3))
    page = watched.page(f"{address}/queues/Orders?state=morgue")
    tabs = page.locator(".tabs")
    expect(page.locator(".newer")).to_be_hidden()
    queue.bury(["0", "1"])
    queue.pause()
    expect(tabs.get_by_role("link", name="Dead")).to_contain_text("2")
    expect(tabs.get_by_role("link", name="Queued")).to_contain_text("1")
    expect(tabs.get_by_role("link", name="Scheduled")).to_contain_text("1")
    expect(page.locator(".newer")).to_have_text("2 newer: reload")
    expect(page.locator("h1 .badge")).to_have_text("paused")
    expect(page.locator(".facts-line")).to_contain_text("buried 2")
    page.locator(".newer a").click()
    expect(page.locator("tbody tr")).to_have_count(2)
    expect(page.locator(".newer")).to_be_hidden()
    queue.resume()
    expect(page.locator("h1 .badge")).to_have_count(0)


def test_exact_times_are_local_and_remembered_and_the_column_names_the_zone(
    stage: Stage, address: str, watched: Watched
) -> None:
    stage.app.queue("Orders", 1).push({"id": 1, "perform_at": 1_893_456_000})  # 2030-01-01T00:00Z
    page = watched.page(f"{address}/queues/Orders", timezone_id="Asia/Tokyo", locale="en-GB")
    heading, time = page.locator("th[data-zone]"), page.locator("td.at time")
    expect(heading).to_have_text("Due")
    page.get_by_label("Times").select_option("exact")
    page.reload()
    expect(heading).to_have_text("Due Asia/Tokyo")
    expect(time).to_have_text("1 Jan 2030, 09:00:00")
    page.get_by_label("Times").select_option("")
    expect(heading).to_have_text("Due")
    expect(time).to_have_text(re.compile("^in "))
