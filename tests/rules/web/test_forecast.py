"""When the backlog is gone: on the pages, in the API, in the metrics and by the command line."""

import json
import re
import time

import pytest
from starlette.testclient import TestClient

import lowq
from lowq.broker.inflow import Inflow
from lowq.cli import main
from lowq.store.keys import shard_prefix
from tests.recorded import record
from tests.rules.web.shown import Reader

ODD = 'x"><script>alert(1)<b>'
#: What is said of the other queues.
ENDLESS = {"growing": "growing by 10/s", "idle": "empty", "nobody's": "no node works it"}


def worked(app: lowq.Lowq, queue: str, count: int, processed: int, change: int) -> None:
    """A queue with so many jobs, of which a node has recorded something in 50 seconds, which
    are spread over a minute.
    """
    app.queue(queue, 1).push({"id": number} for number in range(count))
    lease = shard_prefix("lowq", queue, 0) + "lease"
    app.client.command("SET", lease, "somebody:1", key=lease)
    at = time.time() // 10 * 10 - 21
    record(app, queue, at, processed, seconds=50.0, inflow=Inflow(3 * processed, change))


def queues(app: lowq.Lowq) -> None:
    """One of each kind."""
    worked(app, ODD, 100, 10, -5)
    worked(app, "growing", 100, 10, 600)
    worked(app, "idle", 0, 10, 0)
    app.queue("nobody's", 1).push([{"id": 1}])


def test_the_pages_say_when_the_backlog_is_gone(app: lowq.Lowq, client: TestClient) -> None:
    queues(app)
    rows = Reader(client).page("/").table("Queue", "Rate")
    texts = {next(iter(row["Queue"].every("a"))).text: row["Rate"].text.partition("/s")[2].strip() for row in rows}
    assert texts == {ODD: "empty in about 20 min", **ENDLESS}
    (path,) = set(re.findall(r'href="(/queues/x[^"?/]+)"', client.get("/").text))
    page = client.get(path).text
    assert ">empty in about 20 min<" in page
    assert "<script>alert" not in page
    assert ">growing by 10/s<" in client.get("/queues/growing").text


def test_programs_get_it_too(app: lowq.Lowq, client: TestClient) -> None:
    queues(app)
    found = client.get("/api/v1/queues/growing/forecast").json()
    assert (found["backlog"], found["drain_seconds"], found["is_worked"]) == (100, None, True)
    assert found["text"] == "growing by 10/s"
    assert found["pushed_rate"] == pytest.approx(0.5)
    assert client.get("/api/v1/queues/nobody's/forecast").json() == {
        "backlog": 1, "pushed_rate": None, "performed_rate": None, "drain_seconds": None, "growing_rate": None,
        "is_worked": False, "text": "no node works it",
    }  # fmt: skip
    assert client.get("/api/v1/queues/none/forecast").status_code == 404
    overview = client.get("/api/v1/overview").json()["queues"]
    assert {name: figures["forecast"] for name, figures in overview.items()} == {
        ODD: "empty in about 20 min", **ENDLESS
    }  # fmt: skip
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("lowq_drain_seconds")]
    assert [line.rpartition("} ")[2] for line in lines] == ["0.0", "1200.0"], "none of those that have no end"
    assert lines[0].startswith('lowq_drain_seconds{queue="idle"}')


def test_the_command_line_shows_it(app: lowq.Lowq, capsys: pytest.CaptureFixture[str]) -> None:
    queues(app)
    with pytest.raises(SystemExit):
        main(["stats", "--redis-url", app.config.redis_url])
    lines = capsys.readouterr().out.splitlines()
    assert "BACKLOG" in lines[0].upper()
    (idle,) = [line for line in lines if line.startswith("idle")]
    assert "empty" not in idle, "an empty cell is quicker to read"
    for text in ("empty in about 20 min", "growing by 10/s", "no node works it"):
        assert sum(text in line for line in lines) == 1, text
    with pytest.raises(SystemExit):
        main(["stats", "--json", "growing", "--redis-url", app.config.redis_url])
    forecast = json.loads(capsys.readouterr().out)["forecasts"]["growing"]
    assert (forecast["backlog"], forecast["drain_seconds"], forecast["text"]) == (100, None, "growing by 10/s")
