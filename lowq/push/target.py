"""The target of pushes: a queue, the shards that its jobs go to, and how they are encoded for them."""

import asyncio
import math
import re
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast
from zlib import crc32

from lowq.codec import EncodedJob, Rest, dump_payload, encode_id, encode_job, score_reader
from lowq.codec.types import PayloadType
from lowq.coroutines import in_own_thread, plain, running_loop
from lowq.errors import JobError, MiddlewareError, QueueFull, Resharding, ShardsCountError
from lowq.job import AnyJobs, Jobs
from lowq.middleware import all_async, wrap
from lowq.observe.events import QueueEvents
from lowq.options import QueueOptions
from lowq.push.batcher import GroupCommit, ThreadRequest
from lowq.push.calls import Part, SharedCall, copy_of, is_full, is_misrouted
from lowq.push.write import PUSH_JOBS, Write
from lowq.settings import Config
from lowq.sharding import Layout, Layouts, Routes
from lowq.store import Refusal
from lowq.store.shard import ShardScripts

T = TypeVar("T")

#: Jobs, and bytes of payloads, of one script call: bounds the time that it holds Redis.
CALL_JOBS = 1000
CALL_BYTES = 2**20
#: Has a push make a shard that is not there: the registry has just said that it is of its queue.
ANEW = b" anew=1"


