"""What nodes have recorded: charts, added up over queues; live rates; times of jobs; and when a backlog is gone."""

import json
import math
import re
import time

import pytest
from starlette.testclient import TestClient

import lowq
from lowq.cli import main
from lowq.observe.tallies import EndedBatch
from lowq.shards.shard import Inflow
from lowq.store.keys import history_key, shard_prefix
from tests.recorded import record
from tests.rows import case
from tests.rules.web.conftest import Open
from tests.rules.web.hand import Hand
from tests.rules.web.shown import Reader
from tests.waiting import until

#: span -> seconds of a stretch, and how many stretches ago the first known one was.
STEPS = {"hour": (10, 200), "day": (300, 100), "month": (7200, 100)}
#: queue -> what was recorded in stretches one after another: performed, failed, lag.
RECORDED = {
    "Orders": [(100, 0, 1.5), (4000, 20, 30.0), (0, 0, 0.0), (700, 90, 4.0), (90, 3, 2.0)],
    "Refunds": [(50, 5, 9.0), (600, 0, 0.5), (30, 10, 7.0), (0, 0, 0.0), (2000, 40, 60.0)],
}
NAMES = ("processed", "failed", "lag")


def fill(app: lowq.Lowq, span: str) -> float:
    """Records everything; the beginning of the first stretch."""
    step, ago = STEPS[span]
    first = (math.floor(time.time() / step) - ago) * step
    for queue, recorded in RECORDED.items():
        hand = Hand(app, queue, 2)
        for n, (processed, failed, lag) in enumerate(recorded):
            hand.record(first + (n + 1) * step - 0.001, step * 0.99, processed, failed, lag)
    return first


def known(span: str, queue: str = "") -> dict[str, list[float]]:
    """What the stretches must show: of one queue, or of all together."""
    step = STEPS[span][0]
    together = list(zip(*(RECORDED[name] for name in ([queue] if queue else RECORDED)), strict=True))
    return {
        "processed": [sum(one[0] for one in stretch) / step for stretch in together],
        "failed": [sum(one[1] for one in stretch) / step for stretch in together],
        "lag": [max(one[2] for one in stretch) for stretch in together],
    }


@pytest.mark.parametrize("span", STEPS)
def test_lines_are_as_high_and_numbers_as_large_as_what_was_recorded(
    app: lowq.Lowq, client: TestClient, span: str
) -> None:
    first, step = fill(app, span), STEPS[span][0]
    for queue in ["", *RECORDED]:
        with case(queue):
            values = known(span, queue)
            path = f"/queues/{queue}/rates" if queue else "/rates"
            document = client.get(f"/api/v1{path}?span={span}").json()
            assert (document["span"], document["step"]) == (span, step)
            found = {rate["at"]: rate for rate in document["rates"]}
            assert list(found) == sorted(found)
            for name in NAMES:
                shown = [found[first + n * step][name] for n in range(-1, 6)]
                assert shown == [None, *(pytest.approx(value, abs=0.001) for value in values[name]), None]
            page = Reader(client).page(f"{f'/queues/{queue}' if queue else '/'}?span={span}")
            lines = [(svg, line) for svg in page.every("svg") for line in svg.every("polyline")]
            drawn = [(name, svg, line) for svg, line in lines for name in NAMES if name in line.classes]
            assert len(drawn) == len(NAMES), "each in one piece"
            for name, svg, line in drawn:
                bottom = float(svg.attributes["viewbox"].split()[3])
                heights = [bottom - float(pair.split(",")[1]) for pair in line.attributes["points"].split()]
                # To a tenth of a pixel.
                expected = [value / max(values[name]) for value in values[name]]
                assert [y / max(heights) for y in heights] == pytest.approx(expected, abs=0.01 + 0.1 / max(heights))


