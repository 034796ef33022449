"""The outbox: jobs pushed in a transaction of SQLite or PostgreSQL, through whatever library, and the relay."""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import psycopg.rows
import pytest
import sqlalchemy
import sqlalchemy.orm
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import lowq
from lowq.contrib import outbox
from lowq.contrib.outbox.databases import connector
from tests.postgres_server import PostgresServer
from tests.rows import case
from tests.waiting import NEVER, PATIENCE, until


@pytest.fixture
def app() -> Iterator[lowq.Lowq]:
    app = lowq.Lowq(redis_url=f"memory://{uuid.uuid4().hex}")
    yield app
    app.close()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as connection:
        assert outbox.create_table(connection)
        assert not outbox.create_table(connection)
    connection.close()
    return f"sqlite:///{path}"


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    url = postgres.empty_database()
    with psycopg.connect(url) as connection:
        assert outbox.create_table(connection)
        assert not outbox.create_table(connection)
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY, version int NOT NULL)")
        connection.execute("INSERT INTO orders SELECT id, 0 FROM generate_series(1, 100) AS id")
    return url


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database with the table, of each kind."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def connect(url: str) -> Iterator[Callable[[], Any]]:
    """Opens connections to it, each of which begins a transaction with its first statement."""
    opened: list[Any] = []

    def open_another() -> Any:
        opened.append(open_sqlite(url) if url.startswith("sqlite") else psycopg.connect(url))
        return opened[-1]

    yield open_another
    for connection in opened:
        connection.close()


def path_of(url: str) -> str:
    return url.removeprefix("sqlite:///")


def open_sqlite(url: str) -> sqlite3.Connection:
    """It waits for a relay that is held up in the middle of a commit."""
    return sqlite3.connect(path_of(url), timeout=PATIENCE)


def worker_of(app: lowq.Lowq, name: str = "OrderSync", **options: Any) -> Any:
    """A worker of one shard, which performs nothing here."""

    def perform(payloads_by_id: dict[str, list[Any]]) -> None: ...

    perform.__name__ = name
    return app.worker(shards_count=1, **options)(perform)


def payloads(app: lowq.Lowq, job_id: object, queue: str = "OrderSync") -> list[Any]:
    """What waits for an id, in the order in which it would be handed over."""
    job = app.queue(queue, 1).peek(job_id)  # type: ignore[arg-type]
    return [] if job is None else [payload for payload, _ in job.payloads]


def rows(connection: Any) -> int:
    cursor = connection.cursor()
    cursor.execute("SELECT count(*) FROM lowq_outbox")
    count = cursor.fetchone()[0]
    connection.rollback()
    return int(count)


# --- what is pushed --------------------------------------------------------------------------------------------


def test_a_job_is_pushed_with_the_commit_and_not_without_it(
    app: lowq.Lowq, url: str, connect: Callable[[], Any]
) -> None:
    order_sync, relay, connection = worker_of(app), outbox.Relay(app, url), connect()
    assert outbox.push(order_sync, 42, {"version": 1}, connection=connection) == 1
    connection.rollback()
    assert relay.run_once() == 0
    outbox.push(order_sync, 42, {"version": 2}, connection=connection)
    outbox.push("OrderSync", 43, connection=connection.cursor(), app=app)
    assert relay.run_once() == 0, "before the commit"
    connection.commit()
    assert relay.run_once() == 2
    assert (payloads(app, 42), payloads(app, 43)) == ([{"version": 2}], [""])
    assert rows(connection) == 0


def test_jobs_of_an_id_keep_the_order_in_which_they_were_pushed(
    app: lowq.Lowq, url: str, connect: Callable[[], Any]
) -> None:
    order_sync, connection = worker_of(app), connect()
    versions = [3, 1, 2, *range(4, 60)]
    outbox.push(order_sync, ({"id": 42, "payload": version} for version in versions[:30]), connection=connection)
    for version in versions[30:]:
        outbox.push(order_sync, 42, version, connection=connection)
    connection.commit()
    assert outbox.Relay(app, url, batch_size=7).run_once() == len(versions)
    assert payloads(app, 42) == versions


def test_a_job_has_what_it_was_pushed_with(app: lowq.Lowq, url: str, connect: Callable[[], Any]) -> None:
    order_sync, connection = worker_of(app), connect()
    by_version = worker_of(app, "ByVersion", score="version")
    text = "ü\n\\ \u2028 'quoted' %s :name \U0001f600"
    outbox.push(order_sync, text, {"text": text, "n": [1, 1.0, 2**53, None, True]}, connection=connection)
    outbox.push(order_sync, "later", 1, delay=NEVER, connection=connection)
    outbox.push(order_sync, {"id": "at", "perform_at": 4_000_000_000}, connection=connection)
    outbox.push(by_version, 42, {"version": 7}, connection=connection)
    outbox.push("ByVersion", 42, {"version": 5}, connection=connection, app=app)
    outbox.push(by_version, 42, {"version": 9}, score=6, connection=connection)
    # A row of somebody who knows nothing of lowq.
    connection.cursor().execute("INSERT INTO lowq_outbox (queue, id) VALUES ('OrderSync', 'by hand')")
    connection.commit()
    assert outbox.Relay(app, url).run_once() == 7
    assert payloads(app, text) == [{"text": text, "n": [1, 1.0, 2**53, None, True]}]
    assert payloads(app, "by hand") == [""]
    found = order_sync.queue.peek("later"), order_sync.queue.peek("at")
    assert [job.state for job in found] == ["scheduled", "scheduled"]
    assert found[1].perform_at == 4_000_000_000
    assert by_version.queue.peek(42).payloads == [({"version": 5}, 5.0), ({"version": 9}, 6.0), ({"version": 7}, 7.0)]


def test_who_knows_the_queue_by_name_pushes_what_gives_its_score(app: lowq.Lowq, sqlite_url: str) -> None:
    """The registry says so to a relay that has no workers."""
    by_version = worker_of(app, "ByVersion", score="version")
    by_version.push(1, {"version": 1})
    stranger = lowq.Lowq(redis_url=app.config.redis_url)
    with open_sqlite(sqlite_url) as connection:
        outbox.push("ByVersion", 42, {"version": 5}, connection=connection, app=stranger)
    connection.close()
    assert outbox.Relay(stranger, sqlite_url).run_once() == 1
    assert by_version.queue.peek(42).payloads == [({"version": 5}, 5.0)]
    stranger.close()


