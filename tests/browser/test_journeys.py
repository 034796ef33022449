"""What operators do, step by step, in a real browser."""

import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

import lowq
import lowq_web
from lowq.metrics.counters import BOUNDS, Counted, record_call
from lowq.store.keys import shard_prefix
from tests.browser.conftest import Watched
from tests.browser.stage import TRACEBACK, Stage
from tests.tiers import often
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
    nothing, now = Counted(0, 0, 0.0, (0,) * (len(BOUNDS) + 1)), time.time()
    for back in range(350, 0, -1):
        done = nothing._replace(processed=120, failed=20)
        call = record_call(f"lowq:v1:history:{queue}", nothing, done, 10.0, lag * (350 - back) / 350, now - 10 * back)
        stage.app.client.run(call.script, call.key, *call.args)


def scheduled(stage: Stage) -> type[lowq.Worker[Any]]:
    """A worker with schedules, of which one is paused. The next node performs them."""

    @lowq.every("0 8 * * 1", tz="Europe/Berlin", name="a-report-with-a-long-name")
    @lowq.every(timedelta(days=1), missed="skip")
    @lowq.every(timedelta(hours=1), missed="all")
    @stage.app.worker(queue_name="Reports", shards_count=1)
    def report(job_id: str, payloads: list[Any]) -> None: ...

    with ExitStack() as ended:
        node = lowq.Node(stage.app, threads=1)
        node.start()
        ended.callback(node.stop, 5.0)
        until(lambda: len(stage.app.schedules()) == 3, "records of the schedules")
    stage.app.pause_schedule("Reports-2", by="ann")
    return report


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


def test_the_chart_and_the_numbers_move_while_jobs_run(stage: Stage, address: str, watched: Watched) -> None:
    with working(stage):
        page = watched.page(address)
        # Drawn with the first live figures that say more than nothing.
        expect(page.locator(".u-over").first).to_be_visible()
        before = number_of(page, "[data-live='total.processed']")
        # Not wait_for_function: it evaluates text in the page, which our policy forbids.
        until(lambda: float(page.locator("[data-charts]").get_attribute("data-last") or 0) > 0, "a live rate")
        seen = int(page.locator("[data-charts]").get_attribute("data-points") or 0)
        until(lambda: int(page.locator("[data-charts]").get_attribute("data-points") or 0) > seen, "another point")
        until(lambda: number_of(page, "[data-live='total.processed']") > before, "more jobs performed")
        expect(page.locator("tr[data-queue=Orders] [data-field=processed_rate]")).to_have_text(re.compile("[1-9]"))
        # What the nodes have recorded is there again after a reload, before any live number has come.
        until(lambda: any(rate.processed for rate in stage.app.queue("Orders").rates().rates), "a history in Redis")


@pytest.mark.parametrize("touch", often([False, True], [False]), ids=["mouse and keys", "touch"])
def test_the_chart_shows_what_was_when(stage: Stage, address: str, watched: Watched, touch: bool) -> None:
    fill(stage)
    history(stage, "Orders", lag=500.0)
    page = watched.page(f"{address}/queues/Orders", has_touch=touch, viewport=NARROW if touch else WIDE,
                        timezone_id="Asia/Tokyo", locale="en-GB")  # fmt: skip
    readout, plots = page.locator("[data-readout]"), page.locator("[data-plot] .u-over")
    expect(plots).to_have_count(2)  # `all` does not wait until they are drawn
    for plot in plots.all():
        expect(plot).to_be_visible()  # the lag of a single queue, too
        expect(readout).to_have_text("")
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        assert box
        middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.touchscreen.tap(*middle) if touch else page.mouse.move(*middle)
        expect(readout).to_have_text(
            re.compile(r"^\s*\d\d:\d\d:\d\d\s+processed 12/s\s+failed 2.0/s\s+latency 4 min( \d+ s)?\s*$")
        )
        if touch:
            return
        page.mouse.move(1, 1)
        # The browser says that the mouse has left when it has time for it.
        expect(readout).to_have_text("")
    page.locator("[data-plot=lag]").focus()
    page.keyboard.press("ArrowLeft")
    expect(readout).to_contain_text("processed")
    # Live numbers don't take it away.
    seen = int(page.locator("[data-charts]").get_attribute("data-points") or 0)
    until(lambda: int(page.locator("[data-charts]").get_attribute("data-points") or 0) > seen, "another point")
    assert "processed" in readout.inner_text()
    before = readout.inner_text()
    page.keyboard.press("ArrowLeft")
    expect(readout).not_to_have_text(before)
    page.keyboard.press("Tab")
    expect(readout).to_have_text("")


