"""The nodes: nodes, deploy-check, stack, quiet, unquiet, stop, reload."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from lowq.application import Lowq
from lowq.cli.group import audited, json_option, queue_argument, with_app
from lowq.cli.output import answer, echo_json, echo_lines, fail_if, number, say, server_time, table
from lowq.clock import duration
from lowq.logs import printable
from lowq.operate.nodes import NodeCommand, NodeInfo
from lowq.schedules import is_internal

#: Seconds from which on `lowq nodes` names a batch that runs.
LONG = 10.0


@click.command
@with_app
@json_option
def nodes(app: Lowq, as_json: bool) -> None:
    """The nodes that live, and what they hold; and those that were lost within the last hour.

    Each as of its last heartbeat.
    """
    found, lost = app.nodes(), app.nodes(lost=True)
    if as_json:
        echo_json({"nodes": found, "lost": lost})
        return
    _say_lost(lost)
    if not found:
        say("no node is running")
        return
    now = server_time(app)
    rows = [
        [
            node.name, f"{sum(item is not None for item in node.performing)}/{node.threads}", number(node.tasks),
            number(sum(len(shards) for queue, shards in node.shards.items() if not is_internal(queue))),
            duration(now - node.started_at) if node.started_at else "", f"{duration(node.seconds_ago)} ago",
            node.version, _remarks(node), " ".join(queue for queue in node.queues if not is_internal(queue)),
        ]
        for node in found
    ]  # fmt: skip
    columns = ("node", "busy", "tasks", "shards", "up", "heartbeat", "version", "?", "queues")
    echo_lines(table(columns, rows, right=("busy", "tasks", "shards")))
    say("BUSY (threads), TASKS (of async workers) and SHARDS: each node as of its heartbeat")
    long = [
        batch_text(node.name, thread, batch)
        for node in found
        for thread, batch in node.batches()
        if batch["seconds"] >= LONG
    ]
    if long:
        echo_lines(["", f"Batches that have been running for more than {LONG:g} s:", *long])
    if any(node.waiting for node in found):
        say("WAITING: Redis is a replica, which can't be written to; nodes go on when it is a primary again")


def _say_lost(lost: Sequence[NodeInfo]) -> None:
    """Names the nodes that died, and what they were performing then."""
    for node in lost:
        say(f"LOST: {node.name}, no heartbeat since {duration(node.seconds_ago)}, and no goodbye")
        for thread, batch in node.batches():
            say(batch_text(node.name, thread, batch))


def batch_text(node: str, thread: int | None, performed: Mapping[str, Any]) -> str:
    """A running batch as a line: where, which ids, for how long."""
    ids, count = performed["ids"][:3], performed["count"]
    more = f" and {number(count - len(ids))} more" if count > len(ids) else ""
    return printable(
        f"  {node} {'task' if thread is None else f'thread {thread}'}: {performed['queue']} shard "
        f"{performed['shard']}, id{'s' * (count != 1)} {', '.join(ids)}{more}, for {duration(performed['seconds'])}"
    )


def _remarks(node: NodeInfo) -> str:
    remarks = ["waiting"] if node.waiting else []
    remarks += ["quiet"] if node.quiet else []
    if node.kind == "consumer":
        remarks.append(f"consumer, taken: {number(node.taken)}")
    if node.written_off:
        remarks.append(f"written off: {node.written_off}")
    return ", ".join(remarks)


@click.command("deploy-check")
@with_app
@json_option
def deploy_check(app: Lowq, as_json: bool) -> None:
    """Whether a deploy is safe now.

    What a stop of all nodes would probably interrupt: batches that run for longer than it waits (shutdown_timeout), or
    often do; jobs in hand of consumers; actions that run in the dashboard. Exit code 0: nothing; 1: what is named. A
    supervisor's deploy (HUP) interrupts no batch.
    """
    found = app.deploy_check()
    lines = [
        f"{batch_text(item.node, item.thread, item.batch)}; a stop waits for {duration(item.shutdown_timeout)}"
        for item in found.interruptions
    ]
    lines += [f"  {printable(node.name)}: consumer, taken: {number(node.taken)}" for node in found.consumers]
    lines += [f"  actions in the dashboard: {found.tasks}"] if found.tasks else []
    consumers = [node.name for node in found.consumers]
    document = {"is_safe": found.is_safe, "interruptions": found.interruptions, "consumers": consumers}
    answer(as_json, document | {"tasks": found.tasks, "versions": found.versions}, *lines)
    say("safe: a stop would interrupt nothing" if found.is_safe else "not safe: a stop would interrupt these")
    if len(found.versions) > 1:
        say("versions: " + ", ".join(f"{count} of {name}" for name, count in sorted(found.versions.items())))
    fail_if(not found.is_safe)


@click.command
@with_app
@queue_argument
@click.argument("job_id", metavar="ID")
@json_option
def stack(app: Lowq, queue: str, job_id: str, as_json: bool) -> None:
    """Where in its code a running job is.

    The stack of the thread, or of the task, that performs the id: files, lines, functions and lines of code, no values.
    Its node is asked for it. Exit code 1 when nothing performs the id, or the node does not answer.
    """
    found = app.queue(queue).stack(job_id)
    if as_json:
        echo_json({"queue": queue, "id": job_id, "stack": found})
    elif found is None:
        say(f"nothing performs {printable(job_id)} now: `lowq why` says where it is")
    else:
        where = "task" if found.thread is None else f"thread {found.thread}"
        blocked = "has not answered: its process may be blocked; kill -TTIN logs all its stacks"
        say(f"{found.node} {where if found.text else blocked}")
        echo_lines([printable(line) for line in found.text.splitlines()])
    fail_if(found is None or not found.text)


def _sends(command: NodeCommand, text: str, then: str = "") -> click.Command:
    """A verb that sends a command to a node. ``then``: how it goes on, for people."""

    @click.command(command, help=text)
    @with_app
    @click.argument("node")
    def send(app: Lowq, node: str) -> None:
        with audited(app, command, node):
            app.send_command(node, command)
        say(f"sent {command} to {node}{then}")

    return send


quiet = _sends(
    "quiet",
    """Have a node take nothing more.

    It finishes what runs, gives its shards to other nodes and stays; `lowq nodes` names the nodes.
    """,
    "; `lowq nodes` shows when it is",
)
unquiet = _sends(
    "unquiet",
    """Have a node that is quiet take jobs again.

    It gets its shards back. A consumer, or a node that is stopping, stays as it is.
    """,
)
stop = _sends("stop", "Stop a node, in order, as TERM does.")
reload = _sends(
    "reload",
    """Have a node go on with new code, as HUP does.

    It loads what is on its disk now. If that can't be run, it goes on with what it has, and its log says why. Otherwise
    it finishes what runs and goes on in the same process, with its shards. A supervisor is sent HUP instead.
    """,
    "; its log says what becomes of it",
)
