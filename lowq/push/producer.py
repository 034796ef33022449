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
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

from lowq.codec import EncodedJob, Rest, dump_payload, encode_id, encode_job, score_reader
from lowq.codec.types import PayloadType
from lowq.coroutines import plain
from lowq.errors import (
    JobError,
    MiddlewareError,
    NotReplicated,
    PayloadError,
    PushError,
    PushInterrupted,
    QueueFull,
    RedisUnavailable,
    Resharding,
    ShardsCountError,
    TimeLimitExceeded,
)
from lowq.middleware import all_async, wrap
from lowq.observe.emit import QueueEvents, observed_push
from lowq.options import QueueOptions
from lowq.push.group_commit import (
    EXTENDED,
    PLAIN,
    PUSH_BYTES,
    PUSH_JOBS,
    Attempts,
    GroupCommit,
    Outcome,
    Part,
    Settled,
    is_full,
    is_misrouted,
    is_misscored,
    is_out_of_turn,
    missed_deadline,
    new_token,
    width_of,
)
from lowq.push.own_thread import in_own_thread
from lowq.settings import Config
from lowq.sharding import Layout, Layouts, Routes, shard_of
from lowq.store import NotConfirmed, Refusal, caller_deadline
from lowq.store.shard import ShardScripts

#: Jobs that are validated and written together.
CHUNK_JOBS = 5000
#: Bytes of payloads that end a chunk early: bounds memory, and what is lost when a connection breaks.
CHUNK_BYTES = 8 * 2**20
#: Jobs, and bytes of payloads, of one script call: bounds the time that it holds Redis.
CALL_JOBS = 1000
CALL_BYTES = 2**20
#: Has a push make a shard that is not there: the registry has just said that it is of its queue.
ANEW = b" anew=1"
T = TypeVar("T")
#: What ``perform_async`` takes: one job, or any iterable of jobs. A `JobDict` is such a mapping.
Jobs = Mapping[str, Any] | Iterable[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Target:
    """Where jobs go: a queue, and who is named to client middlewares."""

    group: GroupCommit
    config: Config
    queue: str
    #: As the code says it.
    shards_count: int
    #: Which shards the jobs go to.
    routes: Routes
    #: The worker's class, or the queue's name when the producer doesn't know the class.
    worker: Any
    options: QueueOptions
    #: What emits which jobs are in, and has pushes observed.
    events: QueueEvents
    #: What of them a push tells Redis.
    words: bytes = b""
    #: How its payloads are encoded; None: as the setting ``dump_payload`` says.
    payload_type: PayloadType | None = None
    #: The prefixes of shards that jobs went to: (epoch, shard) -> prefix.
    prefixes: dict[tuple[int, int], str] = field(default_factory=dict)
    #: The prefixes of shards that are known to be there.
    found: set[str] = field(default_factory=set)
    #: Reads the registry, or enters the queue anew, when a shard that jobs went to is not there any more.
    learn_anew: Callable[[], Layouts] | None = None
    #: ttl and priority of jobs that say none, encoded.
    rest: Rest = field(init=False)
    #: Gives jobs without a score theirs, see `score_reader`; None: the clock does.
    read_score: Callable[[Any, bytes], bytes] | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rest", self.options.rest)
        object.__setattr__(self, "read_score", reader_of(self.options.score, self.worker, self.payload_type))

    def note_misrouted(self, part: Part, refusal: Refusal, refused_at: float = math.inf) -> bool:
        """A shard has said that its jobs belong to others. Returns whether they belong to it all the same: it is not
        there, and is to be made. ``refused_at``: when that was known, monotonic; what was read of the registry since
        then counts.

        Raises:
            ShardsCountError: it was made for another number of shards than the registry says. RedisUnavailable
        """
        assert part.layout is not None
        if refusal.code == "SEALED" and refusal.detail:
            self.routes.note_sealed(part.layout, part.shard, refusal.detail)
            return False
        # Not there: pushed to it, nobody would take them if the queue has another layout by now.
        self.found.discard(part.prefix)
        if self.routes.read_at <= refused_at:
            assert self.learn_anew is not None
            self.routes.note_lost(self.learn_anew())
        layouts = self.routes.layouts
        if refusal.code == "SHARDSCOUNT" and part.layout in layouts.all:
            raise ShardsCountError(self.queue, int(refusal.detail), part.shards_count)
        if part.layout == layouts.next:  # nothing may be taken of it before all is there
            self.group.client.call(ShardScripts(part.prefix).prepare(part.shards_count))
        return part.layout in layouts.all

    def reroute(self, part: Part, refusal: Refusal, refused_at: float) -> list[Part]:
        """As of `lowq.push.parts.Target`."""
        is_made = self.note_misrouted(part, refusal, refused_at)
        groups: dict[tuple[Layout, int, bytes], tuple[list[EncodedJob], list[Mapping[str, Any]]]] = {}
        for item, job in zip(part.items, part.jobs, strict=True):
            group = groups.setdefault(self.routes.find(item[0]), ([], []))
            group[0].append(item)
            group[1].append(job)
        return [
            other
            for (layout, shard, clock), (items, jobs) in groups.items()
            for other in self.parts(layout, shard, items, jobs, part.width, clock, made=part.prefix if is_made else "")
        ]

    def parts(
        self, layout: Layout, shard: int, items: list[EncodedJob], originals: list[Mapping[str, Any]], width: int,
        clock: bytes, *, made: str = "",
    ) -> Iterator[Part]:  # fmt: skip
        """The calls for jobs of a shard: each comes after the one before it. ``made``: the prefix of a shard that is to
        be made if it is not there.
        """
        prefix, words, after = self.prefix(layout, shard), self.words_for(layout, clock), b""
        if prefix == made:
            words += ANEW
        start = 0
        while start < len(items):
            end, size = start, 0
            while end < len(items) and end - start < CALL_JOBS and (size < CALL_BYTES):
                size += len(items[end][1])
                end += 1
            part = Part(
                prefix, layout.shards_count, items[start:end], originals[start:end], width, after, words,
                layout=layout, shard=shard, target=self,
            )  # fmt: skip
            yield part
            if end < len(items):
                part.token = after = new_token()
            start = end

    def prefix(self, layout: Layout, shard: int) -> str:
        """What all keys of a shard begin with."""
        prefix = self.prefixes.get((layout.epoch, shard))
        if prefix is None:
            prefix = self.prefixes[layout.epoch, shard] = layout.prefix(self.config.namespace, self.queue, shard)
        return prefix

    def words_for(self, layout: Layout, clock: bytes) -> bytes:
        """What a push to a shard of that layout tells Redis; ``clock``: of the shard that its ids belonged to."""
        words = self.words
        if layout is not self.routes.current and self.options.capacity is not None:
            capacity = replace(self.options, shards_count=layout.shards_count).shard_capacity
            words = re.sub(rb" capacity=\d+", b" capacity=%d" % (capacity or 0), words)
        return words + b" clock=" + clock if clock else words

    def observed(self, trace: str) -> "Target":
        """The same for a push that is observed already. ``trace``: what is kept beside its payloads."""
        words = self.words + b" trace=" + trace.encode() if trace else self.words
        return replace(self, events=self.events.unobserved(), words=words)


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
        NotReplicated: jobs are in, and what the target's durability is to wait for was not confirmed in time.
        ShardsCountError: the queue exists with another number of shards; nothing was written.
    """
    if target.events.observers:
        with observed_push(target.events.observers, target.queue, jobs) as observed:
            observed.accepted = push(target.observed(observed.trace), jobs, on_progress, timeout)
        return observed.accepted
    if type(jobs) is dict and on_progress is None and target.group.is_busy:
        single = _encode_single(target, jobs)
        if single is not None:
            part, size = single
            _check_in_time(target, part.jobs)
            outcomes = target.group.push([part], 1, size, room_until(timeout))
            if outcomes[0] is True and not target.events.follows_jobs:
                return 1
            return _Push(target, [], None, timeout).count_accepted([part], outcomes)
    return _Push(target, jobs, on_progress, timeout).run()


def room_until(timeout: float | None) -> float:
    """Monotonic time until which a push waits for room that may wait for so many seconds."""
    return min(time.monotonic() + timeout, caller_deadline()) if timeout else 0.0


def tick_payload(tick: float, payload_type: PayloadType | None) -> Any:
    """The payload of a schedule's tick, as the type that the queue's worker says.

    Raises:
        Whatever says why the type has no such value.
    """
    payload = {"planned_at": tick}
    return payload if payload_type is None else payload_type.load(dump_payload(payload))


def push_ticks(
    target: Target, schedule: str, ticks: Sequence[float], record: bytes, new_record: bytes, *, is_anew: bool = False
) -> bool:
    """Pushes ticks of a schedule and changes its record, in one script call. Returns whether the record was still the
    one that the caller has read; otherwise nothing is written. So a tick is pushed once, whoever tries again.
    ``is_anew``: Redis has lost the shard.

    Raises:
        LowqError: client middlewares gave the jobs another id. What else `push` raises.
    """
    jobs = [{"id": schedule, "payload": tick_payload(tick, target.payload_type), "score": tick} for tick in ticks]
    words = target.words + b" ticks=%b>%b" % (record, new_record) + (ANEW if is_anew else b"")
    parts = _Push(replace(target, words=words), jobs, None).prepare_all()
    writer = target.group.writer
    if not parts:  # the middlewares want none of them
        layout, shard, _ = target.routes.find(encode_id(schedule))
        prefix = target.prefix(layout, shard)
        return bool(writer.client.call(ShardScripts(prefix).set_schedule(schedule, record, new_record)))
    if len(parts) > 1 or parts[0].items[0][0] != encode_id(schedule):
        raise MiddlewareError(
            f"a client middleware gave jobs of the schedule {schedule!r} another id: leave it to them"
        )
    attempts = Attempts(target.config.push_timeout)
    results = writer.start(parts, lend=False, deadline=attempts.deadline)()
    writer.repeat_unanswered(parts, results, attempts)
    (result,) = results
    if is_misrouted(result):
        if target.note_misrouted(parts[0], result) and not is_anew:
            return push_ticks(target, schedule, ticks, record, new_record, is_anew=True)
        return False  # the caller reads the record again, where it is now
    if isinstance(result, Resharding):
        return False
    if is_full(result):
        raise QueueFull(target.queue, 0, jobs, target.options.capacity or 0)
    if isinstance(result, Exception):
        raise result
    if result and target.events.follows_jobs:
        target.events.jobs_changed("pushed", [item[0] for item in parts[0].items], 1)
    return bool(result)


def reader_of(score: Any, worker: Any, payload_type: PayloadType | None) -> Callable[[Any, bytes], bytes] | None:
    """What gives jobs without a score theirs, as the option ``score`` says. ``worker``: as of a `Target`."""
    if score is None:
        return None
    whose = worker.__name__ if isinstance(worker, type) else f"the queue {worker!r}"
    return score_reader(score, whose, None if payload_type is None else payload_type.load)


def check_jobs(
    queue: str, config: Config, jobs: Jobs, payload_type: PayloadType | None,
    read_score: Callable[[Any, bytes], bytes] | None,
) -> None:  # fmt: skip
    """Whether the first of these jobs can be pushed: for a queue that is yet to be entered in the registry, where a
    push that is refused is to leave nothing. What only middlewares, or an iterator, can tell is not looked at.

    Raises:
        JobError, PayloadError
    """
    some = _as_iterable(queue, jobs)
    if config.client_middlewares or not isinstance(some, list | tuple):
        return
    dump = config.dump_payload if payload_type is None else payload_type.dump
    for job in some[:PUSH_JOBS]:
        try:
            encode_job(job, dump, config.max_payload_bytes, is_typed=payload_type is not None, read_score=read_score)
        except JobError as error:
            raise _of_queue(queue, error) from error.__cause__


async def apush(
    target: Target, jobs: Jobs, on_progress: Callable[[int], object] | None = None, timeout: float | None = None
) -> int:
    """As `push`, from a coroutine. A small push is encoded here and sent by the event loop. What may take long runs in
    a thread: sync client middlewares, an iterable that is not a list or tuple, and all that is not small.

    When it is cancelled before it was sent, nothing is written. What is under way may be in, and no chunk follows.
    """
    if target.events.observers:
        with observed_push(target.events.observers, target.queue, jobs) as observed:
            observed.accepted = await apush(target.observed(observed.trace), jobs, on_progress, timeout)
        return observed.accepted
    if type(jobs) is dict and on_progress is None:
        single = _encode_single(target, jobs)
        if single is not None:
            part, size = single
            _check_in_time(target, part.jobs)
            outcomes = await target.group.apush([part], 1, size, room_until(timeout))
            if outcomes[0] is True and not target.events.follows_jobs:
                return 1
            return _Push(target, [], None, timeout).count_accepted([part], outcomes)
    return await _Push(target, jobs, on_progress, timeout).arun()


def _encode_single(target: Target, job: dict[str, Any]) -> tuple[Part, int] | None:
    """The one part that a single job is, and its bytes. None: a middleware is to see it, or it is too large to go with
    others.
    """
    config = target.config
    if config.client_middlewares:
        return None
    try:
        if target.payload_type is None and target.read_score is None:
            encoded = encode_job(job, config.dump_payload, config.max_payload_bytes, target.rest)
        else:
            typed = target.payload_type
            dump = config.dump_payload if typed is None else typed.dump
            encoded = encode_job(
                job, dump, config.max_payload_bytes, target.rest, is_typed=typed is not None,
                read_score=target.read_score,
            )  # fmt: skip
    except JobError as error:
        raise _of_queue(target.queue, error) from error.__cause__
    job_id, payload = encoded[:2]
    if len(payload) > PUSH_BYTES:
        return None
    routes = target.routes
    if routes.has_sealed:
        layout, shard, clock = routes.find(job_id)
        words = target.words_for(layout, clock)
    else:
        layout, words = routes.current, target.words
        shard = shard_of(job_id, layout.shards_count)
    prefix = target.prefixes.get((layout.epoch, shard)) or target.prefix(layout, shard)
    width = width_of(encoded)
    part = Part(
        prefix, layout.shards_count, [encoded], [job], width, words=words, layout=layout, shard=shard, target=target
    )
    return part, len(payload)


def _check_in_time(target: Target, jobs: list[Mapping[str, Any]]) -> None:
    late = missed_deadline()
    if late is not None:
        raise _Push(target, [], None).error(jobs, late) from late


def _of_queue(queue: str, error: JobError) -> JobError:
    return type(error)(f"queue {queue!r}: {error}")


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
        self._room_until = room_until(room_timeout)
        #: Whether the coroutine that waits for this was cancelled; and what asks for that, where there is one.
        self._cancelled = False
        self._is_wanted: Callable[[], bool] | None = None

    def run(self) -> int:
        chunk = self._read()
        parts, chunk = self._prepare(chunk)
        return self._send(parts, chunk)

    def prepare_all(self) -> list[Part]:
        """The calls for all jobs, which are few."""
        middlewares, jobs = self._target.config.client_middlewares, self._read()
        if middlewares and all_async(middlewares):
            return asyncio.run(self._wrapped_async(jobs))
        return self._prepare(jobs)[0]

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
        group = self._target.group
        outcomes = await group.apush(parts, self._prepared_jobs, self._prepared_bytes, self._room_until)
        return self.count_accepted(parts, outcomes)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        self._is_wanted = lambda: not self._cancelled
        try:
            return await in_own_thread(work)
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
            outcomes = group.push(parts, self._prepared_jobs, self._prepared_bytes, self._room_until)
            return self.count_accepted(parts, outcomes)
        try:
            return self._send_chunks(parts, chunk)
        finally:
            # An exception would keep it as long as somebody keeps the exception.
            del direct

    def _send_chunks(self, parts: list[Part], chunk: list[Mapping[str, Any]]) -> int:
        group, found = self._target.group, self._target.found
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
            if lend and not found.issuperset([part.prefix for part in parts]):
                # It may be refused, as shards are yet to be made, and the source may keep us waiting.
                self._take_results(parts, finish(), [], attempts)
                finish, parts = list, []
            try:
                following = self._read()
                try:
                    next_parts, following = self._prepare(following)
                except Exception as error:  # a job's, or a middleware's: whatever it is, the replies are not to be lost
                    refusal = error
            finally:
                results = finish()
            if parts:
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

        async def encode(jobs: list[Mapping[str, Any]]) -> None:
            wrapped.extend(self._encode(jobs, None)[0])

        # A list of their own, which they may change: when one of them raises, the rest is what was given.
        plain(wrap(middlewares, self._target.worker, encode, is_async=False))(list(chunk))
        return wrapped, chunk

    async def _wrapped_async(self, chunk: list[Mapping[str, Any]]) -> list[Part]:
        """The calls for the jobs of a chunk, with async middlewares around."""
        wrapped: list[Part] = []

        async def encode(jobs: list[Mapping[str, Any]]) -> None:
            parts, _ = (
                self._encode(jobs, None)
                if len(jobs) <= PUSH_JOBS
                else await in_own_thread(lambda: self._encode(jobs, None))
            )
            wrapped.extend(parts)

        middlewares = self._target.config.client_middlewares
        await wrap(middlewares, self._target.worker, encode, is_async=True)(list(chunk))
        return wrapped

    def _encode(self, chunk: list[Mapping[str, Any]], most_bytes: int | None) -> tuple[list[Part], int]:
        """The calls for the jobs of the chunk, and how many jobs that are."""
        target = self._target
        typed, limit = target.payload_type, target.config.max_payload_bytes
        dump, is_typed = target.config.dump_payload if typed is None else typed.dump, typed is not None
        rest, routes, read_score = target.rest, target.routes, target.read_score
        current = routes.current
        find = routes.find if routes.has_sealed else None
        # By shard of the current layout; while that is being left, by all that `Routes.find` says.
        groups: dict[Any, tuple[list[EncodedJob], list[Mapping[str, Any]]]] = {}
        width, count, size = PLAIN, 0, 0
        for job in chunk:
            try:
                encoded = (
                    encode_job(job, dump, limit, rest, is_typed=is_typed, read_score=read_score)
                    if is_typed or read_score is not None
                    else encode_job(job, dump, limit, rest)
                )
            except JobError as error:
                raise _of_queue(target.queue, error) from error.__cause__
            if encoded[2] or encoded[3] or len(encoded) == EXTENDED:
                width = max(width, width_of(encoded))
            place = shard_of(encoded[0], current.shards_count) if find is None else find(encoded[0])
            group = groups.get(place)
            if group is None:
                group = groups[place] = ([], [])
            group[0].append(encoded)
            group[1].append(job)
            count += 1
            size += len(encoded[1])
            if most_bytes is not None and size >= most_bytes:
                break
        parts: list[Part] = []
        for place, (items, originals) in groups.items():
            layout, shard, clock = (current, place, b"") if find is None else place
            parts += target.parts(layout, shard, items, originals, width, clock)
        self._prepared_jobs, self._prepared_bytes = count, size
        return parts, count

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
            self._target.found.update([part.prefix for part in parts])
            if self._target.events.follows_jobs:
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

    def _conclude(self, parts: Sequence[Part], outcomes: Sequence[Outcome], following: list[Mapping[str, Any]]) -> None:
        """Has sent again what was refused for now, and counts what became of the parts."""
        if any(is_full(outcome) or is_misrouted(outcome) for outcome in outcomes):
            is_wanted = self._is_wanted or (lambda: True)
            settled = self._target.group.writer.settle(parts, outcomes, self._room_until, is_wanted)
        else:
            settled = Settled()
            for part, outcome in zip(parts, outcomes, strict=True):
                if type(outcome) is Settled:
                    settled.pairs += outcome.pairs
                    settled.left += outcome.left
                else:
                    settled.pairs.append((part, outcome))
        left = settled.left
        self._add_outcomes(settled.pairs, left + following)
        if self._cancelled:
            raise asyncio.CancelledError
        if left:
            late = missed_deadline()
            if late is not None:
                raise self.error(left + following, late) from late
            capacity = self._target.options.capacity or 0
            raise QueueFull(self._target.queue, self._accepted, self._rest(left + following), capacity)

    def _add_outcomes(self, pairs: Sequence[tuple[Part, Outcome]], following: list[Mapping[str, Any]]) -> None:
        failed: list[Part] = []
        reason: Exception | None = None
        unsafe: list[tuple[Part, NotConfirmed]] = []
        for part, outcome in pairs:
            assert not isinstance(outcome, Settled)
            if outcome is True or isinstance(outcome, NotConfirmed):
                self._accepted += len(part.items)
                self._target.found.add(part.prefix)
                self._emit_pushed(part)
                if outcome is not True:
                    unsafe.append((part, outcome))
                continue
            # Nobody has said that it is in, so it may be in or not.
            error = outcome or RedisUnavailable("the outcome of the push is not known")
            failed.append(part)
            if is_misscored(error):
                error = self._wrong_scores(part, error)
            if reason is None or not is_out_of_turn(error):
                reason = error
        if self._on_progress is not None:
            self._on_progress(self._accepted)
        if reason is None:
            if unsafe:
                raise self._not_replicated(unsafe, following)
            return
        if is_out_of_turn(reason):
            reason = RedisUnavailable("Redis has lost a call that it had answered: it was restarted without its data")
        if not isinstance(reason, RedisUnavailable) and not self._accepted:
            raise reason
        error = self.error([job for part in failed for job in part.jobs] + following, reason)
        error.unsafe = [job for part, _ in unsafe for job in part.jobs]
        raise error from reason

    def _wrong_scores(self, part: Part, refusal: Refusal) -> PayloadError:
        kind, *positions = refusal.detail.split()
        job = part.jobs[int(positions[0]) if positions else 0]
        if kind == "missing":
            why = (
                "has no score, and others of the queue have versions: its score would be the time, which is above all "
                "of them, so it would come last and count as the newest. Push it with score=..., or declare where "
                "that is, once: the option score='version' of the worker, if that is the field's name"
            )
        else:
            why = (
                f"has a score, {part.items[int(positions[0])][2].decode()}, and others of its shard wait or run that "
                "were pushed without: their score is the time, so they would come after it and count as newer. Push "
                "all with scores, once what was pushed without is performed, or deleted"
            )
        return PayloadError(f"queue {self._target.queue!r}: job {job['id']!r:.100} {why}; nothing was written")

    def _not_replicated(
        self, unsafe: list[tuple[Part, NotConfirmed]], following: list[Mapping[str, Any]]
    ) -> NotReplicated:
        jobs = [job for part, _ in unsafe for job in part.jobs]
        worst = min((outcome for _, outcome in unsafe), key=lambda outcome: outcome.confirmations)
        wait = worst.wait
        return NotReplicated(
            self._target.queue, self._accepted, jobs, self._rest(following), wait.durability, wait.seconds,
            worst.confirmations, worst.reason,
        )  # fmt: skip

    def _emit_pushed(self, part: Part) -> None:
        if self._target.events.follows_jobs:
            self._target.events.jobs_changed("pushed", [item[0] for item in part.items], 1)

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
