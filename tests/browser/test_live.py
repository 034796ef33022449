"""Pages that are up to date while somebody sees them, and say so when they are not."""

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from playwright.sync_api import Page, expect

import lowq
from tests.browser.conftest import Watched
from tests.browser.stage import Stage
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


@pytest.mark.slow
def test_eight_tabs_load_since_only_the_one_that_is_seen_is_live(stage: Stage, address: str, watched: Watched) -> None:
    stage.app.queue("Orders", 4).push({"id": 1, "delay": 3600})
    pages = [watched.page(address)]
    context = pages[0].context
    context.add_init_script(HIDEABLE)
    pages += [context.new_page() for _ in range(7)]
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
    assert [streams(page) for page in pages] == [1] + 7 * [0]
    assert [live_at(page) for page in pages[1:]] == before[1:]


def test_a_page_from_the_back_button_is_live_again(stage: Stage, address: str, watched: Watched) -> None:
    page = watched.page(address)
    page.add_init_script(HIDEABLE)
    page.goto(address)
    until(lambda: live_at(page), "figures")
    # As the browser does with a page that it keeps.
    page.evaluate("dispatchEvent(new PageTransitionEvent('pagehide', { persisted: true }))")
    assert streams(page) == 0
    before = live_at(page)
    page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', { persisted: true }))")
    until(lambda: live_at(page) != before, "figures")


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


@pytest.mark.slow
def test_nodes_come_and_go_without_a_reload(stage: Stage, address: str, watched: Watched) -> None:
    page = watched.page(f"{address}/nodes")
    expect(page.get_by_text("No node is running.")).to_be_visible()
    stage.app.worker(shards_count=4)(lambda _payloads_by_id: None)
    stage.start_node()
    expect(page.locator(".node h2")).to_be_visible()
    expect(page.get_by_text("No node is running.")).to_have_count(0)


@pytest.mark.slow
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


@pytest.mark.slow
def test_shards_are_live(stage: Stage, address: str, watched: Watched) -> None:
    queue = stage.app.queue("Orders", 4)
    queue.push({"id": 1, "delay": 3600})
    page = watched.page(f"{address}/queues/Orders/shards")
    row = page.locator("tbody tr").nth(queue.shard_of("1"))
    expect(row.locator("td").first).to_have_text("1")
    queue.delete("1")
    expect(row.locator("td").first).to_have_text("0")


class Steps:
    """Stands for a bulk action that is one step further whenever the test says so."""

    def __init__(self) -> None:
        self.done = 1
        self.over = threading.Event()

    def bulk(self, *_: Any, **__: Any) -> Iterator[lowq.Step]:
        while not self.over.wait(0.01):
            yield lowq.Step(self.done, 10)
        yield lowq.Step(10, 10)


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
