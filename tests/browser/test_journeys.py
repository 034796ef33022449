"""What operators do, step by step, in a real browser."""

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import FloatRect, Locator, Page, expect

import lowq
from tests.browser.conftest import Watched
from tests.browser.stage import Stage
from tests.recorded import record
from tests.waiting import until

NARROW = {"width": 360, "height": 740}
WIDE = {"width": 1280, "height": 900}


def fill(stage: Stage, count: int = 12) -> lowq.Queue:
    queue = stage.app.queue("Orders", 4)
    queue.push(
        {"id": f"order-{n}", "payload": {"version": 1, "n": n}, "score": 1, "delay": 3600 + n} for n in range(count)
    )
    queue.bury([f"order-{n}" for n in range(3)], "out of stock")
    return queue


def history(stage: Stage, queue: str, lag: float) -> None:
    """What nodes would have recorded: an hour in which little else changed than the lag, which grew to this."""
    now = time.time()
    for back in range(350, 0, -1):
        record(stage.app, queue, now - 10 * back, 120, 20, seconds=10.0, lag=lag * (350 - back) / 350)


@contextmanager
def working(stage: Stage) -> Iterator[None]:
    """A node, and jobs that keep coming, for the time of the block."""
    over = threading.Event()

    def perform(_self: Any, _payloads_by_id: dict[str, list[Any]]) -> None:
        over.wait(0.01)

    stage.app.worker(shards_count=4)(type("Orders", (lowq.Worker,), {"perform": perform}))
    stage.start_node()

    def push() -> None:
        number = 0
        while not over.wait(0.02):
            number += 1
            stage.app.queue("Orders").push({"id": number % 50, "payload": {"version": number}})

    thread = threading.Thread(target=push)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def number_of(page: Page, selector: str) -> int:
    return int((page.locator(selector).get_attribute("title") or "0").replace(",", ""))


def readings(page: Page) -> list[list[float | None]]:
    """Of each moment of the charts: Unix time, processed and failed per second, latency."""
    found: list[list[float | None]] = json.loads(page.locator("[data-charts]").get_attribute("data-readings") or "[]")
    return found


def test_the_chart_and_the_numbers_move_while_jobs_run(stage: Stage, address: str, watched: Watched) -> None:
    with working(stage):
        page = watched.page(address)
        before = number_of(page, "[data-live='total.processed']")
        # Not wait_for_function: it evaluates text in the page, which our policy forbids.
        until(lambda: any(processed for _, processed, *_ in readings(page)), "a rate")
        seen = readings(page)
        until(lambda: readings(page) != seen, "another point")
        until(lambda: number_of(page, "[data-live='total.processed']") > before, "more jobs performed")
        expect(page.locator("tr[data-queue=Orders] [data-field=processed_rate]")).to_have_text(re.compile("[1-9]"))
        # What the nodes have recorded is there again after a reload, before any live number has come.
        until(lambda: any(rate.processed for rate in stage.app.queue("Orders").rates().rates), "a history in Redis")


@pytest.mark.slow
def test_on_a_touchscreen_the_chart_shows_what_was_when(stage: Stage, address: str, watched: Watched) -> None:
    fill(stage)
    history(stage, "Orders", lag=500.0)
    page = watched.page(f"{address}/queues/Orders", has_touch=True, viewport=NARROW)
    plot = page.locator("[data-plot] .lines").first
    plot.scroll_into_view_if_needed()
    box = box_of(plot)
    page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(page.locator("[data-readout]")).to_contain_text("processed 12/s")


