"""The tables ``lowq_outbox`` and ``lowq_outbox_state``: how they are made, and how a row gets into the first, through a
connection of the caller's, of whatever library, and in its transaction.

==========  ========================================================================================================
column      content
==========  ========================================================================================================
seq         the order of the rows: given when a row is inserted
queue       the queue's name
id          the job's id
payload     as the queue encodes it; by default JSON
score       the payload's order within its id; NULL: ``created_at`` gives it
            (noted here by the relay when a push was tried and the row stays)
not_before  when the job is to run; NULL: now
created_at  when the row was inserted
error       why the relay could not push the row; NULL: it waits to be pushed
==========  ========================================================================================================

Any program, or a trigger of the database, may insert rows: queue, id and payload are enough.

``lowq_outbox_state`` has one row at most, of the relay: ``last_score``, the highest score given for a ``created_at``.

=====================================================  =============================  ==========================
the caller has                                         sync                           async
=====================================================  =============================  ==========================
SQLAlchemy                                             Session, Connection            AsyncSession, AsyncConnection
Django                                                 django.db.connection
a driver of PostgreSQL: its connection or its cursor   psycopg, psycopg2, pg8000      psycopg, asyncpg
a driver of SQLite: its connection or its cursor       sqlite3                        aiosqlite
=====================================================  =============================  ==========================

None of these libraries is imported here, except by a caller that has it.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, TypeVar

from lowq.errors import ConfigError

Found = TypeVar("Found")

#: queue, id, payload, score, not_before (Unix time, seconds).
Row = tuple[str, str, str, float | None, float | None]

COLUMNS = ("queue", "id", "payload", "score", "not_before")

_STATE = "CREATE TABLE lowq_outbox_state (last_score double precision NOT NULL)"

# The identity column must have no cache: a session that takes numbers ahead would insert an older number later.
_POSTGRESQL = (
    """\
CREATE TABLE lowq_outbox (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue text NOT NULL,
    id text NOT NULL,
    payload text NOT NULL DEFAULT '""',
    score double precision,
    not_before timestamptz,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    error text
)""",
    _STATE,
    # Wakes the relay when the transaction is committed.
    """\
CREATE FUNCTION lowq_outbox_notify() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_notify('lowq_outbox', ''); RETURN NULL; END $$""",
    """\
CREATE TRIGGER lowq_outbox_notify AFTER INSERT ON lowq_outbox
    FOR EACH STATEMENT EXECUTE FUNCTION lowq_outbox_notify()""",
)

_SQLITE = (
    """\
