"""The target of pushes: a queue, the shards that its jobs go to, and how they are encoded for them."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

from lowq.codec import EncodedJob, Rest, encode_job, score_reader
from lowq.codec.types import PayloadType
from lowq.errors import JobError, ShardsCountError
from lowq.job import Jobs
from lowq.observe.events import QueueEvents
from lowq.options import QueueOptions
from lowq.push.batcher import GroupCommit
from lowq.push.calls import Part
from lowq.push.write import PUSH_BYTES, PUSH_JOBS
from lowq.settings import Config
from lowq.sharding import Layout, Layouts, Routes
from lowq.store import Refusal
from lowq.store.shard import ShardScripts

#: Jobs, and bytes of payloads, of one script call: bounds the time that it holds Redis.
CALL_JOBS = 1000
CALL_BYTES = 2**20
#: Has a push make a shard that is not there: the registry has just said that it is of its queue.
ANEW = b" anew=1"


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

    def single(self, job: dict[str, Any]) -> Part | None:
        """The part that a single job is. None: a middleware is to see it, or it is too large to go with others.

        Raises:
            JobError, PayloadError
        """
        if self.config.client_middlewares:
            return None
        try:
            encoded = encode_job(
                job, self.dump, self.config.max_payload_bytes, self.rest, is_typed=self.payload_type is not None,
                read_score=self.read_score,
            )  # fmt: skip
        except JobError as error:
            raise of_queue(self.queue, error) from error.__cause__
        if len(encoded[1]) > PUSH_BYTES:
            return None
        routes = self.routes
        if routes.sealed:
            layout, shard, clock = routes.find(encoded[0])
            words = self.words_for(layout, clock)
        else:
            layout, words = routes.layouts.current, self.words
            shard = crc32(encoded[0]) % layout.shards_count
        prefix = self.prefixes.get((layout.epoch, shard)) or self.prefix(layout, shard)
        return Part(self, layout, shard, prefix, [encoded], [job], words)

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
        """A shard has said that its jobs belong to others. Returns whether they belong to it all the same: it is not
        there, and is to be made. ``refused_at``: when that was known, monotonic; what was read of the registry since
        then counts.

        Raises:
            ShardsCountError: it was made for another number of shards than the registry says. RedisUnavailable
        """
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
        """What all keys of a shard begin with."""
        prefix = self.prefixes.get((layout.epoch, shard))
        if prefix is None:
            prefix = self.prefixes[layout.epoch, shard] = layout.prefix(self.config.namespace, self.queue, shard)
        return prefix

    def words_for(self, layout: Layout, clock: bytes) -> bytes:
        """What a push to a shard of that layout tells Redis; ``clock``: of the shard that its ids belonged to."""
        words = self.words
        if layout is not self.routes.layouts.current and self.options.capacity is not None:
            capacity = replace(self.options, shards_count=layout.shards_count).shard_capacity
            words = re.sub(rb" capacity=\d+", b" capacity=%d" % (capacity or 0), words)
        return words + b" clock=" + clock if clock else words

    def observed(self, trace: str) -> "Target":
        """The same for a push that is observed already. ``trace``: what is kept beside its payloads."""
        words = self.words + b" trace=" + trace.encode() if trace else self.words
        return replace(self, events=self.events.unobserved(), words=words)


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
    some = as_iterable(queue, jobs)
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
    if not isinstance(given, Iterable) or isinstance(given, str | bytes):
        raise JobError(f"queue {queue!r}: jobs are one mapping or an iterable of mappings, not {type(jobs).__name__}")
    return jobs
