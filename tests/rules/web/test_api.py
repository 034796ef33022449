"""The JSON API beyond what its description says: what it does, and that the description holds."""

import json
import math
import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from prometheus_client.parser import text_string_to_metric_families
from schemathesis.specs.openapi.checks import positive_data_acceptance
from starlette.testclient import TestClient

import lowq
from lowq_web.api import ENDPOINTS
from lowq_web.received import Nothing
from tests.recorded import record
from tests.rows import case
from tests.rules.web.conftest import OWN, Open, dashboard
from tests.rules.web.hand import Hand
from tests.waiting import until


@pytest.fixture
def queue(app: lowq.Lowq) -> lowq.Queue:
    queue = app.queue("Orders", 3)
    queue.push({"id": f"job-{n:02d}", "payload": {"n": n}, "score": n, "delay": 1000 + n} for n in range(20))
    queue.bury(["job-00", "job-01"], "no stock")
    return queue


class TestActing:
    def test_ids_at_once(self, client: TestClient, queue: lowq.Queue) -> None:
        document = {"action": "kick", "ids": ["job-00", "job-05"]}
        answer = client.post("/api/v1/queues/Orders/actions", json=document)
        not_done = [{"id": "job-05", "why": "not in the morgue"}]
        assert answer.json() == {"done": 1, "in_flight": 0, "missing": 1, "not_done": not_done}
        assert queue.stats().morgue_length == 1

    def test_each_id_that_was_left_and_why(self) -> None:
        rows: list[tuple[str, str]] = [
            ("kick", "not in the morgue"), ("bury", "no such job waits"), ("perform_now", "no such job waits"),
            ("delete", "no such job waits or is buried"),
        ]  # fmt: skip
        for action, why in rows:
            with case(action, why), dashboard() as (app, client):
                hand = Hand(app, "Orders")
                hand.push("runs", 1000.0)
                hand.take(["runs"], 1001.0)
                odd = "gone\udcff\x00"
                named = ["runs", odd, odd, *(f"{n:0>500}" for n in range(998))]
                document = json.dumps({"action": action, "ids": [*named[:1000]]})
                answer = client.post(
                    "/api/v1/queues/Orders/actions", content=document, headers={"content-type": "application/json"}
                )
                assert answer.status_code == 200, answer.text
                reasons = {item["id"]: item["why"] for item in answer.json()["not_done"]}
                in_flight = why if action == "kick" else "in flight, left alone"
                assert reasons == dict.fromkeys(named[:1000], why) | {"runs": in_flight}
                assert (answer.json()["missing"], answer.json()["in_flight"]) == (
                    (999, 0) if action == "kick" else (998, 1)
                )
                assert len(answer.json()["not_done"]) == 999

    def test_all_in_the_background(self, client: TestClient, queue: lowq.Queue, app: lowq.Lowq) -> None:
        wanted = {"action": "delete", "all": {"state": "scheduled", "match": "job-1*"}}
        assert client.post("/api/v1/queues/Orders/count", json=wanted).json()["count"] == 10
        answer = client.post("/api/v1/queues/Orders/actions", json=wanted)
        assert answer.status_code == 202
        address = f"/api/v1/tasks/{answer.json()['id']}"
        until(lambda: client.get(address).json()["state"] != "running", "end of the task")
        task = client.get(address).json()
        assert (task["state"], task["done"], task["total"]) == ("done", 10, 10)
        assert queue.stats().length == 8
        assert client.get("/api/v1/audit?limit=1").json()["audit"][0]["count"] == 10

    def test_nonsense_is_refused_with_the_reason(self, client: TestClient, queue: lowq.Queue, app: lowq.Lowq) -> None:
        # What is no document at all is in `test_openapi`.
        documents: list[Any] = [
            {"action": "kick"}, {"action": "kick", "ids": ["a"], "all": {}},
            {"action": "kick", "all": {"state": "due"}},
            {"action": "kick", "ids": ["a"], "reason": "why"}, {"action": "kick", "ids": ["x"] * 1001},
            {"action": "delete", "all": {"min": 10**400}}, {"action": "delete", "ids": ["\ud800"]},
            {"action": "delete", "ids": ["job-05", "ä" * 400]},
            {"action": "bury", "ids": ["job-05"], "reason": "text \udcff"},
        ]  # fmt: skip
        before, headers = queue.stats().length, {"content-type": "application/json"}
        for document in documents:
            with case(document):
                content = json.dumps(document)
                answer = client.post("/api/v1/queues/Orders/actions", content=content, headers=headers)
                assert (answer.status_code, len(answer.json()["error"]) > 10) == (400, True)
        assert (queue.stats().length, app.audit()) == (before, [])

    def test_bodies_that_are_no_json(self, client: TestClient, queue: lowq.Queue) -> None:
        path = "/api/v1/queues/Orders/actions"
        headers = {"content-type": "application/json"}
        for content in ("{", "[" * 100_000, b"\xff\xfe", '{"action": "delete", "all": {"min": NaN}}'):
            assert client.post(path, content=content, headers=headers).status_code == 400
        assert client.post(path, data={"action": "kick"}).status_code == 415