def test_what_can_not_be_pushed_is_refused_at_once(app: lowq.Lowq, sqlite_url: str) -> None:
    order_sync = worker_of(app)
    by_version = worker_of(app, "ByVersion", score="version")
    pickled = lowq.Lowq(redis_url=app.config.redis_url, dump_payload=lambda _: b"\xff", load_payload=lambda _: None)
    connection = open_sqlite(sqlite_url)
    engine = create_async_engine("sqlite+aiosqlite://")
    of_mysql = type("Connection", (), {"__module__": "pymysql.connections"})
    for error, said, pushed in [
        (lowq.JobError, "an id is empty", lambda: outbox.push(order_sync, "", connection=connection)),
        (lowq.JobError, "zero byte", lambda: outbox.push(order_sync, "a\0b", connection=connection)),
        (lowq.PayloadError, "JSON values", lambda: outbox.push(order_sync, 1, {1, 2}, connection=connection)),
        (lowq.PayloadError, "is missing", lambda: outbox.push(by_version, 1, {}, connection=connection)),
        (lowq.PayloadError, "no UTF-8", lambda: outbox.push("Any", 1, app=pickled, connection=connection)),
        (lowq.JobError, "ttl and", lambda: outbox.push(order_sync, {"id": 1, "ttl": 5}, connection=connection)),
        (lowq.JobError, "did you mean", lambda: outbox.push(order_sync, {"id": 1, "scor": 5}, connection=connection)),
        (lowq.JobError, "score beside jobs", lambda: outbox.push(order_sync, [], score=1, connection=connection)),
        (TypeError, "argument 'scroe'", lambda: outbox.push(order_sync, 1, scroe=None, connection=connection)),  # type: ignore[call-arg]
        (TypeError, "argument 'id'", lambda: outbox.push(order_sync, 1, id=2, connection=connection)),  # type: ignore[call-arg]
        (TypeError, "argument 'ttl'", lambda: asyncio.run(outbox.apush(order_sync, 1, ttl=2, connection=connection))),  # type: ignore[call-arg]
        (lowq.ConfigError, "which transaction", lambda: outbox.push(order_sync, 1)),
        (lowq.ConfigError, "no library", lambda: outbox.push(order_sync, 1, connection=object())),
        (lowq.ConfigError, "await outbox.apush", lambda: outbox.push(order_sync, 1, connection=AsyncSession(engine))),
        (lowq.ConfigError, "write a worker", lambda: outbox.push(object, 1, connection=connection)),  # type: ignore[arg-type]
        (lowq.ConfigError, "outbox.push", lambda: asyncio.run(outbox.apush(order_sync, 1, connection=connection))),
        (lowq.ConfigError, "places", lambda: outbox.push(order_sync, 1, connection=of_mysql())),
        (lowq.ConfigError, "change places", lambda: outbox.Relay(app, "mysql+pymysql://root@host/shop")),
        (lowq.ConfigError, "no URL of a database", lambda: outbox.Relay(app, "oracle://root@host/shop")),
        (lowq.ConfigError, "no database of Django", lambda: outbox.Relay(app, "default")),
        (lowq.ConfigError, "interval", lambda: outbox.Relay(app, sqlite_url, interval=0)),
        (lowq.ConfigError, "not with 'mysql'", lambda: outbox.sql("mysql")),
    ]:  # fmt: skip
        with case(said), pytest.raises(error, match=said):
            pushed()  # type: ignore[no-untyped-call]
    assert outbox.push(order_sync, [], connection=connection) == 0
    assert rows(connection) == 0
    connection.close()
    pickled.close()


# --- through what it is pushed ---------------------------------------------------------------------------------


def engine_of(url: str) -> Any:
    return sqlalchemy.create_engine(
        url.replace("postgresql:", "postgresql+psycopg:"), poolclass=sqlalchemy.pool.NullPool
    )


class Traced:
    """A connection as tracing wraps it: of another type, and it claims to be of that of the connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @property
    def __class__(self) -> Any:
        return type(self._connection)

    @__class__.setter
    def __class__(self, _: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def in_transaction(kind: str, url: str, push: Callable[[Any], object], *, commits: bool) -> None:
    """Pushes through a sync connection of this kind, and commits or rolls back."""
    connection: Any
    if kind in ("driver", "cursor", "traced"):
        connection = open_sqlite(url) if url.startswith("sqlite") else psycopg.connect(url)
        through = {"cursor": connection.cursor, "traced": lambda: Traced(connection)}
        push(through.get(kind, lambda: connection)())
    elif kind == "pool":
        connection = engine_of(url).raw_connection()
        push(connection)
    else:
        engine = engine_of(url)
        if kind == "connection":
            connection = engine.connect()
        elif kind == "session":
            connection = sqlalchemy.orm.Session(engine)
        else:
            connection = sqlalchemy.orm.scoped_session(sqlalchemy.orm.sessionmaker(engine))
        push(connection)
    if commits:
        connection.commit()
    else:
        connection.rollback()
    connection.close()


def test_a_job_is_pushed_through_whatever_the_application_has(app: lowq.Lowq, url: str) -> None:
    order_sync = worker_of(app)
    many = [{"id": 43, "payload": number} for number in range(3)]

    def push(*arguments: Any) -> None:
        *job, connection = arguments
        outbox.push(order_sync, *job, connection=connection)

    for kind in ("driver", "cursor", "traced", "pool", "connection", "session", "scoped_session"):
        with case(kind):
            for commits in (False, True):
                for job in ([42, 1], [many]):
                    in_transaction(kind, url, partial(push, *job), commits=commits)
            assert outbox.Relay(app, url).run_once() == 4
            assert (payloads(app, 42), payloads(app, 43)) == ([1], [0, 1, 2])
            order_sync.queue.delete([42, 43])


def test_the_table_is_made_through_whatever_the_application_has(
    app: lowq.Lowq, postgres: PostgresServer, tmp_path: Path
) -> None:
    made: list[bool] = []
    for kind in ("driver", "connection", "session"):
        for url in (postgres.empty_database(), f"sqlite:///{tmp_path / kind}.db"):
            with case(kind, url):
                for is_made in (True, False):
                    in_transaction(kind, url, lambda given: made.append(outbox.create_table(given)), commits=True)
                    assert made.pop() is is_made
                assert outbox.Relay(app, url).run_once() == 0


DJANGO = """
import json, sys
import django, lowq
from django.conf import settings
from django.db import connection, transaction
from lowq.contrib import outbox