def test_a_mouse_that_leaves_takes_nothing_away_from_the_keys(stage: Stage, address: str, watched: Watched) -> None:
    fill(stage)
    history(stage, "Orders", lag=500.0)
    page = watched.page(f"{address}/queues/Orders", viewport=WIDE)
    readout, lag = page.locator("[data-readout]"), page.locator("[data-plot=lag]")
    plots = page.locator("[data-plot] .u-over")
    expect(plots).to_have_count(2)
    for hovered in plots.all():
        hovered.hover()
        expect(readout).to_contain_text("processed")
        lag.focus()
        page.keyboard.press("ArrowLeft")
        page.mouse.move(1, 1)
        page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        expect(readout).to_contain_text("processed")
        page.keyboard.press("Tab")
        expect(readout).to_have_text("")


@pytest.mark.slow
def test_the_axis_of_lag_has_room_for_round_labels(stage: Stage, address: str, watched: Watched) -> None:
    page = watched.page(address)
    # What is drawn on a canvas can't be read back: what is written there is noted on the way.
    page.add_init_script("""
        window.written = [];
        const write = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, x, ...rest) {
          const left = this.getTransform().e + x - (this.textAlign === "right" ? this.measureText(text).width : 0);
          window.written.push([text, left]);
          return write.call(this, text, x, ...rest);
        };""")
    for lag, label in ((20.0, "10 s"), (500.0, "5 min"), (40_000.0, "6 h"), (5400.0, "1 h"), (9e5, "5 d")):
        stage.app.register(f"Late-{lag:g}", 2)
        history(stage, f"Late-{lag:g}", lag=lag)
        page.goto(f"{address}/queues/Late-{lag:g}")
        expect(page.locator("[data-plot=lag] .u-over")).to_be_visible()
        written: list[tuple[str, float]] = until(
            lambda: page.evaluate("window.written.length > 12 && window.written"), "labels"
        )
        assert label in {text for text, _ in written}, (lag, written)
        assert all(left >= 0 for _, left in written), written


def test_jobs_on_a_phone(stage: Stage, address: str, watched: Watched) -> None:
    queue = fill(stage)
    long = {"text": "long " * 60}
    queue.push({"id": "an-id-of-forty-characters-or-very-nearly", "payload": long, "score": 1, "delay": 1})
    page = watched.page(f"{address}/queues/Orders", viewport=NARROW)
    row = page.locator("tbody tr", has_text="order-7")
    link, payload = row.locator("a.id").bounding_box(), row.locator(".newest").bounding_box()
    assert link
    assert payload
    assert link["height"] < 30, "the id is broken over lines"
    assert payload["y"] >= link["y"] + link["height"], "the payload stands below"
    assert payload["x"] + payload["width"] <= NARROW["width"]
    for size in (NARROW, {"width": 640, "height": 700}, {"width": 800, "height": 700}, WIDE):
        page.set_viewport_size(size)  # type: ignore[arg-type]  # a dict of width and height
        for path in ("", "?state=morgue", "?order_by=id"):
            page.goto(f"{address}/queues/Orders{path}")
            box = page.locator("tbody:last-of-type a.id", has_text="order").first.bounding_box()
            assert box
            assert box["height"] < 30, (size, path)


def test_the_numbers_that_matter_are_seen_on_a_phone(stage: Stage, address: str, watched: Watched) -> None:
    fill(stage)
    stage.app.queue("a.queue.with.a.name." + "x" * 100, 2).push({"id": 1})
    page = watched.page(address, viewport=NARROW)
    for field in ("lag", "length", "morgue_length"):
        for cell in page.locator(f"[data-field={field}]").all():
            box = cell.bounding_box()
            assert box
            assert box["x"] + box["width"] <= NARROW["width"], field
    page.set_viewport_size(WIDE)  # type: ignore[arg-type]  # a dict of width and height
    assert page.locator(".queues").evaluate("table => table.scrollWidth <= table.parentElement.clientWidth")


@pytest.mark.parametrize("width", often([1280, 1181, 1180, 1024, 640, 360], [1180, 360]))
def test_a_long_lag_fits_its_tile(stage: Stage, address: str, watched: Watched, width: int) -> None:
    fill(stage)
    stage.app.client.command(
        "ZADD", shard_prefix("lowq", "Orders", 0) + "due", time.time() - 23 * 3600 - 50 * 60, "late"
    )
    page = watched.page(address, viewport={"width": width, "height": 800})
    page.wait_for_selector("body[data-live]")
    tile = page.locator("[data-live='total.lag']")
    expect(tile).to_contain_text("23 h")
    assert tile.evaluate("element => element.scrollWidth <= element.clientWidth"), tile.inner_text()


