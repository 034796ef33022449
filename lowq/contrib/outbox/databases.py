"""The database of the relay: it tells which rows may be pushed now, and lets one relay push them at a time.

Rows are numbered when they are inserted, and become visible when their transactions are committed, which may be in
another order. Of one id a later row must not be pushed before an earlier one that is not visible yet. So the relay
pushes a row when nothing with a lower number can come any more: it is *settled*.

SQLite has one writer at a time, who gets his numbers while he is the one: all that is visible is settled.

PostgreSQL shows in ``pg_locks`` who has a part in this. Whoever inserts into the table gets a lock on it, before his
number, and keeps it until his transaction is over. Each time

1. the relay reads the highest number M that is visible,
2. then it reads who holds the lock: transactions that have inserted, and are not committed.
   One that was not there the last time got its lock, and so its numbers, after that time: they are above the M of then,
3. so all up to the lowest of these bounds is settled; without writers, up to M.
4. Then, in a new snapshot, it reads the settled rows.

What this rests on: a lock is released after the transaction has become visible to new snapshots (2 before 4), and the
isolation level is READ COMMITTED, or 4 would see what 1 saw. Transactions that have inserted nothing here, however
long, delay nobody, and neither do those of other databases: both would with ``pg_snapshot_xmin``. Numbers of
transactions (xid) would not do for the order: whoever has written something else first has an old xid, and inserts
here late.
"""

import fcntl
import math
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from lowq.contrib.outbox.table import driver_of, exists_query, unsupported
from lowq.errors import ConfigError

