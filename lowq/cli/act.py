"""The verbs that change what is there: kick, bury, delete, perform-now, release-all, pause, resume, drop."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from lowq.application import Lowq
from lowq.cli.audited import audited, me
from lowq.cli.failure import FAILED, INTERRUPTED, USAGE, Failure
from lowq.cli.group import Command, json_option, queue_argument, with_app
from lowq.cli.look import server_time
from lowq.cli.output import Progress, count, echo_json, echo_lines, number, say
from lowq.duration import ago
from lowq.job import Job
from lowq.logs import printable
from lowq.operate.actions import IN_FLIGHT, MISSING, Acted, ActionName
from lowq.operate.bulk import STATES_OF, meant_by
from lowq.operate.explain import ABSENT
from lowq.operate.job_filter import JobFilter
from lowq.queue import Queue

#: Up to as many ids the outcome of each one is reported.
REPORTED_ONE_BY_ONE = 50

#: What was done to a job.
_DONE = {"kick": "kicked", "bury": "buried", "delete": "deleted", "perform_now": "due now"}

yes_option = click.option("-y", "--yes", is_flag=True, help="Don't ask.")


# --- jobs: by id, or many ------------------------------------------------------------------------------------


def _on_jobs(action: ActionName) -> Callable[[Command], Command]:
    """Adds what kick, bury, delete and perform-now have in common."""
    default = "Default, and the only one." if action == "kick" else "Default: all that wait."
    options = [
        queue_argument,
        click.argument("ids", nargs=-1, metavar="[ID...]"),
        click.option("--all", "everything", is_flag=True, help="All of them, instead of single ids."),
        click.option("--state", type=click.Choice(STATES_OF[action]), help=f"All of this state. {default}"),
        click.option("--match", metavar="PATTERN", help="All whose id is like this: 4*, order-?, [a-c]*"),
        click.option("--payload", metavar="FIELD:VALUE", help="All with it in a payload: customer:7, order.customer:7"),
        click.option("--error", metavar="TEXT", help="All with it in their error."),
        click.option("--error-group", metavar="GROUP", help="All whose error is in this group of `lowq errors`."),
        click.option("--shard", type=click.IntRange(0), help="All of this shard."),
        yes_option,
        json_option,
    ]

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return with_app(command)

    return add


@click.command
@_on_jobs("kick")
def kick(app: Lowq, queue: str, **arguments: Any) -> None:
    """Move jobs out of the morgue.

    They start afresh and are due now, merged with what waits for the same id.
    The ID - reads ids from the standard input, one a line.
    """
    _act(app, queue, "kick", **arguments)


@click.command
@_on_jobs("bury")
@click.option("--reason", help="Why, for people; default: the job's last error.")
def bury(app: Lowq, queue: str, **arguments: Any) -> None:
    """Move waiting jobs to the morgue.

    The ID - reads ids from the standard input, one a line.
    """
    _act(app, queue, "bury", **arguments)


@click.command
@_on_jobs("delete")
def delete(app: Lowq, queue: str, **arguments: Any) -> None:
    """Remove jobs for good.

    By id from wherever they are, except in flight. With --all or --match those that wait; buried ones with
    --state morgue. The ID - reads ids from the standard input, one a line.
    """
    _act(app, queue, "delete", **arguments)


@click.command("perform-now")
@_on_jobs("perform_now")
def perform_now(app: Lowq, queue: str, **arguments: Any) -> None:
    """Make waiting jobs due now.

    The ID - reads ids from the standard input, one a line.
    """
    _act(app, queue, "perform_now", **arguments)


def _act(
    app: Lowq,
    queue_name: str,
    action: ActionName,
    ids: tuple[str, ...],
    everything: bool,
    yes: bool,
    as_json: bool,
    reason: str | None = None,
    **options: Any,
) -> None:
    queue, wanted = app.queue(queue_name), JobFilter(**options)
    verb = action.replace("_", "-")
    many = everything or wanted != JobFilter()
    if many and ids:
        raise Failure("give ids, or --all, --state, --match or the like, not both", USAGE)
    narrowed = [name for name in wanted.given() if name != "state"]
    if everything and narrowed:
        option = narrowed[0].replace("_", "-")
        raise Failure(f"--all and --{option} say two things: leave one of them out", USAGE)
    if not many and not ids:
        raise Failure(f"which jobs? lowq {verb} {queue.name} ID..., or --all, --state STATE, --match PATTERN", USAGE)
    if many:
        _act_on_many(app, queue, action, wanted, reason, yes=yes, as_json=as_json)
    else:
        _act_on_ids(app, queue, action, ids, reason, as_json=as_json)


def _act_on_ids(
    app: Lowq, queue: Queue, action: ActionName, ids: tuple[str, ...], reason: str | None, *, as_json: bool
) -> None:
    methods: dict[ActionName, Callable[..., Acted]] = {
        "kick": queue.kick, "bury": queue.bury, "delete": queue.delete, "perform_now": queue.perform_now
    }  # fmt: skip
    method = methods[action]
    options: dict[str, Any] = {"reason": reason} if action == "bury" else {}
    outcomes: dict[str, str] | None = None
    queue.shards_count  # noqa: B018 - raises for a queue that nobody has used
    named = [job_id for job_id in ids if job_id != "-"]
    detail = {"ids": named[:5], "named": len(ids) if named == list(ids) else None, "reason": reason}
    with audited(app, action, queue.name, detail) as outcome:
        if "-" not in ids and len(ids) <= REPORTED_ONE_BY_ONE:
            acted, outcomes = Acted(), {}
            for job_id in dict.fromkeys(ids):
                one = method(job_id, **options)
                acted += one
                outcome.count = acted.done
                outcomes[job_id] = "done" if one.done else "in_flight" if one.in_flight else "missing"
        else:
            acted = method(_all_ids(ids), **options)
        outcome.count = acted.done
        left = {"in_flight": acted.in_flight, "missing": acted.missing}
        outcome.detail = {name: number for name, number in left.items() if number}
    if as_json:
        counts = {"done": acted.done, "in_flight": acted.in_flight, "missing": acted.missing}
        echo_json({"action": action, "queue": queue.name, **counts, "ids": outcomes})
    elif outcomes is not None:
        words = {"done": _DONE[action], "in_flight": IN_FLIGHT}
        missing = _whereabouts(app, queue, action, [job_id for job_id, state in outcomes.items() if state == "missing"])
        echo_lines(
            [printable(f"{job_id}: {words.get(state) or missing[job_id]}") for job_id, state in outcomes.items()]
        )
    else:
        parts = [f"{number(acted.done)} {_DONE[action]}"]
        parts += [f"{number(acted.in_flight)} {IN_FLIGHT}"] if acted.in_flight else []
        parts += [f"{number(acted.missing)}: {MISSING[action]}"] if acted.missing else []
        echo_lines(["; ".join(parts)])
    if acted.in_flight or acted.missing:
        click.get_current_context().exit(FAILED)


def _whereabouts(app: Lowq, queue: Queue, action: ActionName, ids: Sequence[str]) -> dict[str, str]:
    """id -> why nothing was done to it: where it is instead, and what to type."""
    found = queue.fetch(ids) if ids else {}
    now = server_time(app) if found else 0.0
    return {job_id: _whereabout(queue.name, action, found.get(job_id), now) for job_id in ids}


def _whereabout(queue: str, action: ActionName, job: Job | None, now: float) -> str:
    if job is None:
        return ABSENT
    if job.state == "morgue":
        return f"buried, {ago(job.buried_at, now)}; {_command('kick', queue, job.id)} has it performed"
    if job.state == "taken":
        where, hint = "in flight", ""
    elif job.state == "due":
        where, hint = "due already", f"; {_command('why', queue, job.id)} says what it waits for"
    else:
        where = f"{job.state}, due {ago(job.perform_at, now)}"
        hint = f"; {_command('perform-now', queue, job.id)} runs it now"
    return f"{MISSING[action]} but {where}{hint}"


def _command(verb: str, queue: str, job_id: str) -> str:
    return shlex.join(["lowq", verb, queue, *(["--"] if job_id.startswith("-") else []), job_id])


def _all_ids(ids: tuple[str, ...]) -> Iterator[str]:
    with Progress("ids") as progress:
        seen = 0
        for item in ids:
            for job_id in _lines() if item == "-" else [item]:
                seen += 1
                progress.show(seen)
                yield job_id


def _lines() -> Iterator[str]:
    with click.open_file("-", encoding="utf-8", errors="surrogateescape") as stream:
        for line in stream:
            if job_id := line.rstrip("\r\n"):
                yield job_id


def _act_on_many(
    app: Lowq, queue: Queue, action: ActionName, wanted: JobFilter, reason: str | None, *, yes: bool, as_json: bool
) -> None:
    meant = meant_by(action, wanted).state
    steps = queue.bulk(action, wanted, reason=reason)
    with Progress("found") as progress:
        for step in steps:
            if not step.counting:
                break
            progress.show(step.total)
    kind = {None: "waiting", "morgue": "buried"}.get(meant, meant)
    what = f"{count(step.total, f'{kind} job')} of queue {queue.name!r}{_described(wanted)}"
    if step.total:
        hint = "; buried ones: --state morgue" if action == "delete" and wanted.state is None else ""
        _confirm(f"{action.replace('_', '-')} {what}{hint}", yes)
    try:
        with (
            audited(app, action, queue.name, {**wanted.given(), "reason": reason}) as outcome,
            Progress(_DONE[action]) as progress,
        ):
            for step in steps:
                outcome.count = step.done
                progress.show(step.done, step.done / max(step.total, 1))
    except KeyboardInterrupt:
        say(f"lowq: stopped; {number(step.done)} of {count(step.total, 'job')} {_DONE[action]}")
        click.get_current_context().exit(INTERRUPTED)
    # Nobody counts those in flight by their ids.
    in_flight = 0 if meant == "morgue" else queue.stats().taken
    if as_json:
        done = {"done": step.done, "total": step.total, "in_flight": in_flight}
        echo_json({"action": action, "queue": queue.name, **done})
    else:
        left = f"; {number(in_flight)} {IN_FLIGHT}" if in_flight else ""
        if in_flight and wanted.given().keys() - {"state"}:
            left = f"; left alone: what is in flight, {count(in_flight, 'job')} of this queue, whichever they are"
        echo_lines([f"{count(step.done, 'job')} {_DONE[action]}{left}"])
        if not step.done and action == "delete" and wanted.state is None:
            buried = next(item.total for item in queue.bulk("delete", wanted, state="morgue") if not item.counting)
            if buried:
                say(f"{count(buried, 'such job')} {'lies' if buried == 1 else 'lie'} in the morgue: --state morgue")


def _described(wanted: JobFilter) -> str:
    """What of a filter is beside the state, in words."""
    words = [
        ("with ids like", wanted.match), ("with the payload", wanted.payload), ("with the error", wanted.error),
        ("with an error of the group", wanted.error_group), ("of shard", wanted.shard),
    ]  # fmt: skip
    return "".join(f" {word} {value!r}" for word, value in words if value is not None)


def _confirm(what: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise Failure(f"this would {what}; add --yes to do it", USAGE)
    if not click.confirm(printable(f"{what}?"), err=True):
        raise Failure("nothing was done")


# --- whole queues --------------------------------------------------------------------------------------------


@click.command
@with_app
@queue_argument
@json_option
def pause(app: Lowq, queue: str, as_json: bool) -> None:
    """Take no more jobs of a queue.

    Those in flight are finished, and pushing goes on.
    """
    handle = app.queue(queue)
    handle.shards_count  # noqa: B018 - raises for a queue that nobody has used
    with audited(app, "pause", queue) as outcome:
        changed = handle.pause(by=me())
        outcome.detail = {} if changed else {"changed": False}
    _show_paused(queue, changed, as_json, paused=True)


@click.command
@with_app
@queue_argument
@json_option
def resume(app: Lowq, queue: str, as_json: bool) -> None:
    """End a pause."""
    handle = app.queue(queue)
    handle.shards_count  # noqa: B018 - raises for a queue that nobody has used
    with audited(app, "resume", queue) as outcome:
        changed = handle.resume()
        outcome.detail = {} if changed else {"changed": False}
    _show_paused(queue, changed, as_json, paused=False)


def _show_paused(queue: str, changed: bool, as_json: bool, *, paused: bool) -> None:
    if as_json:
        echo_json({"queue": queue, "paused": paused, "changed": changed})
    elif paused:
        echo_lines([f"{queue}: paused" if changed else f"{queue}: was paused already"])
    else:
        echo_lines([f"{queue}: goes on" if changed else f"{queue}: was not paused"])


@click.command("release-all")
@with_app
@queue_argument
@json_option
def release_all(app: Lowq, queue: str, as_json: bool) -> None:
    """Have jobs of dead nodes wait again.

    What is in flight of nodes and consumers whose lease has run out waits again at once, charged with a crash: as when
    another one takes over. What living ones have stays theirs.
    """
    handle = app.queue(queue)
    handle.shards_count  # noqa: B018 - raises for a queue that nobody has used
    with audited(app, "release_all", queue) as outcome:
        released = outcome.count = handle.release_all()
    in_flight = handle.stats().taken
    if as_json:
        echo_json({"queue": queue, "released": released, "in_flight": in_flight})
    else:
        left = f"; {number(in_flight)} {IN_FLIGHT}" if in_flight else ""
        echo_lines([f"{count(released, 'job')} released{left}"])


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
    _confirm(f"remove the queue {queue!r} with all its {count(jobs, 'job')} for good", yes)
    with audited(app, "drop", queue) as outcome:
        removed = outcome.count = handle.drop()
    if as_json:
        echo_json({"queue": queue, "removed": removed})
    else:
        echo_lines([f"{queue}: removed, with {count(removed, 'job')}"])