def test_a_slip_keeps_what_was_typed(stage: Stage, address: str, watched: Watched) -> None:
    fill(stage)
    watched.expected = {400}
    page = watched.page(f"{address}/queues/Orders?state=scheduled")
    page.get_by_label("Id like").fill("order-1*")
    page.get_by_label("From").fill("banana")
    page.get_by_role("button", name="Filter").click()
    expect(page.get_by_role("alert")).to_contain_text("From can't be 'banana'")
    expect(page.get_by_label("Id like")).to_have_value("order-1*")
    expect(page.get_by_role("navigation", name="State").locator("[aria-current]")).to_contain_text("Scheduled")
    page.get_by_label("From").fill("+1h")
    page.get_by_role("button", name="Filter").click()
    expect(page.locator("tbody .id")).to_have_text(["order-10", "order-11"])


def test_kick_a_job_out_of_the_morgue_and_watch_it_leave(stage: Stage, address: str, watched: Watched) -> None:
    queue = fill(stage)
    page = watched.page(address)
    page.locator("tr[data-queue=Orders] [data-field=morgue_length]").click()
    expect(page.locator("tbody tr")).to_have_count(3)
    expect(page.locator("tbody .error").first).to_have_text("out of stock")
    # Nothing is selected: nothing can be done to it.
    expect(page.get_by_role("button", name="Retry selected now")).to_be_disabled()
    page.get_by_label("Select order-1", exact=True).check()
    expect(page.locator("[data-selected]")).to_have_text("1 selected")
    page.get_by_role("button", name="Retry selected now").click()
    expect(page.get_by_role("status")).to_contain_text("1 job queued again")
    # It is said once, and the address can be kept.
    expect(page).not_to_have_url(re.compile("said"))
    page.reload()
    expect(page.get_by_role("status")).to_have_count(0)
    expect(page.locator("tbody tr")).to_have_count(2)
    expect(page.locator(".tabs a", has_text="Due")).to_contain_text("1")
    assert queue.stats().morgue_length == 2


def test_filter_select_and_delete_with_confirmation(stage: Stage, address: str, watched: Watched) -> None:
    queue = fill(stage)
    page = watched.page(f"{address}/queues/Orders")
    page.get_by_label("Id like").fill("order-1*")
    page.get_by_role("button", name="Filter").click()
    expect(page).to_have_url(re.compile(r"match=order-1\*|match=order-1%2A"))
    expect(page.locator("tbody .id")).to_have_text(["order-10", "order-11"])
    page.get_by_label("select all").check()
    page.get_by_role("button", name="Delete selected").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Delete 2 jobs?")
    page.get_by_role("link", name="Cancel").click()
    assert queue.stats().length == 9
    page.get_by_label("select all").check()
    page.get_by_role("button", name="Delete selected").click()
    page.get_by_role("button", name="Delete 2 jobs").click()
    expect(page.get_by_role("status")).to_contain_text("2 jobs deleted")
    expect(page.get_by_text("No job matches.")).to_be_visible()
    assert queue.stats().length == 7


def test_delete_all_that_match_in_the_background(stage: Stage, address: str, watched: Watched) -> None:
    queue = stage.app.queue("Orders", 4)
    queue.push({"id": f"{'old' if n % 2 else 'new'}-{n}", "delay": 3600} for n in range(3000))
    page = watched.page(f"{address}/queues/Orders?match=old-*")
    page.get_by_role("button", name="Delete all").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Delete 1,500 jobs?")
    page.get_by_role("button", name="Delete 1,500 jobs").click()
    expect(page.locator(".reason")).to_contain_text("1,500 of 1,500 jobs deleted")
    assert queue.stats().length == 1500
    page.get_by_role("link", name="Audit").click()
    expect(page.locator("tbody tr").first).to_contain_text("1,500")
    expect(page.locator("tbody tr").first).to_contain_text("old-*")


def test_pause_and_resume(stage: Stage, address: str, watched: Watched) -> None:
    queue = fill(stage)
    page = watched.page(f"{address}/queues/Orders")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("h1")).to_contain_text("paused")
    assert queue.stats().paused
    page.goto(f"{address}/queues/Orders/job?id=order-5")
    page.get_by_role("button", name="Run now").click()
    expect(page.locator(".reason")).to_contain_text("queue has been paused for")
    expect(page.locator(".reason")).to_contain_text("by anonymous")
    page.get_by_role("link", name="Orders").click()
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("h1")).not_to_contain_text("paused")
    assert not queue.stats().paused


