"""The command line: ``lowq VERB QUEUE [ID...]``.

::

    group     finds the verb; options, the application, confirmation, the log of what people did
    loading   from -r to the application                    output    tables, times, JSON, progress, `lowq: ...`
    run       a node, or a supervisor of several            process   streams, process 1, what a supervisor hears
    web       the dashboard
    stats     stats, statistics; rates, times, errors, audit
    jobs      jobs, peek, why; kick, bury, delete, cancel, perform-now
    queues    shards, pause, resume, release-all, drop, reshard; limits, schedules
    nodes     nodes, deploy-check, stack; quiet, unquiet, stop, reload
    health    /livez, /readyz, /metrics of a node; ready
    push      NDJSON, a single job, put; outbox             consume   take, consume
    doctor    what is wrong, and what to do about it
    init      the first files of a project (in the folder `project`); completion
"""

import click

from lowq.cli import jobs, nodes, queues, stats
from lowq.cli.consume import consume, take
from lowq.cli.doctor import doctor
from lowq.cli.group import Group
from lowq.cli.health import ready
from lowq.cli.init import completion, init
from lowq.cli.push import outbox, push, put
from lowq.cli.run import run
from lowq.cli.web import web
from lowq.version import VERSION


@click.command(
    cls=Group,
    sections={
        "Run": [run, consume, web, outbox],
        "Look": [
            stats.stats, stats.statistics, nodes.nodes, queues.shards, jobs.jobs, jobs.peek, jobs.why, nodes.stack,
            stats.rates, stats.times, stats.errors, queues.limits, queues.schedules, stats.audit, doctor,
            nodes.deploy_check, ready,
        ],
        "Act": [
            push, put, take, jobs.kick, jobs.bury, jobs.delete, jobs.cancel, jobs.perform_now, queues.pause,
            queues.release_all, queues.resume, queues.reshard, queues.drop, nodes.quiet, nodes.unquiet, nodes.stop,
            nodes.reload,
        ],
        "Begin": [init, completion],
    },
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    subcommand_metavar="VERB QUEUE [ID...]",
)  # fmt: skip
@click.version_option(VERSION, prog_name="lowq", message="%(prog)s %(version)s")
def main() -> None:
    """Background jobs on Redis, in order per entity.

    `lowq -r app.py` is short for `lowq run app.py`. Without -r the application is that of [tool.lowq] in
    pyproject.toml. Options may stand before the verb or behind it.

    Exit codes: 0 done; 1 failed, or some of the ids given were left alone; 2 wrong usage; 3 something of a node
    still ran when its shutdown_timeout was over; 130 interrupted.
    """


__all__ = ["main"]