settings.configure(DATABASES={"default": json.loads(sys.argv[1])})
django.setup()

@lowq.worker(shards_count=1)
def OrderSync(payloads_by_id): ...

with transaction.atomic():
    print(outbox.create_table(connection), outbox.create_table(connection))
try:
    with transaction.atomic():
        outbox.push(OrderSync, 42, 1, connection=connection)
        raise ZeroDivisionError
except ZeroDivisionError:
    pass
with transaction.atomic():
    outbox.push(OrderSync, 42, {"percent": "%s"}, connection=connection)
    outbox.push(OrderSync, [{"id": 43, "payload": number} for number in range(3)], using="default")
"""


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_job_is_pushed_in_a_transaction_of_django(
    app: lowq.Lowq, request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    if kind == "sqlite":
        url = f"sqlite:///{tmp_path / 'django.db'}"
        settings: dict[str, Any] = {"ENGINE": "django.db.backends.sqlite3", "NAME": path_of(url)}
    else:
        url = request.getfixturevalue("postgres").empty_database()
        parts = sqlalchemy.make_url(url)
        places = {"NAME": parts.database, "HOST": parts.host, "PORT": parts.port, "USER": parts.username}
        settings = {"ENGINE": "django.db.backends.postgresql", **places}
    command = [sys.executable, "-c", DJANGO, json.dumps(settings)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert (ran.stdout, ran.stderr) == ("True False\n", "")
    worker_of(app)
    assert outbox.Relay(app, url).run_once() == 4
    assert (payloads(app, 42), payloads(app, 43)) == ([{"percent": "%s"}], [0, 1, 2])


async def _apush(kind: str, url: str, push: Callable[[Any], Any], *, commits: bool) -> None:
    is_sqlite = url.startswith("sqlite")
    if kind in ("connection", "session"):
        driver = ("sqlite:", "sqlite+aiosqlite:") if is_sqlite else ("postgresql:", "postgresql+asyncpg:")
        engine = create_async_engine(url.replace(*driver))
        connection: Any = AsyncSession(engine) if kind == "session" else await engine.connect()
        await push(connection)
        await (connection.commit() if commits else connection.rollback())
        await connection.close()
        await engine.dispose()
    elif kind == "asyncpg":
        import asyncpg  # type: ignore[import-untyped]  # it has no types

        connection = await asyncpg.connect(url)
        transaction = connection.transaction()
        await transaction.start()
        await push(connection)
        await (transaction.commit() if commits else transaction.rollback())
        await connection.close()
    else:
        import aiosqlite

        opening: Any = aiosqlite.connect(path_of(url)) if is_sqlite else psycopg.AsyncConnection.connect(url)
        connection = await opening
        await push(connection)
        await (connection.commit() if commits else connection.rollback())
        await connection.close()


@pytest.mark.parametrize("kind", ["driver", "connection", "session", "asyncpg"])
def test_a_job_is_pushed_through_whatever_an_async_application_has(app: lowq.Lowq, url: str, kind: str) -> None:
    if kind == "asyncpg" and url.startswith("sqlite"):
        return
    order_sync = worker_of(app)
    many = [{"id": 43, "payload": number} for number in range(3)]
    for commits in (False, True):
        asyncio.run(_apush(kind, url, lambda given: outbox.apush(order_sync, 42, 1, connection=given), commits=commits))
        asyncio.run(_apush(kind, url, lambda given: outbox.apush(order_sync, many, connection=given), commits=commits))
    assert outbox.Relay(app, url).run_once() == 4
    assert (payloads(app, 42), payloads(app, 43)) == ([1], [0, 1, 2])


def test_a_session_writes_its_changes_before_the_job(app: lowq.Lowq, postgres_url: str) -> None:
    """So the lock of the entity's row is had before the number in the outbox, and both have one order."""

    class Base(sqlalchemy.orm.DeclarativeBase): ...

    class Order(Base):
        __tablename__ = "orders"
        id: sqlalchemy.orm.Mapped[int] = sqlalchemy.orm.mapped_column(primary_key=True)
        version: sqlalchemy.orm.Mapped[int]

    engine = engine_of(postgres_url)
    statements: list[str] = []
    sqlalchemy.event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2].split()[0]))
    with sqlalchemy.orm.Session(engine) as session:
        order = session.get_one(Order, 42)
        order.version += 1
        outbox.push(worker_of(app), 42, order.version, connection=session)
        session.commit()
    engine.dispose()
    assert statements == ["SELECT", "UPDATE", "INSERT"]


# --- the relay -------------------------------------------------------------------------------------------------


def keep_rows(connection: Any, *, keeps: bool) -> None:
    """The relay's deletes fail, as if it died after the push."""
    cursor = connection.cursor()
    if keeps and isinstance(connection, sqlite3.Connection):
        cursor.execute("CREATE TRIGGER keep BEFORE DELETE ON lowq_outbox BEGIN SELECT RAISE(ABORT, 'died'); END")
    elif keeps:
        body = "BEGIN RAISE EXCEPTION 'died'; END"
        cursor.execute(f"CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$")
        cursor.execute("CREATE TRIGGER keep BEFORE DELETE ON lowq_outbox FOR EACH ROW EXECUTE FUNCTION keep()")
    else:
        cursor.execute("DROP TRIGGER keep" + ("" if isinstance(connection, sqlite3.Connection) else " ON lowq_outbox"))
    connection.commit()


def test_what_is_pushed_twice_as_the_relay_died_is_there_once_and_in_order(
    app: lowq.Lowq, url: str, connect: Callable[[], Any]
) -> None:
    order_sync, connection = worker_of(app, max_payloads=1), connect()
    many = worker_of(app, "Many", merge="append")
    for name in (order_sync, many):
        outbox.push(name, ({"id": 42, "payload": number} for number in range(3)), connection=connection)
    connection.commit()
    keep_rows(connection, keeps=True)
    with pytest.raises(Exception, match="died"):
        outbox.Relay(app, url).run_once()
    with order_sync.queue.consumer() as consumer:  # the first payload is done before the relay comes back
        (job,) = consumer.take(timeout=PATIENCE)
        assert job.payloads == [0]
        job.ack()
    keep_rows(connection, keeps=False)
    outbox.push(order_sync, 42, 3, connection=connection)
    connection.commit()
    assert outbox.Relay(app, url).run_once() == 7
    # The first one is repeated in its place: behind 2, an old state would have been the last.
    assert payloads(app, 42) == [0, 1, 2, 3]
    assert payloads(app, 42, "Many") == [0, 0, 1, 1, 2, 2], "each stays, and order holds"


