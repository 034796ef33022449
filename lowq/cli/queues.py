"""Whole queues: shards, pause, resume, release-all, drop, reshard."""

import time

import click

from lowq.admin import ReshardProgress
from lowq.application import Lowq
from lowq.cli.audited import audited, me
from lowq.cli.failure import INTERRUPTED
from lowq.cli.group import confirm, json_option, queue_argument, used_queue, with_app, yes_option
from lowq.cli.output import Progress, answer, count, echo_json, echo_lines, number, say, table
from lowq.cli.stats import end_without, shards_without
from lowq.duration import duration
from lowq.errors import RedisUnavailable
from lowq.operate.actions import IN_FLIGHT
from lowq.operate.queries import shards_of_handle
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
    if as_json:
        echo_json({"queue": queue, "shards": found} | ({"unanswered": unanswered} if silent else {}))
    else:
        rows = [
            [
                str(shard.index), number(shard.length), number(shard.taken), number(shard.morgue_length),
                duration(shard.lag), shard.owner or "nobody",
                "" if shard.lease_seconds is None else duration(shard.lease_seconds), shard.oldest_id or "",
                "paused" if shard.paused else "",
            ]
            for shard in found
        ]  # fmt: skip
        columns = ("shard", "length", "taken", "morgue", "lag", "owner", "lease?", "oldest?", "?")
        echo_lines(table(columns, rows, right=("shard", "length", "taken", "morgue", "lag", "lease")))
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
    with audited(app, "pause" if paused else "resume", queue) as outcome:
        changed = handle.pause(by=me()) if paused else handle.resume()
        outcome.detail = {} if changed else {"changed": False}
    if paused:
        said = "paused" if changed else "was paused already"
    else:
        said = "goes on" if changed else "was not paused"
    answer(as_json, {"queue": queue, "paused": paused, "changed": changed}, f"{queue}: {said}")


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
    with audited(app, "release_all", queue) as outcome:
        released = outcome.count = handle.release_all()
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
    with audited(app, "drop", queue) as outcome:
        removed = outcome.count = handle.drop()
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

    What is moved is deleted where it was once as many replicas have it as the primary had at the beginning. Without
    them the command waits, and says for which. Of a queue that has N shards it checks that all was moved.
    """
    handle = app.queue(queue)
    before = handle.layouts
    last: ReshardProgress | None = None
    watch = _Watch(queue, shards_count)
    try:
        with (
            audited(app, "reshard", queue, {"from": before.current.shards_count, "to": shards_count}) as outcome,
            Progress("jobs moved") as progress,
        ):

            def show(done: ReshardProgress) -> None:
                nonlocal last
                last = done
                outcome.count = done.jobs_moved
                progress.show(done.jobs_moved, done.shards_moved / done.shards_count)
                watch.show(done)

            handle.reshard(shards_count, on_progress=show, by=me(), unconfirmed=unconfirmed)
    except KeyboardInterrupt:
        shards = "" if last is None else f" {last.shards_moved} of {count(last.shards_count, 'shard')} are moved;"
        say(f"lowq: stopped;{shards} to go on: lowq reshard {queue} {shards_count}")
        click.get_current_context().exit(INTERRUPTED)
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


class _Watch:
    """Names the shards, and the replicas, that are waited for, when it takes long."""

    def __init__(self, queue: str, shards_count: int) -> None:
        self._queue = queue
        self._shards_count = shards_count
        self._since = self._said = time.monotonic()

    def show(self, done: ReshardProgress) -> None:
        now = time.monotonic()
        if not (done.waits_for or done.waits_for_replicas):
            self._since = now
        elif now - self._since >= NAMED_AFTER and now - self._said >= NAMED_AFTER:
            self._said = now
            if done.waits_for_replicas:
                of = ", ".join(filter(None, done.waits_for_replicas)) or "the primary"
                say(
                    f"lowq: waiting until replicas of {of} have what was written; should there be none any more: "
                    f"lowq reshard {self._queue} {self._shards_count} --unconfirmed (a failover may lose jobs then)"
                )
                return
            some = ", ".join(map(str, done.waits_for[:10])) + (", ..." if len(done.waits_for) > 10 else "")
            say(f"lowq: waiting for what is in flight of shard {some} of {self._queue}; `lowq shards` says who has it")
