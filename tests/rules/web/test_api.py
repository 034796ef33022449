"""The JSON API beyond what its description says: what it does, and that the description holds."""

import json
import math
import os
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

import lowq
from lowq.operate.schedules import set_record
from lowq.schedules import Record
from lowq.store.keys import limit_key
from lowq_web.api import ENDPOINTS
from lowq_web.api.received import Nothing
from tests.recorded import record
from tests.rows import case
from tests.rules.web.confirming import ended
from tests.rules.web.conftest import OWN, Open, dashboard
from tests.rules.web.hand import Hand, heartbeat


@pytest.fixture
def queue(app: lowq.Lowq) -> lowq.Queue:
    queue = app.queue("Orders", 3)
    queue.push({"id": f"job-{n:02d}", "payload": {"n": n}, "score": n, "delay": 1000 + n} for n in range(20))
    queue.bury(["job-00", "job-01"], "no stock")
    return queue


ACTIONS = "/api/v1/queues/Orders/actions"
JSON = {"content-type": "application/json"}


def test_what_was_done_to_ids_and_why_others_were_left() -> None:
    rows: list[tuple[str, str, int]] = [
        ("kick", "not in the morgue", 1), ("bury", "no such job waits", 1), ("perform_now", "no such job waits", 1),
        ("delete", "no such job waits or is buried", 2),
    ]  # fmt: skip
    for action, why, done in rows:
        with case(action), dashboard() as (app, client):
            hand, odd = Hand(app, "Orders"), "gone\udcff\x00"
            hand.queue.push([{"id": "waits", "delay": 60}, {"id": "dead"}])
            hand.queue.bury("dead")
            hand.push("runs", time.time() - 1)
            hand.take(["runs"], time.time())
            document = {"action": action, "ids": ["runs", odd, odd, "waits", "dead"]}
            answer = client.post(ACTIONS, content=json.dumps(document), headers=JSON).json()
            left = {item["id"]: item["why"] for item in answer["not_done"]}
            assert (left[odd], left["runs"]) == (why, why if action == "kick" else "in flight, left alone")
            assert ("waits" in left, "dead" in left) == (action == "kick", action in ("bury", "perform_now"))
            assert (answer["done"], answer["in_flight"]) == (done, int(action != "kick"))


def test_running_and_waiting_jobs_are_cancelled() -> None:
    with dashboard() as (app, client):
        hand = Hand(app, "Orders")
        hand.queue.push([{"id": "waits", "delay": 60}])
        hand.push("runs", time.time() - 1)
        hand.take(["runs"], time.time())
        document = {"action": "cancel", "ids": ["runs", "waits", "gone"]}
        answer = client.post(ACTIONS, content=json.dumps(document), headers=JSON).json()
        assert (answer["done"], answer["signalled"], answer["missing"]) == (2, 1, 1)
        assert answer["not_done"] == [{"id": "gone", "why": "no such job waits or is in flight"}]
        assert [(entry.action, entry.count, entry.detail["signalled"]) for entry in app.audit()] == [("cancel", 2, 1)]


def test_all_running_jobs_that_match_are_cancelled() -> None:
    with dashboard() as (app, client):
        hand = Hand(app, "Orders")
        for name in ("a", "b"):
            hand.push(name, time.time() - 1)
        hand.take(["a", "b"], time.time())
        assert client.post("/api/v1/queues/Orders/count", json={"action": "cancel"}).json()["count"] == 2
        refused = client.post(ACTIONS, json={"action": "cancel", "all": {"state": "morgue"}})
        assert (refused.status_code, "one of: scheduled, due, retrying, taken" in refused.text) == (400, True)
        wanted = {"state": "taken", "match": "a*"}
        started = client.post(ACTIONS, json={"action": "cancel", "all": wanted, "at_most": 1})
        assert ended(client, started.json()["id"])["done"] == 1
        told = {name: "was cancelled" in hand.queue.why(name).detail for name in ("a", "b")}
        assert told == {"a": True, "b": False}


def test_nonsense_is_refused_with_the_reason(client: TestClient, queue: lowq.Queue, app: lowq.Lowq) -> None:
    # What is wrong in a document by itself is in `test_openapi`.
    documents: list[Any] = [
        {"action": "kick"}, {"action": "kick", "ids": ["a"], "all": {}}, {"action": "kick", "all": {"state": "due"}},
        {"action": "kick", "ids": ["a"], "reason": "why"}, {"action": "kick", "ids": ["x"] * 1001},
        {"action": "delete", "ids": ["job-05", "ä" * 400]},
    ]  # fmt: skip
    before = queue.stats().length
    contents: list[str | bytes] = [*map(json.dumps, documents), "{", "[" * 100_000, b"\xff\xfe"]
    for content in contents:
        with case(content[:100]):
            answer = client.post(ACTIONS, content=content, headers=JSON)
            assert (answer.status_code, len(answer.json()["error"]) > 10) == (400, True)
    assert client.post(ACTIONS, data={"action": "kick"}).status_code == 415
    assert (queue.stats().length, app.audit()) == (before, [])


