"""Pushing: jobs in, streamed in chunks, each chunk validated whole before any of it is written.

::

    jobs -> chunk -> client middlewares -> encode, group by shard -> one script call per shard, in one write
                                                                     (while Redis works, the next chunk is encoded,
                                                                      unless middlewares are async)

Jobs of an id stay in the order in which they came, whatever fails. A chunk is sent when all of the one before is in.
Within a chunk a shard may need several calls: each names the one before it, and Redis refuses it when that was not
carried out.
"""

import asyncio
import math
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar
from zlib import crc32

from lowq.codec import encode_job
from lowq.coroutines import in_own_thread
from lowq.errors import (
    JobError,
    NotReplicated,
    PushError,
    PushInterrupted,
    QueueFull,
    RedisUnavailable,
    TimeLimitExceeded,
)
from lowq.job import AnyJobs, Jobs
from lowq.middleware import all_async
from lowq.observe.events import observed_push
from lowq.push.batcher import ThreadRequest
from lowq.push.calls import Outcome, Part, Request, Settled, is_misscored, is_out_of_turn, sizes_of, wrong_scores
from lowq.push.event_loop import LoopRequest
from lowq.push.target import Target, as_iterable, of_queue
from lowq.push.write import PUSH_BYTES, PUSH_JOBS, Write, missed_deadline, room_until
from lowq.store import NotConfirmed

