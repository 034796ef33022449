"""Limits over all nodes on the dashboard and in the API."""

import time
from typing import Any

from starlette.testclient import TestClient

import lowq
from lowq.store.keys import limit_key
from tests.rules.web.hand import heartbeat
from tests.rules.web.shown import Reader


def test_page_and_api_show_what_each_allows_and_how_far_it_is_used(client: TestClient, app: lowq.Lowq) -> None:
    assert "There are no limits" in client.get("/limits").text
    assert client.get("/api/v1/limits").json() == {"limits": []}

    @app.worker(queue_name="Orders", limit=[lowq.Concurrency(2), lowq.Rate(5, per=60, key="<api>", strict=True)])
    def orders(payloads_by_id: dict[str, list[Any]]) -> None: ...

    orders.push("a")
    now = time.time()
    heartbeat(app, "node", now, limits=[{"rate": 20, "per": 1.0, "key": "erp"}])
    key = limit_key("lowq", "concurrency:Orders")
    for holder, held, since in (("n1:Orders", 2, 0), ("n2:Orders", 0, now)):
        values = f"1 {held} 0 0 {since!r} {now + 60!r} {now!r} 100"
        app.client.command("HSET", key, f"holder:{holder}", values, key=key)
    app.client.command("HSET", limit_key("lowq", "rate:1.0:erp"), "deferred", f"{now + 900!r} 900", key=key)

    rows = Reader(client).page("/limits").table("Limit", "Allows", "Used", "Waiting", "More may begin")
    found = [[row[name].text for name in ("Limit", "Allows", "Used", "Waiting")] for row in rows]
    assert found == [
        ["Orders", "2 at once", "2", "1"], ["erp", "20 in 1.0 s", "0", "0"], ["<api>", "5 in 1 min, strict", "0", "0"]
    ]  # fmt: skip
    more = [row["More may begin"].text for row in rows]
    assert (more[0], more[1][:2], more[2]) == ("when one ends", "in", "now")
    of_orders, erp, api = client.get("/api/v1/limits").json()["limits"]
    assert of_orders == {
        "kind": "concurrency", "limit": 2, "per": None, "strict": False, "key": "Orders", "used": 2, "wait": None,
        "waiting": 1,
    }  # fmt: skip
    assert (erp["kind"], erp["per"], erp["used"], 800 < erp["wait"] <= 900) == ("rate", 1.0, 0, True)
    assert (api["key"], api["strict"], api["wait"]) == ("<api>", True, 0)
