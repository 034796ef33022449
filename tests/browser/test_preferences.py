"""What viewers choose for themselves, what is live, and what says that it is not."""

import re
from functools import partial
from typing import Any

from playwright.sync_api import Page, expect

from tests.browser.conftest import Watched
from tests.browser.stage import Stage
from tests.browser.test_journeys import history
from tests.waiting import until


def background(page: Page) -> str:
    found: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return found


def live_at(page: Page) -> str:
    return page.locator("body").get_attribute("data-live") or ""


def test_the_theme_is_chosen_and_kept_and_no_page_is_in_another_one_first(
    stage: Stage, address: str, watched: Watched
) -> None:
    stage.app.queue("Orders", 1).push({"id": 1, "delay": 3600})
    systems: list[tuple[Any, str]] = [("light", "dark"), ("dark", "light")]
    for system, other in systems:
        page = watched.page(address, color_scheme=system)
        of_system = background(page)
        page.get_by_label("Theme").select_option(other)
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
        for path in ("/nodes", "/queues/Orders"):
            page.goto(address + path)
            assert (page.evaluate("window.first"), background(page)) == (other, chosen)
        page.get_by_label("Theme").select_option("")
        page.goto(address)
        assert background(page) == of_system


def test_charts_are_drawn_in_the_theme(stage: Stage, address: str, watched: Watched) -> None:
    stage.app.queue("Orders", 1).push({"id": 1, "delay": 3600})
    history(stage, "Orders", lag=500.0)
    page = watched.page(address, color_scheme="light")
    canvas = page.locator("[data-plot=rates] canvas")
    expect(canvas).to_be_visible()
    before = canvas.evaluate("canvas => canvas.toDataURL()")
    page.get_by_label("Theme").select_option("dark")
    until(lambda: canvas.evaluate("canvas => canvas.toDataURL()") != before, "a chart in other colours")


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
    page.get_by_label("? opens this help").uncheck()
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


def test_banners_heat_and_facts_are_live(stage: Stage, address: str, watched: Watched) -> None:
    queue = stage.app.queue("Orders", 2)
    queue.push({"id": 1, "delay": 3600})
    page = watched.page(address)
    page.get_by_label("Refresh").select_option("2")
    queue.push({"id": 2})
    banner = page.locator("#part-banners p.warning")
    expect(banner).to_contain_text("No worker for Orders")
    expect(page.locator(".heat title", has_text="1 queued").first).to_be_attached()
    stage.app.worker(shards_count=2)(type("Mail", (), {"perform": lambda _self, _payloads_by_id: None}))
    stage.start_node()
    expect(page.locator(".redis")).to_contain_text("1 alive")
    queue.clear()
    expect(banner).to_have_count(0)
    # The part of the page that stays has its focus.
    page.get_by_role("link", name="Orders", exact=True).first.focus()
    before = page.locator("body").get_attribute("data-parts")
    until(lambda: page.locator("body").get_attribute("data-parts") != before, "parts")
    assert page.evaluate("document.activeElement.textContent") == "Orders"


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


def test_what_is_not_live_says_of_when_it_is(stage: Stage, address: str, watched: Watched) -> None:
    page = watched.page(f"{address}/audit")
    expect(page.locator("footer")).to_contain_text(re.compile(r"As of \d+:\d\d:\d\d.*: reload"))
    expect(page.get_by_label("Refresh")).to_have_count(0)
    stage.app.queue("Orders", 1).push({"id": 1, "delay": 3600})
    page.goto(f"{address}/queues/Orders")
    page.get_by_role("button", name="Delete all").click()
    expect(page.get_by_role("button", name="Delete 1 job")).to_be_visible()
    expect(page.locator("footer")).not_to_contain_text("reload")
    for path, seconds in (("/nodes", "5"), ("/errors", "30")):
        page.goto(address + path)
        expect(page.get_by_label("Refresh")).to_have_value(seconds)


def test_exact_times_are_local_and_remembered_and_the_column_names_the_zone(
    stage: Stage, address: str, watched: Watched
) -> None:
    stage.app.queue("Orders", 1).push({"id": 1, "perform_at": 1_893_456_000})  # 2030-01-01T00:00Z
    page = watched.page(f"{address}/queues/Orders", timezone_id="Asia/Tokyo", locale="en-GB")
    heading, time = page.locator("th[data-zone]"), page.locator("td.at time")
    expect(heading).to_have_text("Due")
    page.get_by_role("button", name="Show exact times").click()
    page.reload()
    expect(heading).to_have_text("Due Asia/Tokyo")
    expect(time).to_have_text("1 Jan 2030, 09:00:00")
    page.get_by_role("button", name="Show how long ago").click()
    expect(heading).to_have_text("Due")
    expect(time).to_have_text(re.compile("^in "))


def test_links_lead_to_the_row_that_they_mean(stage: Stage, address: str, watched: Watched) -> None:
    queue = stage.app.queue("Wide", 450)
    queue.push({"id": "7", "delay": 3600})
    page = watched.page(f"{address}/queues/Wide/job?id=7")
    index = queue.shard_of("7")
    page.locator(".why a", has_text=re.compile(f"^{index}$")).click()
    expect(page.locator("tr:target th")).to_have_text(str(index))
    expect(page.locator("tr:target")).to_be_in_viewport()
