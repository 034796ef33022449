"""An outbox: jobs that are pushed in a transaction of the application's database, and reach Redis after its commit.

::

    application --INSERT, in its transaction--> lowq_outbox --Relay--> queue.push --> Redis
                                                     ^                     |
                                                     +------- DELETE ------+   once the push has returned

    table       makes the table, and inserts rows through any connection of the caller's
    databases   what the relay asks of PostgreSQL and SQLite
    relay       from the table into queues

Nothing is imported but what the caller has: neither SQLAlchemy nor a driver.
"""

import time
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from importlib import import_module
from typing import Any, cast

from lowq.application import Lowq, default
from lowq.codec import encode_job, score_reader
from lowq.contrib.outbox import table
from lowq.contrib.outbox.relay import Relay
from lowq.errors import ConfigError, JobError, PayloadError
from lowq.job import JobId, JobOptions, new_job
from lowq.workers import Worker

__all__ = ["Relay", "apush", "create_table", "push", "sql"]

#: Fields of a job in an outbox; others are options of its worker.
_FIELDS = {"id", "payload", "score", "delay", "perform_at", "perform_in"}


def push(
    worker: type[Worker[Any]] | str,
    job: JobId | Mapping[str, Any] | Iterable[Mapping[str, Any]],
    payload: Any = "",
    *,
    connection: Any = None,
    using: str | None = None,
    app: Lowq | None = None,
    score: float | None = None,
    delay: float | timedelta | None = None,
    perform_at: float | datetime | None = None,
) -> int:
    """Pushes a job, given as its id and its payload, or jobs, given as mappings, when the transaction of the connection
    is committed::

        outbox.push(OrderSync, 42, {"version": 2}, connection=session)
        outbox.push(OrderSync, [{"id": 42, "payload": {"version": 2}}, ...], connection=session)

    ``worker``: its class, or the queue's name. ``connection``: of SQLAlchemy, Django, or a driver, or a cursor of that;
    ``using``: the alias of one of Django's instead. ``app``: of a queue that is given by its name; None: the default
    one. ``score``, ``delay`` (seconds) and ``perform_at`` (Unix time, seconds) are of a single job, as in a `JobDict`.
    Returns the number of rows inserted.

    Raises:
        JobError, PayloadError: a job is malformed; nothing was inserted.
        ConfigError: the connection is missing, async, or of a library that is not known.
        What the database raises.
    """
    rows = _rows(worker, job, payload, app, score=score, delay=delay, perform_at=perform_at)
    connection = _connection_of(connection, using)
    if rows:
        table.insert(connection, rows)
    return len(rows)


async def apush(
    worker: type[Worker[Any]] | str,
    job: JobId | Mapping[str, Any] | Iterable[Mapping[str, Any]],
    payload: Any = "",
    *,
    connection: Any = None,
    app: Lowq | None = None,
    score: float | None = None,
    delay: float | timedelta | None = None,
    perform_at: float | datetime | None = None,
) -> int:
    """`push` through an async connection: an AsyncSession or AsyncConnection of SQLAlchemy, one of psycopg, asyncpg or
    aiosqlite.

    Raises:
        As `push`.
    """
    rows = _rows(worker, job, payload, app, score=score, delay=delay, perform_at=perform_at)
    connection = _connection_of(connection, None)
    if rows:
        await table.ainsert(connection, rows)
    return len(rows)


def create_table(connection: Any) -> bool:
    """Makes the table ``lowq_outbox``, unless it is there, in the transaction of a sync connection: for migrations and
    tests. Of an async one of SQLAlchemy write ``await connection.run_sync(outbox.create_table)``. Returns whether it
    was made.

    Raises:
        ConfigError: as `push`. What the database raises.
    """
    return table.create(_connection_of(connection, None))


def sql(dialect: str) -> str:
    """The SQL that makes the table, for ``"postgresql"`` or ``"sqlite"``.

    Raises:
        ConfigError: no such database.
    """
    return "".join(f"{statement};\n" for statement in table.statements(dialect))


def _connection_of(connection: Any, using: str | None) -> Any:
    if (connection is None) == (using is None):
        raise ConfigError(
            "say in which transaction: outbox.push(..., connection=session), or with Django using='default'"
        )
    if using is None:
        return connection
    try:
        of_django = import_module("django.db").connections
    except ImportError as error:
        raise ConfigError(f"using={using!r} is the alias of a connection of Django, which is not installed") from error
    return of_django[using]


def _rows(worker: type[Worker[Any]] | str, job: Any, payload: Any, app: Lowq | None, **options: Any) -> list[table.Row]:
    """Jobs as rows, each checked as a push would.

    Raises:
        JobError, PayloadError, ConfigError
    """
    if isinstance(job, JobId):
        jobs: list[Any] = [new_job(job, payload, cast(JobOptions, options))]
    else:
        given = [name for name, value in options.items() if value is not None] + (["payload"] if payload != "" else [])
        if given:
            raise JobError(
                f"{', '.join(given)} beside jobs: each job says it for itself, as in {{'id': 42, 'score': 7}}"
            )
        jobs = [job] if isinstance(job, Mapping) else list(job)
    owner = _worker_of(worker, app)
    app = (app or default) if owner is None else cast(Lowq, owner._app)
    name = app.queue(cast(str, worker)).name if owner is None else owner.queue_name
    typed = None if owner is None else app.payload_type_of(name)
    dump = app.config.dump_payload if typed is None else typed.dump
    score = None if owner is None else owner._queue_options.score
    read_score = None
    if owner is not None and score is not None:
        read_score = score_reader(score, owner.__name__, None if typed is None else typed.load)
    rows = []
    for given_job in jobs:
        try:
            _refuse_options(given_job)
            encoded = encode_job(
                given_job, dump, app.config.max_payload_bytes, is_typed=typed is not None, read_score=read_score
            )
        except JobError as error:
            raise type(error)(f"queue {name!r}: {error}") from error.__cause__
        rows.append(_row(name, *encoded[:4]))
    return rows


def _worker_of(worker: Any, app: Lowq | None) -> type[Worker[Any]] | None:
    """The worker's class; None: only its name is known here."""
    if isinstance(worker, str):
        return (app or default).workers.get(worker)
    if not (isinstance(worker, type) and issubclass(worker, Worker) and "_app" in vars(worker)):
        raise ConfigError(
            f"outbox.push({worker!r:.60}, ...): write a worker, as in outbox.push(OrderSync, 42, payload, "
            "connection=...), or the name of its queue"
        )
    return worker


def _refuse_options(job: object) -> None:
    if isinstance(job, Mapping) and not job.keys() <= _FIELDS and ("ttl" in job or "priority" in job):
        raise JobError(
            f"job {job.get('id')!r:.60}: ttl and priority have no place in an outbox; say them as options of the worker"
        )


def _row(queue: str, job_id: bytes, payload: bytes, score: bytes, perform_at: bytes) -> table.Row:
    """An encoded job as a row."""
    if b"\0" in job_id or b"\0" in payload:
        raise JobError(f"queue {queue!r}: job {job_id!r:.60} has a zero byte, which text in a database can't have")
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        raise PayloadError(
            f"queue {queue!r}: job {job_id.decode()!r:.60}: an outbox keeps payloads as text, and dump_payload gave "
            f"{payload!r:.60}, which is no UTF-8"
        ) from None
    at = None
    if perform_at:
        at = time.time() + float(perform_at) if perform_at[:1] == b"+" else float(perform_at)
    return queue, job_id.decode(), text, float(score) if score else None, at