#: Bytes of payloads that are read together, about: bounds memory.
READ_BYTES = 8 * 2**20
#: Seconds, at most, after which a relay that waits notices that it is to stop.
LONGEST_DEAF = 0.5
#: "lowq", as the first half of the advisory lock; the second is the table.
_LOCK = 0x6C6F7771
#: Options of libpq, unless a URL or Django says others: a server that has vanished without a word, as with its machine,
#: is noticed after half a minute. Seconds; the last one in milliseconds.
_OPTIONS: dict[str, Any] = {
    "application_name": "lowq outbox", "connect_timeout": 10, "keepalives_idle": 10, "keepalives_interval": 5,
    "keepalives_count": 3, "tcp_user_timeout": 30_000,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A row of the table."""

    seq: int
    queue: str
    id: str
    #: None: it is larger than what is read.
    payload: str | None
    score: float | None
    #: Unix time, seconds.
    not_before: float | None
    created_at: float


@dataclass(frozen=True, slots=True)
class SettledRows:
    """Rows that may be pushed now, in order."""

    jobs: list[StoredJob]
    #: The highest number that is visible, and that up to which no other can appear any more.
    seen: int = 0
    settled: int = 0
    #: The database's time, Unix time in seconds.
    now: float = 0.0
    #: The highest score that relays have given rows before.
    last_score: float = -math.inf

    @property
    def is_held_back(self) -> bool:
        """Whether rows wait for transactions that are not over."""
        return self.settled < self.seen


@dataclass
class Changes:
    """The changes of a round in the database: all of them or none."""

    #: Rows to be deleted.
    pushed: list[int] = field(default_factory=list)
    #: Rows, and why they can't be pushed.
    refused: list[tuple[int, str]] = field(default_factory=list)
    #: Rows from the future, which become those of the present.
    redated: list[int] = field(default_factory=list)
    #: Row that stays -> the score that it was given.
    scores: dict[int, float] = field(default_factory=dict)
    #: The highest score that is given now; None: as before.
    new_last_score: float | None = None


class Database:
    """A database of the relay, through a connection in autocommit mode; transactions are begun and ended by
    statements. Each call may raise whatever the driver raises.
    """

    #: SQL for the present, as a value of ``created_at``.
    now: ClassVar[str]
    #: Bytes of the largest payload that is read.
    largest_payload: int

    def __init__(self, connection: Any, placeholder: str) -> None:
        self._raw = connection
        self._placeholder = placeholder
        self._cursor = connection.cursor()

    def execute(self, statement: str, parameters: Sequence[Any] = ()) -> None:
        self._cursor.execute(statement, parameters)

    def all(self, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
        self.execute(statement, parameters)
        return list(self._cursor.fetchall())

    def one(self, statement: str) -> Any:
        return self.all(statement)[0][0]

    def read_rows(
        self, limit: int, without: Collection[str], condition: str, not_before: str, created_at: str, size: str
    ) -> list[StoredJob]:
        names = sorted(without)
        if names:
            condition += f" AND queue NOT IN ({', '.join([self._placeholder] * len(names))})"
        # The sum over those before a row bounds what is sent.
        rows = self.all(
            f"SELECT seq, queue, id, CASE WHEN {size} <= {self.largest_payload:d} THEN payload END, score, "
            f"{not_before}, {created_at} FROM ("
            f"SELECT *, sum({size}) OVER (ORDER BY seq) - {size} AS before FROM ("
            f"SELECT * FROM lowq_outbox WHERE error IS NULL AND {condition} ORDER BY seq LIMIT {limit:d}"
            f") AS oldest) AS sized WHERE before < {READ_BYTES} ORDER BY seq",
            names,
        )
        return [StoredJob(*row) for row in rows]

    def read_state(self, now: str) -> tuple[float, float]:
        """The database's time, and the highest score that was given."""
        ((at, last_score),) = self.all(f"SELECT {now}, (SELECT max(last_score) FROM lowq_outbox_state)")
        return float(at), -math.inf if last_score is None else float(last_score)

    def begin(self) -> bool:
        """Begins a round; False: another relay is at work on this database. Until `end` nobody else gets True."""
        raise NotImplementedError

    def read(self, limit: int, without: Collection[str]) -> SettledRows:
        """The first rows that may be pushed, without those of some queues."""
        raise NotImplementedError

    def end(self, changes: Changes) -> None:
        """Ends a round: deletes what was pushed, notes why others can't be, and which scores were given."""
        raise NotImplementedError

    def wait(self, seconds: float, stop: threading.Event) -> None:
        """Waits until somebody has committed rows, if the database tells; at most so long."""
        raise NotImplementedError

    def change(self, changes: Changes) -> None:
        mark = self._placeholder
        for seq, reason in changes.refused:
            self.execute(f"UPDATE lowq_outbox SET error = {mark} WHERE seq = {mark}", (reason, seq))
        if changes.scores:
            scores = [(score, seq) for seq, score in changes.scores.items()]
            self._cursor.executemany(f"UPDATE lowq_outbox SET score = {mark} WHERE seq = {mark}", scores)
        if changes.redated:
            self.execute(f"UPDATE lowq_outbox SET created_at = {self.now} WHERE seq IN ({_listed(changes.redated)})")
        if changes.pushed:
            self.execute(f"DELETE FROM lowq_outbox WHERE seq IN ({_listed(changes.pushed)})")
        if changes.new_last_score is not None:
            self.execute(f"UPDATE lowq_outbox_state SET last_score = {mark}", (changes.new_last_score,))
            if not self._cursor.rowcount:
                self.execute(f"INSERT INTO lowq_outbox_state (last_score) VALUES ({mark})", (changes.new_last_score,))

    def count_rows(self) -> tuple[int, int]:
        """How many rows wait, and how many are refused."""
        ((every, refused),) = self.all("SELECT count(*), count(error) FROM lowq_outbox")
        return every - refused, refused

    def retry_refused(self) -> int:
        """Lets refused rows wait to be pushed again; returns how many."""
        self.execute("UPDATE lowq_outbox SET error = NULL WHERE error IS NOT NULL")
        return int(self._cursor.rowcount)

    def close(self) -> None:
        with suppress(Exception):
            self._raw.close()


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


class PostgreSQL(Database):
    """A round is a transaction, in which nothing is locked but the right to relay: it keeps nobody waiting, and has no
    snapshot while Redis is asked, so VACUUM goes on.
    """

    now = "clock_timestamp()"

    def __init__(self, connection: Any, placeholder: str, hold_seconds: float) -> None:
        connection.autocommit = True
        if hasattr(connection, "row_factory"):  # of psycopg: the application's may make dicts
            connection.row_factory = import_module("psycopg.rows").tuple_row
        super().__init__(connection, placeholder)
        #: Transactions that have inserted and are not over -> a number below all that each inserts.
        self._bounds: dict[str, int] = {}
        #: The highest number that was visible when they were looked at last, and what was settled in spite of them.
        self._seen = self._settled = 0
        #: The file that has the table. TRUNCATE gives it another one, and perhaps numbers from 1 on.
        self._file: object = None
        # A process that was frozen keeps its connection open: others take over when the server has ended its session.
        self._hold = f"SET LOCAL idle_in_transaction_session_timeout = {int(hold_seconds * 1000)}"
        self._listens = hasattr(connection, "notifies") and callable(connection.notifies)
        if self._listens:
            self.execute("LISTEN lowq_outbox")

    def begin(self) -> bool:
        self.execute("BEGIN TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE")
        self.execute(self._hold)
        # For this transaction, so that it is no harm if a pool gives each transaction another session.
        if self.one(
            f"SELECT pg_try_advisory_xact_lock({_LOCK}, ('lowq_outbox'::regclass::oid::bigint & 2147483647)::int)"
        ):
            return True
        self.execute("ROLLBACK")
        return False

    def read(self, limit: int, without: Collection[str]) -> SettledRows:
        # In one statement: from then on the table is locked against TRUNCATE until the round ends.
        ((seen, file),) = self.all(
            "SELECT max(seq), pg_relation_filenode('lowq_outbox') FROM lowq_outbox WHERE error IS NULL"
        )
        if file != self._file:
            self._file, self._bounds, self._seen, self._settled = file, {}, 0, 0
        if seen is None:
            return SettledRows([])
        writers = self.all(
            "SELECT virtualtransaction, pid FROM pg_locks WHERE locktype = 'relation' AND granted "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
            "AND relation = 'lowq_outbox'::regclass AND mode = 'RowExclusiveLock' "
            "AND pid IS DISTINCT FROM pg_backend_pid()"
        )
        # Without a process it is prepared (PREPARE TRANSACTION), and may have been there before under another name.
        self._bounds = {
            name: self._bounds.get(name, self._settled if process is None else self._seen) for name, process in writers
        }
        self._seen = max(self._seen, int(seen))
        settled = self._settled = min(self._bounds.values(), default=self._seen)
        jobs = self.read_rows(
            limit,
            without,
            f"(seq <= {settled:d} OR score IS NOT NULL)",
            "extract(epoch FROM not_before)::double precision",
            "extract(epoch FROM created_at)::double precision",
            "octet_length(payload)",
        )
        now, last_score = self.read_state(f"extract(epoch FROM {self.now})::double precision")
        return SettledRows(jobs, int(seen), settled, now, last_score)

    def end(self, changes: Changes) -> None:
        self.change(changes)
        self.execute("COMMIT")

    def wait(self, seconds: float, stop: threading.Event) -> None:
        if not self._listens:
            stop.wait(seconds)
            return
        give_up_at = time.monotonic() + seconds
        while (left := give_up_at - time.monotonic()) > 0 and not stop.is_set():
            for _ in self._raw.notifies(timeout=min(left, LONGEST_DEAF), stop_after=1):
                return


class SQLite(Database):
    """The right to relay is a lock on a file beside the database, which ends with the process that has it: a
    transaction would keep all writers waiting while Redis is asked.
    """

    now = "(julianday('now') - 2440587.5) * 86400.0"

    def __init__(self, connection: Any, placeholder: str) -> None:
        connection.isolation_level = None
        connection.row_factory = None  # the application's may make dicts
        # SQLite keeps any bytes as text. A row with such text is refused; not to read it would stop all others.
        connection.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
        super().__init__(connection, placeholder)
        self._path = next((row[2] for row in self.all("PRAGMA database_list") if row[1] == "main"), "")
        self._lock: int | None = None
        #: A counter that the commits of others change, as it was before rows were read last.
        self._version: object = None

    def begin(self) -> bool:
        if self._lock is not None or not self._path:
            return True
        descriptor = os.open(f"{self._path}-lowq-outbox", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(PermissionError):  # somebody else has made it
            # As SQLite does with its files: or nobody but root could relay any more, once root has.
            owner = Path(self._path).stat()
            os.fchmod(descriptor, owner.st_mode & 0o666)
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._lock = descriptor
        return True

    def read(self, limit: int, without: Collection[str]) -> SettledRows:
        self._version = self.one("PRAGMA data_version")
        size = "length(CAST(payload AS BLOB))"
        jobs = self.read_rows(limit, without, "1", "not_before", "created_at", size)
        now, last_score = self.read_state(self.now)
        return SettledRows(jobs, now=now, last_score=last_score)

    def end(self, changes: Changes) -> None:
        if not (changes.pushed or changes.refused or changes.redated or changes.scores):
            return
        self.execute("BEGIN IMMEDIATE")
        try:
            self.change(changes)
        except BaseException:
            self.execute("ROLLBACK")
            raise
        self.execute("COMMIT")

    def wait(self, seconds: float, stop: threading.Event) -> None:
        """SQLite tells other connections nothing, but it costs little to look whether one has committed."""
        give_up_at = time.monotonic() + seconds
        while (left := give_up_at - time.monotonic()) > 0 and not stop.is_set():
            if self.one("PRAGMA data_version") != self._version:
                return
            stop.wait(min(left, 0.05))

    def close(self) -> None:
        super().close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def open_database(connection: Any, hold_seconds: float, max_payload_bytes: int) -> Database:
    """The database of a driver's connection, which is used for nothing else. ``hold_seconds``: how long a round may
    take. ``max_payload_bytes``: as in the settings.

    Raises:
        ConfigError: the driver is not known, or there is no table.
    """
    if hasattr(connection, "settings_dict"):
        raise ConfigError("the relay needs a connection of its own: Relay(app, 'default') opens one as Django does")
    dialect, placeholder = driver_of(connection)
    database = (
        PostgreSQL(connection, placeholder, hold_seconds)
        if dialect == "postgresql"
        else SQLite(connection, placeholder)
    )
    # Text may be longer than what is encoded of it, by spaces. Much longer text may not fit into memory.
    database.largest_payload = READ_BYTES + max_payload_bytes
    if not database.one(exists_query(dialect)):
        raise ConfigError(
            f"there is no table lowq_outbox, or no lowq_outbox_state: make them with outbox.create_table(connection), "
            f"or by what `lowq outbox --sql {dialect}` prints"
        )
    return database


def connector(url: str) -> Callable[[], Any]:
    """The function that opens connections to a database: of a URL, ``postgresql://...`` or ``sqlite:///path``, or of
    one of Django's by its alias.

    Raises:
        ConfigError: another database, or its driver is not installed.
    """
    scheme, colon, rest = url.partition("://")
    if re.fullmatch(r"[\w-]+", url):
        return _django_connector(url)
    kind = scheme.partition("+")[0]
    if kind in ("postgresql", "postgres") and colon:
        try:
            import psycopg
        except ImportError as error:
            raise ConfigError("the relay needs psycopg for PostgreSQL: pip install 'lowq[outbox]'") from error
        # Nothing is prepared: a pool may give each transaction another session.
        return lambda: psycopg.connect(
            **{**_OPTIONS, **psycopg.conninfo.conninfo_to_dict(f"postgresql://{rest}")}, prepare_threshold=None
        )
    if kind == "sqlite" and rest.startswith("/") and len(rest) > 1:
        import sqlite3

        # mode=rw: a mistyped path is no new database.
        path = f"file:{quote(rest[1:].partition('?')[0])}?mode=rw"
        return lambda: sqlite3.connect(path, uri=True, check_same_thread=False)
    if kind in ("mysql", "mariadb"):
        raise unsupported(kind)
    raise ConfigError(
        f"{scheme[:30]!r} is no URL of a database that the outbox works with: write "
        "postgresql://user:password@host/name or sqlite:///path/to/file.db"
    )


def _django_connector(alias: str) -> Callable[[], Any]:
    """The function that opens connections of the driver as Django does, none of which Django knows of."""
    try:
        known = import_module("django.db").connections
        known.settings  # noqa: B018 - raises unless there is a project
    except Exception as error:  # Django is not installed, or has no settings
        raise ConfigError(
            f"{alias!r:.60} is no URL, and no database of Django: {type(error).__name__}; write "
            "postgresql://user:password@host/name, or load the project: manage.py lowq"
        ) from None
    if alias not in known.settings:
        raise ConfigError(f"DATABASES of Django has no {alias!r:.60}; it has {', '.join(known.settings)}")
    options = _OPTIONS if driver_of(known[alias])[0] == "postgresql" else {}

    def connect() -> Any:
        one = known[alias].copy()
        one.settings_dict["OPTIONS"].pop("pool", None)
        return one.get_new_connection({**options, **one.get_connection_params()})

    return connect
