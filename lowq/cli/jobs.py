"""Single jobs, and many: jobs, peek, why; kick, bury, delete, perform-now, cancel."""

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from lowq.application import Lowq
from lowq.cli.group import (
    Command,
    audited,
    confirm,
    json_option,
    optional_queue,
    options_of,
    queue_argument,
    used_queue,
    with_app,
    yes_option,
)
from lowq.cli.output import (
    JOB_COLUMNS,
    Progress,
    WrongUsage,
    answer,
    bound,
    count,
    echo_json,
    echo_lines,
    fail_if,
    in_words,
    job_block,
    job_row,
    number,
    say,
    server_time,
    table,
)
from lowq.clock import ago, relative_seconds
from lowq.codec import MAX_PRIORITY
from lowq.errors import EXIT_INTERRUPTED
from lowq.job import Job
from lowq.logs import printable
from lowq.operate.actions import IN_FLIGHT, MISSING, Acted, ActionName
from lowq.operate.bulk import STATES_OF, filter_for
from lowq.operate.explain import ABSENT
from lowq.operate.job_filter import FILTER_STATES, ORDERS, JobFilter
from lowq.operate.jobs import MAX_LIMIT, FoundJob, FoundPage, Page
from lowq.queue import Queue

#: Up to as many ids the outcome of each one is reported.
REPORTED_ONE_BY_ONE = 50

#: The target of an action on several queues, in the audit log: no queue can have that name.
ALL_QUEUES = "all queues"
#: Action -> its result, for people.
_DONE = {"kick": "kicked", "bury": "buried", "delete": "deleted", "perform_now": "due now", "cancel": "cancelled"}
#: The outcome of a cancel of a running job.
_SIGNALLED = "running, told to end"


