"""Why an id is not being performed right now, in a sentence, and the description of an id."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import Any, Literal, NamedTuple

from lowq.clock import duration
from lowq.codec import decode_id
from lowq.job import Job, State
from lowq.limits import Concurrency, LimitRule, Rate, registered_limits
from lowq.operate.jobs import everywhere_calls, jobs_everywhere
from lowq.operate.nodes import NodeInfo, RunningBatch, live_nodes
from lowq.operate.queues import QueueShards, entry_call, entry_of
from lowq.operate.stats import ShardInfo, by_nonce, shard_info
from lowq.operate.walk import ask
from lowq.registrations import QueueInfo
from lowq.retry import MAX_RETRY_COUNT, attempt_text
from lowq.sharding import Layouts
from lowq.store import Call, Client, Command, untrusted
from lowq.store.calls import time_of
from lowq.store.keys import limit_key, nodes_key
from lowq.store.shard_operations import Finished, Flight, ShardOperations, WhyReply

#: Slots of a rate within its time: see ``take_permits.lua``.
_SLOTS = 400


@dataclass(frozen=True, slots=True)
class LimitState:
    """A limit of a queue at one moment, over all nodes and all queues that share it."""

    limit: LimitRule
    #: Of a `lowq.Rate`: jobs that began within its time. Of a `lowq.Concurrency`: batches that run, and those that a
    #: node keeps a place for.
    used: int
    #: Seconds until more may begin; 0.0: more may now; None: as soon as a batch, or a call, ends.
    wait: float | None
    #: Queues of nodes that wait for a permit.
    waiting: int = 0

    @property
    def is_reached(self) -> bool:
        """Whether nothing more may begin now."""
        return self.wait != 0.0

    def __str__(self) -> str:
        shared = f", shared as {self.limit.key!r}" if self.limit.key else ""
        if isinstance(self.limit, Rate):
            return f"{self.used:,} of {self.limit.limit:,} jobs in {duration(self.limit.seconds)}{shared}"
        return f"{self.used:,} of {self.limit.limit:,} batches at once{shared}"


def read_limits(client: Client, namespace: str, queue: str, options: Mapping[str, Any]) -> list[LimitState]:
    """The limits in the queue's options in the registry, and how far they are used.

    Raises:
        RedisUnavailable
    """
    limits = registered_limits(options.get("limit"))
    if not limits:
        return []
    keys = [limit_key(namespace, limit.name(queue)) for limit in limits]
    calls = [Command(keys[0], "TIME"), *(Command(key, "HGETALL", key) for key in keys)]
    time, *replies = ask(client, calls, len(calls))
    now = time_of(time)
    return [_state(limit, reply, now) for limit, reply in zip(limits, replies, strict=True)]


def _state(limit: LimitRule, reply: list[bytes], now: float) -> LimitState:
    fields = dict(zip(reply[::2], reply[1::2], strict=True))
    holders = [_read_holder(record, now) for name, record in fields.items() if name.startswith(b"holder:")]
    waiting = sum(waits for _, waits in holders)
    held = sum(held for held, _ in holders)
    until, _, longest = fields.get(b"deferred", b"").partition(b" ")
    deferred = max(min(untrusted.finite(until, 0.0) - now, untrusted.finite(longest, 0.0)), 0.0)
    if isinstance(limit, Concurrency):
        return LimitState(limit, held, deferred if deferred or held < limit.limit else None, waiting)
    width = limit.seconds / _SLOTS
    slots = {
        untrusted.finite(name[5:], 0.0): int(untrusted.finite(count, 0.0))
        for name, count in fields.items()
        if name.startswith(b"slot:")
    }
    ends = {slot: (slot + _SLOTS + 2) * width for slot in slots}
    used = held + sum(count for slot, count in slots.items() if ends[slot] > now)
    wait, left = 0.0, used
    for slot in sorted(slots):
        if left < limit.limit:
            break
        if ends[slot] > now:
            wait, left = min(ends[slot] - now, limit.seconds), left - slots[slot]
    # Those that are held count until later, at an unknown time.
    return LimitState(limit, used, max(wait, deferred) if deferred or left < limit.limit else None, waiting)


def _read_holder(record: bytes, now: float) -> tuple[int, bool]:
    """The permits of a holder with a sign of life within its ttl, and whether it waits for more; 0 for another
    record.
    """
    words = [untrusted.finite(word, 0.0) for word in record.split()]
    if len(words) != 8:
        return 0, False
    _, held, _, _, since, waits_until, asked, ttl = words
    return (int(held), since > 0 and now < waits_until) if abs(now - asked) < ttl else (0, False)


#: absent      there is no such id
#: over_capacity  there is no such id, and a push to its shard did not fit into the capacity: nothing made room since
#: buried      it is in the morgue
#: expired     its payloads have expired and are about to be removed
#: resharding  its jobs, or others of its new shard, are being moved to another layout of the queue
#: performing  it is in flight: being performed, or about to be
#: not_due     its time has not come
#: debounced   it waits for more payloads: it is due after a while without any, and at the latest at a certain time
#: retry_wait  it failed, and its retry is not due
#: paused      it is due, and the queue is paused
#: no_owner    it is due (or was in flight), and its shard is leased to nobody
#: busy        it is due, and other jobs of its shard are in flight: they come first, however long they take
#: limited     it is due, and a limit of its worker over all nodes is reached
#: no_thread   it is due, and all threads of the node that holds its shard are busy with other shards
#: behind      it is due, and older jobs of its shard come first
#: next        it is the next one of its shard
Reason = Literal[
    "absent", "over_capacity", "buried", "expired", "resharding", "performing", "not_due", "debounced", "retry_wait",
    "paused", "no_owner", "busy", "limited", "no_thread", "behind", "next",
]  # fmt: skip
#: Reasons that a limit may be behind.
MAY_BE_LIMITED: tuple[Reason, ...] = ("behind", "next")
#: Ids that are described in one round trip: each may bring three times the bytes of a reply.
DESCRIBED_TOGETHER = 10
#: Characters of an id in a sentence.
_MAX_ID = 60
#: The sentence about an id without a job.
_NOTHING_KEPT = "of what was performed nothing is kept"
ABSENT = f"no such job waits, is in flight or is buried; {_NOTHING_KEPT}"


@dataclass(frozen=True, slots=True)
class Why:
    """The state of an id, and why it is not being performed."""

    #: None: nowhere.
    state: State | None
    reason: Reason
    #: Unix time, seconds, at which the reason ends by itself; None: no time ends it.
    until: float | None
    #: For people.
    detail: str
    #: The name of the node that holds its shard; None: nobody does, or it is not known.
    node: str | None = None
    #: While it is performed, or its shard is busy: the thread of that node, from 0, if its last heartbeat has it.
    thread: int | None = None
    #: Waiting jobs of its shard that come before it.
    ahead: int = 0
    #: Who paused the queue, if known.
    paused_by: str | None = None
    #: When it is due: how many other jobs of its shard are in flight, up to three of them, and since when (Unix time,
    #: seconds).
    in_flight: int = 0
    in_flight_ids: tuple[str, ...] = ()
    in_flight_since: float | None = None
    #: When it finished last, of a queue with ``keep_finished``; None: that is not known.
    finished: Finished | None = None


@dataclass(frozen=True, slots=True)
class Description:
    """The description of an id. Not a consistent snapshot: it was read in a few steps, and may have changed since."""

    queue: str
    id: str
    #: Unix time, seconds, by the server's clock: when it was read.
    at: float
    #: Its state and the reason: its position, who paused the queue, what else is in flight.
    why: Why
    #: Its jobs with their payloads: in flight, waiting, in the morgue, at most one each. Empty: the id is nowhere.
    jobs: tuple[Job, ...]
    #: Its shard: index, owner, fence, seconds that the lease still runs, length, lag.
    shard: ShardInfo
    #: The node that holds the shard, by its last heartbeat; None: nobody does, or it is not known.
    node: NodeInfo | None
    #: Retries of its worker.
    max_retry_count: int

    @property
    def state(self) -> State | None:
        """In flight before waiting before in the morgue; None: the id is nowhere."""
        return self.why.state

    @property
    def taken(self) -> Job | None:
        """The job in flight."""
        return next((job for job in self.jobs if job.state == "taken"), None)

    @property
    def waiting(self) -> Job | None:
        """The job that waits, also while older payloads are in flight."""
        return next((job for job in self.jobs if job.state not in ("taken", "morgue")), None)

    @property
    def buried(self) -> Job | None:
        """The job in the morgue."""
        return next((job for job in self.jobs if job.state == "morgue"), None)


def explain(found: WhyReply, place: tuple[str, int], node: NodeInfo | None, max_retry_count: int) -> Why:
    """The reason, in words. ``place``: queue and shard; ``node``: the holder of the shard, if it is known."""
    _, shard = place
    owner = _Owner(node, found.lease, place)

    def ago(moment: float) -> str:
        return duration(found.now - moment)

    since = f" for {ago(found.leased_until)} now" if found.now > found.leased_until else ""
    if found.taken_at is not None:
        waits = "; newer payloads wait for its next run" if found.perform_at is not None else ""
        if found.lease is None:
            fate = "removes it, as it was cancelled" if found.cancelled else "puts it back and performs it again"
            detail = f"its owner is gone{since}; whoever gets shard {shard} next {fate}"
            return Why("taken", "no_owner", None, detail + waits)
        by = str(owner) if owner.thread is None else f"{owner}, thread {owner.thread}"
        told = "; it was cancelled, and has not ended yet" if found.cancelled else ""
        detail = f"taken {ago(found.taken_at)} ago by {by}{owner.batch_in_words()}{told}{waits}"
        return Why("taken", "performing", None, detail, owner.name, owner.thread)
    if found.perform_at is None:
        if found.buried_at is not None:
            detail = f"buried {ago(found.buried_at)} ago; kick it to have it performed"
            return Why("morgue", "buried", None, detail)
        if found.full:
            detail = f"{ABSENT}; shard {shard} has reached the capacity of the queue, so it may wait to be pushed"
            return Why(None, "over_capacity", None, detail)
        return Why(None, "absent", None, ABSENT)
    is_due = found.perform_at <= found.due_cutoff
    if found.expired and found.expires_at is not None:
        detail = (
            f"its ttl ended {ago(found.expires_at)} ago: it is not performed any more, and whoever holds shard {shard} "
            "removes it"
        )
        return Why("due" if is_due else "scheduled", "expired", None, detail)
    if found.sealed or found.fed:
        which = "those of its shard" if found.sealed else f"others to its new shard {shard}"
        detail = f"the queue is being resharded: jobs are being moved, {which}, and it rests until all of them are"
        return Why("due" if is_due else "scheduled", "resharding", None, detail)
    retry = "" if found.retry_count is None else f"{attempt_text(found.retry_count, max_retry_count)}, "
    by = f" by {found.paused_by}" if found.paused_by else ""
    if not is_due:
        due_in = f"due in {duration(found.perform_at - found.now)}"
        detail = retry + due_in
        state: State = "retrying" if retry else "scheduled"
        reason: Reason = "retry_wait" if retry else "not_due"
        if found.debounced is not None:
            reason, latest = "debounced", duration(found.debounced - found.now)
            detail = f"debounced: {due_in} unless more comes for it, in {latest} at the latest"
        halted = f"; the queue is paused{by}, too" if found.paused_at is not None else ""
        return Why(state, reason, found.perform_at, detail + halted, owner.name, paused_by=found.paused_by)
    flight, ahead = found.flight, found.ahead

    def due(reason: Reason, detail: str, thread: int | None = None) -> Why:
        name = None if reason == "no_owner" else owner.name
        return Why(
            "due", reason, None, retry + detail, name, thread, ahead, found.paused_by if reason == "paused" else None,
            flight.number, tuple(map(decode_id, flight.ids)), flight.since,
        )  # fmt: skip

    if found.paused_at is not None:
        return due("paused", f"due, and the queue has been paused for {ago(found.paused_at)}{by}; resume it")
    if found.lease is None:
        nodes = "all nodes of this queue are down or quiet, or none has it yet"
        return due("no_owner", f"shard {shard} is leased to nobody{since}: {nodes}")
    older = "more urgent or older" if found.priority else "older"
    first = f"behind {ahead} {older} job{'s' * (ahead != 1)} of shard {shard}" if ahead else f"next of shard {shard}"
    if flight.number:
        worked_by = str(owner) if owner.thread is None else f"thread {owner.thread} of {owner}"
        return due("busy", f"{first}, which {worked_by} {_busy_with(flight, found.now)}", owner.thread)
    if owner.busy:
        return due("no_thread", f"{first}; no thread of {owner} is free ({owner.busy} of {owner.busy} busy)")
    if ahead:
        return due("behind", first + (f"; its priority is {found.priority}" if found.priority else ""))
    return due("next", f"{first}, which {owner} works{', alone' if found.solo else ''}")


def _busy_with(flight: Flight, now: float) -> str:
    """What the thread of a shard does with its jobs in flight."""
    seconds = 0.0 if flight.since is None else now - flight.since
    busy = f"has been busy with for {duration(seconds)}" if seconds >= 1 else "is busy with"
    return f"{busy}: {_some_ids(list(map(decode_id, flight.ids)), flight.number)}"


def _some_ids(ids: Sequence[str], count: int) -> str:
    more = count - len(ids)
    texts = [job_id if len(job_id) <= _MAX_ID else job_id[: _MAX_ID - 1] + "…" for job_id in ids]
    return ", ".join(texts) + (f" and {more:,} more" if more > 0 else "")


class _Owner:
    """The holder of a shard, by the last heartbeat of its node."""

    def __init__(self, node: NodeInfo | None, lease: bytes | None, place: tuple[str, int]) -> None:
        self.name = None if node is None else node.name
        self._text = f"owner {(lease or b'').decode('utf-8', 'replace').rpartition(':')[0]}"
        #: The thread that works the shard, from 0; None: a task of the event loop, or it is not known.
        self.thread: int | None = None
        self._batch: RunningBatch | None = None
        #: The number of its threads, if none was idle at its last heartbeat; otherwise 0.
        self.busy = 0
        if node is not None:
            self._text = f"{node.kind} {node.name}"
            self.busy = len(node.performing) if all(node.performing) else 0
            batches = ((thread, batch) for thread, batch in node.batches() if (batch["queue"], batch["shard"]) == place)
            self.thread, self._batch = next(batches, (None, None))

    def batch_in_words(self) -> str:
        """The batch of the shard that it performs, and for how long, if its last heartbeat has it."""
        if self._batch is None:
            return ""
        ids = _some_ids(self._batch["ids"][:3], self._batch["count"])
        return f"; it performs the batch of {ids}, for {duration(self._batch['seconds'])} now"

    def __str__(self) -> str:
        return self._text


# --- looking it up ---


class _Registries(NamedTuple):
    """The registries' part that concerns a queue."""

    #: None: the queue has no entry, or none that can be read.
    queue: QueueInfo | None
    #: The nodes that live, by name.
    nodes: list[NodeInfo]
    #: The names of all nodes, also of silent ones.
    node_names: list[bytes]

    def holder(self, lease: bytes | None) -> NodeInfo | None:
        """The live node that holds the lease with this token."""
        nonce, _, _ = (lease or b"").decode("utf-8", "replace").rpartition(":")
        # A node's name ends with the beginning of the nonce that it acquires with.
        return next((node for node in self.nodes if node.name.endswith(":" + nonce[:6])), None) if nonce else None


