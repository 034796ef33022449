"""What lowq raises, in one tree: ``except LowqError`` catches everything of ours. And the exit codes of its processes.

::

    LowqError
    +-- ConfigError             a setting, a worker's form or an option is wrong
    |   +-- ShardsCountError    two values of shards_count for one queue
    +-- UnknownQueueError       nobody has used a queue of that name yet
    +-- UnknownNodeError        no node of that name lives
    +-- UnknownScheduleError    there is no schedule of that name, or there are several
    +-- JobError                a job's id, score, time or field is wrong
    |   +-- PayloadError        its payload would not come back as it went in
    +-- QueueInUse              a queue that a node works can't be dropped
    +-- RedisUnavailable        no answer; the same call may succeed later
    |   +-- RedisFull           out of memory: pushes are refused, draining works
    |   +-- RedisNotReady       a read-only replica, or still loading its data: nodes and consumers wait
    +-- PushError               some jobs are in, the rest is handed back
    |   +-- PushInterrupted     because Redis failed; it is a RedisUnavailable, too
    |   +-- QueueFull           because the queue has reached its capacity
    |   +-- NotReplicated       because nobody has confirmed that a replica, or the disk, has what is in
    +-- RedisRefused            an answer, and it is no: password, version, rights
    +-- MiddlewareError         a middleware neither called the next one nor raised
    +-- ScriptError             a script failed: a bug, or foreign data in our keys
    +-- LeaseLost               the shard belongs to somebody else by now
    +-- Resharding              its jobs are being moved to another layout of the queue; later it can be done
    +-- NotTaken                a consumer has not, or not any more, the job that it reports
    +-- SessionInUse            another consumer has the session
    +-- LimitTimeout            no permit of a limit around a call within its timeout
    +-- ConsumerClosed          the consumer was closed, or has detached

    BaseException
    +-- TimeLimitExceeded       raised in a handler whose time_limit has passed; no LowqError, as `except Exception` in
    |                           the handler must not swallow it
    +-- JobCancelled            raised in a handler in a thread whose job was cancelled; the same
"""

from collections.abc import Iterable, Mapping, Sequence
from traceback import format_exception_only
from typing import Any

EXIT_OK = 0
#: It could not start, or a handler or an error stopped it. Of a supervisor: it gave up, or a process failed at its end.
EXIT_FAILED = 1
#: What was typed makes no sense, or a setting: an unknown queue, say.
EXIT_USAGE = 2
#: Something still ran when shutdown_timeout was over, or it had to stop a second time.
EXIT_CUT_SHORT = 3
#: Of a node: half of its threads were written off, as their handlers hang, and a fresh process is to take its place
#: (EX_TEMPFAIL).
EXIT_REPLACE = 75
#: Ended by Ctrl-C.
EXIT_INTERRUPTED = 130


class LowqError(Exception):
    """The root of everything that lowq raises on purpose."""

    #: Of an action on many ids: the least number of jobs that it was done to before.
    done: int = 0


class ConfigError(LowqError, ValueError):
    """A setting, a worker's form or an option is wrong; the message says what to write instead."""


class ShardsCountError(ConfigError):
    """Code with ``strict_shards_count`` has another ``shards_count`` than Redis. Nothing was written.

    Without that setting Redis is followed, with a warning.
    """

    def __init__(self, queue: str, existing: int, wanted: int) -> None:
        super().__init__(
            f"queue {queue!r} has shards_count={existing} in Redis, but this process says "
            f"shards_count={wanted}. Write {existing}, or change the queue: lowq reshard {queue} {wanted}. "
            "Without strict_shards_count this process would follow Redis."
        )
        self.queue = queue
        self.existing = existing
        self.wanted = wanted


class UnknownQueueError(LowqError, LookupError):
    """No worker or producer has used a queue of that name yet."""


class UnknownNodeError(LowqError, LookupError):
    """No node of that name lives; the message names those that do."""


class UnknownScheduleError(LowqError, LookupError):
    """There is no schedule of that name, or several have it; the message names those that there are."""


class JobError(LowqError, ValueError):
    """A job is malformed. Nothing of its chunk was written."""


class PayloadError(JobError):
    """A payload is no JSON value, or would not come back as it went in, or is too large."""


class QueueInUse(LowqError):
    """A node works the queue; stop the node first."""


class MiddlewareError(LowqError):
    """A middleware neither called the next one nor raised, or called it twice."""


#: The advice when Redis was never reached, with a place for the option that says where it is.
START_REDIS = "start Redis, or say where it is with {} or LOWQ_REDIS_URL"


class RedisUnavailable(LowqError, ConnectionError):
    """Redis did not answer, or can't serve just now. The same call may succeed later."""


class RedisFull(RedisUnavailable):
    """Redis has reached ``maxmemory``: pushes are refused until the queue has been drained a bit."""


class RedisNotReady(RedisUnavailable):
    """Redis answers, but can't serve now: it is a read-only replica, or one without its primary, or it loads its data,
    or a foreign script runs for long, or it refuses writes because it can't save them or lacks replicas. Nothing was
    written. Nodes and consumers wait until it can.

    ``state``: why it can't serve, without its address.
    """

    def __init__(self, message: str, state: str = "can't serve now") -> None:
        super().__init__(message)
        self.state = state


