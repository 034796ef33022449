"""The verb schedules: lists them, pauses and resumes them, and pushes a job of one now."""

import click

from lowq.application import Lowq
from lowq.cli.audited import audited, me
from lowq.cli.failure import USAGE, Failure
from lowq.cli.group import json_option, with_app
from lowq.cli.output import echo_json, echo_lines, say, server_time, table
from lowq.duration import ago
from lowq.operate.schedules import ScheduleInfo

_VERBS = {"run-now": "run_schedule", "pause": "pause_schedule", "resume": "resume_schedule"}


@click.command
@with_app
@click.argument("action", required=False, type=click.Choice(list(_VERBS)), metavar="[run-now|pause|resume]")
@click.argument("name", required=False)
@click.option("--queue", metavar="QUEUE", help="Of this queue; needed where schedules of several have that name.")
@click.option("--all", "everything", is_flag=True, help="Pause or resume all of them, or all of the queue.")
@json_option
def schedules(
    app: Lowq, action: str | None, name: str | None, queue: str | None, everything: bool, as_json: bool
) -> None:
    """What is pushed at set times, and when: lists the schedules.

    `lowq schedules run-now NAME` pushes a job of one now, and its time table goes on as it is. `pause NAME` and `resume
    NAME` are for one, with --all instead of the name for all. What a schedule missed while it was paused is made up for
    as its worker says: missed="one", "all" or "skip".
    """
    if action is None:
        _list(app, queue, as_json)
        return
    if (name is None) != everything or (everything and action == "run-now"):
        other = "" if action == "run-now" else ", or --all"
        raise Failure(f"which schedule? lowq schedules {action} NAME{other}", USAGE)
    if name is None:
        found = [info for info in app.schedules() if queue in (None, info.queue)]
    else:
        found = [app.schedule(name, queue)]
    done = [_act(app, action, info) for info in found]
    if as_json:
        echo_json({"action": action, "schedules": [document for document, _ in done]})
    else:
        echo_lines([line for _, line in done])
        if not done:
            say("there are no schedules")


def _act(app: Lowq, action: str, info: ScheduleInfo) -> tuple[dict[str, object], str]:
    """What was done to one: for machines, and for people."""
    names: dict[str, object] = {"name": info.name, "queue": info.queue}
    with audited(app, _VERBS[action], info.queue, {"schedule": info.name}) as outcome:
        if action == "run-now":
            planned_at = app.run_schedule_now(info.name, info.queue)
            outcome.count = 1
            return names | {"planned_at": planned_at}, f"{info.name}: a job of it is in the queue {info.queue}"
        if action == "pause":
            changed = app.pause_schedule(info.name, info.queue, by=me())
            line = "paused" if changed else "was paused already"
        else:
            changed = app.resume_schedule(info.name, info.queue)
            line = "goes on" if changed else "was not paused"
        outcome.detail = {} if changed else {"changed": False}
    return names | {"paused": action == "pause", "changed": changed}, f"{info.name}: {line}"


def _list(app: Lowq, queue: str | None, as_json: bool) -> None:
    found = [info for info in app.schedules() if queue in (None, info.queue)]
    if as_json:
        echo_json({"schedules": found})
    elif not found:
        say("there are no schedules")
    else:
        now = server_time(app)
        rows = [
            [
                info.name,
                info.queue,
                info.text,
                info.missed,
                _next(info, now),
                "" if info.last_at is None else ago(info.last_at, now),
            ]
            for info in found
        ]
        echo_lines(table(("name", "queue", "when", "missed", "next", "last"), rows))


def _next(info: ScheduleInfo, now: float) -> str:
    if info.paused_at is not None:
        return f"paused {ago(info.paused_at, now)}" + (f" by {info.paused_by}" if info.paused_by else "")
    if not info.is_known:
        return "no node knows it"
    return "never" if info.next_at is None else ago(info.next_at, now)