def _ask_all(
    queue: QueueShards, calls_of: Callable[[Layouts], Iterable[Call[Any]]]
) -> tuple[Layouts, _Registries, Iterator[Any]]:
    """The layouts, the registries, and the replies of some shards, in one round trip, or two if the layouts were others
    than this process knew.
    """
    nodes = nodes_key(queue.namespace)
    while True:
        layouts = queue.presumed_layouts
        # In a cluster these are in two slots.
        registry = [entry_call(queue.namespace, queue.name), Command(nodes, "HGETALL", nodes), Command(nodes, "TIME")]
        calls: list[Call[Any]] = [*registry, *calls_of(layouts)]
        entry, raw, time, *replies = ask(queue.client, calls, len(calls))
        info = entry_of(queue.name, entry)
        if queue.are_confirmed(layouts, info):
            return layouts, _Registries(info, live_nodes(raw, time_of(time)), raw[::2]), iter(replies)


def describe_all(queue: QueueShards, ids: Sequence[bytes], now: float | None) -> Iterator[Description]:
    """The descriptions of these ids, in their order: ten in a round trip, as they are asked for."""
    for start in range(0, len(ids), DESCRIBED_TOGETHER):
        yield from _describe(queue, ids[start : start + DESCRIBED_TOGETHER], now)