class TestLooking:
    def test_pages_of_jobs(self, client: TestClient, queue: lowq.Queue) -> None:
        first = client.get("/api/v1/queues/Orders/jobs?limit=10").json()
        rest = client.get("/api/v1/queues/Orders/jobs", params={"limit": "10", "after": first["cursor"]}).json()
        assert [job["id"] for job in first["jobs"] + rest["jobs"]] == [f"job-{n:02d}" for n in range(2, 20)]
        assert rest["cursor"] is None
        assert first["jobs"][0]["payloads"] == [{"payload": {"n": 2}, "score": 2.0}]

    def test_wrong_parameters_are_named(self, client: TestClient, queue: lowq.Queue) -> None:
        queries = [
            "limit=0", "limit=x", "limit=99999", "state=dead", "order_by=size", "colour=red", "reverse=1", "min=x",
            "after=!", "match=%ff*", "match=%ED%A0%80", "limit=%D9%A3", "after=%ff",
        ]  # fmt: skip
        for query in queries:
            with case(query):
                answer = client.get(f"/api/v1/queues/Orders/jobs?{query}")
                assert answer.status_code == 400
                assert query.partition("=")[0] in answer.json()["error"]

    def test_more_fields_than_anything_has_are_refused(self, client: TestClient, queue: lowq.Queue) -> None:
        for path in ("/api/v1/stats", "/api/v1/queues/Orders/jobs"):
            answer = client.get(f"{path}?" + "&".join(f"x{n}=1" for n in range(101)))
            assert (answer.status_code, "too many fields" in answer.text) == (400, True), path

    def test_it_is_described_where_one_looks_first(self, client: TestClient) -> None:
        for path in ("/api/v1", "/api/v1/openapi.json"):
            assert client.get(path, follow_redirects=True).json()["info"]["title"] == "lowq"

    def test_what_is_not_there_is_404_and_wrong_methods_are_405(self, client: TestClient, queue: lowq.Queue) -> None:
        assert client.get("/api/v1/queues/Nowhere").status_code == 404
        assert "did you mean 'Orders'" in client.get("/api/v1/queues/Order").json()["error"]
        assert client.get("/api/v1/nonsense").json()["error"]
        answer = client.post("/api/v1/stats")
        assert (answer.status_code, answer.json()["error"]) == (405, "Method Not Allowed")
        assert answer.headers["allow"]

    def test_every_endpoint_is_described_and_every_description_answered(
        self, client: TestClient, queue: lowq.Queue
    ) -> None:
        paths = client.get("/api/v1/openapi.json").json()["paths"]
        assert {(endpoint.path, endpoint.method.lower()) for endpoint in ENDPOINTS} == {
            (path, method) for path, methods in paths.items() for method in methods
        }
        for endpoint in ENDPOINTS:
            if endpoint.method == "GET" and "{task}" not in endpoint.path:
                path = "/api/v1" + endpoint.path.replace("{queue}", "Orders")
                assert (
                    client.get(path + ("?id=job-05" if path.endswith(("/job", "/search")) else "")).status_code == 200
                ), path


class TestDescription:
    def test_nothing_that_is_sent_finds_a_difference(self, browse: Open, queue: lowq.Queue) -> None:
        check(browse(no_auth=True), examples=int(os.environ.get("SCHEMATHESIS_EXAMPLES", "3")))


def check(client: TestClient, examples: int) -> None:
    """Sends what the description allows and what it doesn't, and compares the answers with it."""
    schema = schemathesis.openapi.from_asgi("/api/v1/openapi.json", client.app)
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
                together = [positive_data_acceptance] if case.operation.path == "/jobs" else []
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
    assert plain["lowq_length"] == plain["lowq_due"] == 2
    assert plain["lowq_morgue_length"] == plain["lowq_buried_total"] == 1
    assert plain["lowq_busy"] == plain["lowq_processed_total"] == plain["lowq_failed_total"] == 0
    assert plain["lowq_lag_seconds"] >= 0
    assert plain["lowq_oldest_age_seconds"] >= 0
    assert plain["lowq_shards_without_owner"] == 3
    assert plain["lowq_nodes"] == 0
    assert (plain["lowq_perform_seconds_count"], plain["lowq_perform_seconds_sum"]) == (4, 1.5)
    assert samples["lowq_perform_seconds_bucket", "0.001"] == 3
    assert samples["lowq_perform_seconds_bucket", "+Inf"] == 4


def test_health_of_a_node_is_that_of_its_keeper(browse: Open) -> None:
    client = browse()
    client.app.state.health = lambda: "the node's maintenance loop has ended"  # type: ignore[attr-defined]  # it is a Starlette
    answer = client.get("/healthz")
    assert (answer.status_code, answer.json()) == (503, {"error": "the node's maintenance loop has ended"})
