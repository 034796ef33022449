"""Pages that are up to date while somebody sees them, and say so when they are not."""

import time
from functools import partial
from typing import Any

from playwright.sync_api import Page, expect

from tests.browser.conftest import Watched
from tests.browser.stage import Stage
from tests.integration.support import until

#: Milliseconds until a page that is fetched anew every few seconds certainly was.
REFRESHED = 20_000
#: Headless, every page counts as seen. With this a test says which ones are.
HIDEABLE = """
Object.defineProperty(document, "hidden", { get: () => window.unseen === true });
"""


def see(page: Page, seen: bool) -> None:
    page.evaluate("seen => { window.unseen = !seen; document.dispatchEvent(new Event('visibilitychange')) }", seen)


def live_at(page: Page) -> str:
    return page.locator("body").get_attribute("data-live") or ""


def test_eight_tabs_load_since_only_the_one_that_is_seen_is_live(stage: Stage, address: str, watched: Watched) -> None:
    stage.app.queue("Orders", 4).push({"id": 1, "delay": 60})
    pages = [watched.page(address)]
    context = pages[0].context
    context.add_init_script(HIDEABLE)
    pages += [context.new_page() for _ in range(7)]
    for page in pages:
        page.goto(address, timeout=10_000)
        until(partial(live_at, page), "figures")
        see(page, False)
    first = pages[0]
    before = [live_at(page) for page in pages]
    see(first, True)
    until(lambda: live_at(first) != before[0], "figures in the tab that is seen again")
    assert [live_at(page) for page in pages[1:]] == before[1:]


def test_a_page_from_the_back_button_is_live_again(stage: Stage, address: str, watched: Watched) -> None:
    page = watched.page(address)
    until(lambda: live_at(page), "figures")
    # As the browser does with a page that it keeps.
    page.evaluate("dispatchEvent(new PageTransitionEvent('pagehide', { persisted: true }))")
    time.sleep(2.5)  # whatever was on its way has come
    before = live_at(page)
    page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', { persisted: true }))")
    until(lambda: live_at(page) != before, "figures")


def test_it_says_since_when_it_is_not_live(stage: Stage, watched: Watched) -> None:
    with stage.serving() as address:
        page, nodes = watched.page(address), watched.page(f"{address}/nodes")
        until(lambda: live_at(page), "figures")
        expect(page.locator("#trouble")).to_be_hidden()
    for left in (page, nodes):
        expect(left.locator("#trouble")).to_contain_text("Not live since", timeout=REFRESHED)
        expect(left.locator("#trouble a")).to_have_text("Load the page anew")
    watched.close()
    refused = "net::ERR_CONNECTION_REFUSED"  # the browser's own lines
    watched.complaints = [line for line in watched.complaints if refused not in line]


def test_nodes_come_and_go_without_a_reload(stage: Stage, address: str, watched: Watched) -> None:
    page = watched.page(f"{address}/nodes")
    expect(page.get_by_text("No node is running.")).to_be_visible()
    stage.app.worker(shards_count=4)(lambda _payloads_by_id: None)
    stage.start_node()
    expect(page.locator(".node h2")).to_be_visible(timeout=REFRESHED)
    expect(page.get_by_text("No node is running.")).to_have_count(0)


def test_the_page_of_an_id_goes_on_while_it_is_read(stage: Stage, address: str, watched: Watched) -> None:
    queue = stage.app.queue("Orders", 4)
    queue.push({"id": 42, "payload": {"n": 1}, "delay": 8})
    page = watched.page(f"{address}/queues/Orders/job?id=42")
    expect(page.locator("h1 .badge")).to_have_text("scheduled")
    shard = page.locator(".why a").first
    shard.focus()
    page.evaluate("getSelection().selectAllChildren(document.querySelector('.payloads pre'))")
    node: Any = page.locator(".payloads pre").element_handle()
    expect(page.locator("h1 .badge")).to_have_text("due", timeout=REFRESHED)
    expect(page.locator(".why .reason")).not_to_contain_text("due in", timeout=REFRESHED)
    assert node.evaluate("node => node.isConnected")
    assert page.evaluate("getSelection().toString()").strip().startswith("{")
    expect(shard).to_be_focused()
    # What is gone is gone, and what is new is there.
    queue.bury("42", "out of stock")
    expect(page.locator("h1 .badge")).to_have_text("morgue", timeout=REFRESHED)
    expect(page.get_by_role("button", name="Kick")).to_be_visible()
    expect(page.get_by_role("button", name="Bury")).to_have_count(0)


def test_shards_are_live(stage: Stage, address: str, watched: Watched) -> None:
    queue = stage.app.queue("Orders", 4)
    queue.push({"id": 1, "delay": 60})
    page = watched.page(f"{address}/queues/Orders/shards")
    row = page.locator("tbody tr").nth(queue.shard_of("1"))
    expect(row.locator("td").first).to_have_text("1")
    queue.delete("1")
    expect(row.locator("td").first).to_have_text("0", timeout=REFRESHED)
