"""Write rows through a connection of the caller's: whatever library it is of, and in its transaction.

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
from collections.abc import Mapping, Sequence
from typing import Any

from lowq.contrib.outbox.table import COLUMNS, Row, exists_query, insert_statement, statements
from lowq.errors import ConfigError

#: The package of a driver -> its database, and how it writes the placeholder number n.
_DRIVERS = {
    "sqlite3": ("sqlite", "?"),
    "aiosqlite": ("sqlite", "?"),
    "psycopg": ("postgresql", "%s"),
    "psycopg2": ("postgresql", "%s"),
    "pg8000": ("postgresql", "%s"),
    "asyncpg": ("postgresql", "${}"),
}
_NAMED = tuple(f":{name}" for name in COLUMNS)


def write(connection: Any, rows: Sequence[Row]) -> None:
    """Inserts rows in the transaction of a sync connection.

    Raises:
        ConfigError: it is async, or of a library that is not known. What the database raises.
    """
    connection = _unscoped(connection)
    _refuse_async(connection)
    if _is_sqlalchemy(connection):
        _write_by_sqlalchemy(connection, rows)
        return
    dialect, placeholder = driver_of(connection)
    statement = insert_statement(dialect, (placeholder,) * len(COLUMNS))
    _with_cursor(connection, lambda cursor: cursor.executemany(statement, rows))


async def awrite(connection: Any, rows: Sequence[Row]) -> None:
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
        await connection.run_sync(_write_by_sqlalchemy, rows)
        return
    dialect, placeholder = driver_of(connection)
    numbered = tuple(placeholder.format(number) for number in range(1, len(COLUMNS) + 1))
    statement = insert_statement(dialect, numbered)
    if hasattr(connection, "executemany"):
        await connection.executemany(statement, rows)
    else:
        async with connection.cursor() as cursor:
            await cursor.executemany(statement, rows)


def create_table(connection: Any) -> bool:
    """Makes the table in the transaction of a sync connection, unless it is there. Returns whether it was made."""
    connection = _unscoped(connection)
    _refuse_async(connection)
    if _is_sqlalchemy(connection):
        return _create_by_sqlalchemy(connection)
    dialect, _ = driver_of(connection)

    def create(cursor: Any) -> bool:
        cursor.execute(exists_query(dialect))
        row = cursor.fetchone()
        if next(iter(row.values() if isinstance(row, Mapping) else row)):
            return False
        for statement in statements(dialect):
            cursor.execute(statement)
        return True

    return bool(_with_cursor(connection, create))


def driver_of(connection: Any) -> tuple[str, str]:
    """The database of a driver's connection or cursor, and its placeholder.

    Raises:
        ConfigError: the driver is not known.
    """
    if _is_django(connection):
        if connection.vendor in ("postgresql", "sqlite"):
            return connection.vendor, "%s"
        raise ConfigError(
            f"the outbox works with postgresql and sqlite; this connection of Django is {connection.vendor}"
        )
    for package in _packages_of(connection):
        if package in _DRIVERS:
            return _DRIVERS[package]
    raise ConfigError(
        f"connection={_named(connection)} is of no library that the outbox knows: give a connection or a cursor of "
        f"{', '.join(_DRIVERS)}, a Session or Connection of SQLAlchemy, or django.db.connection"
    )


def _with_cursor(connection: Any, use: Any) -> Any:
    if hasattr(connection, "fetchone"):  # a cursor already
        return use(connection)
    cursor = connection.cursor()
    try:
        return use(cursor)
    finally:
        cursor.close()


def _write_by_sqlalchemy(connection: Any, rows: Sequence[Row]) -> None:
    from sqlalchemy import text

    connection = _sqlalchemy_connection(connection)
    statement = insert_statement(connection.dialect.name, _NAMED)
    connection.execute(text(statement), [dict(zip(COLUMNS, row, strict=True)) for row in rows])


def _create_by_sqlalchemy(connection: Any) -> bool:
    connection = _sqlalchemy_connection(connection)
    dialect = connection.dialect.name
    if connection.exec_driver_sql(exists_query(dialect)).scalar():
        return False
    for statement in statements(dialect):
        connection.exec_driver_sql(statement)
    return True


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
    """The session that a scoped one of SQLAlchemy stands for."""
    is_scoped = _is_sqlalchemy(connection) and hasattr(connection, "session_factory")
    return connection() if is_scoped else connection


def _packages_of(connection: Any) -> list[str]:
    return [kind.__module__.partition(".")[0] for kind in type(connection).__mro__]


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
        getattr(type(connection), "execute", None)
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