@dataclass(frozen=True, slots=True)
class Target:
    """A queue that jobs are pushed to: its shards, options and encoding."""

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
    #: Emits the events of pushes.
    events: QueueEvents
    #: The options that a push tells Redis.
    words: bytes = b""
    #: How its payloads are encoded; None: as the setting ``dump_payload`` says.
    payload_type: PayloadType | None = None
    #: The prefixes of shards that jobs went to: (epoch, shard) -> prefix.
    prefixes: dict[tuple[int, int], str] = field(default_factory=dict)
    #: The prefixes of shards that are known to be there.
    found: set[str] = field(default_factory=set)
    #: Reads the registry, or enters the queue anew, when a shard that jobs went to is not there any more.
    learn_anew: Callable[[], Layouts] | None = None
    #: Encodes payloads.
    dump: Callable[[Any], bytes] = field(init=False)
    #: ttl and priority of jobs that say none, encoded.
    rest: Rest = field(init=False)
    #: Gives jobs without a score theirs, see `score_reader`; None: the clock does.
    read_score: Callable[[Any, bytes], bytes] | None = field(init=False)

    def __post_init__(self) -> None:
        config, typed = self.config, self.payload_type
        object.__setattr__(self, "dump", config.dump_payload if typed is None else typed.dump)
        object.__setattr__(self, "rest", self.options.rest)
        object.__setattr__(self, "read_score", reader_of(self.options.score, self.worker, self.payload_type))

    def prepare(self, jobs: list[Mapping[str, Any]]) -> list[Part]:
        """The parts for jobs, with client middlewares around, of which not all are async."""
        parts: list[Part] = []

        async def encode(jobs: list[Mapping[str, Any]]) -> None:
            parts.extend(self.encode(jobs)[0])

        # A list of their own, which they may change: when one of them raises, the caller gets back its own jobs.
        plain(wrap(self.config.client_middlewares, self.worker, encode, is_async=False))(list(jobs))
        return parts

    async def aprepare(self, jobs: list[Mapping[str, Any]]) -> list[Part]:
        """The same with async client middlewares."""
        parts: list[Part] = []

        async def encode(jobs: list[Mapping[str, Any]]) -> None:
            work = partial(self.encode, jobs)
            parts.extend((work() if len(jobs) <= PUSH_JOBS else await in_own_thread(work))[0])

        await wrap(self.config.client_middlewares, self.worker, encode, is_async=True)(list(jobs))
        return parts

    def encode(self, jobs: list[Mapping[str, Any]], most_bytes: float = math.inf) -> tuple[list[Part], int]:
        """The parts for the first of these jobs, up to so many bytes of payloads, and how many jobs that are.

        Raises:
            JobError, PayloadError
        """
        dump, limit, rest, read_score = self.dump, self.config.max_payload_bytes, self.rest, self.read_score
        is_typed, routes = self.payload_type is not None, self.routes
        current = routes.layouts.current
        shards_count, find = current.shards_count, routes.find if routes.sealed else None
        # By shard of the current layout; while that is being left, by all that `Routes.find` says.
        groups: dict[Any, tuple[list[EncodedJob], list[Mapping[str, Any]]]] = {}
        count = size = 0
        for job in jobs:
            try:
                encoded = encode_job(job, dump, limit, rest, is_typed=is_typed, read_score=read_score)
            except JobError as error:
                raise of_queue(self.queue, error) from error.__cause__
            place = crc32(encoded[0]) % shards_count if find is None else find(encoded[0])
            group = groups.get(place)
            if group is None:
                group = groups[place] = ([], [])
            group[0].append(encoded)
            group[1].append(job)
            count += 1
            size += len(encoded[1])
            if size >= most_bytes:
                break
        parts: list[Part] = []
        for place, (items, originals) in groups.items():
            layout, shard, clock = (current, place, b"") if find is None else place
            parts += self.parts(layout, shard, items, originals, clock)
        return parts, count

    def parts(
        self, layout: Layout, shard: int, items: list[EncodedJob], jobs: list[Mapping[str, Any]], clock: bytes, *,
        made: str = "",
    ) -> Iterator[Part]:  # fmt: skip
        """The parts for jobs of a shard, none of which takes Redis long. ``made``: the prefix of a shard that is to be
        made if it is not there.
        """
        prefix, words = self.prefix(layout, shard), self.words_for(layout, clock)
        if prefix == made:
            words += ANEW
        start = 0
        while start < len(items):
            end, size = start, 0
            while end < len(items) and end - start < CALL_JOBS and (size < CALL_BYTES):
                size += len(items[end][1])
                end += 1
            yield Part(self, layout, shard, prefix, items[start:end], jobs[start:end], words)
            start = end

    def note_misrouted(self, part: Part, refusal: Refusal, refused_at: float = math.inf) -> bool:
        """Notes that a shard has refused jobs as not its own. Returns whether they are its own all the same: it is not
        there, and is to be made. ``refused_at``: when that was known, monotonic; the registry is read again unless it
        was read since then.

        Raises:
            ShardsCountError: it was made for another number of shards than the registry says. RedisUnavailable
        """
        if refusal.code == "SEALED" and refusal.detail:
            self.routes.note_sealed(part.layout, part.shard, refusal.detail)
            return False
        # It is not there. If the queue has another layout by now, no node would take jobs of it.
        self.found.discard(part.prefix)
        if self.routes.read_at <= refused_at:
            assert self.learn_anew is not None
            self.routes.note_lost(self.learn_anew())
        layouts = self.routes.layouts
        if refusal.code == "SHARDSCOUNT" and part.layout in layouts.all:
            raise ShardsCountError(self.queue, refusal.shards_count, part.layout.shards_count)
        if part.layout == layouts.next:  # nothing may be taken of it before all is there
            self.group.client.call(ShardScripts(part.prefix).prepare(part.layout.shards_count))
        return part.layout in layouts.all

    def reroute(self, part: Part, refusal: Refusal, refused_at: float) -> list[Part]:
        """As of `lowq.push.calls.Target`."""
        made = part.prefix if self.note_misrouted(part, refusal, refused_at) else ""
        groups: dict[tuple[Layout, int, bytes], tuple[list[EncodedJob], list[Mapping[str, Any]]]] = {}
        for item, job in zip(part.items, part.jobs, strict=True):
            items, jobs = groups.setdefault(self.routes.find(item[0]), ([], []))
            items.append(item)
            jobs.append(job)
        return [
            other
            for (layout, shard, clock), (items, jobs) in groups.items()
            for other in self.parts(layout, shard, items, jobs, clock, made=made)
        ]

    def prefix(self, layout: Layout, shard: int) -> str:
        """The prefix of all keys of a shard."""
        prefix = self.prefixes.get((layout.epoch, shard))
        if prefix is None:
            prefix = self.prefixes[layout.epoch, shard] = layout.prefix(self.config.namespace, self.queue, shard)
        return prefix

    def words_for(self, layout: Layout, clock: bytes) -> bytes:
        """The options that a push to a shard of that layout tells Redis; ``clock``: of the shard that its ids belonged
        to.
        """
        words = self.words
        if layout is not self.routes.layouts.current and self.options.capacity is not None:
            capacity = replace(self.options, shards_count=layout.shards_count).shard_capacity
            words = re.sub(rb" capacity=\d+", b" capacity=%d" % (capacity or 0), words)
        return words + b" clock=" + clock if clock else words

    def observed(self, trace: str) -> "Target":
        """The same for a push that is observed already. ``trace``: its trace context."""
        words = self.words + b" trace=" + trace.encode() if trace else self.words
        return replace(self, events=self.events.unobserved(), words=words)


