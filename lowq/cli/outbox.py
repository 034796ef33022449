"""``lowq outbox``: the relay of an outbox as a process; its table as SQL."""

import click

from lowq import logs
from lowq.cli.failure import FAILED, USAGE, Failure
from lowq.cli.group import open_app, with_connection
from lowq.cli.output import count, say
from lowq.cli.process import stopped_by_signals
from lowq.cli.web import log_options
from lowq.errors import LowqError
from lowq.logs import LogFormat

#: Seconds, at most, for which --once waits for transactions that were open when it began.
WAIT_FOR_WRITERS = 10.0


@click.command
@with_connection
@click.argument("database_url", required=False, envvar="DATABASE_URL")
@click.option("--once", is_flag=True, help="Push what is committed now, then end.")
@click.option("--retry", is_flag=True, help="Let rows that could not be pushed wait again, then end.")
@click.option(
    "--sql", type=click.Choice(["postgresql", "sqlite"]), metavar="DATABASE",
    help="Print what makes the table, for postgresql or sqlite, then end.",
)  # fmt: skip
@click.option(
    "--interval", type=click.FloatRange(0, 3600, min_open=True), default=1.0, show_default=True, metavar="SECONDS",
    help="Look for rows after so long, though nobody has told of any.",
)  # fmt: skip
@log_options
def outbox(
    database_url: str | None, once: bool, retry: bool, sql: str | None, interval: float, log_format: LogFormat | None,
    log_level: str | None, **connection: str | None,
) -> None:  # fmt: skip
    """Push what the transactions of a database have left in its table lowq_outbox.

    DATABASE_URL, or the variable of that name, is postgresql://user:password@host/name or sqlite:///path/to/file.db. Of
    several relays of one database one is at work, the others wait. TERM and Ctrl-C end it.

    \b
    lowq outbox --sql postgresql | psql "$DATABASE_URL"
    lowq outbox -r shop.workers
    """
    from lowq.contrib import outbox as contrib  # the other verbs do without it

    if sql is not None:
        click.echo(contrib.sql(sql), nl=False)
        return
    if not database_url:
        raise Failure("which database? lowq outbox postgresql://user:password@host/name, or set DATABASE_URL", USAGE)
    logs.configure(log_format, log_level)
    app = open_app(**connection)
    logs.configure(log_format, log_level)
    relay = contrib.Relay(app, database_url, interval=interval)
    if not once and not retry:
        with stopped_by_signals(relay.request_stop):
            say("relaying the outbox; Ctrl-C ends it")
            relay.run()
        return
    try:
        if retry:
            say(f"{count(relay.retry_refused(), 'row')} wait again")
        else:
            pushed = relay.run_once(wait=WAIT_FOR_WRITERS)
            waiting, refused = relay.count_rows()
            say(
                f"{count(pushed, 'job')} pushed"
                + (f"; {count(waiting, 'row')} left for later" if waiting else "")
                + (f"; {count(refused, 'row')} kept with an error" if refused else "")
            )
    except LowqError:
        raise
    except Exception as error:  # the driver's
        raise Failure(f"the database can't be used: {type(error).__name__}: {error}".strip(), FAILED) from None
