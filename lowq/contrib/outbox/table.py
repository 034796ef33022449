"""The tables ``lowq_outbox`` and ``lowq_outbox_state``: how they are made, and how a row gets into the first.

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
"""

from lowq.errors import ConfigError

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


def checked_dialect(dialect: str) -> str:
    """The name of a database that there is a table for.

    Raises:
        ConfigError: there is none.
    """
    if dialect not in _STATEMENTS:
        raise ConfigError(f"the outbox works with postgresql and sqlite, not with {dialect!r:.60}")
    return dialect


def statements(dialect: str) -> tuple[str, ...]:
    """What makes the table, one statement after the other.

    Raises:
        ConfigError: no such database.
    """
    return _STATEMENTS[checked_dialect(dialect)]


def exists_query(dialect: str) -> str:
    """The query whose single value says whether the table is there."""
    return _EXISTS[checked_dialect(dialect)]


def insert_statement(dialect: str, placeholders: tuple[str, ...]) -> str:
    """The statement that inserts a `Row`. ``placeholders``: as the driver writes them."""
    values = _VALUES[checked_dialect(dialect)].format(*placeholders)
    return f"INSERT INTO lowq_outbox ({', '.join(COLUMNS)}) VALUES ({values})"