def reader_of(score: Any, worker: Any, payload_type: PayloadType | None) -> Callable[[Any, bytes], bytes] | None:
    """Gives jobs without a score theirs, as the option ``score`` says. ``worker``: as of a `Target`."""
    if score is None:
        return None
    whose = worker.__name__ if isinstance(worker, type) else f"the queue {worker!r}"
    return score_reader(score, whose, None if payload_type is None else payload_type.load)


def check_jobs(
    queue: str, config: Config, jobs: AnyJobs, payload_type: PayloadType | None,
    read_score: Callable[[Any, bytes], bytes] | None,
) -> None:  # fmt: skip
    """Checks the first of these jobs, for a queue that is yet to be entered in the registry: a push that is refused is
    to leave nothing there. Jobs behind middlewares or of an iterator are not looked at.

    Raises:
        JobError, PayloadError
    """
    some = () if isinstance(jobs, AsyncIterable) else as_iterable(queue, jobs)
    if config.client_middlewares or not isinstance(some, list | tuple):
        return
    dump = config.dump_payload if payload_type is None else payload_type.dump
    for job in some[:PUSH_JOBS]:
        try:
            encode_job(job, dump, config.max_payload_bytes, is_typed=payload_type is not None, read_score=read_score)
        except JobError as error:
            raise of_queue(queue, error) from error.__cause__


def of_queue(queue: str, error: JobError) -> JobError:
    return type(error)(f"queue {queue!r}: {error}")


def as_iterable(queue: str, jobs: Jobs) -> Iterable[Mapping[str, Any]]:
    if isinstance(jobs, Mapping):
        return [jobs]
    given: object = jobs
    if isinstance(given, Iterable) and not isinstance(given, str | bytes):
        return jobs
    hint = ""
    if isinstance(given, AsyncIterable):
        hint = "; an async iterable is pushed by a coroutine: await queue.apush(jobs), or aperform_async(jobs)"
    elif isinstance(given, Coroutine):
        given.close()
        hint = "; await it first"
    raise JobError(f"queue {queue!r}: jobs are one mapping or an iterable of mappings, not {type(jobs).__name__}{hint}")


# --- lookups ---


class _Line:
    """The waiting coroutines of one loop."""

    def __init__(self) -> None:
        self.count = 0
        #: Admits them one by one, in their order.
        self.turn = asyncio.Lock()
        #: The number of failed lookups, and the last error.
        self.failures = 0
        self.error: Exception | None = None


