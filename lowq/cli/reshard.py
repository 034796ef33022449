"""``lowq reshard QUEUE N``: another number of shards for a queue, while it is used."""

import time

import click

from lowq.admin import ReshardProgress
from lowq.application import Lowq
from lowq.cli.audited import audited, me
from lowq.cli.failure import INTERRUPTED
from lowq.cli.group import json_option, queue_argument, with_app
from lowq.cli.output import Progress, count, echo_json, echo_lines, number, say
from lowq.errors import RedisUnavailable

#: Seconds after which the shards are named that are waited for, and between two such lines.
NAMED_AFTER = 5.0


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
    if as_json:
        was = before.current.shards_count if last is None else last.before.shards_count
        echo_json({"queue": queue, "from": was, "to": shards_count, "jobs_moved": moved, "changed": last is not None})
    elif last is None:
        echo_lines([f"{queue}: has {count(shards_count, 'shard')} already"])
    else:
        echo_lines([f"{queue}: has {count(shards_count, 'shard')} now; {number(moved)} jobs moved"])


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