#: Jobs that are validated and written together.
CHUNK_JOBS = 5000
#: Bytes of payloads that end a chunk early: bounds memory, and the loss when a connection breaks.
CHUNK_BYTES = 8 * 2**20
R = TypeVar("R", bound=Request)
T = TypeVar("T")


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
        NotReplicated: jobs are in, but not confirmed in time as the target's durability wants it.
        ShardsCountError: the queue exists with another number of shards; nothing was written.
    """
    if target.events.observers:
        with observed_push(target.events.observers, target.queue, jobs) as observed:
            observed.accepted = push(target.observed(observed.trace), jobs, on_progress, timeout)
        return observed.accepted
    request = None
    if type(jobs) is dict and on_progress is None:
        request = _single_request(ThreadRequest, target, jobs, timeout)
    if request is None:
        return Push(target, jobs, on_progress, timeout).run()
    target.group.push(request)
    if request.outcomes[request.parts[0]] is True and not target.events.follows_jobs:
        return 1
    return Push(target, [], None).result_of(request)


async def apush(
    target: Target, jobs: AnyJobs, on_progress: Callable[[int], object] | None = None, timeout: float | None = None
) -> int:
    """As `push`, from a coroutine, and of an async iterable, too. A small push is encoded here and sent by the event
    loop. Sync client middlewares, an iterable that is not a list or tuple, and a large push may take long: they run in
    a thread.

    If it is cancelled before it was sent, nothing is written. A chunk that is under way may be in, and none follows.
    """
    if target.events.observers:
        with observed_push(target.events.observers, target.queue, jobs) as observed:
            observed.accepted = await apush(target.observed(observed.trace), jobs, on_progress, timeout)
        return observed.accepted
    request = None
    if type(jobs) is dict and on_progress is None:
        request = _single_request(LoopRequest, target, jobs, timeout)
    if request is None:
        return await Push(target, jobs, on_progress, timeout, is_awaited=True).arun()
    await target.group.apush(request)
    if request.outcomes[request.parts[0]] is True and not target.events.follows_jobs:
        return 1
    return Push(target, [], None).result_of(request)


def _single_request(kind: type[R], target: Target, job: dict[str, Any], timeout: float | None) -> R | None:
    """The request that the push of a single job is. None: a middleware is to see it, or it is too large to go with
    others.

    Raises:
        JobError, PayloadError. PushError: the deadline of the caller's batch has passed.
    """
    if target.config.client_middlewares:
        return None
    try:
        encoded = encode_job(
            job, target.dump, target.config.max_payload_bytes, target.rest, is_typed=target.payload_type is not None,
            read_score=target.read_score,
        )  # fmt: skip
    except JobError as error:
        raise of_queue(target.queue, error) from error.__cause__
    if len(encoded[1]) > PUSH_BYTES:
        return None
    routes = target.routes
    if routes.sealed:
        layout, shard, clock = routes.find(encoded[0])
        words = target.words_for(layout, clock)
    else:
        layout, words = routes.layouts.current, target.words
        shard = crc32(encoded[0]) % layout.shards_count
    prefix = target.prefixes.get((layout.epoch, shard)) or target.prefix(layout, shard)
    part = Part(target, layout, shard, prefix, [encoded], [job], words)
    until = room_until(timeout) if timeout else 0.0
    request = kind([part], 1, len(encoded[1]), target.group.seconds, until)
    if request.is_limited_by_batch:
        Push(target, [], None).check_goes_on(part.jobs)
    return request


class Push:
    """A push of any number of jobs, from one source."""

    def __init__(
        self, target: Target, jobs: Any, on_progress: Callable[[int], object] | None, timeout: float | None = None, *,
        is_awaited: bool = False,
    ) -> None:  # fmt: skip
        self._target = target
        #: The source, if it is an async iterable: read by the caller's task, a chunk whenever the one before is in.
        self._awaited = aiter(jobs) if is_awaited and isinstance(jobs, AsyncIterable) else None
        self._jobs = as_iterable(target.queue, jobs if self._awaited is None else iter(()))
        self._source = iter(self._jobs)
        self._listed = isinstance(self._jobs, Sequence)
        self._on_progress = on_progress
        self._accepted = 0
        #: Jobs that were read and are yet to be encoded.
        self._put_back: list[Mapping[str, Any]] = []
        #: Whether the source may have more, and its error.
        self._more = True
        self._source_error: BaseException | None = None
        #: Monotonic time until which room is waited for.
        self._room_until = room_until(timeout) if timeout else 0.0
        #: The last request of a thread; and whether the coroutine that waits for it was cancelled.
        self._request: ThreadRequest | None = None
        self._cancelled = False

    def run(self) -> int:
        """Pushes all, and returns how many payloads were accepted. It blocks."""
        parts, chunk = self._prepare(self._read())
        if not parts or not self._is_small(parts):
            return self._send_chunks(parts, chunk)
        request = self._begin(self._small_request(ThreadRequest, parts, chunk))
        self._target.group.push(request)
        return self.result_of(request)

    async def arun(self) -> int:
        """As `run`, from a coroutine."""
        middlewares = self._target.config.client_middlewares
        # Nothing of a longer one is read or encoded here: that would keep all other coroutines waiting.
        is_short = self._listed and len(self._jobs) <= PUSH_JOBS  # type: ignore[arg-type]  # a list or tuple has a length
        if self._awaited is not None or (middlewares and all_async(middlewares)):
            return await self._arun_chunks(is_short)
        if middlewares or not is_short:
            parts, chunk = await self._in_thread(lambda: self._prepare(self._read()))
            if self._is_small(parts):  # a thread for each of many that wait would be too many
                return await self._asend(parts, chunk)
            return await self._in_thread(partial(self._send_chunks, parts, chunk))
        jobs = self._read()
        parts, count = self._target.encode(jobs, PUSH_BYTES)
        if count < len(jobs):  # large payloads
            self._put_back = jobs
            return await self._in_thread(self.run)
        return await self._asend(parts, jobs)

    async def _arun_chunks(self, is_short: bool) -> int:
        """With an async iterable, or async middlewares, which run in the caller's task. Steps that block or take long
        run in threads, one after the other, so that no thread waits for the event loop: the loop may be closed
        meanwhile, or need a thread itself when all of them wait.
        """
        chunk = self._read() if is_short and self._awaited is None else await self._aread()
        is_first = True
        while chunk:
            try:
                parts, chunk = await self._aprepare(chunk)
            except Exception as error:
                if is_first:
                    raise
                raise self.error(chunk, error) from error
            if is_first and self._is_small(parts):
                return await self._asend(parts, chunk)
            await self._in_thread(partial(self._send_chunk, parts, chunk))
            chunk = await self._aread()
            is_first = False
        return self._result()

    async def _aread(self) -> list[Mapping[str, Any]]:
        """As `_read`, which blocks."""
        if self._awaited is None:
            return await self._in_thread(self._read)
        if self._put_back or self._source_error is not None:
            return self._read()
        chunk: list[Mapping[str, Any]] = []
        try:
            async for job in self._awaited:
                chunk.append(job)
                if len(chunk) == CHUNK_JOBS:
                    break
        except Exception as error:  # cancelling ends it all
            self._source_error = error
            return []
        self._more = len(chunk) == CHUNK_JOBS
        return chunk

    async def _aprepare(self, chunk: list[Mapping[str, Any]]) -> tuple[list[Part], list[Mapping[str, Any]]]:
        """As `_prepare`, which takes long."""
        middlewares = self._target.config.client_middlewares
        if middlewares and all_async(middlewares):
            return await self._target.aprepare(chunk), chunk
        return await self._in_thread(partial(self._prepare, chunk))

    async def _asend(self, parts: list[Part], chunk: list[Mapping[str, Any]]) -> int:
        """Sends a small push by the event loop."""
        if not parts:  # there was none, or the source raised, or a middleware has removed all
            return self._result()
        request = self._small_request(LoopRequest, parts, chunk)
        await self._target.group.apush(request)
        return self.result_of(request)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await in_own_thread(work)
        except asyncio.CancelledError:
            self._cancelled = True
            if self._request is not None:
                self._request.abandoned = True
            raise

    def _is_small(self, parts: list[Part]) -> bool:
        """Whether these are all that there is, and can go together with pushes of others."""
        if self._more or self._put_back:
            return False
        count, size = sizes_of(parts)
        return count <= PUSH_JOBS and size <= PUSH_BYTES

    def _small_request(self, kind: type[R], parts: list[Part], chunk: list[Mapping[str, Any]]) -> R:
        self.check_goes_on(chunk)
        return kind(parts, *sizes_of(parts), self._target.group.seconds, self._room_until)

    def _begin(self, request: ThreadRequest) -> ThreadRequest:
        self._request = request
        request.abandoned = self._cancelled  # meanwhile
        return request

    def _send_chunks(self, parts: list[Part], chunk: list[Mapping[str, Any]]) -> int:
        """Sends prepared parts, and all chunks that follow."""
        group, found = self._target.group, self._target.found
        while chunk:
            self.check_goes_on(chunk)
            # The producer's own code runs while Redis works: the source, middlewares, codec. It may well push or look
            # something up, so the connection is lent: all of them could be held by threads that wait for one more.
            # Not when nothing follows, as with a single job: lending takes two locks.
            lend = self._more or bool(self._put_back)
            next_parts: list[Part] = []
            refusal: Exception | None = None
            following: list[Mapping[str, Any]] = []
            write: Write[ThreadRequest] | None = None
            finish: Callable[[], list[Any]] = list
            if lend and not found.issuperset([part.prefix for part in parts]):
                # It may be refused, as shards are yet to be made, and the source may keep us waiting.
                self._send_chunk(parts, chunk)
            else:
                write = self._write(parts)
                finish = write.start(lend=lend)
            try:
                following = self._read()
                try:
                    next_parts, following = self._prepare(following)
                except Exception as error:  # a job's, or a middleware's: whatever it is, the replies are not to be lost
                    refusal = error
            finally:
                results = finish()
            if write is not None:
                group.settle(write, results)
                self._conclude(write.requests[0], following)
            if refusal is not None:
                raise self.error(following, refusal) from refusal
            chunk, parts = following, next_parts
        return self._result()

    def _send_chunk(self, parts: list[Part], chunk: list[Mapping[str, Any]]) -> None:
        """Sends prepared parts, and no more."""
        self.check_goes_on(chunk)
        write = self._write(parts)
        self._target.group.settle(write, write.start()())
        self._conclude(write.requests[0], [])

    def _write(self, parts: list[Part]) -> Write[ThreadRequest]:
        """A write of its own for a chunk. It may take as long as Redis keeps answering."""
        request = self._begin(ThreadRequest(parts, 0, 0, math.inf, self._room_until))
        write = Write(self._target.group.writer, [request])
        write.share_calls()
        return write

    def check_goes_on(self, chunk: list[Mapping[str, Any]]) -> None:
        """Raises if the caller was cancelled, or its batch's deadline has passed. ``chunk``: jobs to be sent."""
        if self._cancelled:
            raise asyncio.CancelledError
        if (late := missed_deadline()) is not None:
            raise self.error(chunk, late) from late

    def _result(self) -> int:
        """Returns the number of accepted payloads, or raises the error of the source."""
        if self._source_error is not None:
            raise self._source_error
        return self._accepted

    def _read(self) -> list[Mapping[str, Any]]:
        """Reads the next chunk: jobs that were put back, or of the source. A chunk in which the source raises is not
        pushed, those before it are.
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
        """Middlewares, validation, encoding. Returns the parts, and how much of the chunk they are: a chunk of large
        payloads ends early, and the rest of it is put back.
        """
        if not chunk:
            return [], chunk
        if self._target.config.client_middlewares:
            return self._target.prepare(chunk), chunk
        parts, count = self._target.encode(chunk, CHUNK_BYTES)
        self._put_back = chunk[count:]
        return parts, chunk[:count]

    def result_of(self, request: Request) -> int:
        """Returns or raises as the push does whose only request this was."""
        self._conclude(request, [])
        return self._result()

    def _conclude(self, request: Request, following: list[Mapping[str, Any]]) -> None:
        """Counts the outcomes of the parts. ``following`` was read from the source and not yet sent.

        Raises:
            PushError, QueueFull, NotReplicated; the refusal itself when nothing was accepted before.
        """
        left: list[Mapping[str, Any]] = []
        pairs: list[tuple[Part, Outcome | None]] = []
        for part in request.parts:
            outcome = request.outcomes.get(part)
            if isinstance(outcome, Settled):
                pairs += outcome.pairs
                left += outcome.left
            else:
                pairs.append((part, outcome))
        self._count(pairs, left + following)
        if self._cancelled:
            raise asyncio.CancelledError
        if left:
            if (late := missed_deadline()) is not None:
                raise self.error(left + following, late) from late
            capacity = self._target.options.capacity or 0
            raise QueueFull(self._target.queue, self._accepted, self._rest(left + following), capacity)

    def _count(self, pairs: Sequence[tuple[Part, Outcome | None]], following: list[Mapping[str, Any]]) -> None:
        failed: list[Part] = []
        reason: Exception | None = None
        unsafe: list[tuple[Part, NotConfirmed]] = []
        for part, outcome in pairs:
            if outcome is True or isinstance(outcome, NotConfirmed):
                self._accepted += len(part.items)
                self._target.found.add(part.prefix)
                if self._target.events.follows_jobs:
                    self._target.events.jobs_changed("pushed", part.ids(), 1)
                if outcome is not True:
                    unsafe.append((part, outcome))
                continue
            failed.append(part)
            # Without an outcome it may be in or not.
            error = outcome if isinstance(outcome, Exception) else RedisUnavailable("the outcome is not known")
            if is_misscored(error):
                error = wrong_scores(part, error)
            if reason is None or not is_out_of_turn(error):
                reason = error
        if self._on_progress is not None:
            self._on_progress(self._accepted)
        unsafe_jobs = [job for part, _ in unsafe for job in part.jobs]
        if reason is None:
            if unsafe:
                worst = min((outcome for _, outcome in unsafe), key=lambda outcome: outcome.confirmations)
                raise NotReplicated(
                    self._target.queue, self._accepted, unsafe_jobs, self._rest(following), worst.wait.durability,
                    worst.wait.seconds, worst.confirmations, worst.reason,
                )  # fmt: skip
            return
        if is_out_of_turn(reason):
            reason = RedisUnavailable("Redis has lost a call that it had answered: it was restarted without its data")
        if not isinstance(reason, RedisUnavailable) and not self._accepted:
            raise reason
        push_error = self.error([job for part in failed for job in part.jobs] + following, reason)
        push_error.unsafe = unsafe_jobs
        raise push_error from reason

    def error(self, pending: list[Mapping[str, Any]], reason: BaseException) -> PushError:
        kind = PushInterrupted if isinstance(reason, RedisUnavailable | TimeLimitExceeded) else PushError
        return kind(self._target.queue, self._accepted, self._rest(pending), reason)

    def _rest(self, pending: list[Mapping[str, Any]]) -> Any:
        if self._awaited is not None:
            return self._awaited_rest(self._awaited, [*pending, *self._put_back])
        rest: Iterable[Mapping[str, Any]] = chain(pending, self._put_back, self._remaining())
        return list(rest) if self._listed else rest

    async def _awaited_rest(self, source: AsyncIterator[Any], pending: list[Mapping[str, Any]]) -> AsyncIterator[Any]:
        for job in pending:
            yield job
        if self._source_error is not None:
            raise self._source_error
        async for job in source:
            yield job

    def _remaining(self) -> Iterator[Mapping[str, Any]]:
        # A source that raised ends there. A caller that pushes the rest must not take that for the end of all jobs.
        if self._source_error is not None:
            raise self._source_error
        yield from self._source