def test_a_connection_whose_rows_are_dicts_may_be_relayed_from(
    app: lowq.Lowq, url: str, connect: Callable[[], Any]
) -> None:
    def with_dicts() -> Any:
        connection = connect()
        connection.row_factory = psycopg.rows.dict_row if url.startswith("postgres") else sqlite_dict
        return connection

    def sqlite_dict(cursor: Any, row: Any) -> dict[str, Any]:
        return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}

    order_sync, connection = worker_of(app), connect()
    outbox.push(order_sync, 42, 1, connection=connection)
    connection.commit()
    relay = outbox.Relay(app, with_dicts)
    assert relay.run_once() == 1
    assert (relay.count_rows(), payloads(app, 42)) == ((0, 0), [1])


def test_a_row_that_can_not_be_pushed_keeps_its_error_and_stops_nobody(
    app: lowq.Lowq, url: str, connect: Callable[[], Any]
) -> None:
    order_sync, connection = worker_of(app), connect()
    outbox.push(order_sync, 42, 1, connection=connection)
    cursor = connection.cursor()
    cursor.execute("INSERT INTO lowq_outbox (queue, id, payload) VALUES ('OrderSync', '42', '{no JSON')")
    cursor.execute(f"INSERT INTO lowq_outbox (queue, id) VALUES ('OrderSync', '{'x' * 600}')")
    cursor.execute("INSERT INTO lowq_outbox (queue, id) VALUES ('{Order}Sync', '42')")
    outbox.push(order_sync, 42, 2, connection=connection)
    outbox.push(order_sync, 43, 3, connection=connection)
    connection.commit()
    relay = outbox.Relay(app, url)
    assert relay.run_once() == 3
    assert (payloads(app, 42), payloads(app, 43)) == ([1, 2], [3])
    cursor = connection.cursor()
    cursor.execute("SELECT error FROM lowq_outbox ORDER BY seq")
    errors = [row[0] for row in cursor.fetchall()]
    assert errors[0].startswith("PayloadError: ")
    assert "600 bytes" in errors[1]
    assert errors[2].startswith("ConfigError: ")
    cursor.execute("UPDATE lowq_outbox SET queue = 'OrderSync', payload = '4', id = '44'")
    connection.commit()
    assert relay.run_once() == 0
    assert relay.retry_refused() == 3
    assert relay.run_once() == 3
    assert payloads(app, 44) == [4]


def test_a_payload_that_is_far_too_large_is_refused_without_being_read(
    app: lowq.Lowq, url: str, connect: Callable[[], Any]
) -> None:
    """A node that reads gigabytes is killed, and so is the next one that relays."""
    order_sync, connection = worker_of(app), connect()
    app.config.max_payload_bytes = 1000
    outbox.push(order_sync, [{"id": number, "payload": number} for number in (41, 42, 43)], connection=connection)
    set_payload = "UPDATE lowq_outbox SET payload = {} WHERE id = '{}'"
    spaces = "repeat(' ', {})" if url.startswith("postgres") else "printf('%.*c', {}, ' ')"
    cursor = connection.cursor()
    cursor.execute(set_payload.format(f"{spaces.format(8 * 2**20)} || '\"x\"'", 42))
    cursor.execute(set_payload.format(f"{spaces.format(9 * 2**20)} || '\"x\"'", 43))
    connection.commit()
    relay = outbox.Relay(app, url)
    assert relay.run_once() == 2
    assert (payloads(app, 41), payloads(app, 42)) == ([41], ["x"])
    cursor.execute("SELECT error FROM lowq_outbox")
    assert [row[0] for row in cursor.fetchall()] == [
        "PayloadError: the payload is far larger than max_payload_bytes=1000"
    ]


@pytest.mark.parametrize("column", ["queue", "id", "payload", "score", "not_before", "created_at"])
def test_text_of_sqlite_that_is_no_utf_8_stops_nobody(app: lowq.Lowq, sqlite_url: str, column: str) -> None:
    order_sync, connection = worker_of(app), open_sqlite(sqlite_url)
    outbox.push(order_sync, [{"id": 42}, {"id": 43}], connection=connection)
    connection.execute(f"UPDATE lowq_outbox SET {column} = CAST(x'22ff22' AS TEXT) WHERE id = '42'")
    connection.commit()
    relay = outbox.Relay(app, sqlite_url)
    assert relay.run_once() == 1
    assert payloads(app, 43) == [""]
    assert relay.count_rows() == (0, 1)
    connection.close()


def test_rows_of_a_queue_that_takes_none_wait_and_those_of_others_go_on(
    app: lowq.Lowq, url: str, connect: Callable[[], Any]
) -> None:
    order_sync, connection = worker_of(app), connect()
    full = worker_of(app, "Full", capacity=2)
    for number in range(4):
        outbox.push(full, number, number, connection=connection)
        outbox.push("Unknown", 42, number, connection=connection, app=app)
        outbox.push(order_sync, 42, number, connection=connection)
    connection.commit()
    relay = outbox.Relay(app, url)
    with pytest.raises(lowq.LowqError, match=r"is full|Unknown"):
        relay.run_once()
    assert payloads(app, 42) == [0, 1, 2, 3]
    assert [payloads(app, number, "Full") for number in range(4)] == [[0], [1], [], []]
    assert rows(connection) == 2 + 4
    app.queue("Unknown", 1).push(1)
    full.queue.delete([0, 1])
    assert relay.run_once() == 6
    assert payloads(app, 42, "Unknown") == [0, 1, 2, 3]
    assert [payloads(app, number, "Full") for number in range(4)] == [[], [], [2], [3]]


