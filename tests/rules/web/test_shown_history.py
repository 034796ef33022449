"""Charts of what nodes have recorded: known numbers of an hour, a day and 30 days, added up over queues, there again
after a reload and for another process; and the live rates.
"""

import math
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from tests.rows import case
from tests.rules.web.conftest import Open
from tests.rules.web.hand import Hand
from tests.rules.web.shown import Element, Reader, Row
from tests.waiting import until

#: span -> seconds of a stretch, and how many stretches ago the first known one was.
STEPS = {"hour": (10, 200), "day": (300, 100), "month": (7200, 100)}
#: queue -> what was recorded in stretches one after another: performed, failed, lag.
RECORDED = {
    "Orders": [(100, 0, 1.5), (4000, 20, 30.0), (0, 0, 0.0), (700, 90, 4.0), (90, 3, 2.0)],
    "Refunds": [(50, 5, 9.0), (600, 0, 0.5), (30, 10, 7.0), (0, 0, 0.0), (2000, 40, 60.0)],
}
NAMES = ("processed", "failed", "lag")
Known = dict[str, list[float]]


def fill(app: lowq.Lowq, span: str) -> float:
    """Records everything; the beginning of the first stretch."""
    step, ago = STEPS[span]
    first = (math.floor(time.time() / step) - ago) * step
    for queue, recorded in RECORDED.items():
        hand = Hand(app, queue, 2)
        for n, (processed, failed, lag) in enumerate(recorded):
            hand.record(first + (n + 1) * step - 0.001, step * 0.99, processed, failed, lag)
    return first


def known(span: str, queue: str = "") -> Known:
    """What the stretches must show: of one queue, or of all together."""
    step = STEPS[span][0]
    together = list(zip(*(RECORDED[name] for name in ([queue] if queue else RECORDED)), strict=True))
    return {
        "processed": [sum(one[0] for one in stretch) / step for stretch in together],
        "failed": [sum(one[1] for one in stretch) / step for stretch in together],
        "lag": [max(one[2] for one in stretch) for stretch in together],
    }


@dataclass(frozen=True)
class World:
    span: str
    client: TestClient
    #: The beginning of the first stretch.
    first: float

    @property
    def reader(self) -> Reader:
        return Reader(self.client)


@pytest.fixture(scope="module", params=STEPS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Something was recorded as long ago as only this span, and the longer ones, reach."""
    app = lowq.Lowq(redis_url=f"memory://{uuid.uuid4().hex}")
    first = fill(app, request.param)
    yield World(request.param, TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1"), first)
    app.close()


def drawn(page: Element) -> dict[str, list[list[tuple[float, float]]]]:
    """The lines of a page's charts: name -> unbroken pieces of it -> points: from the left and from the bottom, as
    shares of the drawing.
    """
    found: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in NAMES}
    for svg in page.every("svg"):
        box = svg.attributes.get("viewbox", "")
        for line in svg.every("polyline"):
            (name,) = (name for name in NAMES if name in line.classes)
            _, _, width, height = map(float, box.split())
            pairs = [tuple(map(float, pair.split(","))) for pair in line.attributes["points"].split()]
            found[name].append([(x / width, 1 - y / height) for x, y in pairs])
    return found


def test_lines_are_as_high_as_what_was_recorded(world: World) -> None:
    for queue in ["", *RECORDED]:
        with case(queue):
            page = world.reader.page(f"{f'/queues/{queue}' if queue else '/'}?span={world.span}")
            lines, values = drawn(page), known(world.span, queue)
            step, count = STEPS[world.span][0], {"hour": 360, "day": 288, "month": 360}[world.span]
            for name in NAMES:
                (piece,) = lines[name]
                top, heights = max(values[name]), [y for _, y in piece]
                highest = max(heights)
                # To a tenth of a pixel, of some hundred.
                expected = [value / top for value in values[name]]
                assert [y / highest for y in heights] == pytest.approx(expected, abs=0.01 + 0.001 / highest), name
                # On one scale with the other line of its chart; the higher one fills at least two fifths.
                scale = max(values["processed"]) if name == "failed" else top
                assert 0.38 <= highest / (top / scale) <= 1, name
                # And where they belong: the right end is now, but for the stretches of which not all is known yet.
                assert piece[0][0] == pytest.approx(1 - (time.time() - world.first) / step / count, abs=0.02), name
                assert piece[-1][0] - piece[0][0] == pytest.approx((len(piece) - 1) / count, abs=0.001), name


def test_the_numbers_behind_the_lines(world: World) -> None:
    for queue in ["", *RECORDED]:
        with case(queue):
            path = f"/api/v1/queues/{queue}/rates" if queue else "/api/v1/rates"
            document = world.client.get(f"{path}?span={world.span}").json()
            step = STEPS[world.span][0]
            assert (document["span"], document["step"]) == (world.span, step)
            found = {rate["at"]: rate for rate in document["rates"]}
            assert len(found) == len(document["rates"])
            assert list(found) == sorted(found)
            values = known(world.span, queue)
            for n in range(len(values["lag"])):
                rate = found[world.first + n * step]
                for name in NAMES:
                    assert rate[name] == pytest.approx(values[name][n], abs=0.001), (n, name)
            for nothing in (found[world.first - step], found[world.first + len(values["lag"]) * step]):
                assert [nothing[name] for name in NAMES] == [None, None, None]


def test_no_record_no_line(browse: Open, app: lowq.Lowq) -> None:
    app.queue("Orders", 1).push({"id": 1})
    assert drawn(Reader(browse()).page("/")) == {name: [] for name in NAMES}


def test_rates_are_measured_from_one_look_to_the_next(
    browse: Open, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowq_web.stats_cache.INTERVAL", 0.6)
    began = time.time()
    orders, refunds = Hand(app, "Orders"), Hand(app, "Refunds")
    orders.push("first", began - 500)
    reader, looked_at = Reader(browse()), time.monotonic()
    assert "-" in reader.page("/").facts["Processed"].text
    orders.fail("first", began - 500, began + 900)
    ids = [f"job-{n:02d}" for n in range(100)]
    for hand, times in ((orders, 3), (refunds, 1)):
        for _ in range(times):
            for job_id in ids:
                hand.push(job_id, began - 400)
            hand.perform(ids, began - 400)

    def shown_rate(element: Element) -> float:
        number = re.search(r"([\d.]+K?)/s", element.text)
        assert number, element.text
        return float(number[1].replace("K", "")) * (1000 if "K" in number[1] else 1)

    def page_with_rates() -> tuple[Element, Row] | None:
        page = reader.page("/")
        rates = {row["Queue"].find("a").text: row["Rate"] for row in page.table("Queue", "Rate")}
        return None if "-" in rates["Orders"].text else (page, rates)

    found = until(page_with_rates, "rates")
    assert found is not None
    page, rates = found
    longest = time.monotonic() - looked_at
    one = shown_rate(rates["Refunds"]) / 100  # what once in that time is per second
    assert 0.95 / longest <= one <= 1 / 0.5
    assert shown_rate(rates["Orders"]) == pytest.approx(300 * one, rel=0.06)
    assert shown_rate(page.facts["Processed"]) == pytest.approx(400 * one, rel=0.06)
    assert shown_rate(page.facts["Failed"]) == pytest.approx(one, rel=0.06)
