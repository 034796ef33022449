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
import lowq_web
from lowq.observe.error_groups import error_fingerprint
from lowq.operate import nodes
from lowq.shards.shard import Inflow
from lowq.store.keys import error_groups_key
from tests.browser.conftest import Watched
from tests.browser.stage import Stage
from tests.recorded import record
from tests.rules.support import run_script
from tests.rules.web.hand import Hand, heartbeat
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
    tap(page, page.locator("[data-plot] .lines").first, page.locator("[data-readout]"), "processed 12/s")


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


def tap(page: Page, element: Locator, readout: Locator, says: str) -> None:
    """In the middle of it, until the readout says that: what comes in between may have moved it."""

    def tapped() -> bool:
        element.scroll_into_view_if_needed()
        box = box_of(element)
        page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        return says in (readout.text_content() or "")

    until(tapped, says)


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
    page.get_by_text("Order, time, shard").click()
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
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Skip to the queues")
    page.keyboard.press("Control+K")
    page.keyboard.type("order-5")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_contain_text("order-5")
    page.wait_for_load_state()
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


def test_rows_are_walked_and_ticked_by_single_keys_that_can_be_switched_off(
    stage: Stage, address: str, watched: Watched
) -> None:
    queue = fill(stage)
    page = watched.page(address)
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.type("jx")  # within a field they are letters
    expect(page.get_by_role("searchbox")).to_have_value("jx")
    page.goto(f"{address}/queues/Orders?state=morgue")
    # The second link skips to the jobs: it is not far from there to the first tick box.
    for key in ("Tab", "Tab", "Enter", *["Tab"] * 3):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.name") == "id"
    page.reload()
    names = page.locator("tbody:last-of-type th a.id").all_text_contents()
    for key, row in (("k", 0), ("j", 1), ("j", 2), ("j", 2), ("k", 1)):
        page.keyboard.press(key)
        expect(page.locator(":focus")).to_have_text(names[row])
    page.keyboard.press("x")
    expect(page.locator("[data-selected]")).to_have_text("1 selected")
    page.keyboard.press("j")
    page.keyboard.press("x")
    page.keyboard.press("x")
    expect(page.locator("[data-selected]")).to_have_text("1 selected")
    page.get_by_role("button", name="Retry selected now").click()
    expect(page.get_by_role("status")).to_contain_text("1 job")
    assert {job.id for job in queue.jobs("due")} == {names[1]}
    page.wait_for_load_state()
    page.get_by_role("button", name="Keys").click()
    page.get_by_label("Keys without Ctrl").uncheck()
    page.get_by_role("button", name="Close").click()
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).not_to_be_focused()