def test_the_chart_shows_what_was_when_to_the_mouse_and_to_keys(stage: Stage, address: str, watched: Watched) -> None:
    fill(stage)
    history(stage, "Orders", lag=500.0)
    page = watched.page(f"{address}/queues/Orders", viewport=WIDE, timezone_id="Asia/Tokyo", locale="en-GB")
    readout, plots = page.locator("[data-readout]"), page.locator("[data-plots]")
    assert page.locator("[data-plot] .lines").count() == 3
    for plot in page.locator("[data-plot] .lines").all():
        plot.hover()
        expect(readout).to_have_text(
            re.compile(r"^\s*\d\d:\d\d:\d\d\s+processed 12/s\s+failed 2.0/s\s+latency 4 min( \d+ s)?\s*$")
        )
        plots.focus()
        page.keyboard.press("ArrowLeft")
        page.mouse.move(1, 1)  # a mouse that leaves takes nothing away from the keys
        page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        expect(readout).to_contain_text("processed")
        page.keyboard.press("Tab")
        expect(readout).to_have_text("")
        plot.hover()
        expect(readout).to_contain_text("processed")
        page.mouse.move(1, 1)
        expect(readout).to_have_text("")
    plots.focus()
    page.keyboard.press("ArrowLeft")
    # Live numbers don't take it away.
    seen = readings(page)
    until(lambda: readings(page) != seen, "another point")
    before = readout.inner_text()
    assert "processed" in before
    page.keyboard.press("ArrowLeft")
    expect(readout).not_to_have_text(before)


def test_what_matters_is_seen_on_a_phone(stage: Stage, address: str, watched: Watched) -> None:
    queue = fill(stage)
    long = {"text": "long " * 60}
    queue.push({"id": "an-id-of-forty-characters-or-very-nearly", "payload": long, "score": 1, "delay": 1})
    stage.app.queue("a.queue.with.a.name." + "x" * 100, 2).push({"id": 1})
    page = watched.page(f"{address}/queues/Orders", viewport=NARROW)
    row = page.locator("tbody tr", has_text="order-7")
    link, payload = box_of(row.locator("a.id")), box_of(row.locator(".newest"))
    assert payload["y"] >= link["y"] + link["height"], "the payload stands below"
    assert payload["x"] + payload["width"] <= NARROW["width"]
    for path in ("", "?state=morgue", "?order_by=id"):
        page.goto(f"{address}/queues/Orders{path}")
        shown = box_of(page.locator("tbody:last-of-type a.id", has_text="order").first)
        assert shown["height"] < 30, (path, "the id is broken over lines")
    page.goto(address)
    for field in ("lag", "length", "morgue_length"):
        for cell in page.locator(f"[data-field={field}]").all():
            box = box_of(cell)
            assert box["x"] + box["width"] <= NARROW["width"], field


def box_of(element: Locator) -> FloatRect:
    box = element.bounding_box()
    assert box is not None
    return box


def test_jobs_are_ticked_one_by_one_and_all_at_once(stage: Stage, address: str, watched: Watched) -> None:
    queue = fill(stage)
    page = watched.page(f"{address}/queues/Orders?state=morgue")
    # Nothing is selected: nothing can be done to it.
    expect(page.get_by_role("button", name="Retry selected now")).to_be_disabled()
    page.get_by_label("Select order-1", exact=True).check()
    expect(page.locator("[data-selected]")).to_have_text("1 selected")
    page.get_by_role("button", name="Retry selected now").click()
    expect(page.get_by_role("status")).to_be_visible()
    # It is said once, and the address can be kept.
    expect(page).not_to_have_url(re.compile("said"))
    page.reload()
    expect(page.get_by_role("status")).to_have_count(0)
    assert queue.stats().morgue_length == 2
    page.goto(f"{address}/queues/Orders?match=order-1*&order_by=id&min=order-10")
    page.get_by_label("select all").check()
    page.get_by_role("button", name="Delete selected").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Delete 2 jobs?")
    page.get_by_role("button", name="Delete 2 jobs").click()
    expect(page.get_by_role("status")).to_contain_text("2 jobs")
    assert queue.stats().length == 8