CREATE TABLE lowq_outbox (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    queue TEXT NOT NULL,
    id TEXT NOT NULL,
    payload TEXT NOT NULL DEFAULT '""',
    score REAL,
    not_before REAL,
    created_at REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0),
    error TEXT
)""",
    _STATE,
)

_STATEMENTS = {"postgresql": _POSTGRESQL, "sqlite": _SQLITE}
_EXISTS = {
    "postgresql": "SELECT to_regclass('lowq_outbox') IS NOT NULL AND to_regclass('lowq_outbox_state') IS NOT NULL",
    "sqlite": (
        "SELECT count(*) = 2 FROM sqlite_master WHERE type = 'table' AND name IN ('lowq_outbox', 'lowq_outbox_state')"
    ),
}
_VALUES = {
    "postgresql": "{}, {}, {}, CAST({} AS double precision), to_timestamp(CAST({} AS double precision))",
    "sqlite": "{}, {}, {}, {}, {}",
}


#: The package of a driver -> its database, and how it writes the placeholder number n.
_DRIVERS = {
    "sqlite3": ("sqlite", "?"),
    "aiosqlite": ("sqlite", "?"),
    "psycopg": ("postgresql", "%s"),
    "psycopg2": ("postgresql", "%s"),
    "pg8000": ("postgresql", "%s"),
    "asyncpg": ("postgresql", "${}"),
}
_OF_MYSQL = {"MySQLdb", "pymysql", "mysql", "mariadb", "aiomysql", "asyncmy"}
_NAMED = tuple(f":{name}" for name in COLUMNS)


# --- statements ---


def unsupported(database: str) -> ConfigError:
    """The error for a database that the outbox does not work with."""
    why = ""
    if database in ("mysql", "mariadb"):
        why = ": it does not show which open transactions have inserted rows, so rows of one id could change places"
    return ConfigError(f"the outbox works with postgresql and sqlite, not with {database!r:.60}{why}")


def _of_dialect(found: Mapping[str, Found], dialect: str) -> Found:
    if dialect not in found:
        raise unsupported(dialect)
    return found[dialect]


def statements(dialect: str) -> tuple[str, ...]:
    """The statements that make the table, in their order.

    Raises:
        ConfigError: no such database.
    """
    return _of_dialect(_STATEMENTS, dialect)


def exists_query(dialect: str) -> str:
    """The query whose single value says whether the table is there."""
    return _of_dialect(_EXISTS, dialect)


def insert_statement(dialect: str, placeholders: tuple[str, ...]) -> str:
    """The statement that inserts a `Row`. ``placeholders``: as the driver writes them."""
    values = _of_dialect(_VALUES, dialect).format(*placeholders)
    return f"INSERT INTO lowq_outbox ({', '.join(COLUMNS)}) VALUES ({values})"


# --- through a connection ---


def insert(connection: Any, rows: Sequence[Row]) -> None:
    """Inserts rows in the transaction of a sync connection.

    Raises:
        ConfigError: it is async, or of a library that is not known. What the database raises.
    """
    connection = _unscoped(connection)
    _refuse_async(connection)
    if _is_sqlalchemy(connection):
        _insert_by_sqlalchemy(connection, rows)
        return
    dialect, placeholder = driver_of(connection)
    with _cursor_of(connection) as cursor:
        cursor.executemany(insert_statement(dialect, (placeholder,) * len(COLUMNS)), rows)


async def ainsert(connection: Any, rows: Sequence[Row]) -> None:
    """Inserts rows in the transaction of an async connection.

    Raises:
        ConfigError: it is sync, or of a library that is not known. What the database raises.
    """
    connection = _unscoped(connection)
    if not _is_async(connection):
        raise ConfigError(
            f"outbox.apush: {_named(connection)} is a sync connection; write outbox.push(...), in a thread of its own "
            "if it may block"
        )
    if _is_sqlalchemy(connection):
        await connection.run_sync(_insert_by_sqlalchemy, rows)
        return
    dialect, placeholder = driver_of(connection)
    numbered = tuple(placeholder.format(number) for number in range(1, len(COLUMNS) + 1))
    statement = insert_statement(dialect, numbered)
    if hasattr(connection, "executemany"):
        await connection.executemany(statement, rows)
    else:
        async with connection.cursor() as cursor:
            await cursor.executemany(statement, rows)


def create(connection: Any) -> bool:
    """Makes the table in the transaction of a sync connection, unless it is there. Returns whether it was made."""
    connection = _unscoped(connection)
    _refuse_async(connection)
    if _is_sqlalchemy(connection):
        connection = _sqlalchemy_connection(connection)
        return _create(connection.dialect.name, connection.exec_driver_sql, lambda result: result.scalar())
    dialect, _ = driver_of(connection)
    with _cursor_of(connection) as cursor:
        return _create(dialect, cursor.execute, lambda _: _only_value(cursor.fetchone()))


def _create(dialect: str, execute: Callable[[str], Any], value_of: Callable[[Any], Any]) -> bool:
    if value_of(execute(exists_query(dialect))):
        return False
    for statement in statements(dialect):
        execute(statement)
    return True


def _only_value(row: Any) -> Any:
    return next(iter(row.values() if isinstance(row, Mapping) else row))


def driver_of(connection: Any) -> tuple[str, str]:
    """The database of a driver's connection or cursor, and its placeholder.

    Raises:
        ConfigError: the driver is not known.
    """
    if _is_django(connection):
        if connection.vendor in ("postgresql", "sqlite"):
            return connection.vendor, "%s"
        raise unsupported(connection.vendor)
    for package in _packages_of(connection):
        if package in _DRIVERS:
            return _DRIVERS[package]
        if package in _OF_MYSQL:
            raise unsupported("mysql")
    raise ConfigError(
        f"connection={_named(connection)} is of no library that the outbox knows: give a connection or a cursor of "
        f"{', '.join(_DRIVERS)}, a Session or Connection of SQLAlchemy, or django.db.connection"
    )


def _cursor_of(connection: Any) -> AbstractContextManager[Any]:
    """A cursor of the connection, which may be one itself."""
    return nullcontext(connection) if hasattr(connection, "fetchone") else closing(connection.cursor())


def _insert_by_sqlalchemy(connection: Any, rows: Sequence[Row]) -> None:
    from sqlalchemy import text

    connection = _sqlalchemy_connection(connection)
    statement = insert_statement(connection.dialect.name, _NAMED)
    connection.execute(text(statement), [dict(zip(COLUMNS, row, strict=True)) for row in rows])


def _sqlalchemy_connection(connection: Any) -> Any:
    """The Connection of a Session.

    What the session has changed is flushed first: an UPDATE locks the entity's row, and so gives concurrent
    transactions of one entity an order, which the rows of the outbox must have, too.
    """
    if not hasattr(connection, "flush"):
        return connection
    connection.flush()
    return connection.connection()


def _unscoped(connection: Any) -> Any:
    """The connection that another object stands for: a session that is scoped, one that SQLAlchemy's pool lends, a
    cursor of Django.
    """
    if _is_sqlalchemy(connection) and hasattr(connection, "session_factory"):
        return connection()
    if _is_sqlalchemy(connection) and hasattr(connection, "dbapi_connection"):
        return connection.dbapi_connection
    return connection.db if _is_django(getattr(connection, "db", None)) else connection


def _packages_of(connection: Any) -> list[str]:
    """The packages of its class, and of the class that a proxy, as tracing puts around it, claims to be."""
    kinds = [*type(connection).__mro__, *connection.__class__.__mro__]
    return [kind.__module__.partition(".")[0] for kind in kinds]


def _is_sqlalchemy(connection: Any) -> bool:
    return "sqlalchemy" in _packages_of(connection)


def _is_django(connection: Any) -> bool:
    return hasattr(connection, "vendor") and hasattr(connection, "settings_dict")


def _is_async(connection: Any) -> bool:
    if _is_django(connection):
        return False
    if _is_sqlalchemy(connection):
        return hasattr(connection, "run_sync")
    packages = _packages_of(connection)
    return not {"asyncpg", "aiosqlite"}.isdisjoint(packages) or inspect.iscoroutinefunction(
        getattr(connection.__class__, "execute", None)
    )


def _refuse_async(connection: Any) -> None:
    if _is_async(connection):
        raise ConfigError(
            f"{_named(connection)} is an async connection: write `await outbox.apush(...)`; for create_table "
            "`await connection.run_sync(outbox.create_table)`"
        )


def _named(connection: Any) -> str:
    kind = type(connection)
    return f"a {kind.__module__}.{kind.__qualname__}"
