"""Whole queues: shards, pause, resume, release-all, drop, reshard; limits and schedules."""

import time
from collections.abc import Callable

import click

from lowq.admin import ReshardProgress
from lowq.application import Lowq
from lowq.cli.group import audited, confirm, json_option, me, queue_argument, used_queue, with_app, yes_option
from lowq.cli.output import (
    Progress,
    WrongUsage,
    answer,
    answered,
    count,
    echo_lines,
    number,
    say,
    server_time,
    table,
)
from lowq.cli.stats import end_without, shards_without
from lowq.clock import ago, duration
from lowq.errors import EXIT_INTERRUPTED, RedisUnavailable
from lowq.limits import LimitRule, Rate
from lowq.operate.actions import IN_FLIGHT
from lowq.operate.queries import shards_of_handle
from lowq.operate.schedules import ScheduleInfo
from lowq.operate.stats import read_shards
from lowq.operate.walk import Silent

#: Seconds after which the shards are named that are waited for, and between two such lines.
NAMED_AFTER = 5.0


@click.command
@with_app
@queue_argument
@json_option
def shards(app: Lowq, queue: str, as_json: bool) -> None:
    """The shards of a queue: who works them, what waits."""
    silent: Silent = {}
    found = read_shards(shards_of_handle(app.queue(queue)), silent=silent)
    unanswered = {queue: shards_without(silent, "not shown")} if silent else {}
    rows = [
        [
            str(shard.index), number(shard.length), number(shard.taken), number(shard.morgue_length),
            duration(shard.lag), shard.owner or "nobody",
            "" if shard.lease_seconds is None else duration(shard.lease_seconds), shard.oldest_id or "",
            "paused" if shard.paused else "",
        ]
        for shard in found
    ]  # fmt: skip
    columns = ("shard", "length", "running", "dead", "latency", "owner", "lease?", "oldest?", "?")
    lines = table(columns, rows, right=("shard", "length", "running", "dead", "latency", "lease"))
    answer(as_json, {"queue": queue, "shards": found} | ({"unanswered": unanswered} if silent else {}), *lines)
    end_without(unanswered)


@click.command
@with_app
@queue_argument
@json_option
def pause(app: Lowq, queue: str, as_json: bool) -> None:
    """Take no more jobs of a queue.

    Those in flight are finished, and pushing goes on.
    """
    _pause(app, queue, as_json, paused=True)


@click.command
@with_app
@queue_argument
@json_option
def resume(app: Lowq, queue: str, as_json: bool) -> None:
    """End a pause."""
    _pause(app, queue, as_json, paused=False)


def _pause(app: Lowq, queue: str, as_json: bool, *, paused: bool) -> None:
    handle = used_queue(app, queue)
    with audited(app, "pause" if paused else "resume", queue) as result:
        changed = handle.pause(by=me()) if paused else handle.resume()
        result.detail |= {} if changed else {"changed": False}
    answer(as_json, {"queue": queue, "paused": paused, "changed": changed}, f"{queue}: {_pause_text(paused, changed)}")


def _pause_text(paused: bool, changed: bool) -> str:
    """Says whether a pause, or its end, has changed anything."""
    if paused:
        return "paused" if changed else "was paused already"
    return "goes on" if changed else "was not paused"


@click.command("release-all")
@with_app
@queue_argument
@json_option
def release_all(app: Lowq, queue: str, as_json: bool) -> None:
    """Have jobs of dead nodes wait again.

    What is in flight of nodes and consumers whose lease has run out waits again at once, charged with a crash: as when
    another one takes over. What living ones have stays theirs.
    """
    handle = used_queue(app, queue)
    with audited(app, "release_all", queue) as result:
        released = result.count = handle.release_all()
    in_flight = handle.stats().taken
    left = f"; {number(in_flight)} {IN_FLIGHT}" if in_flight else ""
    document = {"queue": queue, "released": released, "in_flight": in_flight}
    answer(as_json, document, f"{count(released, 'job')} released{left}")


