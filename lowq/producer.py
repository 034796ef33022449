"""Producing: jobs in, streamed in chunks, each chunk validated whole before any of it is written.

::

    jobs -> chunk -> client middlewares -> encode, group by shard -> one script call per shard, in one write
                                                                     (while Redis works, the next chunk is encoded,
                                                                      unless middlewares are async)

Jobs of an id stay in the order in which they came, whatever fails. A chunk is sent when all of the one before is in.
Within a chunk a shard may need several calls: each names the one before it, and Redis refuses it when that was not
carried out.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

from lowq.codec import EncodedJob, Rest, encode_job, encode_priority, encode_ttl
from lowq.errors import (
    JobError,
    PushError,
    PushInterrupted,
    QueueFull,
    RedisUnavailable,
    ShardsCountError,
    TimeLimitExceeded,
)
from lowq.group_commit import (
    EXTENDED,
    PLAIN,
    PUSH_BYTES,
    PUSH_JOBS,
    Attempts,
    GroupCommit,
    Outcome,
    Overflow,
    Part,
    is_full,
    is_out_of_turn,
    missed_deadline,
    new_token,
    width_of,
)
from lowq.job_events import QueueEvents
from lowq.middleware import all_async, wrap, wrap_async
from lowq.queue_options import QueueOptions
from lowq.settings import Config
from lowq.sharding import shard_of
from lowq.store import Refusal, caller_deadline
from lowq.store.keys import shard_prefix

#: Jobs that are validated and written together.
CHUNK_JOBS = 5000
#: Bytes of payloads that end a chunk early: bounds memory, and what is lost when a connection breaks.
CHUNK_BYTES = 8 * 2**20
#: Jobs, and bytes of payloads, of one script call: bounds the time that it holds Redis.
CALL_JOBS = 1000
CALL_BYTES = 2**20
T = TypeVar("T")
#: What ``perform_async`` takes: one job, or any iterable of jobs. A `JobDict` is such a mapping.
Jobs = Mapping[str, Any] | Iterable[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Target:
    """Where jobs go: a queue, and who is named to client middlewares."""

    group: GroupCommit
    config: Config
    queue: str
    shards_count: int
    #: The worker's class, or the queue's name when the producer doesn't know the class.
    worker: Any
    options: QueueOptions
    #: Where it is emitted which jobs are in; None: nobody listens.
    events: QueueEvents | None = None
    #: What of them a push tells Redis.
    words: bytes = b""
    #: The prefixes of shards that single jobs went to.
    prefixes: dict[int, str] = field(default_factory=dict)
    #: ttl and priority of jobs that say none, encoded.
    rest: Rest = field(init=False)

    def __post_init__(self) -> None:
        rest = encode_ttl(self.options.ttl), encode_priority(self.options.priority)
        object.__setattr__(self, "rest", rest)


def push(
    target: Target, jobs: Jobs, on_progress: Callable[[int], object] | None = None, timeout: float | None = None
) -> int:
    """Pushes one job or any iterable of jobs; returns the number of payloads accepted. ``timeout``: seconds to wait for
    room in a queue that has reached its capacity.

    Raises:
        JobError, PayloadError: a job is malformed; nothing was written.
        PushError: Redis failed, or a later chunk was malformed, or a client middleware raised in one: it says how many
            are in and carries the rest. Inside of ``perform`` also when the deadline of the batch has passed, which is
            as if Redis did not answer, and ``__cause__`` is a `TimeLimitExceeded`.
        QueueFull: there was no room for the rest of the jobs.
        ShardsCountError: the queue exists with another number of shards; nothing was written.
    """
    if type(jobs) is dict and on_progress is None and target.group.is_busy:
        single = _encode_single(target, jobs)
        if single is not None:
            part, size = single
            _check_in_time(target, part.jobs)
            outcomes = target.group.push([part], 1, size)
            if outcomes[0] is True and target.events is None:
                return 1
            return _Push(target, [], None, timeout).count_accepted([part], outcomes)
    return _Push(target, jobs, on_progress, timeout).run()


async def apush(
    target: Target, jobs: Jobs, on_progress: Callable[[int], object] | None = None, timeout: float | None = None
) -> int:
    """As `push`, from a coroutine. A small push is encoded here and sent by the event loop. What may take long runs in
    a thread: sync client middlewares, an iterable that is not a list or tuple, and all that is not small.

    When it is cancelled before it was sent, nothing is written. What is under way may be in, and no chunk follows.
    """
    if type(jobs) is dict and on_progress is None:
        single = _encode_single(target, jobs)
        if single is not None:
            part, size = single
            _check_in_time(target, part.jobs)
            outcomes = await target.group.apush([part], 1, size)
            if outcomes[0] is True and target.events is None:
                return 1
            return await _Push(target, [], None, timeout).acount([part], outcomes)
    return await _Push(target, jobs, on_progress, timeout).arun()


def _encode_single(target: Target, job: dict[str, Any]) -> tuple[Part, int] | None:
    """The one part that a single job is, and its bytes. None: a middleware is to see it, or it is too large to go with
    others.
    """
    config = target.config
    if config.client_middlewares:
        return None
    try:
        encoded = encode_job(job, config.dump_payload, config.max_payload_bytes, target.rest)
    except JobError as error:
        raise _of_queue(target, error) from error.__cause__
    job_id, payload = encoded[:2]
    if len(payload) > PUSH_BYTES:
        return None
    shard = shard_of(job_id, target.shards_count)
    prefix = target.prefixes.get(shard)
    if prefix is None:
        prefix = target.prefixes[shard] = shard_prefix(config.namespace, target.queue, shard)
    return Part(prefix, target.shards_count, [encoded], [job], width_of(encoded), words=target.words), len(payload)


def _check_in_time(target: Target, jobs: list[Mapping[str, Any]]) -> None:
    late = missed_deadline()
    if late is not None:
        raise _Push(target, [], None).error(jobs, late) from late


def _of_queue(target: Target, error: JobError) -> JobError:
    return type(error)(f"queue {target.queue!r}: {error}")


def _as_iterable(queue: str, jobs: Jobs) -> Iterable[Mapping[str, Any]]:
    if isinstance(jobs, Mapping):
        return [jobs]
    if not _is_iterable_of_jobs(jobs):
        raise JobError(f"queue {queue!r}: jobs are one mapping or an iterable of mappings, not {type(jobs).__name__}")
    return jobs


def _is_iterable_of_jobs(jobs: object) -> bool:
    return isinstance(jobs, Iterable) and not isinstance(jobs, str | bytes)


class _Push:
    def __init__(
        self,
        target: Target,
        jobs: Jobs,
        on_progress: Callable[[int], object] | None,
        room_timeout: float | None = None,
    ) -> None:
        jobs = _as_iterable(target.queue, jobs)
        self._target = target
        self._jobs = jobs
        self._source = iter(jobs)
        self._listed = isinstance(jobs, Sequence)
        self._on_progress = on_progress
        self._accepted = 0
        #: Jobs that were read and are yet to be encoded.
        self._put_back: list[Mapping[str, Any]] = []
        #: Whether the source may have more.
        self._more = True
        #: What the source raised.
        self._source_error: BaseException | None = None
        self._timeout: float = target.config.push_timeout
        #: Jobs, and bytes of payloads, of the calls that were prepared last.
        self._prepared_jobs = self._prepared_bytes = 0
        #: Monotonic time until which room is waited for.
        self._waits_until = 0.0 if not room_timeout else min(time.monotonic() + room_timeout, caller_deadline())
        #: Whether the coroutine that waits for this was cancelled; and what asks for that, where there is one.
        self._cancelled = False
        self._is_wanted: Callable[[], bool] | None = None

    def run(self) -> int:
        chunk = self._read()
        parts, chunk = self._prepare(chunk)
        return self._send(parts, chunk)

    async def arun(self) -> int:
        middlewares = self._target.config.client_middlewares
        # Nothing of a longer one is read or encoded here: that would keep all other coroutines waiting.
        is_short = self._listed and len(self._jobs) <= PUSH_JOBS  # type: ignore[arg-type]  # what is listed has a length
        if middlewares and all_async(middlewares):
            return await self._arun_wrapped(is_short)
        if not is_short:
            parts, chunk = await self._in_thread(lambda: self._prepare(self._read()))
            return await self._asend(parts, chunk)
        jobs = self._read()
        if middlewares:
            parts, chunk = await self._in_thread(lambda: self._prepare(jobs))
            return await self._asend(parts, chunk)
        parts, count = self._encode(jobs, PUSH_BYTES)
        if count < len(jobs):  # large payloads
            parts, jobs = await self._in_thread(lambda: self._prepare(jobs))
        return await self._asend(parts, jobs)

    async def _arun_wrapped(self, is_short: bool) -> int:
        """With async middlewares, which run in the caller's task. What blocks or takes long is done in threads, one
        step after the other. So no thread ever waits for the event loop: the loop may be closed meanwhile, and what it
        is to do may need a thread when all of them wait.
        """
        chunk = self._read() if is_short else await self._in_thread(self._read)
        is_first = True
        while chunk:
            try:
                parts = await self._wrapped_async(chunk)
            except Exception as error:
                if is_first:
                    raise
                raise self.error(chunk, error) from error
            if is_first and self._is_small():
                return await self._asend(parts, chunk)
            await self._in_thread(partial(self._send_chunk, parts, chunk))
            chunk = await self._in_thread(self._read)
            is_first = False
        return self._result()

    async def _asend(self, parts: list[Part], chunk: list[Mapping[str, Any]]) -> int:
        """Sends what was prepared, and what follows it."""
        if chunk and not self._is_small():
            return await self._in_thread(lambda: self._send_chunks(parts, chunk))
        if not parts:  # there was none, or the source raised, or a middleware has removed all
            return self._result()
        _check_in_time(self._target, chunk)
        pushed = self._target.group.apush(parts, self._prepared_jobs, self._prepared_bytes)
        return await self.acount(parts, await pushed)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        self._is_wanted = lambda: not self._cancelled
        try:
            return await asyncio.to_thread(work)
        except asyncio.CancelledError:
            self._cancelled = True
            raise

    def _is_small(self) -> bool:
        """Whether all that there is was prepared, and can go together with pushes of others."""
        return (
            not self._more
            and self._prepared_jobs <= PUSH_JOBS
            and self._prepared_bytes <= PUSH_BYTES
            and not self._put_back
        )

    def _send(self, parts: list[Part], chunk: list[Mapping[str, Any]]) -> int:
        """Sends what was prepared, and what follows it."""
        if not self._is_small() or not parts:
            return self._send_chunks(parts, chunk)
        group = self._target.group
        direct = group.direct(parts)
        if direct is None:
            _check_in_time(self._target, chunk)
            return self.count_accepted(parts, group.push(parts, self._prepared_jobs, self._prepared_bytes))
        try:
            return self._send_chunks(parts, chunk)
        finally:
            # An exception would keep it as long as somebody keeps the exception.
            del direct

    def _send_chunks(self, parts: list[Part], chunk: list[Mapping[str, Any]]) -> int:
        group = self._target.group
        while chunk:
            self._check_goes_on(chunk)
            # The producer's own code runs while Redis works: the source, middlewares, codec. It may well push or look
            # something up, so the connection is lent: with all of them held by threads that wait for one more,
            # nobody would get on. Not when nothing follows, as with a single job: lending takes two locks.
            lend = self._more or bool(self._put_back)
            attempts = Attempts(self._timeout)
            next_parts: list[Part] = []
            refusal: Exception | None = None
            following: list[Mapping[str, Any]] = []
            finish = group.writer.start(parts, lend=lend, deadline=attempts.deadline, is_wanted=self._is_wanted)
            try:
                following = self._read()
                try:
                    next_parts, following = self._prepare(following)
                except Exception as error:  # a job's, or a middleware's: whatever it is, the replies are not to be lost
                    refusal = error
            finally:
                results = finish()
            self._take_results(parts, results, following, attempts)
            if refusal is not None:
                raise self.error(following, refusal) from refusal
            chunk, parts = following, next_parts
        return self._result()

    def _send_chunk(self, parts: list[Part], chunk: list[Mapping[str, Any]]) -> None:
        """Sends what was prepared, and nothing else."""
        self._check_goes_on(chunk)
        attempts = Attempts(self._timeout)
        writer = self._target.group.writer
        results = writer.start(parts, lend=False, deadline=attempts.deadline, is_wanted=self._is_wanted)()
        self._take_results(parts, results, [], attempts)

    def _check_goes_on(self, chunk: list[Mapping[str, Any]]) -> None:
        if self._cancelled:
            raise asyncio.CancelledError
        late = missed_deadline()
        if late is not None:
            raise self.error(chunk, late) from late

    def _result(self) -> int:
        """What the push returns, or raises, when all was sent that its source gave."""
        if self._source_error is not None:
            raise self._source_error
        return self._accepted

    def _read(self) -> list[Mapping[str, Any]]:
        """The next chunk: what was put back, or of the source. A chunk in which the source raises is not pushed, those
        before it are.
        """
        chunk, self._put_back = self._put_back, []
        if not chunk and self._source_error is None:
            try:
                chunk = list(islice(self._source, CHUNK_JOBS))
                self._more = len(chunk) == CHUNK_JOBS
            except BaseException as error:
                self._source_error = error
        return chunk

    def _prepare(self, chunk: list[Mapping[str, Any]]) -> tuple[list[Part], list[Mapping[str, Any]]]:
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
        wrapped: list[Part] = []

        def encode(jobs: list[Mapping[str, Any]]) -> None:
            wrapped.extend(self._encode(jobs, None)[0])

        # A list of their own, which they may change: when one of them raises, the rest is what was given.
        wrap(middlewares, self._target.worker, encode)(list(chunk))
        return wrapped, chunk

    async def _wrapped_async(self, chunk: list[Mapping[str, Any]]) -> list[Part]:
        """The calls for the jobs of a chunk, with async middlewares around."""
        wrapped: list[Part] = []

        async def encode(jobs: list[Mapping[str, Any]]) -> None:
            parts, _ = (
                self._encode(jobs, None)
                if len(jobs) <= PUSH_JOBS
                else await asyncio.to_thread(self._encode, jobs, None)
            )
            wrapped.extend(parts)

        await wrap_async(self._target.config.client_middlewares, self._target.worker, encode)(list(chunk))
        return wrapped

    def _encode(self, chunk: list[Mapping[str, Any]], most_bytes: int | None) -> tuple[list[Part], int]:
        """The calls for the jobs of the chunk, and how many jobs that are."""
        target = self._target
        dump, limit = target.config.dump_payload, target.config.max_payload_bytes
        shards_count, rest = target.shards_count, target.rest
        groups: dict[int, tuple[list[EncodedJob], list[Mapping[str, Any]]]] = {}
        width, count, size = PLAIN, 0, 0
        for job in chunk:
            try:
                encoded = encode_job(job, dump, limit, rest)
            except JobError as error:
                raise _of_queue(target, error) from error.__cause__
            if encoded[2] or encoded[3] or len(encoded) == EXTENDED:
                width = max(width, width_of(encoded))
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
        parts: list[Part] = []
        for shard, (items, originals) in groups.items():
            prefix = shard_prefix(target.config.namespace, target.queue, shard)
            parts += self._parts(prefix, items, originals, width)
        self._prepared_jobs, self._prepared_bytes = count, size
        return parts, count

    def _parts(
        self, prefix: str, items: list[EncodedJob], originals: list[Mapping[str, Any]], width: int
    ) -> Iterator[Part]:
        shards_count, after = self._target.shards_count, b""
        start = 0
        while start < len(items):
            end, size = start, 0
            while end < len(items) and end - start < CALL_JOBS and (size < CALL_BYTES):
                size += len(items[end][1])
                end += 1
            part = Part(prefix, shards_count, items[start:end], originals[start:end], width, after, self._target.words)
            yield part
            if end < len(items):
                part.token = after = new_token()
            start = end

    def _take_results(
        self, parts: list[Part], results: list[Any], following: list[Mapping[str, Any]],
        attempts: Attempts,
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
            if self._target.events is not None:
                for part in parts:
                    self._emit_pushed(part)
            if self._on_progress is not None:
                self._on_progress(self._accepted)
            return
        self._target.group.writer.repeat_unanswered(parts, results, attempts)
        outcomes: list[Outcome] = [result if isinstance(result, Exception) else True for result in results]
        self._conclude(parts, outcomes, following)

    def count_accepted(self, parts: list[Part], outcomes: Sequence[Outcome]) -> int:
        """What a push that went together with others returns, or raises."""
        self._conclude(parts, outcomes, [])
        return self._result()

    async def acount(self, parts: list[Part], outcomes: Sequence[Outcome]) -> int:
        """As `count_accepted`. What did not fit is seen to in a thread."""
        if any(map(is_full, outcomes)):
            return await self._in_thread(lambda: self.count_accepted(parts, outcomes))
        return self.count_accepted(parts, outcomes)

    def _conclude(self, parts: Sequence[Part], outcomes: Sequence[Outcome], following: list[Mapping[str, Any]]) -> None:
        """Sends again what did not fit, for as long as there is time, and counts what became of the parts."""
        left: list[Mapping[str, Any]] = []
        if any(map(is_full, outcomes)):
            parts, outcomes, left = Overflow(parts, outcomes, self._send_again).settle(
                self._target.group.client, self._waits_until, lambda: not self._cancelled
            )
        self._add_outcomes(parts, outcomes, left + following)
        if self._cancelled:
            raise asyncio.CancelledError
        if left:
            late = missed_deadline()
            if late is not None:
                raise self.error(left + following, late) from late
            capacity = self._target.options.capacity or 0
            raise QueueFull(self._target.queue, self._accepted, self._rest(left + following), capacity)

    def _send_again(self, parts: list[Part]) -> list[Outcome]:
        attempts = Attempts(self._timeout)
        writer = self._target.group.writer
        results = writer.start(parts, lend=False, deadline=attempts.deadline, is_wanted=self._is_wanted)()
        writer.repeat_unanswered(parts, results, attempts)
        return [result if isinstance(result, Exception) else True for result in results]

    def _add_outcomes(
        self, parts: Sequence[Part], outcomes: Sequence[Outcome], following: list[Mapping[str, Any]]
    ) -> None:
        failed: list[Part] = []
        reason: Exception | None = None
        for part, outcome in zip(parts, outcomes, strict=True):
            if outcome is True:
                self._accepted += len(part.items)
                self._emit_pushed(part)
                continue
            # Nobody has said that it is in, so it may be in or not.
            error = outcome or RedisUnavailable("the outcome of the push is not known")
            failed.append(part)
            if reason is None or not is_out_of_turn(error):
                reason = error
        if self._on_progress is not None:
            self._on_progress(self._accepted)
        if reason is None:
            return
        if is_out_of_turn(reason):
            reason = RedisUnavailable("Redis has lost a call that it had answered: it was restarted without its data")
        if isinstance(reason, Refusal):
            raise ShardsCountError(self._target.queue, int(reason.detail), self._target.shards_count) from None
        if not isinstance(reason, RedisUnavailable) and not self._accepted:
            raise reason
        raise self.error([job for part in failed for job in part.jobs] + following, reason) from reason

    def _emit_pushed(self, part: Part) -> None:
        if self._target.events is not None:
            self._target.events.emit("pushed", [item[0] for item in part.items], 1)

    def error(self, pending: list[Mapping[str, Any]], reason: BaseException) -> PushError:
        kind = PushInterrupted if isinstance(reason, RedisUnavailable | TimeLimitExceeded) else PushError
        return kind(self._target.queue, self._accepted, self._rest(pending), reason)

    def _rest(self, pending: list[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
        rest: Iterable[Mapping[str, Any]] = chain(pending, self._put_back, self._remaining())
        return list(rest) if self._listed else rest

    def _remaining(self) -> Iterator[Mapping[str, Any]]:
        # A source that raised ends there. Who pushes the rest must not take that for the end of all jobs.
        if self._source_error is not None:
            raise self._source_error
        yield from self._source
