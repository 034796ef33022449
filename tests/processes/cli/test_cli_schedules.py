"""`lowq schedules`: the list, run-now, pause and resume, by name or all, and what is refused."""

import json
from collections.abc import Iterator
from functools import partial

import pytest
from click.testing import Result

from lowq.node.schedules import take_turn
from lowq.schedules import Schedule, schedules_queue
from lowq.store.keys import nodes_key
from tests.processes.cli.support import Cli
from tests.rows import case
from tests.rules.support import run_script


class Schedules(Cli):
    """The verb, and two queues with schedules: a node knows those of Report, and nobody that of Other."""

    def __call__(self, *args: str, code: int = 0, stdin: str | bytes | None = None) -> Result:
        return super().__call__("schedules", *args, code=code, stdin=stdin)

    def declare(self) -> None:
        known = [Schedule("weekly", "0 8 * * 1", "Europe/Berlin"), Schedule("often", 2, missed="all")]
        tables = {schedule.name: schedule.shown() for schedule in known}
        details = json.dumps({"schedules": {"Report": tables}})
        run_script(self.app.client, "heartbeat", nodes_key("lowq"), "", "host:1:a", "", details, 60)
        for queue, schedules in (("Report", known), ("Other", [Schedule("weekly", 60)])):
            self.app.registrations.enter(queue, 2)
            self.app.registrations.enter(schedules_queue(queue), 1)
            for schedule in schedules:
                table = {schedule.name: schedule}
                take_turn(self.app, self.app.queue(queue, 2), schedule.name, partial(dict, table))


@pytest.fixture
def cli(redis_url: str) -> Iterator[Schedules]:
    cli = Schedules(redis_url)
    yield cli
    cli.app.close()


def test_without_any_it_says_so(cli: Schedules) -> None:
    assert "there are no schedules" in cli().stderr
    assert cli.json() == {"schedules": []}
    assert "there are no schedules" in cli("pause", "--all").stderr


def test_the_list_shows_when_each_comes(cli: Schedules) -> None:
    cli.declare()
    lines = cli().stdout.splitlines()
    assert lines[0].split() == ["NAME", "QUEUE", "WHEN", "MISSED", "NEXT", "LAST"]
    assert "no node knows it" in lines[1]
    assert "every 2 s" in lines[2]
    assert "0 8 * * 1 Europe/Berlin" in lines[3]
    assert " in " in lines[3]
    assert [line.split()[0] for line in cli("--queue", "Report").stdout.splitlines()[1:]] == ["often", "weekly"]
    found = cli.json()["schedules"]
    assert [(item["name"], item["queue"], item["is_known"]) for item in found] == [
        ("weekly", "Other", False), ("often", "Report", True), ("weekly", "Report", True),
    ]  # fmt: skip


def test_one_is_run_paused_and_resumed(cli: Schedules) -> None:
    cli.declare()
    assert cli("run-now", "often").stdout == "often: a job of it is in the queue Report\n"
    (payload, _), *_ = cli.app.queue("Report").describe("often").jobs[0].payloads
    assert payload.keys() == {"planned_at"}
    assert cli("pause", "often").stdout == "often: paused\n"
    assert cli("pause", "often").stdout == "often: was paused already\n"
    assert "paused" in cli().stdout.splitlines()[2]
    assert cli("resume", "often").stdout == "often: goes on\n"
    assert cli("resume", "often").stdout == "often: was not paused\n"
    entries = [(entry.action, entry.target, entry.count, dict(entry.detail)) for entry in cli.app.audit()[::-1]]
    assert entries == [
        ("run_schedule", "Report", 1, {"schedule": "often"}),
        ("pause_schedule", "Report", None, {"schedule": "often"}),
        ("pause_schedule", "Report", None, {"schedule": "often", "changed": False}),
        ("resume_schedule", "Report", None, {"schedule": "often"}),
        ("resume_schedule", "Report", None, {"schedule": "often", "changed": False}),
    ]


def test_all_are_paused_and_resumed_and_machines_are_told_the_same(cli: Schedules) -> None:
    cli.declare()
    assert cli.json("run-now", "often")["schedules"][0]["planned_at"] > 1e9
    assert cli.json("pause", "--all", "--queue", "Report") == {
        "action": "pause",
        "schedules": [
            {"name": "often", "queue": "Report", "paused": True, "changed": True},
            {"name": "weekly", "queue": "Report", "paused": True, "changed": True},
        ],
    }
    cli("pause", "weekly", "--queue", "Other")
    assert all(info.paused_at is not None for info in cli.app.schedules())
    assert cli("resume", "--all").stdout.count(": goes on\n") == 3


def test_what_is_not_clear_is_refused(cli: Schedules) -> None:
    rows: list[tuple[list[str], int, str]] = [
        (["pause"], 2, "which schedule? lowq schedules pause NAME, or --all"),
        (["pause", "often", "--all"], 2, "which schedule?"),
        (["run-now"], 2, "which schedule? lowq schedules run-now NAME\n"),
        (["run-now", "--all"], 2, "which schedule? lowq schedules run-now NAME\n"),
        (["run-now", "dayly"], 1, "there is no schedule 'dayly'; known are: 'weekly', 'often'"),
        (["run-now", "weekly"], 1, "there are several schedules 'weekly': say which queue, of 'Other', 'Report'"),
        (["start", "often"], 2, "'start' is not one of 'run-now', 'pause', 'resume'"),
    ]
    cli.declare()
    for args, code, message in rows:
        with case(args, code, message):
            assert message in cli(*args, code=code).stderr
            assert cli.app.audit() == []
