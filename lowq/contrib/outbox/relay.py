"""The relay: from the table into queues, in order, and out of the table once Redis has it.

::

    begin (one relay per database) -> read what is settled -> push, queue by queue -> delete -> wait

What holds if the process dies, or Redis or the database goes away:

==========================  ==========================================================================================
before the push             nothing has happened; the rows are read again
in the push                 some are in: the rows are pushed again, with the same scores. While a payload waits, its
                            repeat is the same payload; one that was performed is performed again, and what follows it
                            in the table follows it again. With ``merge="append"`` both stay
between push and delete     the same
after the delete            all is done
==========================  ==========================================================================================

A row keeps its score however often it is pushed: its own, or the time at which it was inserted, made to grow from row
to row of an id. With the time of the push instead, a repeat of what was performed already would come behind what still
waits. The highest score that was given is kept in the database and changes with the delete, in one transaction: so
whoever reads the rows again computes the same scores, and whoever reads later rows, higher ones. Rows that stay though
a push was tried keep what they were given in their column ``score``, as rows of other queues go on without them.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from lowq.application import Lowq
from lowq.contrib.outbox.databases import Changes, Database, SettledRows, StoredJob, connector, open_database
from lowq.errors import ConfigError, JobError, NotReplicated, PayloadError, PushError, UnknownQueueError
from lowq.logs import get_log
from lowq.options import check_queue_name

log = get_log("lowq.outbox")

#: Seconds after which rows that wait for open transactions are looked at again, as nobody tells of a rollback.
HELD_BACK_INTERVAL = 0.05
#: Seconds, at most, until a database that is away is tried again.
MAX_BACKOFF = 5.0
#: Seconds after which it is said that rows wait for an open transaction.
LONG_HELD_BACK = 10.0
#: Seconds for which the options of a queue are cached.
OPTIONS_SECONDS = 60.0
#: Characters of an error that are kept with a row.
KEPT_ERROR = 1000
#: Seconds that a row's ``created_at`` may be ahead of the database's clock, as after that was set back. As its score it
#: puts all later rows ahead as well, so a row that is further ahead is dated now.
MAX_AHEAD = 60.0


@dataclass
class _Round(Changes):
    """The results of one round."""

    #: The rows as they were read.
    found: SettledRows = field(default_factory=lambda: SettledRows([]))
    #: Row -> the score that it was given.
    given: dict[int, float] = field(default_factory=dict)
    #: (queue, id) -> the score that its last row was given.
    newest: dict[tuple[str, str], float] = field(default_factory=dict)
    #: Rows that certainly no push was tried of: what is known of their queue may be another thing the next time.
    untried: set[int] = field(default_factory=set)
    #: Errors for which rows of some queues stay for now.
    troubles: list[Exception] = field(default_factory=list)


class Relay:
    """Pushes what is committed to the table ``lowq_outbox`` of one database into its queues.

    Of several relays one is at work, and another takes over when that ends. ``connect``: opens a connection of a driver
    (psycopg, sqlite3), for the relay alone; or the URL of the database, or its alias in Django. ``interval``: seconds
    after which it looks for rows though nobody has told of any. ``batch_size``: rows that are read and pushed together,
    at most.

    `run` works in the calling thread, `start` in one of its own; `run_once` until nothing is left.
    """

    def __init__(
        self, app: Lowq, connect: Callable[[], Any] | str, *, interval: float = 1.0, batch_size: int = 1000
    ) -> None:
        if not 0 < interval <= 3600 or batch_size < 1:
            raise ConfigError(
                f"outbox.Relay: interval={interval!r} must be seconds, and batch_size={batch_size!r} rows"
            )
        self._app = app
        self._connect = connector(connect) if isinstance(connect, str) else connect
        self._interval = interval
        self._batch_size = batch_size
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        #: Queue -> when it is tried again, monotonic seconds, and why not now.
        self._held: dict[str, tuple[float, str]] = {}
        #: Whether the round before has put a queue on hold: this one reads what is behind its rows.
        self._reads_on = False
        #: Queue -> whether its payloads give their scores, and until when that is cached, monotonic seconds.
        self._reads_score: dict[str, tuple[bool, float]] = {}
        self._held_back_since: float | None = None
        #: The type of error with which the database can't be used; "": it can.
        self._away = ""

    def start(self) -> None:
        """Runs in a thread of its own until `stop`. It may end with the process at any moment."""
        self._stop.clear()
        self._thread = threading.Thread(target=self.run, name="lowq-outbox", daemon=True)
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Ends `run` after the round that is under way, wherever it runs. Waits for the thread of `start`, and returns
        whether that has ended.
        """
        self._stop.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def request_stop(self) -> None:
        """`stop` for a signal handler: waits for nothing."""
        self._stop.set()

    def run(self) -> None:
        """Relays until `stop`. When the database is away, it is tried again and again."""
        database: Database | None = None
        failures = 0
        while not self._stop.is_set():
            try:
                if database is None:
                    database = self._open()
                self._work(database)
                failures = 0
            except Exception as error:
                if database is not None:
                    database.close()
                    database = None
                self._note_away(error)
                failures += 1
                self._stop.wait(min(0.1 * 2 ** min(failures, 10), MAX_BACKOFF))
        if database is not None:
            database.close()

    def run_once(self, *, wait: float = 0.0) -> int:
        """Relays what is committed, and returns how many rows that was. What waits for open transactions, or for
        another relay, stays. ``wait``: seconds, at most, until those transactions have ended that were open when it
        looked first.

        Raises:
            LowqError: rows of some queues could not be pushed now; the others are.
            What the database raises.
        """
        count, seen_first = 0, None
        troubles: list[Exception] = []
        give_up_at = time.monotonic() + wait
        self._held.clear()
        with closing(self._open()) as database:
            while not self._stop.is_set() and database.begin():
                found = database.read(self._batch_size, self._held)
                seen_first = found.seen if seen_first is None else seen_first
                done = self._relay(database, found)
                count += len(done.pushed)
                troubles += done.troubles
                if found.jobs:
                    continue
                # Transactions that began later insert above what was seen first.
                if not found.is_held_back or found.settled >= seen_first or time.monotonic() >= give_up_at:
                    break
                self._stop.wait(HELD_BACK_INTERVAL)
        if troubles:
            raise troubles[0]
        return count

    def count_rows(self) -> tuple[int, int]:
        """How many committed rows wait in the table, and how many are kept there with an error."""
        with closing(self._open()) as database:
            return database.count_rows()

    def retry_refused(self) -> int:
        """Lets rows that could not be pushed (column ``error``) wait again; returns how many."""
        with closing(self._open()) as database:
            return database.retry_refused()

    def _open(self) -> Database:
        connection = self._connect()
        try:
            return open_database(connection, 2 * self._patience + 30, self._app.config.max_payload_bytes)
        except BaseException:
            with suppress(Exception):
                connection.close()
            raise

    @property
    def _patience(self) -> float:
        """Seconds that a push may take, or until one begins after its rows were read."""
        return self._app.config.push_timeout + 10

    def _work(self, database: Database) -> None:
        """One round, and the wait for the next."""
        if not database.begin():
            self._stop.wait(self._interval)  # and no longer listens: each commit would wake all relays
            return
        now = time.monotonic()
        held = [name for name, (until, _) in self._held.items() if self._reads_on or until > now]
        found = database.read(self._batch_size, held)
        done = self._relay(database, found)
        if self._away:
            self._away = ""
            log.info("outbox: the database is back", extra={"event": "outbox_back"})
        self._note_held_back(found, now)
        # At once: the rows of a queue that was put on hold may have been all that fitted into the found.
        self._reads_on = bool(done.troubles)
        if done.pushed or done.refused or done.redated or done.troubles:
            return
        database.wait(HELD_BACK_INTERVAL if found.is_held_back else self._interval, self._stop)

    def _relay(self, database: Database, found: SettledRows) -> _Round:
        """Pushes rows, and deletes those that are in."""
        read_at = time.monotonic()
        done = _Round(found=found)
        done.redated = [row.seq for row in found.jobs if row.score is None and _is_ahead(row, found.now)]
        if done.redated:
            # First, and alone: a row has one score however often it is pushed, and these depend on the present.
            database.end(done)
            log.warning(
                "outbox: %d rows were dated more than %g s ahead of the database's clock; they count as of now",
                len(done.redated), MAX_AHEAD, extra={"event": "outbox_redated"},
            )  # fmt: skip
            return done
        by_queue: dict[str, list[StoredJob]] = {}
        for job in found.jobs:
            by_queue.setdefault(job.queue, []).append(job)
        for name, jobs in by_queue.items():
            # A process that was frozen meanwhile may have been replaced: what it has read may be old.
            if self._stop.is_set() or time.monotonic() - read_at > self._patience:
                break
            self._push(name, jobs, done)
        gone = {*done.pushed, *(seq for seq, _ in done.refused), *done.untried}
        done.scores = {seq: score for seq, score in done.given.items() if seq not in gone}
        done.new_last_score = max(done.given.values(), default=None)
        database.end(done)
        return done

    def _push(self, name: str, rows: Sequence[StoredJob], done: _Round) -> None:
        """Pushes rows of a queue, in order. What is malformed is refused, and the others go on without it."""
        try:
            check_queue_name(name)
        except ConfigError as error:  # no queue will ever have this name
            for row in rows:
                self._refuse(row, error, done)
            return
        jobs: list[dict[str, Any]] = []
        sources: dict[int, StoredJob] = {}  # the identity of a job -> its row
        try:
            for row in rows:
                try:
                    jobs.append(self._job(row, done))
                except JobError as error:
                    self._refuse(row, error, done)
                    continue
                sources[id(jobs[-1])] = row
            queue = self._app.queue(name)
            singly = self._push_together(queue, jobs)
            alone = {id(job) for job in singly}
            done.pushed += [sources[id(job)].seq for job in jobs if id(job) not in alone]
            for job in singly:
                try:
                    queue.push([job])
                    done.pushed.append(sources[id(job)].seq)
                except JobError as error:
                    self._refuse(sources[id(job)], error, done)
        except Exception as error:
            if isinstance(error, PushError):
                done.pushed += [sources[job].seq for job in _accepted(error, jobs)]
            elif isinstance(error, ConfigError | UnknownQueueError):
                done.untried.update(row.seq for row in rows)
                self._reads_score.pop(name, None)
            self._hold(name, error, done)
        else:
            if self._held.pop(name, None) is not None:
                log.info("outbox: queue %r takes jobs again", name, extra={"event": "outbox_back", "queue": name})

    def _push_together(self, queue: Any, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Pushes jobs; returns those that are to be pushed one by one, as one of them is malformed."""
        if not jobs:
            return []
        try:
            queue.push(jobs)
        except JobError:
            return jobs
        except PushError as error:
            if not isinstance(error.__cause__, JobError):
                raise
            accepted = _accepted(error, jobs)
            return [job for job in jobs if id(job) not in accepted]
        return []

    def _job(self, row: StoredJob, done: _Round) -> dict[str, Any]:
        """The job of a row.

        Raises:
            PayloadError: the payload can't be decoded, or is too large to be read. JobError: ``created_at`` gives no
            score. LowqError: the registry can't be read.
        """
        if row.payload is None:
            raise PayloadError(f"the payload is far larger than max_payload_bytes={self._app.config.max_payload_bytes}")
        typed = self._app.payload_type_of(row.queue)
        load = self._app.config.load_payload if typed is None else typed.load
        try:
            payload = load(row.payload.encode())
        except Exception as error:
            raise PayloadError(f"the payload can't be decoded: {type(error).__name__}: {error}") from error
        job: dict[str, Any] = {"id": row.id, "payload": payload}
        if row.not_before is not None:
            job["perform_at"] = row.not_before
        if row.score is not None:
            job["score"] = row.score
        elif not self._payload_gives_score(row.queue):
            job["score"] = self._give_score(row, done)
        return job

    def _give_score(self, row: StoredJob, done: _Round) -> float:
        """The score that a row has each time it is pushed. They grow from row to row of an id, whatever the clock of
        the database does, and depend on nothing but what is in the database and the rows of the id before it: not on
        those of other queues, which may be on hold the next time.

        Raises:
            JobError: ``created_at`` is no time.
        """
        at: object = row.created_at
        if not _is_time(at):
            raise JobError(f"created_at={at!r:.60} is no time, which is the row's score")
        key = row.queue, row.id
        score = max(float(row.created_at), math.nextafter(done.newest.get(key, done.found.last_score), math.inf))
        done.newest[key] = done.given[row.seq] = score
        return score

    def _payload_gives_score(self, name: str) -> bool:
        worker = self._app.workers.get(name)
        if worker is not None:
            return worker.score is not None
        gives, until = self._reads_score.get(name, (False, 0.0))
        if time.monotonic() >= until:
            gives = self._app.queue(name).options.get("score") is not None
            self._reads_score[name] = gives, time.monotonic() + OPTIONS_SECONDS
        return gives

    def _refuse(self, row: StoredJob, error: Exception, done: _Round) -> None:
        done.refused.append((row.seq, f"{type(error).__name__}: {error}"[:KEPT_ERROR].replace("\0", "")))
        log.error(
            "outbox: row %d, job %r of queue %r, can't be pushed, and stays in the table with its error: %s",
            row.seq, row.id, row.queue, error, extra={"event": "outbox_refused", "queue": row.queue, "job_id": row.id},
        )  # fmt: skip

    def _hold(self, name: str, error: Exception, done: _Round) -> None:
        """The rows of a queue wait, in order; those of others go on."""
        done.troubles.append(error)
        said = self._held.get(name, (0.0, ""))[1]
        reason = type(error).__name__
        # Longer than the wait for the next round, so that not each one begins with rows that can't be pushed.
        self._held[name] = time.monotonic() + self._interval + min(self._interval, MAX_BACKOFF), reason
        if reason != said:
            log.warning(
                "outbox: rows of queue %r wait in the table, and are tried again: %s", name, error,
                extra={"event": "outbox_held", "queue": name},
            )  # fmt: skip

    def _note_held_back(self, found: SettledRows, now: float) -> None:
        if not found.is_held_back:
            self._held_back_since = None
        elif self._held_back_since is None:
            self._held_back_since = now
        elif now - self._held_back_since > LONG_HELD_BACK:
            self._held_back_since = math.inf  # said once
            log.warning(
                "outbox: rows have been waiting for %g s for a transaction that has inserted into lowq_outbox before "
                "them and is still open; pg_locks and pg_stat_activity show it", LONG_HELD_BACK,
                extra={"event": "outbox_held_back"},
            )  # fmt: skip

    def _note_away(self, error: Exception) -> None:
        kind = type(error).__name__
        if kind != self._away:
            self._away = kind
            log.error(
                "outbox: the database can't be used, and is tried again: %s: %s", kind, error,
                extra={"event": "outbox_away"},
            )  # fmt: skip


def _is_time(at: object) -> TypeGuard[float]:
    return isinstance(at, int | float) and math.isfinite(at)  # SQLite keeps any text there


def _is_ahead(row: StoredJob, now: float) -> bool:
    return _is_time(row.created_at) and row.created_at > now + MAX_AHEAD


def _accepted(error: PushError, jobs: Sequence[dict[str, Any]]) -> set[int]:
    """The identities of jobs that are in for certain. None if that can't be told, as middlewares may have put others in
    their places: then all are pushed again, which merges.
    """
    unsafe = error.unsafe if isinstance(error, NotReplicated) else ()
    rest = {id(job) for job in (*unsafe, *error.rest)}
    known = {id(job) for job in jobs}
    if not rest <= known or error.accepted - len(unsafe) + len(rest) != len(jobs):
        return set()
    return known - rest