def test_the_page_of_a_retrying_id(stage: Stage, address: str, watched: Watched) -> None:
    queue = stage.app.queue("Orders", 4)
    queue.push([{"id": "42", "payload": {"version": n}, "score": n} for n in (2, 1)])
    stage.fail("Orders", "42", TRACEBACK, retry_count=2, delay=900.0)
    page = watched.page(address)
    page.get_by_role("searchbox").fill("42")
    page.get_by_role("searchbox").press("Enter")
    expect(page.locator("h1")).to_contain_text("42")
    expect(page.locator(".reason")).to_have_text(
        re.compile(r"retry 3 of 25, due in (15 min|14 min \d+ s)\.", re.IGNORECASE)
    )
    expect(page.locator("pre.error")).to_contain_text("TimeoutError: warehouse did not answer")
    expect(page.locator(".payloads pre")).to_have_text([re.compile('"version": 1'), re.compile('"version": 2')])
    expect(page.locator(".retries li").first).to_contain_text("3")
    clock = page.locator(".retries time").first
    text = clock.inner_text()
    expect(clock).not_to_have_text(text)  # it runs


@pytest.mark.slow
def test_a_reader_gets_no_button_and_a_403(stage: Stage, watched: Watched) -> None:
    queue = fill(stage)
    users: Any = {"ann": ("secret", "admin"), "bob": ("look", "read")}
    watched.expected = {401, 403}
    with stage.serving(auth=lowq_web.BasicAuth(users)) as address:
        page = watched.page(address, http_credentials={"username": "bob", "password": "look"})
        expect(page.locator(".who")).to_contain_text("bob read only")
        for path in ("/queues/Orders", "/queues/Orders/job?id=order-5", "/nodes"):
            page.goto(address + path)
            assert page.locator("main button:not(.plain)").count() == 0
        status = page.evaluate("fetch('/queues/Orders/pause', {method: 'POST'}).then(answer => answer.status)")
        assert status == 403
        assert not queue.stats().paused
        page = watched.page(f"{address}/queues/Orders", http_credentials={"username": "ann", "password": "secret"})
        page.get_by_role("button", name="Pause").click()
        expect(page.locator("h1")).to_contain_text("paused")
        assert stage.app.audit()[0].who == "ann"
        watched.close()


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
    page.goto(f"{address}/search?id=order-7")
    page.get_by_role("button", name="Bury").click()
    page.get_by_label("Reason").fill("by hand")
    page.get_by_role("button", name="Bury 1 job").click()
    expect(page.locator(".error")).to_have_text("by hand")
    assert (queue.stats().morgue_length, queue.stats().due) == (1, 1)


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_narrow_screens_and_contrast(stage: Stage, address: str, watched: Watched, scheme: str) -> None:
    fill(stage, 60)
    stage.app.queue("Orders").push({"id": "x" * 400, "payload": "y" * 3000, "score": 1, "delay": 1})
    stage.fail("Orders", "order-9", TRACEBACK) if stage.app.queue("Orders").perform_now("order-9") else None
    stage.app.note("ann", "kick", "Orders", 5, {"match": "z" * 200})
    stage.app.queue("Orders").pause(by="ann")
    page = watched.page(address, viewport=NARROW, color_scheme=scheme)
    paths = ("/", "/queues/Orders", "/queues/Orders?state=morgue", "/queues/Orders/job?id=order-9",
             f"/queues/Orders/job?id={'x' * 400}", "/queues/Orders/shards", "/nodes", "/audit", "/tasks",
             "/search?id=nothing", "/queues/Orders?did=kick&n=1")  # fmt: skip
    for size in (NARROW, WIDE):
        page.set_viewport_size(size)  # type: ignore[arg-type]  # a dict of width and height
        for path in paths:
            page.goto(address + path)
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], path
            assert page.evaluate(CONTRAST) == [], (path, scheme)