def test_rows_of_a_queue_that_takes_none_do_not_fill_the_batch_for_ever(
    app: lowq.Lowq, url: str, connect: Callable[[], Any]
) -> None:
    """It doesn't wait before it reads what is behind them, or it would begin with them again."""
    order_sync, connection = worker_of(app), connect()
    for name in ("Nobody", "NorThis"):
        outbox.push(name, [{"id": number} for number in range(3)], connection=connection, app=app)
    outbox.push(order_sync, 42, 1, connection=connection)
    connection.commit()
    relay = outbox.Relay(app, url, interval=NEVER, batch_size=3)
    relay.start()
    until(lambda: payloads(app, 42) == [1], "the relay goes on behind what it can't push")
    assert relay.stop(PATIENCE)
    assert rows(connection) == 6


class OneBatch(outbox.Relay):
    """Ends after a batch, as if another relay had its turn then: what that knows is in the database."""

    def _relay(self, database: Any, batch: Any) -> Any:
        done = super()._relay(database, batch)
        self.request_stop()
        return done


def set_times(connection: Any, times: str, condition: str = "1 = 1") -> None:
    connection.cursor().execute(f"UPDATE lowq_outbox SET created_at = {times} WHERE {condition}")
    connection.commit()


def scores(app: lowq.Lowq, job_id: object, queue: str = "OrderSync") -> list[float]:
    job = app.queue(queue, 1).peek(job_id)  # type: ignore[arg-type]
    return [] if job is None else [score for _, score in job.payloads]


#: SQL for the database's present, and what is added to it.
PRESENT = {"sqlite": "(julianday('now') - 2440587.5) * 86400.0 + {}", "postgr": "now() + {} * interval '1 second'"}


def test_order_outlives_the_relay(app: lowq.Lowq, url: str, connect: Callable[[], Any]) -> None:
    """Rows of one time, as those of one statement are, relayed by several in turn; then a clock that steps back."""
    order_sync, connection = worker_of(app), connect()
    outbox.push(order_sync, [{"id": 42, "payload": number} for number in range(6)], connection=connection)
    connection.commit()
    set_times(connection, "(SELECT min(created_at) FROM lowq_outbox)")
    for taken in (2, 4, 6):
        assert OneBatch(app, url, batch_size=2).run_once() == 2
        assert payloads(app, 42) == list(range(taken))
    for number, ahead in ((6, 30), (7, -30), (8, 0)):
        outbox.push(order_sync, 42, number, connection=connection)
        set_times(connection, PRESENT[url[:6]].format(ahead))
        assert outbox.Relay(app, url).run_once() == 1
    assert payloads(app, 42) == list(range(9))
    cursor = connection.cursor()
    cursor.execute("SELECT last_score FROM lowq_outbox_state")
    assert cursor.fetchall() == [(scores(app, 42)[-1],)]


def test_a_row_has_the_same_score_whenever_it_is_pushed(app: lowq.Lowq, url: str, connect: Callable[[], Any]) -> None:
    """By another relay after a crash, and by one that has gone on with other queues after a push of unknown outcome."""

    class NoReply(outbox.Relay):
        def _push_together(self, queue: Any, jobs: Any) -> Any:
            alone = super()._push_together(queue, jobs)
            if queue.name == "Uncertain":
                raise ConnectionError("no reply")
            return alone

    order_sync, _, connection = worker_of(app), worker_of(app, "Uncertain"), connect()
    for name in ("Uncertain", "OrderSync"):
        many = [{"id": 42, "payload": number} for number in range(3)]
        outbox.push(name, many, connection=connection, app=app)
    connection.commit()
    set_times(connection, "(SELECT min(created_at) FROM lowq_outbox)")
    keep_rows(connection, keeps=True)
    with pytest.raises(Exception, match="died"):
        NoReply(app, url).run_once()
    given = scores(app, 42), scores(app, 42, "Uncertain")
    assert [len(set(each)) for each in given] == [3, 3]
    keep_rows(connection, keeps=False)
    order_sync.queue.delete([42])  # or the repeats would be merged with what is there
    with pytest.raises(ConnectionError, match="no reply"):
        NoReply(app, url).run_once()
    assert rows(connection) == 3
    outbox.push(order_sync, 43, connection=connection)
    outbox.push("Uncertain", 42, 3, connection=connection, app=app)
    connection.commit()
    app.queue("Uncertain", 1).delete([42])
    assert outbox.Relay(app, url).run_once() == 5
    assert scores(app, 42) == given[0]
    assert scores(app, 42, "Uncertain")[:3] == given[1]
    assert payloads(app, 42, "Uncertain") == [0, 1, 2, 3]


def test_a_time_that_is_none_is_refused_alone_and_spoils_no_score(
    app: lowq.Lowq, url: str, connect: Callable[[], Any]
) -> None:
    order_sync, connection = worker_of(app), connect()
    present = PRESENT[url[:6]]
    times = ["9e999", "-9e999", "'2026-11-26 10:00:00'", "x'00'"]
    if not url.startswith("sqlite"):
        times = ["'infinity'", "'-infinity'"]
    outbox.push(order_sync, [{"id": 42, "payload": number} for number in range(len(times) + 2)], connection=connection)
    outbox.push(order_sync, 44, score=7, connection=connection)  # its time is of no use
    connection.commit()
    set_times(connection, times[0], "id = '44'")
    for number, at in enumerate(times):
        set_times(connection, at, f"payload = '{number}'")
    ahead = present.format(30)
    set_times(connection, ahead, f"payload = '{len(times)}'")
    relay = outbox.Relay(app, url)
    assert relay.run_once() == 3
    assert payloads(app, 42) == [len(times), len(times) + 1], "also behind one of the near future"
    first, second = scores(app, 42)
    assert first < second < first + 1
    cursor = connection.cursor()
    cursor.execute("SELECT error FROM lowq_outbox ORDER BY seq")
    errors = [row[0] for row in cursor.fetchall()]
    assert len(errors) == len(times)
    for error in errors:
        assert error.startswith("JobError: created_at=")
        assert "is no time" in error
    connection.commit()
    outbox.push(order_sync, 43, connection=connection)
    connection.commit()
    assert relay.run_once() == 1
    assert scores(app, 43)[0] < first + 1
    assert relay.count_rows() == (0, len(times))


