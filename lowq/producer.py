"""Producing: jobs in, streamed in chunks, each chunk validated whole before any of it is written.

::

    jobs -> chunk -> client middlewares -> encode, group by shard -> one script call per shard, in one write
                                                                     (while Redis works, the next chunk is encoded)

Jobs of an id stay in the order in which they came, whatever fails. A chunk is sent when all of the one before is in.
Within a chunk a shard may need several calls: each names the one before it, and Redis refuses it when that was not
carried out.
"""

import math
import secrets
import time
from binascii import b2a_base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

from lowq.codec import EncodedJob, encode_job
from lowq.errors import JobError, PushError, PushInterrupted, RedisUnavailable, ShardsCountError, TimeLimitExceeded
from lowq.middleware import wrap
from lowq.settings import Config
from lowq.sharding import shard_of
from lowq.store import SOCKET_TIMEOUT, Call, Client, Deadline, Refusal, caller_deadline, deadlines
from lowq.store.keys import shard_prefix

#: Jobs that are validated and written together.
CHUNK_JOBS = 5000
#: Bytes of payloads that end a chunk early: bounds memory, and what is lost when a connection breaks.
CHUNK_BYTES = 8 * 2**20
#: Jobs, and bytes of payloads, of one script call: bounds the time that it holds Redis.
CALL_JOBS = 1000
CALL_BYTES = 2**20
#: Seconds before each repeat of a push that got no answer.
_PAUSES = (0.0, 0.1)
#: How many times push_timeout, at least how many times the socket timeout, Redis remembers a call, so that it knows a
#: repeat; and after how many of them none is sent any more. What is between is for the way there.
KEPT, REPEATED = 3, 2

#: Seconds, of a clock that goes on while the machine is suspended, where there is one: Redis's does, too.
_clock: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)

#: What ``perform_async`` takes: one job, or any iterable of jobs. A `JobDict` is such a mapping.
Jobs = Mapping[str, Any] | Iterable[Mapping[str, Any]]