def test_pages_of_jobs(client: TestClient, queue: lowq.Queue) -> None:
    first = client.get("/api/v1/queues/Orders/jobs?limit=10").json()
    rest = client.get("/api/v1/queues/Orders/jobs", params={"limit": "10", "after": first["cursor"]}).json()
    assert [job["id"] for job in first["jobs"] + rest["jobs"]] == [f"job-{n:02d}" for n in range(2, 20)]
    assert rest["cursor"] is None
    assert first["jobs"][0]["payloads"] == [{"payload": {"n": 2}, "score": 2.0}]


def test_wrong_parameters_are_named(client: TestClient, queue: lowq.Queue) -> None:
    for query in ("limit=%D9%A3", "order_by=size", "min=x", "after=!", "match=%ff*", "after=%ff"):
        with case(query):
            answer = client.get(f"/api/v1/queues/Orders/jobs?{query}")
            assert answer.status_code == 400
            assert query.partition("=")[0] in answer.json()["error"]
    answer = client.get("/api/v1/stats?" + "&".join(f"x{n}=1" for n in range(101)))
    assert (answer.status_code, "too many fields" in answer.text) == (400, True)


def test_what_is_not_there_is_404_and_wrong_methods_are_405(client: TestClient, queue: lowq.Queue) -> None:
    assert client.get("/api/v1", follow_redirects=True).json()["info"]["title"] == "lowq"
    assert "did you mean 'Orders'" in client.get("/api/v1/queues/Order").json()["error"]
    assert client.get("/api/v1/nonsense").json()["error"]
    answer = client.post("/api/v1/stats")
    assert (answer.status_code, answer.json()["error"]) == (405, "Method Not Allowed")
    assert answer.headers["allow"]


@pytest.mark.usefixtures("queue")
def test_the_description_holds_for_what_it_allows_and_what_it_does_not(browse: Open) -> None:
    import schemathesis  # here: it takes long
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    examples = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "3"))
    schema = schemathesis.openapi.from_asgi("/api/v1/openapi.json", browse(hosts=["*"]).app)
    # What takes nothing can't be sent anything wrong.
    takes = {
        (endpoint.path, endpoint.method)
        for endpoint in ENDPOINTS
        if endpoint.takes is not Nothing or endpoint.method == "POST"
    }
    positive, negative = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
    found = 0
    for result in schema.get_all_operations():
        operation: Any = result.ok()  # type: ignore[union-attr]  # an Err raises here, as it should
        found += 1
        for mode in (positive, negative) if (operation.path, operation.method.upper()) in takes else (positive,):

            @settings(
                max_examples=examples, deadline=None, derandomize=True, database=None,
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(case=operation.as_strategy(generation_mode=mode))
            def compare(case: Any) -> None:
                # Parameters that are right alone may make no sense together: an order and its bounds. That is 400.
                together = [positive_data_acceptance] if case.operation.path.startswith("/jobs") else []
                case.call_and_validate(headers=dict(OWN), excluded_checks=together)
                if "queue" in (case.path_parameters or {}):
                    # One that exists. Parameters that are right alone may then make no sense together: that is 400.
                    case.path_parameters["queue"] = "Orders"
                    case.call_and_validate(headers=dict(OWN), excluded_checks=[positive_data_acceptance])

            compare()
    assert found == len(ENDPOINTS) - 1  # it leaves out the description itself


def test_stats_have_lowkiqs_shape_with_totals_and_every_queue(client: TestClient, app: lowq.Lowq) -> None:
    nothing = {"total": {"length": 0, "morgue_length": 0, "lag": 0.0}, "by_worker": {}}
    assert client.get("/api/v1/stats").json() == nothing
    app.queue("Orders", 3).push([{"id": number} for number in range(5)])
    app.queue("Refunds", 2).push([{"id": 1}, {"id": 2, "delay": 60}])
    client.app.state.context.stats_cache.forget()  # type: ignore[attr-defined]  # it is a Starlette
    answer = client.get("/api/v1/stats").json()
    assert {name: figures["length"] for name, figures in answer["by_worker"].items()} == {"Orders": 5, "Refunds": 2}
    assert (set(answer), answer["total"]["length"], answer["total"]["morgue_length"]) == ({"total", "by_worker"}, 7, 0)
    assert answer["total"]["lag"] == max(figures["lag"] for figures in answer["by_worker"].values()) > 0


def test_metrics_have_what_an_alert_needs(browse: Open, app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 3)
    queue.push([{"id": 1}, {"id": 2}, {"id": 3, "delay": 60}])
    queue.bury("3")
    record(app, "Orders", runs={0.001: 3, math.inf: 1}, run_seconds=1.5)
    answer = browse().get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    samples = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.labels.get("queue", "Orders") == "Orders"
    }
    plain = {name: value for (name, le), value in samples.items() if le is None}
    figures = {"length": 2, "due": 2, "morgue_length": 1, "buried_total": 1, "busy": 0, "processed_total": 0,
               "failed_total": 0, "shards_without_owner": 3, "nodes": 0}  # fmt: skip
    assert {name: plain[f"lowq_{name}"] for name in figures} == figures
    assert min(plain["lowq_lag_seconds"], plain["lowq_oldest_age_seconds"]) >= 0
    assert (plain["lowq_perform_seconds_count"], plain["lowq_perform_seconds_sum"]) == (4, 1.5)
    assert samples["lowq_perform_seconds_bucket", "0.001"] == 3
    assert samples["lowq_perform_seconds_bucket", "+Inf"] == 4