def test_everything_without_javascript(stage: Stage, address: str, watched: Watched) -> None:
    queue = fill(stage)
    history(stage, "Orders", lag=5.0)
    page = watched.page(address, java_script_enabled=False)
    expect(page.locator(".plot svg").first).to_be_visible()
    page.get_by_role("link", name="Latency", exact=True).click()
    expect(page).to_have_url(re.compile("sort=lag"))
    page.locator("tbody").get_by_role("link", name="Orders").click()
    page.get_by_role("link", name="Dead").click()
    page.get_by_label("Select order-0", exact=True).check()
    page.get_by_role("button", name="Retry selected now").click()
    expect(page.get_by_role("status")).to_contain_text("1 job queued again")
    page.get_by_label("Id like").fill("order-?")
    page.locator("select[name=order_by]").select_option("id")
    page.get_by_role("button", name="Filter").click()
    expect(page).to_have_url(re.compile("order_by=id"))  # the page before shows the same two
    expect(page.locator("tbody:last-of-type .id")).to_have_text(["order-1", "order-2"])
    # Of what a scan sent bit by bit only the last word is to be seen.
    expect(page.locator("tbody:visible")).to_have_count(1)
    page.get_by_role("button", name="Delete all").click()
    page.get_by_role("button", name="Delete 2 jobs").click()
    expect(page.locator(".reason")).to_contain_text("2 of 2 jobs deleted")
    assert (queue.stats().morgue_length, queue.stats().due) == (0, 1)


def test_by_keyboard_alone(stage: Stage, address: str, watched: Watched) -> None:
    fill(stage)
    page = watched.page(address)
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Skip to the content")
    # A letter alone is nobody's shortcut: it may come from somebody's voice.
    page.keyboard.press("/")
    expect(page.locator(":focus")).to_have_text("Skip to the content")
    page.keyboard.press("Control+K")
    page.keyboard.type("order-5")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_contain_text("order-5")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Delete":
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Delete 1 job?")
    assert page.locator("button, a, input, select").evaluate_all(
        "all => all.every(e => e.tabIndex >= 0)"
    )  # nothing that only a mouse reaches


def test_hostile_text_stays_text(stage: Stage, address: str, watched: Watched) -> None:
    word = "<img src=x onerror=document.title=1>\"'\u202e</script><script>document.title=1</script>"
    queue = stage.app.queue("a/b%2F<i>", 2)
    queue.push({"id": word, "payload": {word: word}, "delay": 3600})
    queue.push({"id": "a/b?c#d%2e%", "payload": word, "delay": 3600})
    queue.bury(word, word)
    stage.app.note(word, word, word, 1, {word: word})
    page = watched.page(address)
    page.locator("tbody th a").first.click()
    expect(page.locator("h1")).to_have_text("a/b%2F<i>")
    page.locator("a.id").first.click()
    expect(page.locator("h1")).to_contain_text("a/b?c#d%2e%")
    page.goto(f"{address}/search?id={quote(word)}")
    expect(page.locator("h1")).to_contain_text("<img src=x")
    page.get_by_role("link", name="a/b%2F<i>").click()
    page.get_by_role("link", name="30 days").click()
    page.goto(f"{address}/audit")
    assert page.title() != "1"
    assert page.locator("img").count() == 0


def test_other_sites_can_neither_post_nor_frame_it(stage: Stage, address: str, watched: Watched) -> None:
    queue = fill(stage)
    watched.expected = {403}
    page = watched.page("data:text/html,<title>evil</title>")
    page.set_content(f"<form method=post action='{address}/queues/Orders/pause'><button>win</button></form>")
    with page.expect_response(re.compile("pause")) as answer:
        page.get_by_role("button").click()
    assert answer.value.status == 403
    assert not queue.stats().paused
    page = watched.page("data:text/html,<title>evil</title>")
    page.set_content(f"<iframe src='{address}/queues/Orders'></iframe>")
    until(lambda: page.evaluate("1") and page.frames[1].url.startswith("chrome-error:"), "a refused frame")
    watched.complaints.clear()  # that it was refused is what the browser complains of