def test_rates_are_measured_from_one_look_to_the_next(
    browse: Open, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowq_web.stats_cache.INTERVAL", 0.6)
    began = time.time()
    orders, refunds = Hand(app, "Orders"), Hand(app, "Refunds")
    reader = Reader(browse())
    assert "-" in reader.page("/").facts["Processed"].text
    ids = [f"job-{n:02d}" for n in range(100)]
    for hand in (orders, refunds, orders, orders):
        for job_id in ids:
            hand.push(job_id, began - 400)
        hand.perform(ids, began - 400)

    def rates() -> list[float]:
        page = reader.page("/")
        shown = {row["Queue"].find("a").text: row["Rate"] for row in page.table("Queue", "Rate")}
        texts = [element.text for element in (shown["Orders"], shown["Refunds"], page.facts["Processed"])]
        found = [re.search(r"([\d.]+)(K?)/s", text) for text in texts]
        return [float(match[1]) * (1000 if match[2] else 1) for match in found if match] if all(found) else []

    of_orders, of_refunds, of_all = until(rates, "rates")
    assert of_orders == pytest.approx(3 * of_refunds, rel=0.06)
    assert of_all == pytest.approx(4 * of_refunds, rel=0.06)


ODD = "</th><script>alert('1')</script>"


@pytest.fixture
def timed(app: lowq.Lowq, client: TestClient) -> TestClient:
    app.queue("Orders", 450).push([{"id": "x"}, {"id": ODD}])
    slow = [(120.0, EndedBatch(ODD, 3, 449, 44.0, 0.0)), (0.0, EndedBatch("b", 1, 2, 0.04, 0.0))]
    app.client.command("HSET", history_key("lowq", "Orders"), "slow:3:7", "no batch", key=history_key("lowq", "Orders"))
    waits = {0.5: 94, 60.0: 5, math.inf: 1}
    record(app, "Orders", None, 10, waits=waits, waited=70.0, runs={0.05: 10}, run_seconds=0.4, slow=slow, lag=None)
    return client


def test_percentiles_and_the_slowest_are_shown(app: lowq.Lowq, timed: TestClient) -> None:
    page = Reader(timed).page("/queues/Orders/times")
    for shown in (page, Reader(timed).page("/queues/Orders/times?span=month")):
        wait, run = [section.text for section in shown.every("section") if "times" in section.classes]
        assert ("p50 about 383 ms p95 about 36 s p99 about 1 min" in wait, "100 jobs" in wait) == (True, True)
        assert ("p50 about 37.5 ms p95 about 48.8 ms p99 about 49.8 ms" in run, "10 batches" in run) == (True, True)
    first, second = page.table("Id", "Ran", "Ended", "Shard")
    assert first["Id"].text == f"{ODD} and 2 more in its batch"
    assert (first["Ran"].text, second["Ran"].text) == ("44 s", "40 ms")
    assert first["Ended"].lasts(120)
    assert 'id="shard-449"' in timed.get(first["Shard"].link).text
    assert timed.get(next(first["Id"].every("a")).link).status_code == 200
    record(app, "Orders", runs={math.inf: 10**6}, lag=None)
    assert timed.get("/api/v1/queues/Orders/times").json()["run"]["p50"] is None
    assert "p50 longer" in Reader(timed).page("/queues/Orders/times").text


def test_api_and_metrics_tell_the_same(timed: TestClient) -> None:
    found = timed.get("/api/v1/queues/Orders/times?span=day").json()
    assert found["wait"] == {"count": 100, "p50": 0.5, "p95": 60.0, "p99": 60.0}
    assert found["run"] == {"count": 10, "p50": 0.05, "p95": 0.05, "p99": 0.05}
    (stretch,) = [item for item in found["stretches"] if item["run"]["count"]]
    assert stretch["at"] <= time.time() < stretch["at"] + 2 * found["step"]
    slowest = timed.get("/api/v1/queues/Orders/slowest").json()["slowest"]
    shown = [(item["id"], item["ids_count"], item["seconds"], item["shard"]) for item in slowest]
    assert shown == [(ODD, 3, 44.0, 449), ("b", 1, 0.04, 2)]
    for path in ("times", "slowest"):
        assert timed.get(f"/api/v1/queues/nobody/{path}").status_code == 404
    figures = timed.get("/metrics").text
    assert 'lowq_wait_seconds_bucket{le="0.5",queue="Orders"} 94.0' in figures
    assert 'lowq_wait_seconds_sum{queue="Orders"} 70.0' in figures


#: Queue -> what is said of it.
TEXTS = {
    "shrinks": "empty in about 20 min",
    "growing": "growing by 10/s",
    "idle": "empty",
    "nobody's": "no node works it",
}


@pytest.fixture
def forecasting(app: lowq.Lowq) -> lowq.Lowq:
    """One queue of each kind: a node has recorded something in 50 seconds, which are spread over a minute."""
    for queue, count, change in (("shrinks", 100, -5), ("growing", 100, 600), ("idle", 0, 0)):
        app.queue(queue, 1).push({"id": number} for number in range(count))
        lease = shard_prefix("lowq", queue, 0) + "lease"
        app.client.command("SET", lease, "somebody:1", key=lease)
        record(app, queue, time.time() // 10 * 10 - 21, 10, seconds=50.0, inflow=Inflow(30, change))
    app.queue("nobody's", 1).push([{"id": 1}])
    return app


@pytest.mark.usefixtures("forecasting")
def test_pages_api_and_metrics_say_when_the_backlog_is_gone(client: TestClient) -> None:
    rows = Reader(client).page("/").table("Queue", "Rate")
    texts = {next(row["Queue"].every("a")).text: row["Rate"].text.partition("/s")[2].strip() for row in rows}
    assert texts == TEXTS
    assert ">growing by 10/s<" in client.get("/queues/growing").text
    overview = client.get("/api/v1/overview").json()["queues"]
    assert {name: figures["forecast"] for name, figures in overview.items()} == TEXTS
    found = client.get("/api/v1/queues/growing/forecast").json()
    assert (found["backlog"], found["drain_seconds"], found["is_worked"]) == (100, None, True)
    assert (found["text"], found["pushed_rate"]) == ("growing by 10/s", pytest.approx(0.5))
    assert client.get("/api/v1/queues/none/forecast").status_code == 404
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("lowq_drain_seconds")]
    assert [line.rpartition("} ")[2] for line in lines] == ["0.0", "1200.0"], "none of those that have no end"


def test_the_command_line_says_when_the_backlog_is_gone(
    forecasting: lowq.Lowq, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["stats", "--redis-url", forecasting.config.redis_url])
    lines = capsys.readouterr().out.splitlines()
    for queue, text in TEXTS.items():
        (line,) = [line for line in lines if line.startswith(queue)]
        assert (text in line) is (queue != "idle"), "an empty cell is quicker to read"
    with pytest.raises(SystemExit):
        main(["stats", "--json", "growing", "--redis-url", forecasting.config.redis_url])
    forecast = json.loads(capsys.readouterr().out)["forecasts"]["growing"]
    assert (forecast["backlog"], forecast["drain_seconds"], forecast["text"]) == (100, None, "growing by 10/s")