class PushError(LowqError):
    """Redis failed while jobs were being pushed, or a job of a later chunk was malformed, or a client middleware raised
    in a later chunk. ``__cause__`` is that error.

    ``accepted`` payloads are certainly in. ``rest`` holds the other jobs, ready to be pushed again: a list when the
    jobs came as a list, otherwise an iterator that goes on with the original iterable. Jobs of a call without an answer
    are among the rest although they may be in: pushing them again merges them.
    """

    #: With a ``durability``: jobs that are in, but were not confirmed by a replica, or by the disk.
    unsafe: Sequence[Mapping[str, Any]] = ()

    def __init__(self, queue: str, accepted: int, rest: Iterable[Any], reason: BaseException) -> None:
        # A foreign exception is shown with its class. Its own __str__ may raise.
        own = isinstance(reason, LowqError | TimeLimitExceeded)
        why = str(reason) if own else format_exception_only(reason)[-1].strip()
        why = why.rstrip(".")
        when = "when there is time" if isinstance(reason, TimeLimitExceeded) else "when Redis is back"
        super().__init__(
            f"queue {queue!r}: {accepted} payloads are in, the others are in PushError.rest: {why}. "
            + (
                f"Push the rest again {when}."
                if isinstance(self, PushInterrupted)
                else "Put right what is wrong, then push the rest again."
            )
        )
        self.queue = queue
        self.accepted = accepted
        self.rest = rest


class PushInterrupted(PushError, RedisUnavailable):
    """Redis failed while jobs were being pushed, or the deadline of the batch that pushes them has passed; see
    `PushError`.
    """


class QueueFull(PushError):
    """The queue has reached its ``capacity``; see `PushError`. Nothing was sent after the first jobs that did not
    fit."""

    def __init__(self, queue: str, accepted: int, rest: Iterable[Any], capacity: int) -> None:
        LowqError.__init__(
            self,
            f"queue {queue!r} is full (capacity={capacity:,}, shared out among its shards): {accepted} payloads are "
            "in, the others are in QueueFull.rest. Push the rest again when jobs have been performed, or give push a "
            "timeout in which to wait for room.",
        )
        self.queue = queue
        self.accepted = accepted
        self.rest = rest
        #: The declared capacity.
        self.capacity = capacity


class NotReplicated(PushError):
    """Jobs are in, and are performed as usual, but their ``durability`` was not confirmed in time: those in ``unsafe``
    may be lost if the server fails.

    ``accepted`` payloads are in, the unsafe ones included. ``rest`` holds the jobs that were not pushed: nothing was
    sent after the first chunk that was not confirmed. Repair the replicas, or the disk; then push ``unsafe`` again,
    which merges with the jobs that are there, and ``rest``.
    """

    def __init__(
        self,
        queue: str,
        accepted: int,
        unsafe: Sequence[Mapping[str, Any]],
        rest: Iterable[Any],
        durability: str,
        seconds: float,
        replicas: int = 0,
        reason: str = "",
    ) -> None:
        if reason:
            why = f"the server said: {reason}"
        elif durability == "fsynced":
            why = f"they were not written to the server's disk within {seconds:g} s (durability_timeout)"
        else:
            why = f"{replicas} of 1 replica confirmed them within {seconds:g} s (durability_timeout)"
        see_to = "the server's disk" if durability == "fsynced" else "its replicas"
        LowqError.__init__(
            self,
            f"queue {queue!r}: {accepted} payloads are in, but {len(unsafe)} of them are not safe, as asked for by "
            f"durability={durability!r}: {why}. They are performed as usual, and may be lost if the server fails. See "
            f"to {see_to}, then push NotReplicated.unsafe again, and NotReplicated.rest, which was not pushed.",
        )
        self.queue = queue
        self.accepted = accepted
        self.unsafe = unsafe
        self.rest = rest
        #: The durability that was asked for.
        self.durability = durability
        #: Why they are not safe, for people.
        self.reason = why
        #: The number of replicas that have confirmed it, of the 1 that it waits for.
        self.replicas = replicas


class RedisRefused(LowqError):
    """Redis answered and refused: wrong password, missing rights, or a server that is too old."""


class ScriptError(LowqError):
    """A script failed in Redis: a bug in lowq, or foreign values in lowq's keys."""

    #: The key of the call, or the prefix of its shard (it ends with a colon); None: not known.
    key: str | None = None


class LeaseLost(LowqError):
    """The shard is leased to another holder by now; the write was refused."""


class Resharding(LowqError):
    """The jobs are being moved by a reshard. Nothing was done; try again in a moment."""


class NotTaken(LowqError):
    """The consumer does not hold the job: it was reported already, or its ``ttr`` has passed, or the lease of its shard
    was lost, or the receipt belongs to another queue. Nothing was written.
    """


class SessionInUse(LowqError):
    """Another consumer has the session."""


class ConsumerClosed(LowqError):
    """The consumer was closed, or has detached; make a new one."""


class LimitTimeout(LowqError, TimeoutError):
    """There was no permit of a limit around a call within its timeout, or none before the node stops: then the job is
    not charged, and performed elsewhere.
    """

    def __init__(self, message: str, *, node_stops: bool = False) -> None:
        super().__init__(message)
        self.node_stops = node_stops


class TimeLimitExceeded(BaseException):
    """The batch has run for longer than the time_limit of its worker.

    No `Exception`, like `asyncio.CancelledError`: it also ends a handler that goes on after any `Exception`.
    """

    def __init__(self, *args: object) -> None:
        # Raised in another thread, it is made without arguments.
        super().__init__(*(args or ("the batch has run for longer than its time_limit",)))


class JobCancelled(BaseException):
    """The job was cancelled while its handler ran. An async handler gets `asyncio.CancelledError`.

    No `Exception`, as `TimeLimitExceeded`.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(args or ("the job was cancelled",)))
