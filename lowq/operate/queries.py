"""The reading half of a queue's handle. Every call to Redis is short, every reply bounded.

The answers are of slightly different moments in different shards, and may have changed since.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

from lowq.backend import Backend
from lowq.clock import now as clock_now
from lowq.codec import lookup_id
from lowq.errors import ConfigError
from lowq.job import Job, JobId, State
from lowq.observe.error_groups import ErrorGroup, read_error_groups
from lowq.observe.histories import (
    History,
    SlowBatch,
    Span,
    Times,
    TotalTimes,
    history,
    read_slowest,
    read_times,
    total_times,
)
from lowq.operate.actions import Pause, as_ids, find_pause
from lowq.operate.explain import Description, LimitState, Why, describe_all, max_retry_count, read_limits, read_why
from lowq.operate.job_filter import STATES, FilterOptions, FilterState, JobFilter
from lowq.operate.jobs import Page, everywhere_calls, jobs_everywhere, look_up, pages_of_queue
from lowq.operate.nodes import send_message
from lowq.operate.queues import QueueShards
from lowq.operate.stats import (
    Forecast,
    ShardInfo,
    Statistics,
    Stats,
    node_names,
    read_forecast,
    read_queue,
    read_statistics,
    shard_info,
)
from lowq.operate.walk import Silent, ask, read_stats
from lowq.sharding import Layouts
from lowq.store import untrusted
from lowq.store.keys import stack_key


@dataclass(frozen=True, slots=True)
class Stack:
    """Where the thread, or the task, that performs an id is in its code."""

    node: str
    #: Of that node, from 0; None: a task of its event loop.
    thread: int | None
    #: Files, lines and functions, outermost first, with lines of code and without values; of a very deep stack the
    #: innermost calls. Empty: the node has not answered. What it performs may block it, or its release is older.
    text: str


class Queries:
    """The reading half of a queue's handle. Safe for threads.

    ``now`` (Unix time, seconds) stands for the server's clock wherever it is given.
    """

    def __init__(self, backend: Backend, name: str, shards_count: int | None = None) -> None:
        self.name = name
        self._backend = backend
        self._shards = QueueShards(backend, name, shards_count)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def shards_count(self) -> int:
        """How many shards the queue has.

        Raises:
            UnknownQueueError: it was not given, and nobody has used the queue yet.
        """
        return self.layouts.current.shards_count

    def find_pause(self) -> Pause | None:
        """When the queue was paused, and by whom; None: it is not paused."""
        return find_pause(self._shards)

    @property
    def layouts(self) -> Layouts:
        """Its layout, and while a reshard is under way the one that its jobs are being moved to; as the registry has
        said in the last second.

        Raises:
            UnknownQueueError: as `shards_count`.
        """
        return self._shards.layouts

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of its worker, as they are in the registry; empty when nobody who knows them has used the queue.

        Raises:
            RedisUnavailable
        """
        entry = self._shards.read_entry()
        return {} if entry is None else entry.options

    @property
    def max_retry_count(self) -> int:
        """How often its worker tries again; the default when nobody who knows has used the queue.

        Raises:
            RedisUnavailable
        """
        return max_retry_count(self._shards.read_entry())

    # --- figures ---

    def stats(self, *, now: float | None = None) -> Stats:
        """The queue in figures.

        Raises:
            UnknownQueueError, RedisUnavailable
        """
        return read_queue(self._shards, now).stats

    def forecast(self, *, now: float | None = None) -> Forecast:
        """When its backlog is gone, if it goes on as in the last 5 minutes, as its nodes have recorded them.

        Raises:
            UnknownQueueError, RedisUnavailable
        """
        _, forecast = self.stats_and_forecast(now=now)
        return forecast

    def stats_and_forecast(self, *, now: float | None = None, silent: Silent | None = None) -> tuple[Stats, Forecast]:
        """Both, of the same moment; see `stats` and `forecast`. ``silent``: shards whose primary does not answer are
        left out, and entered there.
        """
        found = read_queue(self._shards, now, silent)
        return found.stats, read_forecast(self._shards, found, now, is_partial=bool(silent))

    def statistics(self, *, now: float | None = None) -> Statistics:
        """Tasks by state and calls by verb, in the words of Tarantool's queue module.

        Raises:
            UnknownQueueError, RedisUnavailable
        """
        return read_statistics(self._shards, now)

    def rates(self, span: Span = "hour", *, now: float | None = None) -> History:
        """Rates and lag over the last "hour", "day" or "month" (30 days), as its nodes have recorded them.

        Raises:
            ConfigError: an unknown span. RedisUnavailable
        """
        return history(self._backend, self.name, span, now)

    def perform_times(self) -> TotalTimes:
        """How long its performs took, batch by batch, as its nodes have recorded it.

        Raises:
            RedisUnavailable
        """
        return total_times(self._backend, [self.name])[self.name][1]

    def wait_times(self) -> TotalTimes:
        """How long its jobs had waited since they were due, when a node took them. As `perform_times`.

        Raises:
            RedisUnavailable
        """
        return total_times(self._backend, [self.name])[self.name][0]

    def times(self, span: Span = "hour", *, now: float | None = None) -> Times:
        """How long its jobs waited and were performed over the last "hour", "day" or "month" (30 days), as its nodes
        have recorded it: ``queue.times("day").run.percentile(0.95)``.

        Raises:
            ConfigError: an unknown span. RedisUnavailable
        """
        return read_times(self._backend, self.name, span, now)

    def slowest(self, *, now: float | None = None) -> list[SlowBatch]:
        """The batches of the last hour that took longest, the slowest first: 20 at most, each of another id. What ended
        in its first ten minutes may be missing.

        Raises:
            RedisUnavailable
        """
        return read_slowest(self._backend, self.name, now)

    def error_groups(self) -> list[ErrorGroup]:
        """Its failures in groups of alike errors, as its nodes have recorded them: those seen last first.

        Raises:
            RedisUnavailable
        """
        return read_error_groups(self._backend, [self.name])

    # --- jobs by id ---

    def peek(self, job_id: JobId, state: State | None = None, *, now: float | None = None) -> Job | None:
        """The job of an id, wherever it is; None when it is nowhere.

        An id may be in several places at once: in flight, with newer payloads waiting, and with older ones in the
        morgue. The first of these is meant, unless ``state`` says which.

        Raises:
            JobError: the id is none. UnknownQueueError, RedisUnavailable
        """
        return next(iter(self.fetch([job_id], state, now=now).values()), None)

    def places(self, job_id: JobId, *, now: float | None = None) -> list[Job]:
        """The jobs of an id everywhere: in flight, waiting, in the morgue; at most one each.

        Raises:
            JobError: the id is none. UnknownQueueError, RedisUnavailable
        """
        encoded = lookup_id(job_id)
        calls = everywhere_calls(self._shards, encoded, now, self.layouts)
        return jobs_everywhere(self._shards, encoded, ask(self._shards.client, calls, len(calls)))

    def describe(self, job_id: JobId, *, now: float | None = None) -> Description:
        """Everything that is known of an id, in one round trip to Redis, or two: where its payloads are, why it is not
        being performed, its shard, and the node that holds that.

        One round trip is enough where the number of shards is known; otherwise the first one asks for it. In a cluster
        calls go to the servers of the registries and of the shard side by side. At most 1,000 payloads, or
        about 1 MiB, are read from each place; ``Job.payloads_count`` is the number of all.

        Raises:
            JobError: the id is none. UnknownQueueError, RedisUnavailable
        """
        (found,) = self.describe_all([job_id], now=now)
        return found

    def describe_all(self, ids: Iterable[JobId], *, now: float | None = None) -> Iterator[Description]:
        """As `describe`, of several ids in their order, each once: ten of them in a round trip, as they are asked for.

        Raises:
            As `describe`.
        """
        return describe_all(self._shards, list(dict.fromkeys(map(lookup_id, as_ids(ids)))), now)

    def shard_of(self, job_id: JobId) -> int:
        """The index of an id's shard.

        Raises:
            JobError: the id is none. UnknownQueueError
        """
        return self.layouts.current.shard_of(lookup_id(job_id))

    def shard(self, index: int, *, now: float | None = None) -> ShardInfo:
        """One of its shards.

        Raises:
            ConfigError: there is no such shard. UnknownQueueError, RedisUnavailable
        """
        if not 0 <= index < self.shards_count:
            raise ConfigError(f"queue {self.name!r} has the shards 0 to {self.shards_count - 1}, not {index}")
        (stats,) = read_stats(self._shards.client, [self._shards.prefix(self.layouts.current, index)], now)
        return shard_info(index, stats, node_names(self._backend))

    def fetch(self, ids: Iterable[JobId], state: State | None = None, *, now: float | None = None) -> dict[str, Job]:
        """The jobs of many ids, id -> job, in the order of ``ids``; those that are nowhere are left out.

        Of long payload lists only the lowest scores are read, 1,000 payloads or about 1 MiB;
        ``Job.payloads_count`` is the number of all. A payload that can't be decoded is shown as the str
        ``"undecodable payload: ..."`` with its raw bytes.

        Raises:
            JobError: an id is none. UnknownQueueError, RedisUnavailable
        """
        if state is not None and state not in STATES:
            raise ConfigError(f"state={state!r}: it is one of {', '.join(STATES)}, or None for wherever the job is")
        where = "" if state is None else state if state in ("taken", "morgue") else "waiting"
        encoded = [lookup_id(job_id) for job_id in as_ids(ids)]
        keys = [(self.name, job_id) for job_id in dict.fromkeys(encoded)]
        found, _ = look_up({self.name: self._shards}, keys, where, now)
        jobs = [found[key] for key in keys if key in found]
        return {job.id: job for job in jobs if state in (None, job.state)}

    # --- pages of jobs ---

    def jobs(
        self, wanted: JobFilter | FilterState | None = None, /, *, limit: int = 50, after: str | None = None,
        now: float | None = None, **options: Unpack[FilterOptions],
    ) -> Page:  # fmt: skip
        """A page of jobs, in order over all shards. Give its cursor as ``after`` for the next one.

        Which jobs: a state, the fields of a `JobFilter` by their names, or a `JobFilter`; None means all that wait.
        ``limit``: 1 to 1,000. A page ends earlier, with a cursor, when its payloads and errors take more than 4 MiB.

        A page is the next one after a position in the order, not after a number of jobs: those that stay where
        they are come exactly once, however many come and go meanwhile. ``match``, ``order_by="id"`` and fresh jobs
        by retry_count look at every id, in short steps: two or three seconds per million.

        Raises:
            ConfigError: it names what is allowed. UnknownQueueError, RedisUnavailable
        """
        *_, page = pages_of_queue(self._shards, JobFilter.of(wanted, options), limit=limit, after=after, now=now)
        return page

    def jobs_in_steps(
        self, wanted: JobFilter | FilterState | None = None, /, *, limit: int = 50, after: str | None = None,
        interval: float = 0.25, now: float | None = None, redact: Callable[[Any], Any] | None = None,
        **options: Unpack[FilterOptions],
    ) -> Iterator[Page]:  # fmt: skip
        """As `jobs`, for listings that take a while: those that look at every id, or at all that one state leaves out.
        What is found so far, at once and about every ``interval`` seconds, and at last the page itself; others give
        just that. While nothing new is found the same page comes again: who stops iterating stops the looking.
        ``redact``: what a payload is looked at as, so that nobody finds by a filter what they may not see.

        Raises:
            As `jobs`.
        """
        meant = JobFilter.of(wanted, options)
        return pages_of_queue(
            self._shards, meant, limit=limit, after=after, interval=interval, now=now, redact=redact
        )  # fmt: skip

    # --- why ---

    def why(self, job_id: JobId, *, now: float | None = None) -> Why:
        """Why this id is not being performed right now.

        Raises:
            JobError: the id is none. UnknownQueueError, RedisUnavailable
        """
        return read_why(self._shards, lookup_id(job_id), now)

    def stack(self, job_id: JobId, *, timeout: float = 5.0) -> Stack | None:
        """Where the thread, or the task, that performs an id is in its code: asks its node, and waits so many seconds
        for the answer. None: nothing performs it now; it waits, or was taken by hand.

        Raises:
            JobError: the id is malformed. UnknownQueueError, RedisUnavailable
        """
        found, key = self.describe(job_id), stack_key(self._backend.config.namespace, request := secrets.token_hex(8))
        node = found.node
        if found.why.reason != "performing" or node is None or node.kind == "consumer":
            return None
        message = {"to": node.name, "do": "stack", "queue": self.name, "id": found.id, "request": request}
        give_up_at = (ask_at := clock_now()) + timeout
        while (raw := self._backend.client.command("GET", key, key=key)) is None:
            if clock_now() >= ask_at:  # again: it may not have listened yet, or be busy with another one's
                send_message(self._backend, message)
                ask_at += 1.0
            elif clock_now() >= give_up_at:
                return Stack(node.name, None, "")
            time.sleep(0.05)
        answer = untrusted.json_object(raw) or {}
        text = untrusted.text(answer.get("text"))
        return Stack(node.name, untrusted.whole(answer.get("thread"), 0), text) if text else None

    def limits(self) -> list[LimitState]:
        """The limits of its worker over all nodes, as of the registry, and what is granted of them.

        Raises:
            RedisUnavailable, RedisRefused
        """
        return read_limits(self._shards.client, self._shards.namespace, self.name, self.options)


def shards_of_handle(queue: Queries) -> QueueShards:
    """The shards of the queue that a handle is of."""
    return queue._shards