@click.command
@with_app
@queue_argument
@yes_option
@json_option
def drop(app: Lowq, queue: str, yes: bool, as_json: bool) -> None:
    """Remove a queue with all its jobs, for good. No node may be working it."""
    handle = app.queue(queue)
    figures = handle.stats()
    jobs = figures.length + figures.taken + figures.morgue_length
    confirm(f"remove the queue {queue!r} with all its {count(jobs, 'job')} for good", yes)
    with audited(app, "drop", queue) as result:
        removed = result.count = handle.drop()
    answer(as_json, {"queue": queue, "removed": removed}, f"{queue}: removed, with {count(removed, 'job')}")


@click.command
@with_app
@queue_argument
@click.argument("shards_count", metavar="N", type=int)
@click.option("--unconfirmed", is_flag=True, help="Do not wait for replicas: a failover may lose jobs.")
@json_option
def reshard(app: Lowq, queue: str, shards_count: int, unconfirmed: bool, as_json: bool) -> None:
    """Give a queue N shards, while it is used.

    Pushing goes on, and so do nodes: an id rests only while the shards are moved that feed its new one. It may be
    stopped, or die, at any moment: the same command again goes on.

    What is moved is deleted where it was once as many replicas have it as the primary has, or had since the beginning.
    Without them the command waits, and says for which. Of a queue that has N shards it checks that all was moved.
    """
    handle = app.queue(queue)
    before = handle.layouts
    last: ReshardProgress | None = None
    say_what_it_waits_for = _waiting_lines(queue, shards_count)
    try:
        with (
            audited(app, "reshard", queue, {"from": before.current.shards_count, "to": shards_count}) as result,
            Progress("jobs moved") as progress,
        ):

            def show(done: ReshardProgress) -> None:
                nonlocal last
                last = done
                result.count = done.jobs_moved
                progress.show(done.jobs_moved, done.shards_moved / done.shards_count)
                say_what_it_waits_for(done)

            handle.reshard(shards_count, on_progress=show, by=me(), unconfirmed=unconfirmed)
    except KeyboardInterrupt:
        shards = "" if last is None else f" {last.shards_moved} of {count(last.shards_count, 'shard')} are moved;"
        say(f"lowq: stopped;{shards} to go on: lowq reshard {queue} {shards_count}")
        click.get_current_context().exit(EXIT_INTERRUPTED)
    except RedisUnavailable:
        say(f"lowq: what was moved stays so; to go on: lowq reshard {queue} {shards_count}")
        raise
    if last is not None and not last.is_done:
        last = None  # replicas were waited for, to find that all is in order
    moved = 0 if last is None else last.jobs_moved
    was = before.current.shards_count if last is None else last.before.shards_count
    answer(
        as_json,
        {"queue": queue, "from": was, "to": shards_count, "jobs_moved": moved, "changed": last is not None},
        f"{queue}: has {count(shards_count, 'shard')} "
        + ("already" if last is None else f"now; {number(moved)} jobs moved"),
    )


def _waiting_lines(queue: str, shards_count: int) -> Callable[[ReshardProgress], None]:
    """Makes what is shown each step of a reshard: it names the shards, and the replicas, that are waited for, when that
    takes long.
    """
    since = said = time.monotonic()

    def show(done: ReshardProgress) -> None:
        nonlocal since, said
        now = time.monotonic()
        if not (done.waits_for or done.waits_for_replicas):
            since = now
        if now - since < NAMED_AFTER or now - said < NAMED_AFTER:
            return
        said = now
        if done.waits_for_replicas:
            of = ", ".join(filter(None, done.waits_for_replicas)) or "the primary"
            say(
                f"lowq: waiting until replicas of {of} have what was written; should there be none any more: "
                f"lowq reshard {queue} {shards_count} --unconfirmed (a failover may lose jobs then)"
            )
        else:
            some = ", ".join(map(str, done.waits_for[:10])) + (", ..." if len(done.waits_for) > 10 else "")
            say(f"lowq: waiting for what is in flight of shard {some} of {queue}; `lowq shards` says who has it")

    return show