def test_metrics_say_of_schedules_and_limits_what_can_be_missed(browse: Open, app: lowq.Lowq) -> None:
    @lowq.every(3600, name="hourly")
    @lowq.every(60, name="report", missed="skip")
    @app.worker(queue_name="Reports", shards_count=1, limit=[lowq.Rate(5, per=60, key="api"), lowq.Concurrency(2)])
    def report(payloads_by_id: dict[str, list[Any]]) -> None: ...

    now = time.time()
    around_calls = [{"rate": 20, "per": 1.0, "key": "erp"}, {"rate": 9}, "nonsense"]
    hourly = {"hourly": {"at": 3600.0, "tz": None, "missed": "one"}}
    heartbeat(app, "a", now, schedules={"Reports": hourly}, limits=around_calls)
    for name, settled, missed, last in (("hourly", now + 60, 0, None), ("report", now - 900, 7, now - 900)):
        entry = Record({"at": 60.0 if name == "report" else 3600.0, "tz": None, "missed": "one"}, settled, last)
        assert set_record(app, "Reports", name, b"", entry.changed(missed=missed).encode())
    app.queue("lowq:schedules:Reports", 1).push("hourly")
    report.push("a")
    key = limit_key("lowq", "rate:60.0:api")
    for holder, held, since in (("n1:Reports", 0, now), ("n2:Reports", 3, 0), ("dead:Reports", 9, now - 999)):
        asked = now if since != now - 999 else now - 999
        values = f"1 {held} 0 0 {since!r} {asked + 60!r} {asked!r} 100"
        app.client.command("HSET", key, f"holder:{holder}", values, key=key)
    text = browse().get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    schedules = {(s.name, s.labels["schedule"]): s.value for s in samples if "schedule" in s.labels}
    assert {s.labels["queue"] for s in samples if "schedule" in s.labels or "limit" in s.labels} == {"Reports", ""}
    assert schedules == {
        ("lowq_schedule_last_seconds", "report"): now - 900,
        ("lowq_schedule_next_seconds", "hourly"): schedules["lowq_schedule_next_seconds", "hourly"],
        ("lowq_schedule_missed_total", "hourly"): 0, ("lowq_schedule_missed_total", "report"): 7,
        ("lowq_schedule_unknown", "hourly"): 0, ("lowq_schedule_unknown", "report"): 1,
    }  # fmt: skip
    assert schedules["lowq_schedule_next_seconds", "hourly"] > now
    limits = {(s.name, s.labels["limit"]): s.value for s in samples if "limit" in s.labels}
    assert limits == {
        ("lowq_limit_permits", "rate:60.0:api"): 5, ("lowq_limit_permits", "concurrency:Reports"): 2,
        ("lowq_limit_permits_used", "rate:60.0:api"): 3, ("lowq_limit_permits_used", "concurrency:Reports"): 0,
        ("lowq_limit_permits", "rate:1.0:erp"): 20, ("lowq_limit_permits_used", "rate:1.0:erp"): 0,
        ("lowq_limit_waiting", "rate:1.0:erp"): 0,
        ("lowq_limit_waiting", "rate:60.0:api"): 1, ("lowq_limit_waiting", "concurrency:Reports"): 0,
    }  # fmt: skip


def test_health_of_a_node_is_that_of_its_keeper(browse: Open) -> None:
    client = browse()
    client.app.state.health = lambda: "the node's maintenance loop has ended"  # type: ignore[attr-defined]  # it is a Starlette
    answer = client.get("/healthz")
    assert (answer.status_code, answer.json()) == (503, {"error": "the node's maintenance loop has ended"})