class SharedLookup:
    """A blocking lookup for coroutines: one at a time for each event loop. Coroutines that wait share its result or
    error. They go on in the order of their calls, also those that call when the result is known while earlier ones have
    not gone on yet. Safe for several loops.
    """

    def __init__(self) -> None:
        self._lines: dict[asyncio.AbstractEventLoop, _Line] = {}

    def is_under_way(self) -> bool:
        """Whether the running loop has coroutines that wait for a lookup, or that have not gone on after one."""
        return bool(self._lines) and asyncio.get_running_loop() in self._lines

    async def get(self, find: Callable[[], T | None], look_up: Callable[[], T], timeout: float) -> T:
        """The result of ``find``, or else of ``look_up``, which runs in a thread, in an empty context. A coroutine that
        calls while others wait has its turn after them, and mostly finds their result.

        Raises:
            TimeoutError: there was no result within so many seconds. The error of the lookup, or of one that failed
            while the caller waited.
        """

        def attempt() -> tuple[T | None, Exception | None]:
            try:
                return look_up(), None
            except Exception as error:
                return None, error

        loop = running_loop()
        if loop not in self._lines:
            for other in [other for other in list(self._lines) if other.is_closed()]:
                self._lines.pop(other, None)  # it was closed during a lookup
        line = self._lines.setdefault(loop, _Line())
        line.count += 1
        failures = line.failures
        try:
            async with asyncio.timeout(timeout), line.turn:
                found = find()
                if found is not None:
                    return found
                if line.error is not None and line.failures > failures:
                    raise copy_of(line.error)
                found, error = await in_own_thread(partial(Context().run, attempt))
                if error is not None:
                    # A copy, without the traceback, which would keep this frame and so the line.
                    line.failures, line.error = line.failures + 1, copy_of(error)
                    raise error
                return cast(T, found)
        except TimeoutError:
            found = find()  # another coroutine may have found it
            if found is None:
                raise
            return found
        finally:
            line.count -= 1
            if not line.count:
                self._lines.pop(loop, None)


# --- ticks of schedules ---


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
    one that the caller has read; otherwise nothing is written. So each tick is pushed once. ``is_anew``: Redis has lost
    the shard.

    Raises:
        MiddlewareError: client middlewares gave the jobs another id. Other errors as of `push`.
    """
    jobs: list[Mapping[str, Any]]
    jobs = [{"id": schedule, "payload": tick_payload(tick, target.payload_type), "score": tick} for tick in ticks]
    words = target.words + b" ticks=%b>%b" % (record, new_record) + (ANEW if is_anew else b"")
    told = replace(target, words=words)
    middlewares = target.config.client_middlewares
    parts = asyncio.run(told.aprepare(jobs)) if middlewares and all_async(middlewares) else told.prepare(jobs)
    if not parts:  # the middlewares want none of them
        layout, shard, _ = target.routes.find(encode_id(schedule))
        prefix = target.prefix(layout, shard)
        return bool(target.group.client.call(ShardScripts(prefix).set_schedule(schedule, record, new_record)))
    part = parts[0]
    if len(parts) > 1 or part.items[0][0] != encode_id(schedule):
        raise MiddlewareError(
            f"a client middleware gave jobs of the schedule {schedule!r} another id: leave it to them"
        )
    request = ThreadRequest(parts, 1, 0, math.inf)
    write = Write(target.group.writer, [request])
    write.calls = [SharedCall(request, part, b"")]
    write.send()
    refusal, outcome = request.again.get(part), request.outcomes.get(part)
    if is_misrouted(refusal):
        if target.note_misrouted(part, refusal) and not is_anew:
            return push_ticks(target, schedule, ticks, record, new_record, is_anew=True)
        return False  # the caller reads the record again, where it is now
    if is_full(refusal):
        raise QueueFull(target.queue, 0, jobs, target.options.capacity or 0)
    if isinstance(outcome, Exception) and not isinstance(outcome, Resharding):
        raise outcome
    if outcome is not True:
        return False
    if target.events.follows_jobs:
        target.events.jobs_changed("pushed", part.ids(), 1)
    return True