# --- limits ---


@click.command
@with_app
@json_option
def limits(app: Lowq, as_json: bool) -> None:
    """The limits over all nodes: of workers, and around calls of nodes that live; how far they are used."""
    found = app.limits()
    documents = [
        {**state.limit.shown(), "used": state.used, "wait": state.wait, "waiting": state.waiting} for state in found
    ]
    if answered(as_json, {"limits": documents}, found, "there are no limits"):
        return
    rows = [
        [
            state.limit.key or "", rule_text(state.limit), f"{number(state.used)}", number(state.waiting),
            "now" if state.wait == 0 else "when one ends" if state.wait is None else f"in {duration(state.wait)}",
        ]
        for state in found
    ]  # fmt: skip
    echo_lines(table(("limit", "allows", "used", "waiting", "more"), rows, right=("used", "waiting")))
    say("USED: permits; WAITING: queues of nodes, and processes, that wait for one")


def rule_text(rule: LimitRule) -> str:
    """What a limit allows, for people."""
    if isinstance(rule, Rate):
        return f"{number(rule.limit)} in {duration(rule.seconds)}{', strict' if rule.strict else ''}"
    return f"{number(rule.limit)} at once"


# --- schedules ---

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
        _list_schedules(app, queue, as_json)
        return
    if (name is None) != everything or (everything and action == "run-now"):
        other = "" if action == "run-now" else ", or --all"
        raise WrongUsage(f"which schedule? lowq schedules {action} NAME{other}")
    if name is None:
        found = [info for info in app.schedules() if queue in (None, info.queue)]
    else:
        found = [app.schedule(name, queue)]
    done = [_act_on_schedule(app, action, info) for info in found]
    document = {"action": action, "schedules": [document for document, _ in done]}
    if not answered(as_json, document, done, "there are no schedules"):
        echo_lines([line for _, line in done])


def _act_on_schedule(app: Lowq, action: str, info: ScheduleInfo) -> tuple[dict[str, object], str]:
    """Runs, pauses or resumes a schedule. Returns the result for machines, and for people."""
    names: dict[str, object] = {"name": info.name, "queue": info.queue}
    with audited(app, _VERBS[action], info.queue, {"schedule": info.name}) as result:
        if action == "run-now":
            planned_at = app.run_schedule_now(info.name, info.queue)
            result.count = 1
            return names | {"planned_at": planned_at}, f"{info.name}: a job of it is in the queue {info.queue}"
        paused = action == "pause"
        changed = (
            app.pause_schedule(info.name, info.queue, by=me()) if paused else app.resume_schedule(info.name, info.queue)
        )
        result.detail |= {} if changed else {"changed": False}
    return names | {"paused": paused, "changed": changed}, f"{info.name}: {_pause_text(paused, changed)}"


def _list_schedules(app: Lowq, queue: str | None, as_json: bool) -> None:
    found = [info for info in app.schedules() if queue in (None, info.queue)]
    if answered(as_json, {"schedules": found}, found, "there are no schedules"):
        return
    now = server_time(app)
    rows = [
        [info.name, info.queue, info.text, info.missed, _next_time(info, now), ago(info.last_at, now)] for info in found
    ]
    echo_lines(table(("name", "queue", "when", "missed", "next", "last"), rows))


def _next_time(info: ScheduleInfo, now: float) -> str:
    if info.paused_at is not None:
        return f"paused {ago(info.paused_at, now)}" + (f" by {info.paused_by}" if info.paused_by else "")
    if not info.is_known:
        return "no node knows it"
    return "never" if info.next_at is None else ago(info.next_at, now)