def test_what_is_wrong_is_seen_without_a_click_and_leads_to_its_rows(
    stage: Stage, address: str, watched: Watched
) -> None:
    for number in range(9):
        stage.app.queue(f"nobody-{number}", 2).push({"id": n} for n in range(number + 1))
    hand, now = Hand(stage.app, "Fails"), time.time()
    hand.push("1", now)
    hand.fail("1", now, now + 1800, error="out of stock")
    record(stage.app, "Fails", now // 10 * 10 - 21, 10, 40, seconds=50.0, inflow=Inflow(0, 0))
    page = watched.page(address, viewport=WIDE)
    verdict = page.get_by_role("region", name="Is anything wrong?")
    charts = box_of(page.locator("[data-charts]"))
    for number, words in enumerate((
        "9 queues wait, and no node is running: nobody-0",
        "Fails fails: 80% of what it performed in the last 5 minutes. 1 job to be retried.",
    )):  # fmt: skip
        line = verdict.locator("li.red").nth(number)
        expect(line).to_contain_text(words)
        box = box_of(line)
        assert box["y"] + box["height"] < charts["y"], "before any chart"
    expect(verdict.locator("li.red").first).to_contain_text("45 jobs wait")
    # The cells that it is about are marked, and what is counted leads to just these rows.
    expect(page.locator("tr[data-queue=Fails] td.red")).to_have_text("1")
    verdict.get_by_role("link", name="9 queues").click()
    expect(page.locator("table.queues tbody tr")).to_have_count(9)
    expect(page.locator("tr[data-queue=Fails]")).to_have_count(0)
    page.locator("table.queues").get_by_role("link", name="nobody-3", exact=True).click()
    expect(page.get_by_role("region", name="What is wrong with it")).to_contain_text("4 jobs wait")


def test_a_shard_of_a_heat_map_is_told_to_a_finger_and_to_keys(stage: Stage, address: str, watched: Watched) -> None:
    fill(stage)
    page = watched.page(f"{address}/queues/Orders/shards", has_touch=True, viewport=NARROW)
    readout, map_ = page.locator("[data-heat-readout]"), page.locator("[data-heat]")
    map_.focus()
    for key, shard in (("ArrowRight", 0), ("ArrowRight", 1), ("ArrowLeft", 0), ("ArrowLeft", 0)):
        page.keyboard.press(key)
        expect(readout).to_contain_text(f"shard {shard}: ")
    # What is fetched anew does not take it away.
    seen = page.locator("body").get_attribute("data-live")
    until(lambda: page.locator("body").get_attribute("data-live") != seen, "fresh shards")
    expect(readout).to_contain_text("shard 0: ")
    expect(map_).to_be_focused()
    page.keyboard.press("Tab")
    expect(readout).to_have_text("")
    tap(page, map_.locator("g").nth(2), readout, "shard 2: ")


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


def test_what_hangs_is_cancelled_in_two_clicks(
    stage: Stage, address: str, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "STUCK_SECONDS", 0.0)  # nobody waits for a minute
    begun, ended, over = threading.Event(), threading.Event(), threading.Event()

    @stage.app.worker(shards_count=1, queue_name="Orders")
    def hangs_here(payloads_by_id: dict[str, list[Any]]) -> None:
        begun.set()
        try:
            while not over.wait(0.01):
                pass
        except lowq.JobCancelled:
            ended.set()
            raise

    queue = stage.app.queue("Orders")
    queue.push({"id": "order-7"})
    stage.start_node()
    try:
        until(begun.is_set, "a job that hangs")
        until(stage.app.stuck, "heartbeat that has it")
        page = watched.page(address)
        page.locator("#stuck").get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Cancel 1 job").click()
        expect(page.get_by_role("status")).to_contain_text("1 running, told to end")
        until(ended.is_set, "end of the handler")
        until(lambda: queue.stats().taken == 0, "end of the job")
        assert queue.peek("order-7") is None
    finally:
        over.set()


def test_where_a_running_job_is_in_its_code_is_one_click_from_its_page(
    stage: Stage, address: str, watched: Watched
) -> None:
    begun, over = threading.Event(), threading.Event()

    @stage.app.worker(shards_count=1, queue_name="Orders")
    def hangs_here(payloads_by_id: dict[str, list[Any]]) -> None:
        begun.set()
        over.wait(60)

    stage.app.queue("Orders").push({"id": "order-7"})
    stage.start_node()
    try:
        until(begun.is_set, "a job that hangs")
        page = watched.page(f"{address}/queues/Orders/job?id=order-7")
        page.get_by_role("link", name="Where it is in its code").click()

        def is_said() -> bool:
            if "over.wait(60)" in page.locator("main").inner_text():
                return True
            page.reload()  # its thread was not there yet, or its node took long to answer
            return False

        page.wait_for_url("**/stack?**")
        until(is_said, "the line in which it waits")
        expect(page.locator("pre")).to_contain_text("over.wait(60)")
        expect(page.get_by_role("button", name="Cancel")).to_be_visible()
    finally:
        over.set()


def test_whether_a_deploy_is_safe_is_one_click_away(stage: Stage, address: str, watched: Watched) -> None:
    batch = {"queue": "Orders", "shard": 0, "ids": ["order-7"], "count": 1, "seconds": 90.0}
    supervisor = {"pid": 4711, "started_at": time.time() - 3600, "version": "1.0"}
    heartbeat(
        stage.app, "shop:1:aaaaaa", time.time(), host="shop", version="1.1", started_at=time.time() - 60, threads=1,
        shutdown_timeout=25.0, performing=[batch], supervisor=supervisor,
    )  # fmt: skip
    page = watched.page(address)
    page.get_by_role("link", name="1 node alive").first.click()
    card = page.locator("#deploy")
    expect(card).to_contain_text("Not quite")
    expect(card).to_contain_text("order-7 on shop:1:aaaaaa: running for 1 min 30 s")
    expect(card.locator("tbody tr", has_text="supervisor of 1")).to_contain_text("shop:4711")
    card.get_by_role("link", name="Version").click()
    expect(page.locator("#deploy tbody th").first).to_contain_text("supervisor of 1")


def test_who_paused_a_queue_when_and_why_is_on_its_page(stage: Stage, watched: Watched) -> None:
    fill(stage)
    with stage.serving(auth=lambda _request: lowq_web.User("ann")) as address:
        page = watched.page(f"{address}/queues/Orders")
        page.get_by_label("Why it is paused").fill("the warehouse is closed")
        page.get_by_role("button", name="Pause").click()
        expect(page.get_by_role("status")).to_be_visible()
        seen = watched.page(f"{address}/queues/Orders").locator("main")
        expect(seen).to_contain_text(re.compile(r"Paused by ann .* ago: the warehouse is closed"))
        watched.close()


def test_an_error_is_retried_in_all_queues_in_two_clicks(stage: Stage, address: str, watched: Watched) -> None:
    queues = [stage.app.queue(name, 2) for name in ("Bills", "Mails", "Orders")]
    error = "TimeoutError: the bank did not answer"
    for queue in queues:
        queue.push({"id": n} for n in range(4))
        queue.bury(range(2), error)
        queue.bury(2, "KeyError: 'total'")
        name, key = error_fingerprint(error), error_groups_key("lowq", queue.name)
        run_script(stage.app.client, "record_errors", key, "", 200, 3600, name, 2, "0", error)
    page = watched.page(f"{address}/errors")
    page.locator("tbody tr", has_text="the bank").get_by_role("button", name="Retry the dead").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Retry 6 jobs now?")
    page.get_by_role("button", name="Retry 6 jobs now").click()
    expect(page.locator(".reason")).to_contain_text("6 of 6 jobs queued again")
    assert [[job.id for job in queue.jobs("morgue")] for queue in queues] == [["2"]] * 3


def test_all_jobs_of_a_customer_in_any_state_are_one_search_away(stage: Stage, address: str, watched: Watched) -> None:
    bills, mails = stage.app.queue("Bills", 2), stage.app.queue("Mails", 2)
    bills.push({"id": f"bill-{n}", "payload": {"customer": n % 9}, "delay": 60 * n} for n in range(18))
    mails.push({"id": "mail-1", "payload": {"customer": 7}})
    mails.bury("mail-1", "bounced")
    mails.push([{"id": "runs", "payload": {"customer": 7}}, {"id": "other", "payload": {"customer": 8}}])
    with mails.consumer() as consumer:
        until(lambda: "runs" in {job.id for job in consumer.take(limit=1, timeout=1)}, "the job to be taken")
        page = watched.page(address)
        page.get_by_role("searchbox").fill("customer:7")
        page.keyboard.press("Enter")
        rows = page.locator("tbody:last-of-type tr")
        expect(rows.locator("a.id")).to_have_text(["runs", "bill-7", "bill-16", "mail-1"])
        expect(rows.nth(0)).to_contain_text("running")
        expect(rows.nth(3)).to_contain_text("dead")
        page.wait_for_load_state()
    # Acted on where they are, over queues.
    page.get_by_label("Select bill-7", exact=True).check()
    page.get_by_label("Select mail-1", exact=True).check()
    page.get_by_role("button", name="Delete selected").click()
    page.get_by_role("button", name="Delete 2 jobs").click()
    expect(page.get_by_role("status")).to_contain_text("2 jobs deleted")
    assert (bills.peek("bill-7"), mails.peek("mail-1")) == (None, None)