def test_rows_from_the_future_count_as_of_now_each_time_that_they_are_pushed(
    app: lowq.Lowq, url: str, connect: Callable[[], Any]
) -> None:
    """As after the database's clock was set back."""
    order_sync, connection, present = worker_of(app), connect(), PRESENT[url[:6]]
    outbox.push(order_sync, [{"id": 42, "payload": number} for number in range(4)], connection=connection)
    connection.commit()
    for number, ahead in enumerate((7200, 90, 1e9)):
        set_times(connection, present.format(ahead), f"payload = '{number}'")
    keep_rows(connection, keeps=True)
    with pytest.raises(Exception, match="died"):
        outbox.Relay(app, url).run_once()
    given = scores(app, 42)
    order_sync.queue.delete([42])  # or the repeats would be merged with what is there
    keep_rows(connection, keeps=False)
    assert outbox.Relay(app, url).run_once() == 4
    assert (payloads(app, 42), scores(app, 42)) == ([0, 1, 2, 3], given)
    outbox.push(order_sync, 43, connection=connection)
    connection.commit()
    assert outbox.Relay(app, url).run_once() == 1
    assert max(given) < scores(app, 43)[0] < min(given) + PATIENCE


def test_a_relay_ends_while_it_waits(app: lowq.Lowq, url: str) -> None:
    waits = threading.Event()

    class Connection(psycopg.Connection[Any]):
        def notifies(self, **options: Any) -> Any:
            waits.set()
            return super().notifies(**options)

    class Lite(sqlite3.Connection):
        def cursor(self, *args: Any, **options: Any) -> Any:
            waits.set()
            return super().cursor(*args, **options)

    def open_one() -> Any:
        if url.startswith("sqlite"):
            return sqlite3.connect(path_of(url), factory=Lite, check_same_thread=False)
        return Connection.connect(url)

    relay = outbox.Relay(app, open_one, interval=NEVER)
    relay.start()
    assert waits.wait(PATIENCE)
    assert relay.stop(PATIENCE)


#: Prints the options of the connection that the relay opens to Django's database.
OPTIONS = """
import json, sys
import django.conf
from psycopg.conninfo import conninfo_to_dict
from lowq.contrib.outbox.databases import connector

at = conninfo_to_dict(sys.argv[1])
database = {"ENGINE": "django.db.backends.postgresql", "NAME": at["dbname"], "OPTIONS": {"keepalives_count": 7}}
django.conf.settings.configure(
    DATABASES={"default": {**database, "HOST": at["host"], "PORT": at["port"], "USER": at["user"]}}
)
print(json.dumps(connector("default")().info.get_parameters()))
"""