#: Texts whose contrast with what is behind them is below 4.5, with that.
CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const colour = parse(getComputedStyle(element).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("svg, title, script")) continue;
    if (!element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const [one, two] = [light(parse(style.color).slice(0, 3)), light(behind(element))].sort((a, b) => b - a);
    const contrast = (one + 0.05) / (two + 0.05);
    if (contrast < 4.5) found.push(`${walker.currentNode.data.trim().slice(0, 30)}: ${contrast.toFixed(2)}`);
  }
  return found;
}"""


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


@pytest.mark.slow
def test_times_are_in_the_viewers_zone(stage: Stage, address: str, watched: Watched) -> None:
    stage.app.queue("Orders", 1).push({"id": "a", "perform_at": 1_900_000_000})  # 2030-03-17T17:46:40Z
    page = watched.page(f"{address}/queues/Orders", timezone_id="Asia/Tokyo", locale="en-GB")
    expect(page.locator("tbody time")).to_have_attribute("title", re.compile(r"18 Mar 2030.*02:46:40"))
    # Without a mouse to hover with: all of them, and remembered.
    expect(page.locator("tbody time")).to_have_text(re.compile("^in "))
    page.get_by_role("button", name="Show exact times").click()
    expect(page.locator("tbody time")).to_have_text(re.compile(r"18 Mar 2030.*02:46:40"))
    page.reload()
    expect(page.locator("tbody time")).to_have_text(re.compile(r"18 Mar 2030.*02:46:40"))
    page.get_by_role("button", name="Show how long ago").click()
    expect(page.locator("tbody time")).to_have_text(re.compile("^in "))
    page = watched.page(f"{address}/queues/Orders", java_script_enabled=False)
    expect(page.locator("tbody time")).to_have_attribute("title", "2030-03-17 17:46:40.000 UTC")


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


def test_send_a_node_the_commands_quiet_and_stop(stage: Stage, address: str, watched: Watched) -> None:
    with working(stage):
        node = stage.app.nodes()[0]
        page = watched.page(f"{address}/nodes")
        expect(page.locator(".node h2")).to_contain_text(node.name)
        expect(page.locator(".threads tbody tr")).to_have_count(3)
        page.get_by_role("button", name="Quiet").click()
        expect(page.locator("h1")).to_have_text("Let this node go quiet?")
        expect(page.locator(".warning")).to_contain_text("the last node that isn't quiet")
        page.get_by_role("link", name="Cancel").click()
        assert not stage.app.nodes()[0].quiet
        page.get_by_role("button", name="Quiet").click()
        page.get_by_role("button", name="Go quiet").click()
        expect(page.get_by_role("status")).to_have_text(f"Sent quiet to {node.name}.")
        until(lambda: stage.app.nodes()[0].quiet, "a quiet node")
        page.reload()
        expect(page.locator(".node h2")).to_contain_text("quiet")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("h1")).to_have_text("Stop this node?")
        page.get_by_role("button", name="Stop the node").click()
        until(stage.stopping, "a node that stops")


@pytest.mark.slow
def test_mounted_below_a_path_of_another_application(stage: Stage, watched: Watched) -> None:
    fill(stage)
    history(stage, "Orders", lag=5.0)
    with stage.serving(below="/ops/lowq") as address:
        page = watched.page(f"{address}/ops/lowq/")
        expect(page.locator(".u-over").first).to_be_visible()
        page.wait_for_selector("body[data-live]")
        page.locator("tbody").get_by_role("link", name="Orders").click()
        page.get_by_role("button", name="Pause").click()
        expect(page.locator("h1")).to_contain_text("paused")
        watched.close()


def test_a_long_scan_shows_its_first_rows_at_once(stage: Stage, address: str) -> None:
    # Not in a browser: what matters is when bytes come.
    queue = stage.app.queue("Orders", 2)
    queue.push({"id": f"order-{n}", "delay": 60 + n} for n in range(150_000))
    with urllib.request.urlopen(f"{address}/queues/Orders?match=*9&order_by=id") as answer:
        page = answer.read().decode()
    assert page.count("<tbody") >= 2


def test_a_schedule_runs_now_is_paused_and_goes_on(stage: Stage, address: str, watched: Watched) -> None:
    report = scheduled(stage)
    stage.start_node()
    page = watched.page(address)
    page.get_by_role("link", name="Schedules", exact=True).click()
    row = page.get_by_role("row").filter(has_text="every 3600 s")
    expect(row).to_contain_text("in ")
    row.get_by_role("button", name="Run now").click()
    expect(page.get_by_role("status").first).to_contain_text("A job of Reports is in the queue Reports.")
    until(lambda: report.queue.stats().processed == 1, "the job")
    row.get_by_role("button", name="Pause").click()
    expect(row).to_contain_text("paused")
    row.get_by_role("button", name="Resume").click()
    expect(row).to_contain_text("in ")
    paused = page.get_by_role("row").filter(has_text="every 86400 s")
    expect(paused).to_contain_text("by ann")
    page.get_by_role("link", name="Audit", exact=True).click()
    expect(page.locator("tbody tr").first).to_contain_text("resume schedule")