def _age(_context: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """Reads ``2h``, or seconds.

    Raises:
        click.BadParameter
    """
    if text is None:
        return None
    try:
        seconds = relative_seconds(f"+{text}")
        return float(text) if seconds is None else seconds
    except ValueError:
        raise click.BadParameter(
            f"{text!r:.60} is no age, such as 90 (seconds), 30min, 2h or 7d", param=param
        ) from None


def _filter_options(jobs: str, ids: str, shard: str) -> Callable[[Command], Command]:
    """Adds the options of a filter. ``jobs``, ``ids``, ``shard``: how their help names these."""
    return options_of(
        click.option("--match", metavar="PATTERN", help=f"{ids} like this: 4*, order-?, [a-c]*"),
        click.option(
            "--payload", metavar="FIELD:VALUE", help=f"{jobs} with it in a payload: customer:7, order.customer:7"
        ),
        click.option("--error", metavar="TEXT", help=f"{jobs} with it in their error."),
        click.option("--error-group", metavar="GROUP", help=f"{jobs} whose error is in this group of `lowq errors`."),
        click.option("--shard", type=click.IntRange(0), help=shard),
        click.option("--priority", type=click.IntRange(0, MAX_PRIORITY), help=f"{jobs} of this priority that wait."),
        click.option(
            "--older-than",
            metavar="AGE",
            callback=_age,
            help=f"{jobs} whose time passed so long ago: 90 (s), 30min, 2h, 7d. In the morgue: since they were buried.",
        ),
        click.option("--newer-than", metavar="AGE", callback=_age, help=f"{jobs} whose time came since then, or will."),
    )


@click.command
@with_app
@optional_queue
@click.option("--state", type=click.Choice(FILTER_STATES), help="Default: all that wait.")
@_filter_options("Only those", "Only ids", "Only this shard of the queue.")
@click.option("--order-by", type=click.Choice(ORDERS), help="Default: perform_at; in the morgue buried_at.")
@click.option("--reverse", is_flag=True, help="The last ones first.")
@click.option("--limit", type=click.IntRange(1, MAX_LIMIT), default=50, show_default=True)
@click.option("--after", metavar="CURSOR", help="Goes on where a page ended.")
@click.option("--min", metavar="VALUE", help="Bounds what it is ordered by: a time (ISO, -2h), a number, an id.")
@click.option("--max", metavar="VALUE", help="Likewise. Both are included.")
@json_option
def jobs(app: Lowq, queue: str | None, limit: int, after: str | None, as_json: bool, **options: Any) -> None:
    """A page of jobs, in order over all shards, and without QUEUE over all queues.

    --payload, --error and --error-group look into the jobs, some 20,000 for a page: it says where to go on.
    """
    bounds = {name: bound(app, f"--{name}", options[name], options["order_by"]) for name in ("min", "max")}
    wanted = JobFilter(**{**options, **bounds})
    columns = ["buried" if name == "when" and wanted.state == "morgue" else name for name in JOB_COLUMNS]
    page: Page | FoundPage
    if queue is None:
        page = app.jobs(wanted, limit=limit, after=after)
        columns.insert(0, "queue")
        head: dict[str, Any] = {}
        found: list[Any] = [dataclasses.asdict(item.job) | {"queue": item.queue} for item in page]
    else:
        page = app.queue(queue).jobs(wanted, limit=limit, after=after)
        head, found = {"queue": queue}, page.jobs
    if as_json:
        looked = {} if page.looked is None else {"looked": page.looked}
        echo_json({**head, "jobs": found, "cursor": page.cursor, **looked})
        return
    now = server_time(app)
    if len(page):
        rows = [
            [item.queue, *job_row(item.job, now)] if isinstance(item, FoundJob) else job_row(item, now) for item in page
        ]
        echo_lines(table(columns, rows, right=("attempt", "payloads")))
    elif not page.cursor:
        say("no such job" if wanted.state is not None or queue is None else _elsewhere(app.queue(queue)))
    if page.looked is not None:
        say(f"{count(page.looked, 'job')} looked at")
    if page.cursor:
        say(f"there are more: --after {page.cursor}")


def _elsewhere(handle: Queue) -> str:
    """Says that no such job waits, and where the queue has others."""
    figures = handle.stats()
    places = [("morgue", figures.morgue_length, "in the morgue"), ("taken", figures.taken, "in flight")]
    hints = [f"{number(count)} {where} (--state {state})" for state, count, where in places if count]
    return "no such job waits" + (f"; the queue has {' and '.join(hints)}" if hints else "")


# --- by id ---------------------------------------------------------------------------------------------------

ids_argument = click.argument("ids", nargs=-1, required=True, metavar="ID...")


@click.command
@with_app
@queue_argument
@ids_argument
@json_option
def peek(app: Lowq, queue: str, ids: tuple[str, ...], as_json: bool) -> None:
    """All about single jobs, wherever they are.

    An id may be in flight, wait with newer payloads, and have older ones in the morgue: all of that is shown.
    Exit code 1 when an id is nowhere.
    """
    jobs: list[Job] = []
    missing = []
    for item in app.queue(queue).describe_all(ids):
        missing += [] if item.jobs else [item.id]
        if as_json:
            jobs += item.jobs
        else:
            echo_lines([line for job in item.jobs for line in job_block(job, item.at, item.max_retry_count)])
    if as_json:
        echo_json({"queue": queue, "jobs": jobs, "missing": missing})
    for job_id in () if as_json else missing:
        say(f"{job_id}: {ABSENT}")
    fail_if(missing)


@click.command
@with_app
@queue_argument
@ids_argument
@json_option
def why(app: Lowq, queue: str, ids: tuple[str, ...], as_json: bool) -> None:
    """Why these ids are not being performed right now.

    Exit code 1 when an id is nowhere.
    """
    items: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for item in app.queue(queue).describe_all(ids):
        why, buried_at = item.why, None if item.buried is None else item.buried.buried_at
        items.append({"id": item.id} | dataclasses.asdict(why) | {"buried_at": buried_at})
        until = f" ({ago(why.until, item.at)})" if why.until and "due in" not in why.detail else ""
        rows.append([item.id, why.state or "absent", why.detail + until])
        if buried_at is not None and why.state != "morgue":
            rows.append(
                [item.id, "morgue", f"also buried, {ago(buried_at, item.at)}; kick it to have that performed, too"]
            )
    answer(as_json, {"queue": queue, "why": items}, *table(("id", "state", "why"), rows))
    fail_if(any(item["state"] is None for item in items))


# --- jobs: by id, or many ------------------------------------------------------------------------------------


def _on_jobs(action: ActionName) -> Callable[[Command], Command]:
    """Adds what kick, bury, delete, cancel and perform-now have in common."""
    default = {"kick": "Default, and the only one.", "cancel": "Default: all that wait or run."}.get(
        action, "Default: all that wait."
    )
    return options_of(
        with_app,
        optional_queue,
        click.argument("ids", nargs=-1, metavar="[ID...]"),
        click.option("--all-queues", is_flag=True, help="Those of all queues, instead of one."),
        click.option("--all", "everything", is_flag=True, help="All of them, instead of single ids."),
        click.option("--state", type=click.Choice(STATES_OF[action]), help=f"All of this state. {default}"),
        _filter_options("All", "All whose id is", "All of this shard."),
        yes_option,
        json_option,
    )


@click.command
@_on_jobs("kick")
def kick(app: Lowq, queue: str | None, **arguments: Any) -> None:
    """Move jobs out of the morgue.

    They start afresh and are due now, merged with what waits for the same id.
    The ID - reads ids from the standard input, one a line.
    """
    _act(app, queue, "kick", **arguments)


@click.command
@_on_jobs("bury")
@click.option("--reason", help="Why, for people; default: the job's last error.")
def bury(app: Lowq, queue: str | None, **arguments: Any) -> None:
    """Move waiting jobs to the morgue.

    The ID - reads ids from the standard input, one a line.
    """
    _act(app, queue, "bury", **arguments)


@click.command
@_on_jobs("delete")
def delete(app: Lowq, queue: str | None, **arguments: Any) -> None:
    """Remove jobs for good.

    By id from wherever they are, except in flight. With --all or --match those that wait; buried ones with
    --state morgue. The ID - reads ids from the standard input, one a line.
    """
    _act(app, queue, "delete", **arguments)


@click.command("perform-now")
@_on_jobs("perform_now")
def perform_now(app: Lowq, queue: str | None, **arguments: Any) -> None:
    """Make waiting jobs due now.

    The ID - reads ids from the standard input, one a line.
    """
    _act(app, queue, "perform_now", **arguments)


@click.command
@_on_jobs("cancel")
def cancel(app: Lowq, queue: str | None, **arguments: Any) -> None:
    """End jobs: those that wait are deleted, running ones are told to end.

    An async handler gets asyncio.CancelledError, one in a thread lowq.JobCancelled; a call that blocks in C is reached
    when it returns. Nothing of them runs again. `lowq why` says whether one has ended.
    The ID - reads ids from the standard input, one a line.
    """
    _act(app, queue, "cancel", **arguments)


def _act(
    app: Lowq, name: str | None, action: ActionName, ids: tuple[str, ...], all_queues: bool, everything: bool,
    yes: bool, as_json: bool, reason: str | None = None, **options: Any,
) -> None:  # fmt: skip
    wanted, verb = JobFilter(**options), action.replace("_", "-")
    if (name is None) != all_queues:
        raise WrongUsage(f"which queue? lowq {verb} QUEUE ..., or --all-queues with --state, --match or the like")
    many = everything or wanted != JobFilter()
    if many and ids:
        raise WrongUsage("give ids, or --all, --state, --match or the like, not both")
    narrowed = [option for option in wanted.given() if option != "state"]
    if everything and narrowed:
        option = narrowed[0].replace("_", "-")
        raise WrongUsage(f"--all and --{option} say two things: leave one of them out")
    if not many and not ids:
        where = "--all-queues with" if name is None else f"{name} ID..., or"
        raise WrongUsage(f"which jobs? lowq {verb} {where} --all, --state STATE, --match PATTERN")
    if many:
        _act_on_many(app, name, action, wanted, reason, yes=yes, as_json=as_json)
    elif name is not None:
        _act_on_ids(app, used_queue(app, name), action, ids, reason, as_json=as_json)


def _act_on_ids(
    app: Lowq, queue: Queue, action: ActionName, ids: tuple[str, ...], reason: str | None, *, as_json: bool
) -> None:
    method: Callable[..., Acted] = getattr(queue, action)
    options: dict[str, Any] = {"reason": reason} if action == "bury" else {}
    outcomes: dict[str, str] | None = None
    named = [job_id for job_id in ids if job_id != "-"]
    detail = {"ids": named[:5], "named": len(ids) if named == list(ids) else None, "reason": reason}
    with audited(app, action, queue.name, detail) as result:
        if "-" not in ids and len(ids) <= REPORTED_ONE_BY_ONE:
            acted, outcomes = Acted(), {}
            for job_id in dict.fromkeys(ids):
                one = method(job_id, **options)
                acted += one
                result.count = acted.done
                done = "signalled" if one.signalled else "done"
                outcomes[job_id] = done if one.done else "in_flight" if one.in_flight else "missing"
        else:
            acted = method(_all_ids(ids), **options)
        result.count = acted.done
        left = {"in_flight": acted.in_flight, "missing": acted.missing}
        told = {"signalled": acted.signalled} if action == "cancel" else {}
        result.detail |= {name: number for name, number in (told | left).items() if number}
    if as_json:
        echo_json({"action": action, "queue": queue.name, "done": acted.done, **told, **left, "ids": outcomes})
    elif outcomes is not None:
        words = {"done": _DONE[action], "in_flight": IN_FLIGHT, "signalled": _SIGNALLED}
        missing = _whereabouts(app, queue, action, [job_id for job_id, state in outcomes.items() if state == "missing"])
        echo_lines(
            [printable(f"{job_id}: {words.get(state) or missing[job_id]}") for job_id, state in outcomes.items()]
        )
    else:
        parts = [f"{number(acted.done)} {_DONE[action]}"]
        parts += [f"of these {number(acted.signalled)} {_SIGNALLED}"] if acted.signalled else []
        parts += [f"{number(acted.in_flight)} {IN_FLIGHT}"] if acted.in_flight else []
        parts += [f"{number(acted.missing)}: {MISSING[action]}"] if acted.missing else []
        echo_lines(["; ".join(parts)])
    fail_if(acted.in_flight or acted.missing)


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
    app: Lowq, name: str | None, action: ActionName, wanted: JobFilter, reason: str | None, *, yes: bool, as_json: bool
) -> None:
    meant = filter_for(action, wanted).state
    queue: Queue | Lowq = app if name is None else app.queue(name)
    steps = queue.bulk(action, wanted, reason=reason)
    with Progress("found") as progress:
        for step in steps:
            if not step.counting:
                break
            progress.show(step.total)
    kind = {None: "waiting", "morgue": "buried", "taken": "running"}.get(meant, meant)
    if action == "cancel" and meant is None:
        kind = "waiting or running"
    target = f"queue {name!r}" if name else ALL_QUEUES
    what = f"{count(step.total, f'{kind} job')} of {target}{in_words(wanted)}"
    if step.total:
        has_others = action == "delete" and wanted.state is None and wanted.priority is None
        hint = "; buried ones: --state morgue" if has_others else ""
        confirm(f"{action.replace('_', '-')} {what}{hint}", yes)
    try:
        with (
            audited(app, action, name or ALL_QUEUES, {**wanted.given(), "reason": reason}) as result,
            Progress(_DONE[action]) as progress,
        ):
            for step in steps:
                result.count = step.done
                progress.show(step.done, step.done / max(step.total, 1))
    except KeyboardInterrupt:
        say(f"lowq: stopped; {number(step.done)} of {count(step.total, 'job')} {_DONE[action]}")
        click.get_current_context().exit(EXIT_INTERRUPTED)
    # Nobody counts those in flight by their ids.
    in_flight = 0
    if meant != "morgue" and action != "cancel":
        in_flight = sum(app.queue(each).stats().taken for each in ([name] if name else [q.name for q in app.queues()]))
    left = f"; {number(in_flight)} {IN_FLIGHT}" if in_flight else ""
    if in_flight and wanted.given().keys() - {"state"}:
        whose = "this queue" if name else ALL_QUEUES
        left = f"; left alone: what is in flight, {count(in_flight, 'job')} of {whose}, whichever they are"
    done = {"action": action, "queue": name, "done": step.done, "total": step.total, "in_flight": in_flight}
    answer(as_json, done, f"{count(step.done, 'job')} {_DONE[action]}{left}")
    if not as_json and not step.done and action == "delete" and wanted.state is None and wanted.priority is None:
        buried = queue.count("delete", wanted, state="morgue")
        if buried:
            say(f"{count(buried, 'such job')} {'lies' if buried == 1 else 'lie'} in the morgue: --state morgue")