def _describe(queue: QueueShards, ids: Sequence[bytes], now: float | None) -> Iterator[Description]:
    def calls_of(layouts: Layouts) -> Iterator[Call[Any]]:
        for job_id in ids:
            yield from everywhere_calls(queue, job_id, now, layouts)
            for prefix in queue.prefixes_of(job_id, layouts):
                yield from (ShardOperations(prefix).why(job_id, now), ShardOperations(prefix).stats(now))

    layouts, registries, replies = _ask_all(queue, calls_of)
    both = len(layouts.all)
    for job_id in ids:
        jobs = jobs_everywhere(queue, job_id, islice(replies, 3 * both))
        found = list(islice(replies, 2 * both))
        number = _decisive(found[::2])
        stats, shard = found[2 * number + 1], layouts.all[number].shard_of(job_id)
        why = found[2 * number]._replace(finished=_latest(found[::2]))
        yield Description(
            queue=queue.name,
            id=decode_id(job_id),
            at=why.now,
            why=_explain(queue, why, shard, registries),
            jobs=tuple(jobs),
            shard=shard_info(shard, stats, by_nonce(registries.node_names)),
            node=registries.holder(why.lease),
            max_retry_count=max_retry_count(registries.queue),
        )


def read_why(queue: QueueShards, job_id: bytes, now: float | None) -> Why:
    """Why this id is not being performed right now."""
    layouts, registries, replies = _ask_all(
        queue,
        lambda layouts: [ShardOperations(prefix).why(job_id, now) for prefix in queue.prefixes_of(job_id, layouts)],
    )
    whys = list(replies)
    number = _decisive(whys)
    why = whys[number]._replace(finished=_latest(whys))
    return _explain(queue, why, layouts.all[number].shard_of(job_id), registries)


