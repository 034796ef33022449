"""Charts of what was recorded, where nothing live is added to them: without JavaScript."""

import math
import time

from playwright.sync_api import expect

from tests.browser.conftest import Watched
from tests.browser.stage import Stage
from tests.browser.test_journeys import working
from tests.recorded import record
from tests.rules.web.hand import Hand
from tests.waiting import PATIENCE


def test_charts_without_data_say_what_to_do_next(stage: Stage, address: str, watched: Watched) -> None:
    stage.app.queue("Orders", 2).push({"id": 1, "delay": 3600})
    for script in (True, False):
        page = watched.page(f"{address}/queues/Orders", java_script_enabled=script)
        if script:
            page.wait_for_selector("body[data-live]")
        expect(page.locator("[data-empty]")).to_contain_text("lowq run app.py")
        expect(page.locator(".plot").locator("visible=true")).to_have_count(0)


def test_little_data_has_axes_without_nonsense(stage: Stage, address: str, watched: Watched) -> None:
    hand, last = Hand(stage.app, "Orders", 2), math.floor(time.time() / 10) * 10
    for span, back, processed in (("hour", 30, 7), ("month", 7230, 0)):
        for ago in (back, 20):
            hand.record(last - ago + 9.9, 9.8, processed=processed, failed=0, lag=0.0)
        page = watched.page(f"{address}/?span={span}")
        page.wait_for_selector("body[data-live]")
        expect(page.locator(".plot")).to_have_count(3)
        for plot in page.locator(".plot").all():
            for axis in (".steps", ".marks"):
                labels = plot.locator(f"{axis} text").all_text_contents()
                assert len(labels) >= 2, (span, axis)
                assert len(set(labels)) == len(labels), (span, labels)
                assert not [label for label in labels if "e-" in label], (span, labels)


def test_the_first_words_of_a_node_bring_the_charts(stage: Stage, address: str, watched: Watched) -> None:
    stage.app.queue("Orders", 4).push({"id": 1})
    page = watched.page(address)
    expect(page.locator("[data-empty]")).to_be_visible()
    with working(stage):
        expect(page.locator(".plot").first).to_be_visible(timeout=1000 * PATIENCE)
        expect(page.locator("[data-empty]")).to_be_hidden()


def test_what_the_server_has_drawn_has_its_times_in_the_zone_of_the_viewer(
    stage: Stage, address: str, watched: Watched
) -> None:
    stage.app.registrations.enter("Orders", 1)
    for ago in (600.0, 60.0):
        record(stage.app, "Orders", time.time() - ago, 10, waits={0.5: 10}, waited=5.0, runs={0.05: 10}, lag=None)
    marks = {}
    for zone in ("UTC", "Asia/Kolkata"):
        page = watched.page(f"{address}/queues/Orders/times", timezone_id=zone)
        expect(page.locator("[data-times]")).to_contain_text(
            "Times are in UTC" if zone == "UTC" else "Times are in Asia"
        )
        marks[zone] = page.locator(".marks text").first.text_content() or ""
    minutes = [int(mark[:2]) * 60 + int(mark[3:]) for mark in marks.values()]
    assert abs((minutes[1] - minutes[0]) % 1440 - 330) <= 10