@dataclass(slots=True)
class _Part:
    """One script call, and the jobs it stands for."""

    call: Call
    jobs: list[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Target:
    """Where jobs go: a queue, and who is named to client middlewares."""

    client: Client
    config: Config
    queue: str
    shards_count: int
    #: The worker's class, or the queue's name when the producer doesn't know the class.
    worker: Any


def push(target: Target, jobs: Jobs, on_progress: Callable[[int], object] | None = None) -> int:
    """Pushes one job or any iterable of jobs; returns the number of payloads accepted.

    Raises:
        JobError, PayloadError: a job is malformed; nothing was written.
        PushError: Redis failed, or a later chunk was malformed, or a client middleware raised in one: it says how many
            are in and carries the rest. Inside of ``perform`` also when the deadline of the batch has passed, which is
            as if Redis did not answer, and ``__cause__`` is a `TimeLimitExceeded`.
        ShardsCountError: the queue exists with another number of shards; nothing was written.
    """
    if isinstance(jobs, Mapping):
        jobs = [jobs]
    elif not _is_iterable_of_jobs(jobs):
        raise JobError(
            f"queue {target.queue!r}: jobs are one mapping or an iterable of mappings, not {type(jobs).__name__}"
        )
    return _Push(target, jobs, on_progress).run()


def _is_iterable_of_jobs(jobs: object) -> bool:
    return isinstance(jobs, Iterable) and not isinstance(jobs, str | bytes)


class _Push:
    def __init__(
        self, target: Target, jobs: Iterable[Mapping[str, Any]], on_progress: Callable[[int], object] | None
    ) -> None:
        self._target = target
        self._source = iter(jobs)
        self._listed = isinstance(jobs, Sequence)
        self._on_progress = on_progress
        self._accepted = 0
        #: Jobs that were read and are yet to be encoded.
        self._put_back: list[Mapping[str, Any]] = []
        #: Whether the source may have more.
        self._more = True
        #: What the source raised.
        self._trouble: BaseException | None = None
        self._timeout: float = target.config.push_timeout
        # Redis remembers calls for at least as long as connections wait by themselves.
        self._patience = max(self._timeout, SOCKET_TIMEOUT)
        self._keep = b"%d" % math.ceil(KEPT * self._patience)

    def run(self) -> int:
        chunk = self._read()
        parts, chunk = self._prepare(chunk)
        while chunk:
            # The producer's own code runs while Redis works: the source, middlewares, codec. It may well push or look
            # something up, so the connection is lent: with all of them held by threads that wait for one more,
            # nobody would get on. Not when nothing follows, as with a single job: lending takes two locks.
            lend = self._more or bool(self._put_back)
            if caller_deadline() <= time.monotonic():
                late = TimeLimitExceeded("the deadline of the batch that pushes them has passed")
                raise self._error(chunk, late) from late
            attempts = deadlines(self._timeout, 1 + len(_PAUSES))
            next_parts: list[_Part] = []
            refusal: Exception | None = None
            following: list[Mapping[str, Any]] = []
            sent_at = _clock()
            finish = self._target.client.start([part.call for part in parts], lend=lend, deadline=next(attempts))
            try:
                following = self._read()
                try:
                    next_parts, following = self._prepare(following)
                except Exception as error:  # a job's, or a middleware's: whatever it is, the replies are not to be lost
                    refusal = error
            finally:
                results = finish()
            self._settle(parts, results, following, attempts, sent_at)
            if refusal is not None:
                raise self._error(following, refusal) from refusal
            chunk, parts = following, next_parts
        if self._trouble is not None:
            raise self._trouble
        return self._accepted

    def _read(self) -> list[Mapping[str, Any]]:
        """The next chunk: what was put back, or of the source. A chunk in which the source raises is not pushed, those
        before it are.
        """
        chunk, self._put_back = self._put_back, []
        if not chunk and self._trouble is None:
            try:
                chunk = list(islice(self._source, CHUNK_JOBS))
                self._more = len(chunk) == CHUNK_JOBS
            except BaseException as error:
                self._trouble = error
        return chunk

    def _prepare(self, chunk: list[Mapping[str, Any]]) -> tuple[list[_Part], list[Mapping[str, Any]]]:
        """Middlewares, validation, encoding. Returns the calls, and how much of the chunk they are: a chunk of large
        payloads ends early, and the rest of it is put back.
        """
        if not chunk:
            return [], chunk
        middlewares = self._target.config.client_middlewares
        if not middlewares:
            parts, count = self._encode(chunk, CHUNK_BYTES)
            self._put_back = chunk[count:]
            return parts, chunk[:count]
        wrapped: list[_Part] = []

        def encode(jobs: list[Mapping[str, Any]]) -> None:
            wrapped.extend(self._encode(jobs, None)[0])

        # A list of their own, which they may change: when one of them raises, the rest is what was given.
        wrap(middlewares, self._target.worker, encode)(list(chunk))
        return wrapped, chunk

    def _encode(self, chunk: list[Mapping[str, Any]], most_bytes: int | None) -> tuple[list[_Part], int]:
        """The calls for the jobs of the chunk, and how many jobs that are."""
        target = self._target
        dump, limit = target.config.dump_payload, target.config.max_payload_bytes
        shards_count = target.shards_count
        groups: dict[int, tuple[list[EncodedJob], list[Mapping[str, Any]]]] = {}
        plain = True
        count = size = 0
        for job in chunk:
            try:
                encoded = encode_job(job, dump, limit)
            except JobError as error:
                raise type(error)(f"queue {target.queue!r}: {error}") from error.__cause__
            if encoded[2] or encoded[3]:
                plain = False
            shard = shard_of(encoded[0], shards_count)
            group = groups.get(shard)
            if group is None:
                group = groups[shard] = ([], [])
            group[0].append(encoded)
            group[1].append(job)
            count += 1
            size += len(encoded[1])
            if most_bytes is not None and size >= most_bytes:
                break
        parts: list[_Part] = []
        for shard, (items, originals) in groups.items():
            prefix = shard_prefix(target.config.namespace, target.queue, shard)
            parts += self._calls(prefix, items, originals, 2 if plain else 4)
        return parts, count

    def _calls(
        self, prefix: str, items: list[EncodedJob], originals: list[Mapping[str, Any]], width: int
    ) -> Iterator[_Part]:
        shards_count, keep, after = b"%d" % self._target.shards_count, self._keep, b""
        start = 0
        while start < len(items):
            end, size = start, 0
            while end < len(items) and end - start < CALL_JOBS and (size < CALL_BYTES):
                size += len(items[end][1])
                end += 1
            token = b2a_base64(secrets.token_bytes(9), newline=False)
            data = [b"", token, b"", shards_count, b"2" if width == 2 else b"4", keep, after]
            if width == 2:
                for item in items[start:end]:
                    data += item[:2]
            else:
                data += chain.from_iterable(items[start:end])
            yield _Part(Call("push", prefix, (), data), originals[start:end])
            start, after = end, token

    def _settle(
        self, parts: list[_Part], results: list[Any], following: list[Mapping[str, Any]],
        attempts: Iterator[Deadline | None], sent_at: float,
    ) -> None:  # fmt: skip
        """Takes note of the replies to a chunk. ``following`` was read from the source and not yet sent.

        Raises:
            PushError; what Redis refused when nothing was accepted before.
        """
        for result in results:
            if isinstance(result, Exception):
                break
        else:  # as nearly always
            self._accepted += sum(results)
            if self._on_progress is not None:
                self._on_progress(self._accepted)
            return
        deadline = None
        pauses = iter(_PAUSES)
        while (again := _unsettled(parts, results)) and _clock() - sent_at <= REPEATED * self._patience:
            pause = next(pauses, None)
            if pause is None:
                break
            time.sleep(pause)
            deadline = next(attempts)
            for i in again:
                parts[i].call.data[2] = b"1"
            replies = self._target.client.start([parts[i].call for i in again], deadline=deadline)()
            for i, result in zip(again, replies, strict=True):
                results[i] = result
        failed: list[_Part] = []
        reason: Exception | None = None
        for part, result in zip(parts, results, strict=True):
            if isinstance(result, Exception):
                failed.append(part)
                if reason is None or not _out_of_turn(result):
                    reason = result
            else:
                self._accepted += result
        if self._on_progress is not None:
            self._on_progress(self._accepted)
        if reason is None:
            return
        if type(reason) is RedisUnavailable and deadline is not None and deadline.passed:
            is_late = caller_deadline() <= time.monotonic()
            limit = "until the deadline of the batch" if is_late else f"for push_timeout={self._timeout:g} s"
            reason = RedisUnavailable(f"{reason}, {limit}")
        if _out_of_turn(reason):
            reason = RedisUnavailable("Redis has lost a call that it had answered: it was restarted without its data")
        if isinstance(reason, Refusal):
            raise ShardsCountError(self._target.queue, int(reason.detail), self._target.shards_count) from None
        if not isinstance(reason, RedisUnavailable) and not self._accepted:
            raise reason
        raise self._error([job for part in failed for job in part.jobs] + following, reason) from reason

    def _error(self, pending: list[Mapping[str, Any]], reason: BaseException) -> PushError:
        rest: Iterable[Mapping[str, Any]] = chain(pending, self._put_back, self._remaining())
        kind = PushInterrupted if isinstance(reason, RedisUnavailable | TimeLimitExceeded) else PushError
        return kind(self._target.queue, self._accepted, list(rest) if self._listed else rest, reason)

    def _remaining(self) -> Iterator[Mapping[str, Any]]:
        # A source that raised ends there. Who pushes the rest must not take that for the end of all jobs.
        if self._trouble is not None:
            raise self._trouble
        yield from self._source


def _unsettled(parts: list[_Part], results: list[Any]) -> list[int]:
    """The calls that are to be repeated: those without an answer, and those that were refused because one of them had
    to come before. Not what comes after a call that was refused for good: its time has not come.
    """
    again: list[int] = []
    refused: set[str] = set()
    for i, (part, result) in enumerate(zip(parts, results, strict=True)):
        if not isinstance(result, Exception) or part.call.key in refused:
            continue
        if type(result) is RedisUnavailable or _out_of_turn(result):
            again.append(i)
        else:
            refused.add(part.call.key)
    return again


def _out_of_turn(result: Exception) -> bool:
    return isinstance(result, Refusal) and result.code == "OUTOFTURN"
