"""Charts of what was recorded, where nothing live is added to them: without JavaScript."""

import math
import time

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Watched
from tests.browser.stage import Stage
from tests.browser.test_journeys import working
from tests.processes.support import until
from tests.recorded import record
from tests.rules.web.hand import Hand

#: What is drawn on a canvas can't be read back: what is written there is noted on the way.
NOTED = """
  window.written = [];
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
    window.written.push([this.canvas.closest("[data-plot]")?.dataset.plot, text]);
    return write.call(this, text, ...rest);
  };
  const clear = CanvasRenderingContext2D.prototype.clearRect;
  CanvasRenderingContext2D.prototype.clearRect = function (...rest) {
    const plot = this.canvas.closest("[data-plot]")?.dataset.plot;
    window.written = window.written.filter(([other]) => other !== plot);
    return clear.call(this, ...rest);
  };"""


def test_charts_without_data_say_what_to_do_next(stage: Stage, address: str, watched: Watched) -> None:
    stage.app.queue("Orders", 2).push({"id": 1, "delay": 3600})
    for script in (True, False):
        page = watched.page(f"{address}/queues/Orders", java_script_enabled=script)
        if script:
            page.wait_for_selector("body[data-live]")
        expect(page.locator("[data-empty]")).to_contain_text("lowq run app.py")
        for drawn in (".u-over", ".plot", "[data-charts] h3"):
            expect(page.locator(drawn).locator("visible=true")).to_have_count(0)


#: Of each span: a time ago that is of a stretch before the one that goes on, of which too little may be known.
BEFORE = {"hour": 30, "month": 7230}
#: A span ends at a full hour, as it does for a while in each: a day ends at the hour that it began with.
AT_THE_FULL_HOUR = """
  const ask = window.fetch;
  window.fetch = async (...rest) => {
    const answer = await ask(...rest);
    if (!answer.url.includes("/rates?")) return answer;
    const history = await answer.json();
    const shift = history.rates.at(-1).at % 7200;
    for (const rate of history.rates) rate.at -= shift;
    return { ok: true, json: async () => history };
  };"""


@pytest.mark.parametrize(
    ("span", "processed", "full_hour"), [("hour", 7, True), pytest.param("month", 0, False, marks=pytest.mark.slow)]
)
def test_little_data_has_axes_without_nonsense(
    stage: Stage, address: str, watched: Watched, span: str, processed: int, full_hour: bool
) -> None:
    hand, last = Hand(stage.app, "Orders", 2), math.floor(time.time() / 10) * 10
    for back in (BEFORE[span], 20):
        hand.record(last - back + 9.9, 9.8, processed=processed, failed=0, lag=0.0)
    page = watched.page(address)
    if full_hour:
        page.add_init_script(AT_THE_FULL_HOUR)
    page.add_init_script(NOTED)
    page.goto(f"{address}/?span={span}")
    expect(page.locator(".u-over").first).to_be_visible()
    page.wait_for_selector("body[data-live]")
    if span == "hour":
        seen = int(page.locator("[data-charts]").get_attribute("data-points") or 0)
        until(lambda: int(page.locator("[data-charts]").get_attribute("data-points") or 0) > seen, "a live point")
    for plot in ("rates", "lag"):
        labels = [text for where, text in page.evaluate("window.written") if where == plot and text]
        assert len(labels) >= 3
        assert len(set(labels)) == len(labels), labels
        assert not [text for text in labels if "e-" in text]


def test_the_first_words_of_a_node_bring_the_charts(stage: Stage, address: str, watched: Watched) -> None:
    stage.app.queue("Orders", 4).push({"id": 1})
    page = watched.page(address)
    expect(page.locator("[data-empty]")).to_be_visible()
    with working(stage):
        expect(page.locator(".u-over").first).to_be_visible()
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
        expect(page.locator("figcaption").first).to_contain_text("times are UTC" if zone == "UTC" else "times are Asia")
        marks[zone] = page.locator(".marks text").first.text_content() or ""
    minutes = [int(mark[:2]) * 60 + int(mark[3:]) for mark in marks.values()]
    assert abs((minutes[1] - minutes[0]) % 1440 - 330) <= 10