def _explain(queue: QueueShards, found: WhyReply, shard: int, registries: _Registries) -> Why:
    most = max_retry_count(registries.queue)
    why = explain(found, (queue.name, shard), registries.holder(found.lease), most)
    if found.finished is not None:
        why = replace(why, finished=found.finished, detail=_with_last_run(why.detail, found))
    if why.reason not in MAY_BE_LIMITED or registries.queue is None:
        return why
    limits = read_limits(queue.client, queue.namespace, queue.name, registries.queue.options)
    reached = [state for state in limits if state.is_reached]
    if not reached:
        return why
    # The limit that is reached the longest.
    latest = max(reached, key=lambda state: inf if state.wait is None else state.wait)
    more = "when one ends" if latest.wait is None else f"in {duration(latest.wait)}"
    text = f"{why.detail}; the limit of the queue over all nodes is reached: {latest}, more may begin {more}"
    return replace(why, reason="limited", detail=text)


def _with_last_run(detail: str, found: WhyReply) -> str:
    last = found.finished
    assert last is not None
    payloads, took = f"{last.payloads:,} payload{'s' * (last.payloads != 1)}", duration(last.seconds, fine=True)
    ran = f"it finished {duration(found.now - last.at)} ago, with {payloads} in {took}, on {last.node}"
    return detail.replace(_NOTHING_KEPT, ran) if _NOTHING_KEPT in detail else f"{detail}; {ran}"


def _latest(whys: Sequence[WhyReply]) -> Finished | None:
    """The latest of what the shards of an id know, while its queue is resharded."""
    known = [why.finished for why in whys if why.finished is not None]
    return max(known, key=lambda finished: finished.at, default=None)


def _decisive(whys: Sequence[WhyReply]) -> int:
    """The index of the shard that decides, among those of an id: the old one until all its jobs were moved."""
    return next((number for number, reply in enumerate(whys) if not reply.moved), len(whys) - 1)


def max_retry_count(entry: QueueInfo | None) -> int:
    """The retries of a queue's worker, by the registry, or the default."""
    most = None if entry is None else entry.options.get("max_retry_count")
    return most if isinstance(most, int) else MAX_RETRY_COUNT
