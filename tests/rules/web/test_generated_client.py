"""A client that is generated from the description of the API reads every list and does every action."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lowq
import lowq_web
from lowq.node.schedules import take_turn
from lowq.schedules import Schedule, schedules_queue
from tests.rules.web.hand import heartbeat
from tests.rules.web.served import get, served
from tests.waiting import until

ODD = "a/b-é"


@pytest.fixture
def generated(app: lowq.Lowq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, set[str]]]:
    """A package that openapi-python-client has made of a served description, and the operations that this has."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # it formats with ruff
    monkeypatch.syspath_prepend(tmp_path)
    with served(lowq_web.create_app(app)) as address:
        document = tmp_path / "openapi.json"
        document.write_bytes(get(address, "/api/v1/openapi.json")[1])
        paths = json.loads(document.read_bytes())["paths"].values()
        command = [sys.executable, "-m", "openapi_python_client", "generate", "--path", str(document), "--meta", "none"]
        command += ["--output-path", str(tmp_path / "generated_lowq")]
        made = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "arning" not in made.stdout, made.stdout
        with importlib.import_module("generated_lowq").Client(base_url=f"{address}/api/v1") as client:
            yield client, {operation["operationId"] for path in paths for operation in path.values()}
    for name in [name for name in sys.modules if name.partition(".")[0] == "generated_lowq"]:
        del sys.modules[name]


def test_it_does_all_that_the_api_does(app: lowq.Lowq, generated: tuple[Any, set[str]]) -> None:
    client, described = generated
    api, models = (importlib.import_module(f"generated_lowq.{name}") for name in ("api.default", "models"))
    called: set[str] = set()

    def call(name: str, *args: Any, **options: Any) -> Any:
        """What an operation answers, as its own type."""
        operation = importlib.import_module(f"{api.__name__}.{name}")
        answer = operation.sync_detailed(*args, client=client, **options)
        assert answer.status_code in (200, 202), (name, answer.content)
        assert answer.parsed is not None, name
        called.add(name)
        return answer.parsed

    queue, name = app.queue(ODD, 2), ODD.replace("/", "%2F")
    queue.push({"id": str(n), "payload": {"customer": n % 2}, "delay": 600} for n in range(6))
    heartbeat(app, "shop-1:7:abcdef", time.time(), threads=1, host="shop-1", pid=7, queues=[ODD], shards={ODD: [0]},
              performing=[{"queue": ODD, "shard": 0, "ids": ["x"], "count": 1, "seconds": 9.5}])  # fmt: skip

    assert [item.name for item in call("queues").queues] == [ODD]
    assert call("queue", name).stats.length == 6
    assert call("stats").total.length == 6
    assert call("overview").total.length == 6
    (place,) = call("search", id="3").found
    assert (place.queue, [state.value for state in place.states]) == (ODD, ["scheduled"])
    assert len(call("jobs", name, payload="customer:1").jobs) == 3
    assert len(call("all_jobs", limit=4).found) == 4
    assert call("job", name, id="3").jobs[0].payloads[0].payload == {"customer": 1}
    assert call("stack", name, id="3").stack is None
    assert call("shards", name).shards[1].index == 1
    assert call("statistics", name).tasks.delayed == 6
    assert call("forecast", name).backlog == 0
    assert call("perform_times", name).count == 0
    assert call("times", name, span=models.Span.DAY).wait.count == 0
    assert call("slowest", name).slowest == []
    assert len(call("rates").rates) > 10
    assert call("queue_rates", name, span=models.Span.MONTH).span == "month"
    assert call("errors").errors == call("queue_errors", name).errors == []
    assert call("stuck").batches == []
    assert call("deploy").is_safe
    assert call("redis").version == ""
    (node,) = call("nodes").nodes
    assert (node.host, node.performing[0].queue, node.performing[0].seconds) == ("shop-1", ODD, 9.5)

    assert call("pause", name, body=models.Nothing()).changed is True
    assert call("resume", name, body=models.Nothing()).paused is False
    buries = models.ActDocument(action=models.ActionName.BURY, ids=["0", "1"], reason="no order 7")
    assert call("act", name, body=buries).done == 2
    everything = models.JobFilter(match="*", shard=0)
    assert call("count", name, body=models.CountDocument(action=models.ActionName.DELETE, all_=everything)).count >= 0
    started = call("act", name, body=models.ActDocument(action=models.ActionName.KICK, all_=models.JobFilter()))
    until(lambda: call("task", started.id).state == "done", "end of the task")
    dead = models.JobFilter(state=models.State.MORGUE)
    assert call("count_all", body=models.CountAllDocument(action=models.ActionName.KICK, all_=dead)).count == 0
    started = call("act_on_all", body=models.ActOnAllDocument(action=models.ActionName.KICK, all_=dead))
    until(lambda: call("task", started.id).state == "done", "end of the task")
    assert call("tasks").tasks[0].id == started.id
    assert queue.stats().morgue_length == 0
    quiet = models.CommandDocument(node="shop-1:7:abcdef", do=models.NodeCommand.QUIET)
    assert call("send_command", body=quiet).sent == "quiet"
    app.registrations.enter(schedules_queue(ODD), 1)
    hourly = Schedule("hourly", 3600)
    take_turn(app, queue, "hourly", lambda: {"hourly": hourly})
    which = models.ScheduleDocument(name="hourly", queue=ODD)
    assert call("run_schedule", body=which).planned_at > 0
    assert call("pause_schedule", body=which).changed is True
    (schedule,) = call("schedules").schedules
    assert (schedule.at, schedule.is_known, schedule.paused_at is None) == (3600, False, False)
    assert call("limits").limits == []
    assert call("resume_schedule", body=models.ScheduleDocument(name="hourly")).paused is False
    assert call("cancel", started.id, body=models.Nothing()).id == started.id
    moved = call("reshard", name, body=models.ReshardDocument(shards_count=5))
    assert (moved.action, moved.shards_count) == ("reshard", 5)
    until(lambda: call("task", moved.id).state == "done", "end of the reshard")
    found = call("reshard_progress", name)
    assert (found.shards_count, found.epoch, found.to) == (5, 1, None)
    assert {entry.action for entry in call("audit").audit} >= {"bury", "kick", "pause", "quiet"}
    call("description")

    assert described == {module.name for module in pkgutil.iter_modules(api.__path__)}, (
        "the generator has left out some"
    )
    assert called == described, "what is new in the API is called here, too"
