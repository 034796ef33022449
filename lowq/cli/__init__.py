"""The command line: ``lowq VERB QUEUE [ID...]``.

::

    group     finds the verb; -r, --redis-url, --namespace     failure   exit codes, `lowq: ...`
    loading   from -r to the application                       output    tables, times, JSON, progress
    web       the dashboard; `web_user`: a line of its users   supervised  a command as a process of another
    run       a node, or a supervisor of several; `embedded`: the store inside of it
    reload    new code for a node, in its process
    look      stats, statistics, nodes, shards, jobs, peek, why
    history   rates, times, errors, audit                    nodes     quiet, stop, reload
    push      NDJSON, or a single job
    act       kick, bury, delete, perform-now, release-all, pause, resume, drop
    reshard   another number of shards for a queue
    outbox    from a table of the application's database into queues
    schedules what is pushed at set times; pause, resume, run-now
    doctor    what is wrong, and what to do about it         audited   changes, in the log of what people did
"""

import click

from lowq.cli import act, history, look, nodes
from lowq.cli.completion import completion
from lowq.cli.consume import consume, put, take
from lowq.cli.doctor import doctor
from lowq.cli.group import Group
from lowq.cli.init import init
from lowq.cli.outbox import outbox
from lowq.cli.push import push
from lowq.cli.reshard import reshard
from lowq.cli.run import run
from lowq.cli.schedules import schedules
from lowq.cli.web import web
from lowq.cli.web_user import web_user
from lowq.version import VERSION


@click.command(
    cls=Group,
    sections={
        "Run": [run, consume, web, outbox],
        "Look": [
            look.stats,
            look.statistics,
            look.nodes,
            look.shards,
            look.jobs,
            look.peek,
            look.why,
            history.rates,
            history.times,
            history.errors,
            schedules,
            history.audit,
            doctor,
        ],
        "Act": [
            push,
            put,
            take,
            act.kick,
            act.bury,
            act.delete,
            act.perform_now,
            act.pause,
            act.release_all,
            act.resume,
            reshard,
            act.drop,
            nodes.quiet,
            nodes.stop,
            nodes.reload,
            web_user,
        ],
        "Begin": [init, completion],
    },
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    subcommand_metavar="VERB QUEUE [ID...]",
)
@click.version_option(VERSION, prog_name="lowq", message="%(prog)s %(version)s")
def main() -> None:
    """Background jobs on Redis, in order per entity.

    `lowq -r app.py` is short for `lowq run app.py`. Without -r the application is that of [tool.lowq] in
    pyproject.toml. Options may stand before the verb or behind it.

    Exit codes: 0 done; 1 failed, or some of the ids were left alone; 2 wrong usage; 3 something of a node
    still ran when its shutdown_timeout was over; 130 interrupted.
    """


__all__ = ["main"]
