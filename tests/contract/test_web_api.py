"""The JSON API over ASGI."""

from starlette.testclient import TestClient

import lowq
import lowq_web


def _client(url: str) -> tuple[lowq.Lowq, TestClient]:
    app = lowq.Lowq(redis_url=url)
    return app, TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1")


def test_stats_has_lowkiqs_shape_with_totals_and_every_queue(store_url: str) -> None:
    app, client = _client(store_url)
    app.queue("Orders", 3).push([{"id": number} for number in range(5)])
    app.queue("Refunds", 2).push([{"id": 1}, {"id": 2, "delay": 60}])

    answer = client.get("/api/v1/stats").json()

    assert set(answer) == {"total", "by_worker"}
    assert {name: figures["length"] for name, figures in answer["by_worker"].items()} == {"Orders": 5, "Refunds": 2}
    assert answer["total"]["length"] == 7
    assert answer["total"]["morgue_length"] == 0
    assert answer["total"]["lag"] == max(figures["lag"] for figures in answer["by_worker"].values()) > 0


def test_stats_of_nothing_are_zeros(store_url: str) -> None:
    _, client = _client(store_url)
    assert client.get("/api/v1/stats").json() == {
        "total": {"length": 0, "morgue_length": 0, "lag": 0.0},
        "by_worker": {},
    }


def test_health_is_503_with_the_reason_when_redis_is_away() -> None:
    _, client = _client("redis://127.0.0.1:1/0")
    answer = client.get("/healthz")
    assert answer.status_code == 503
    assert "does not answer" in answer.json()["error"]


def test_health_is_200_when_redis_answers(store_url: str) -> None:
    _, client = _client(store_url)
    assert client.get("/healthz").status_code == 200
