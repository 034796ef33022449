"""How long jobs wait and run: the page of a queue's times, the API and the metrics."""

import math
import time

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq.metrics.slowest import EndedBatch
from lowq.store.keys import history_key
from tests.recorded import record
from tests.rules.web.shown import Reader

ODD = "</th><script>alert('1')</script>"


@pytest.fixture
def client(app: lowq.Lowq) -> TestClient:
    app.queue("Orders", 450).push([{"id": "x"}, {"id": ODD}])
    slow = [(120.0, EndedBatch(ODD, 3, 449, 44.0, 0.0)), (0.0, EndedBatch("b", 1, 2, 0.04, 0.0))]
    app.client.command("HSET", history_key("lowq", "Orders"), "slow:3:7", "no batch", key=history_key("lowq", "Orders"))
    waits = {0.5: 94, 60.0: 5, math.inf: 1}
    record(app, "Orders", None, 10, waits=waits, waited=70.0, runs={0.05: 10}, run_seconds=0.4, slow=slow, lag=None)
    return TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1")


def test_percentiles_of_waits_and_runs_are_shown(client: TestClient) -> None:
    for span in ("hour", "day", "month"):
        page = Reader(client).page(f"/queues/Orders/times?span={span}")
        wait, run = [section.text for section in page.every("section") if "times" in section.classes]
        assert ("p50 ≤ 500 ms p95 ≤ 1 min p99 ≤ 1 min" in wait, "100 jobs" in wait) == (True, True)
        assert ("p50 ≤ 50 ms p95 ≤ 50 ms p99 ≤ 50 ms" in run, "10 batches" in run) == (True, True)


def test_the_slowest_link_to_their_ids_and_shards(client: TestClient) -> None:
    page = Reader(client).page("/queues/Orders/times")
    first, second = page.table("Id", "Ran", "Ended", "Shard")
    assert first["Id"].text == f"{ODD} and 2 more in its batch"
    assert (first["Ran"].text, second["Ran"].text) == ("44 s", "40 ms")
    assert first["Ended"].lasts(120)
    assert first["Shard"].link.endswith("#shard-449")
    assert 'id="shard-449"' in client.get(first["Shard"].link).text
    assert client.get(next(first["Id"].every("a")).link).status_code == 200


def test_the_api_tells_the_same(client: TestClient) -> None:
    found = client.get("/api/v1/queues/Orders/times?span=day").json()
    assert found["wait"] == {"count": 100, "p50": 0.5, "p95": 60.0, "p99": 60.0}
    assert found["run"] == {"count": 10, "p50": 0.05, "p95": 0.05, "p99": 0.05}
    (stretch,) = [item for item in found["stretches"] if item["run"]["count"]]
    assert stretch["at"] <= time.time() < stretch["at"] + 2 * found["step"]
    slowest = client.get("/api/v1/queues/Orders/slowest").json()["slowest"]
    assert [(item["id"], item["ids_count"], item["seconds"], item["shard"]) for item in slowest] == [
        (ODD, 3, 44.0, 449), ("b", 1, 0.04, 2)
    ]  # fmt: skip
    for path in ("times", "slowest"):
        assert client.get(f"/api/v1/queues/nobody/{path}").status_code == 404
    assert client.get("/api/v1/queues/Orders/times?span=year").status_code == 400


def test_what_is_beyond_all_bounds_is_no_number(app: lowq.Lowq, client: TestClient) -> None:
    record(app, "Orders", runs={math.inf: 10**6}, lag=None)
    assert client.get("/api/v1/queues/Orders/times").json()["run"]["p50"] is None
    assert "p50 longer" in Reader(client).page("/queues/Orders/times").text


def test_metrics_have_both_as_histograms(client: TestClient) -> None:
    text = client.get("/metrics").text
    assert 'lowq_wait_seconds_bucket{le="0.5",queue="Orders"} 94.0' in text
    assert 'lowq_wait_seconds_count{queue="Orders"} 100.0' in text
    assert 'lowq_wait_seconds_sum{queue="Orders"} 70.0' in text
    assert 'lowq_perform_seconds_count{queue="Orders"} 10.0' in text