def test_a_postgresql_that_vanishes_without_a_word_is_noticed_after_a_while(postgres_url: str) -> None:
    def opened(url: str) -> dict[str, str]:
        with closing(connector(url)()) as connection:
            return dict(connection.info.get_parameters())

    ran = subprocess.run(
        [sys.executable, "-c", OPTIONS, postgres_url], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    rows = (
        (opened(postgres_url), "3"), (opened(f"{postgres_url}?keepalives_count=7"), "7"), (json.loads(ran.stdout), "7"),
    )  # fmt: skip
    for found, count in rows:
        with case(found):
            kept = [found[name] for name in ("keepalives_idle", "keepalives_interval", "tcp_user_timeout")]
            assert (kept, found["keepalives_count"]) == (["10", "5", "30000"], count)


def test_whoever_may_write_to_a_database_of_sqlite_may_relay_from_it(app: lowq.Lowq, sqlite_url: str) -> None:
    path = Path(path_of(sqlite_url))
    path.chmod(0o660)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    outbox.Relay(app, sqlite_url).run_once()
    of_database, of_lock = path.stat(), Path(f"{path}-lowq-outbox").stat()
    assert (of_lock.st_mode, of_lock.st_uid, of_lock.st_gid) == (
        of_database.st_mode, of_database.st_uid, of_database.st_gid,
    )  # fmt: skip


def test_of_two_relays_one_is_at_work_and_the_other_takes_over(
    app: lowq.Lowq, url: str, connect: Callable[[], Any]
) -> None:
    order_sync, connection = worker_of(app), connect()
    entered, goes_on, pushes = threading.Event(), threading.Event(), []

    def slow(worker: Any, jobs: Any, call: Callable[[], Any]) -> Any:
        pushes.append([job["payload"] for job in jobs])
        entered.set()
        assert goes_on.wait(60)
        return call()

    first_app = lowq.Lowq(redis_url=app.config.redis_url, client_middlewares=[slow])
    first, second = outbox.Relay(first_app, url, interval=0.01), outbox.Relay(app, url, interval=0.01)
    order_sync.push(1)
    outbox.push(order_sync, 42, 1, connection=connection)
    connection.commit()
    first.start()
    assert entered.wait(60)
    second.start()
    outbox.push(order_sync, 42, 2, connection=connection)  # the relay keeps no writer waiting
    connection.commit()
    assert outbox.Relay(app, url).run_once() == 0
    assert payloads(app, 42) == []
    goes_on.set()
    assert first.stop(60)
    until(lambda: rows(connection) == 0, "the other relay pushes the rest")
    assert second.stop(60)
    assert payloads(app, 42) == [1, 2]
    first_app.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_commit_wakes_the_relay(app: lowq.Lowq, request: pytest.FixtureRequest, kind: str) -> None:
    url = str(request.getfixturevalue(f"{kind}_url"))
    order_sync = worker_of(app)
    relay = outbox.Relay(app, url, interval=NEVER)
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        for number in range(3):
            connection = open_sqlite(url) if kind == "sqlite" else psycopg.connect(url)
            outbox.push(order_sync, number, number, connection=connection)
            connection.commit()
            connection.close()
            until(lambda n=number: payloads(app, n) == [n], "the relay pushes it")  # type: ignore[misc]
    finally:
        relay.request_stop()
        last = open_sqlite(url) if kind == "sqlite" else psycopg.connect(url)
        outbox.push(order_sync, 42, connection=last)  # wakes it
        last.commit()
        last.close()
        thread.join(60)
    assert not thread.is_alive()


# --- order among transactions that overlap -----------------------------------------------------------------------


class Overlap:
    """Open transactions in PostgreSQL, and a relay that looks again and again, as one of a running process does."""

    def __init__(self, app: lowq.Lowq, url: str) -> None:
        self.url, self.app = url, app
        self.worker = worker_of(app)
        self._opened: list[psycopg.Connection[Any]] = []

    def begin(self) -> psycopg.Connection[Any]:
        self._opened.append(psycopg.connect(self.url))
        self._opened[-1].execute("SELECT 1")
        return self._opened[-1]

    def push(self, transaction: psycopg.Connection[Any], version: int, job_id: int = 42, **options: Any) -> None:
        outbox.push(self.worker, job_id, version, connection=transaction, **options)

    def relay(self) -> list[int]:
        """A round of a relay that has just been started; returns what waits for 42."""
        outbox.Relay(self.app, self.url).run_once()
        return payloads(self.app, 42)

    def close(self) -> None:
        for connection in self._opened:
            connection.close()


@pytest.fixture
def overlap(app: lowq.Lowq, postgres_url: str) -> Iterator[Overlap]:
    overlap = Overlap(app, postgres_url)
    yield overlap
    overlap.close()


def test_a_later_row_does_not_pass_an_earlier_one_that_is_not_committed(overlap: Overlap) -> None:
    first, second = overlap.begin(), overlap.begin()
    overlap.push(first, 1)
    overlap.push(second, 2)
    second.commit()
    assert overlap.relay() == []
    first.commit()
    assert overlap.relay() == [1, 2]


def test_nor_at_whatever_moment_of_a_round_the_earlier_one_is_committed(overlap: Overlap) -> None:
    """A commit between two queries of the relay is seen by one of them, and not by the other."""
    meanwhile: list[Callable[[], object]] = []
    steps = 0

    class Cursor(psycopg.Cursor[Any]):
        def execute(self, *args: Any, **options: Any) -> Any:
            nonlocal steps
            steps -= 1
            if steps == 0:
                meanwhile.pop()()
            return super().execute(*args, **options)

    for step in range(3, 16):
        with case(step):
            first, second = overlap.begin(), overlap.begin()
            overlap.push(first, 1, job_id=step)
            overlap.push(second, 2, job_id=step)
            second.commit()
            meanwhile.append(first.commit)
            steps = step
            outbox.Relay(overlap.app, lambda: psycopg.connect(overlap.url, cursor_factory=Cursor)).run_once()
            if meanwhile:
                meanwhile.pop()()
            outbox.Relay(overlap.app, overlap.url).run_once()
            assert payloads(overlap.app, step) == [1, 2]
            first.close()
            second.close()


def test_nor_where_the_later_one_is_of_the_older_transaction(overlap: Overlap) -> None:
    """By the numbers of transactions (``xid < pg_snapshot_xmin``) the second row would go first."""
    old, young = overlap.begin(), overlap.begin()
    old.execute("UPDATE orders SET version = 1 WHERE id = 1")  # so it has a number
    overlap.push(young, 1)
    overlap.push(old, 2)
    old.commit()
    assert overlap.relay() == []
    young.commit()
    assert overlap.relay() == [1, 2]


def test_rows_have_the_order_of_the_changes_that_they_tell_of(overlap: Overlap) -> None:
    """A lock on the entity's row orders both, whichever transaction is older. By (xid, seq) the second is first."""
    old, young = overlap.begin(), overlap.begin()
    old.execute("UPDATE orders SET version = 1 WHERE id = 1")
    young.execute("UPDATE orders SET version = 1 WHERE id = 42")
    overlap.push(young, 1)
    done = threading.Event()

    def change_too() -> None:
        old.execute("UPDATE orders SET version = 2 WHERE id = 42")  # waits for the lock
        overlap.push(old, 2)
        old.commit()
        done.set()

    thread = threading.Thread(target=change_too)
    thread.start()
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    with psycopg.connect(overlap.url, autocommit=True) as looking:
        until(lambda: looking.execute(waiting).fetchone() == (1,), "the lock is waited for")
    assert overlap.relay() == []
    young.commit()
    assert done.wait(60)
    thread.join()
    assert overlap.relay() == [1, 2]


def test_a_transaction_that_ends_without_its_row_lets_the_others_go(overlap: Overlap) -> None:
    first, second, third = overlap.begin(), overlap.begin(), overlap.begin()
    overlap.push(first, 1)
    third.execute("SAVEPOINT before")
    overlap.push(third, 1)
    third.execute("ROLLBACK TO SAVEPOINT before")
    overlap.push(second, 2)
    second.commit()
    assert overlap.relay() == []
    first.rollback()
    assert overlap.relay() == [2], "and what was taken back to a savepoint delays nobody"


def test_order_holds_when_numbers_begin_again(overlap: Overlap) -> None:
    """TRUNCATE ... RESTART IDENTITY: numbers that this relay has seen may be given once more."""
    relay = outbox.Relay(overlap.app, overlap.url, interval=0.01)
    relay.start()
    before = overlap.begin()
    for number in range(10):
        overlap.push(before, number, job_id=41)
    before.commit()
    until(lambda: len(payloads(overlap.app, 41)) == 10, "the relay has seen numbers up to 10")
    with psycopg.connect(overlap.url) as connection:
        connection.execute("TRUNCATE lowq_outbox RESTART IDENTITY")
    first, second, third = overlap.begin(), overlap.begin(), overlap.begin()
    overlap.push(first, 1)
    overlap.push(second, 2)
    second.commit()
    overlap.push(third, 3, job_id=43, score=1)
    third.commit()
    until(lambda: payloads(overlap.app, 43) == [3], "the relay has looked")
    assert payloads(overlap.app, 42) == []
    first.commit()
    until(lambda: payloads(overlap.app, 42) == [1, 2], "both, in order")
    assert relay.stop(60)


def test_a_single_run_may_wait_for_the_transactions_that_it_has_found(overlap: Overlap) -> None:
    """Not for those that come later: there may be one at any time."""
    first, second, third = overlap.begin(), overlap.begin(), overlap.begin()
    looks: list[int] = []

    class Cursor(psycopg.Cursor[Any]):
        def execute(self, query: Any, *args: Any, **options: Any) -> Any:
            found = super().execute(query, *args, **options)
            if "pg_locks" in query:
                looks.append(len(looks))
                if len(looks) == 1:
                    overlap.push(third, 3)
                elif len(looks) == 3:
                    first.commit()
            return found

    overlap.push(first, 1)
    overlap.push(second, 2)
    second.commit()
    relay = outbox.Relay(overlap.app, lambda: psycopg.connect(overlap.url, cursor_factory=Cursor))
    assert relay.run_once(wait=NEVER) == 2
    assert payloads(overlap.app, 42) == [1, 2]
    third.commit()
    assert overlap.relay() == [1, 2, 3]


def test_a_prepared_transaction_is_waited_for(overlap: Overlap) -> None:
    first, second = psycopg.connect(overlap.url, autocommit=True), overlap.begin()
    first.execute("DROP TRIGGER lowq_outbox_notify ON lowq_outbox")  # nobody may NOTIFY in such a transaction
    relay = outbox.Relay(overlap.app, overlap.url, interval=0.01)
    relay.start()
    first.execute("BEGIN")
    overlap.push(first, 1)
    overlap.push(second, 2)
    for marker, prepares in ((7, True), (8, False)):  # before and after it gets another name
        overlap.push(second, 1, job_id=marker, score=1)
        second.commit()
        until(lambda n=marker: payloads(overlap.app, n), "the relay has looked")  # type: ignore[misc]
        if prepares:
            first.execute("PREPARE TRANSACTION 'pending'")
    assert payloads(overlap.app, 42) == []
    first.execute("COMMIT PREPARED 'pending'")
    until(lambda: payloads(overlap.app, 42) == [1, 2], "both, in order")
    assert relay.stop(60)
    first.close()


def test_transactions_that_push_nothing_delay_nobody(overlap: Overlap, postgres: PostgresServer) -> None:
    report, change, elsewhere = overlap.begin(), overlap.begin(), psycopg.connect(postgres.url())
    report.execute("SELECT count(*) FROM lowq_outbox")
    change.execute("UPDATE orders SET version = 1 WHERE id = 1")
    elsewhere.execute("CREATE TABLE something (id int)")
    writer = overlap.begin()
    overlap.push(writer, 1)
    writer.commit()
    assert overlap.relay() == [1]
    elsewhere.close()


def test_a_row_with_a_score_waits_for_nobody(overlap: Overlap) -> None:
    open_one, second = overlap.begin(), overlap.begin()
    overlap.push(open_one, 1, score=1)
    overlap.push(second, 2, score=2)
    overlap.push(second, 3, job_id=43)
    second.commit()
    assert overlap.relay() == [2]
    assert payloads(overlap.app, 43) == []
    open_one.commit()
    assert overlap.relay() == [1, 2]
    assert payloads(overlap.app, 43) == [3]


def test_transactions_that_always_overlap_hold_rows_back_for_one_of_them_only(overlap: Overlap) -> None:
    """There is an open one at any time, and rows that were committed before it began are relayed all the same."""
    relay = outbox.Relay(overlap.app, overlap.url, interval=0.01)
    relay.start()
    before = overlap.begin()
    overlap.push(before, 0, job_id=100)
    for number in range(1, 5):
        current = overlap.begin()
        overlap.push(current, number, job_id=100 + number)
        before.commit()
        marker = overlap.begin()  # the relay has seen the one that is open now
        overlap.push(marker, 1, job_id=200 + number, score=1)
        marker.commit()
        until(lambda n=number: payloads(overlap.app, 200 + n), "the relay has looked")  # type: ignore[misc]
        before = current
    until(lambda: payloads(overlap.app, 102) == [2], "rows before the last one are pushed while that is open")
    assert payloads(overlap.app, 104) == []
    before.commit()
    until(lambda: payloads(overlap.app, 104) == [4], "the last one")
    assert relay.stop(60)


def test_versions_pushed_by_many_at_once_arrive_in_order(overlap: Overlap) -> None:
    """Writers that lock the entity's row before they push, and a relay at work all the time."""
    relay = outbox.Relay(overlap.app, overlap.url, interval=0.01, batch_size=5)
    relay.start()

    def write(seed: int) -> None:
        with psycopg.connect(overlap.url) as connection:
            for turn in range(40):
                order = (seed * 7 + turn * 3) % 4 + 1
                other = 5 + seed
                connection.execute("UPDATE orders SET version = version + 1 WHERE id = %s", (other,))
                found = connection.execute(
                    "UPDATE orders SET version = version + 1 WHERE id = %s RETURNING version", (order,)
                ).fetchone()
                assert found is not None
                overlap.push(connection, found[0], job_id=order)
                overlap.push(connection, turn, job_id=other)
                if turn % 5 == 4:
                    connection.rollback()
                else:
                    connection.commit()

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with psycopg.connect(overlap.url, autocommit=True) as looking:
        until(lambda: rows(looking) == 0, "all rows are pushed")
        last: dict[int, int] = dict(looking.execute("SELECT id, version FROM orders WHERE id <= 4").fetchall())
    assert relay.stop(60)
    assert {order: payloads(overlap.app, order) for order in last} == {
        order: list(range(1, version + 1)) for order, version in last.items()
    }
    for seed in range(4):
        assert payloads(overlap.app, 5 + seed) == [turn for turn in range(40) if turn % 5 != 4]


def test_the_printed_sql_makes_the_table(tmp_path: Path, app: lowq.Lowq, postgres: PostgresServer) -> None:
    url = postgres.empty_database()
    with psycopg.connect(url) as connection:
        connection.execute(outbox.sql("postgresql"))
    path = tmp_path / "printed.db"
    sqlite = sqlite3.connect(path)
    sqlite.executescript(outbox.sql("sqlite"))
    sqlite.close()
    for made in (url, f"sqlite:///{path}"):
        assert outbox.Relay(app, made).run_once() == 0


def test_a_trigger_of_the_database_may_push(app: lowq.Lowq, postgres_url: str) -> None:
    worker_of(app)
    with psycopg.connect(postgres_url) as connection:
        connection.execute(
            "CREATE FUNCTION order_changed() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "INSERT INTO lowq_outbox (queue, id, payload) VALUES ('OrderSync', NEW.id, to_jsonb(NEW)::text); "
            "RETURN NULL; END $$"
        )
        connection.execute(
            "CREATE TRIGGER order_changed AFTER UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION order_changed()"
        )
        connection.execute("UPDATE orders SET version = 7 WHERE id = 42")
    assert outbox.Relay(app, postgres_url).run_once() == 1
    assert payloads(app, 42) == [json.loads('{"id": 42, "version": 7}')]
