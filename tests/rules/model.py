"""One shard as the design describes it, in a few dicts: what the state machine compares Redis with.

Written from the rules, not from the scripts, and slow and plain on purpose: every transition says in one place
what becomes of the job. A payload is its bytes, a refusal is the exception `Refused`.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

#: One tick of the clock that gives payloads their default scores, seconds.
TICK = 0.000001
#: What a payload counts in a reply beyond its own bytes.
OVERHEAD = 100
#: What is due now may be so many seconds ahead of the server's time: jobs of one push are due a tick apart.
AHEAD = 0.001
#: The latest time there is, Unix seconds.
NEVER = 2.0**33 - 1
#: Seconds between two pushes that are no jump of the server's clock.
NO_JUMP = 60
#: How much later than at the earliest a job may come whose owner died, seconds.
JITTER = 0.45
#: What is between the scores of two priorities.
LEVEL = 2.0**33
#: Seconds for which push calls want to be remembered.
KEEP = 15


class Refused(Exception):
    """The caller doesn't hold the lease."""


@dataclass
class Flight:
    """A job in flight: all that is needed to put it back."""

    delivery: int
    perform_at: float
    retry_count: int
    taken_at: float
    payloads: dict[bytes, float]
    #: When they expire, those that do.
    expires: dict[bytes, float] = field(default_factory=dict)
    level: int = 0
    #: It is to end: "x": nothing of it waits again; "s": it does.
    mark: str = ""


@dataclass
class Buried:
    at: float
    reason: str
    payloads: dict[bytes, float]


@dataclass
class Waiting:
    #: Of its level.
    time: float
    payloads: dict[bytes, float] = field(default_factory=dict)
    retry_count: int = -1
    expires: dict[bytes, float] = field(default_factory=dict)
    level: int = 0

    @property
    def perform_at(self) -> float:
        return self.score - self.level * LEVEL

    @perform_at.setter
    def perform_at(self, time: float) -> None:
        self.time = time

    @property
    def score(self) -> float:
        """In `due`. Of a level above 0 its time is kept less exactly."""
        return self.level * LEVEL + self.time

    #: Until when it may be put off by more payloads; None: it may not.
    deadline: float | None = None


@dataclass
class Taken:
    """What `ack_and_take` answers."""

    delivery: int
    delay: int | None
    #: 1: paused; 2: has payloads with a ttl; 32: the job is a solo one; or several.
    state: int
    acknowledged: int
    #: (id, perform_at, retry_count, [(payload, score)...])
    jobs: list[tuple[str, float, int, list[tuple[bytes, float]]]]
    #: Id, when the first of its payloads expires, id...
    ends: list[str | float] = field(default_factory=list)


def merge_into(target: dict[bytes, float], source: dict[bytes, float]) -> None:
    """Equal payloads collapse, the lowest score wins."""
    for payload, score in source.items():
        target[payload] = min(score, target.get(payload, score))


def merge_with_times(target: Waiting, source: "Flight | Waiting") -> None:
    """The same with the times at which they expire. Of two the earlier counts, and "never" before all."""
    for payload in source.payloads:
        at = source.expires.get(payload)
        if payload in target.payloads:
            present = target.expires.pop(payload, None)
            at = None if at is None or present is None else min(at, present)
        if at is not None:
            target.expires[payload] = at
    merge_into(target.payloads, source.payloads)


def keep_latest(target: dict[bytes, float], source: dict[bytes, float]) -> None:
    """Only the payload with the highest score stays; of equal scores that of the target."""
    if source:
        found = max([in_order(source)[-1], *in_order(target)[-1:]], key=lambda pair: pair[1])
        if target and in_order(target)[-1][1] == found[1]:
            found = in_order(target)[-1]
        target.clear()
        target.update([found])


def keep_latest_with_times(target: Waiting, source: "Flight | Waiting") -> None:
    """The same with the time at which it expires."""
    if not source.payloads:
        return
    times = [(held.expires.get(payload), payload) for held in (target, source) for payload in held.payloads]
    keep_latest(target.payloads, source.payloads)
    (stays,) = target.payloads
    own = [at for at, payload in times if payload == stays]
    target.expires = {} if None in own else {stays: min(at for at in own if at is not None)}


def appended(payload: bytes, clock: float) -> bytes:
    """A payload that stays beside equal ones."""
    return b"\0\0a%014x" % math.floor(clock * 2**22) + payload


def _behind(attempts: list[str]) -> str:
    """What is behind an error."""
    text = "".join(attempts)
    return f"{text}{len(text):08d}\0attempts" if text else ""


def in_order(payloads: dict[bytes, float]) -> list[tuple[bytes, float]]:
    return sorted(payloads.items(), key=lambda item: (item[1], item[0]))


class Model:
    """A shard. `now` is explicit everywhere, so nothing but `clock` moves the shard's clock."""

    def __init__(
        self, *, shards_count: int, max_payloads: int, max_bytes: int, max_crash_count: int, lease_ttl: float,
        keeper: str = "",
    ) -> None:  # fmt: skip
        #: Who reports, as `keep_finished` has it; "": nothing is kept.
        self.keeper = keeper
        #: id -> what is kept of when it finished last; and of its latest attempts that failed, beside its error.
        self.finished: dict[str, str] = {}
        self.attempts: dict[str, list[str]] = {}
        self.shards_count = shards_count
        self.max_payloads = max_payloads
        self.max_bytes = max_bytes
        self.max_crash_count = max_crash_count
        self.waiting: dict[str, Waiting] = {}
        self.taken: dict[str, Flight] = {}
        self.morgue: dict[str, Buried] = {}
        self.errors: dict[str, str] = {}
        self.crashes: dict[str, int] = {}
        #: How often the end of an owner that stopped was charged to nobody.
        self.uncharged: dict[str, int] = {}
        self.solo: set[str] = set()
        self.pushed: list[str] = []
        #: Token -> slot, of calls that were repeated.
        self.repeated: dict[str, int] = {}
        #: Slot, when it ends, how many tokens are of the two before it; None: before the first push.
        self.slot: tuple[int, int, int, int] | None = None
        #: Attempts of operators' calls that came to be repeated.
        self.superseded: dict[str, float] = {}
        self.lease: str | None = None
        self.owner: str | None = None
        self.fence: int | None = None
        #: The fence since the lease was resumed.
        self.resumed_fence: int | None = None
        self.clock: float | None = None
        #: The server's time at the last push, and since when it had come there without a jump.
        self.server_time: float | None = None
        self.server_time_since: float | None = None
        #: What kind of scores it has.
        self.scores: str | None = None
        self.paused: float | None = None
        self.owner_uncharged = False
        #: What is still in flight of the last owner is charged to nobody.
        self.is_uncharged = False
        #: Milliseconds, once there was an owner.
        self.lease_ttl: int | None = None
        self._lease_ttl = int(lease_ttl * 1000)
        self.used = False
        #: What is noted of what pushes used, in that order.
        self.features: list[str] = []
        self.delayed: list[str] = []
        names = "delivery pushed processed failed buried expired released kicked deleted cancelled"
        self.counters = dict.fromkeys(names.split(), 0)

    # --- producing ---

    def push(
        self,
        now: float,
        token: str,
        jobs: list[tuple[str, bytes, float | None, float | str | None, float | None, int]],
        *,
        repeat: bool,
        policy: str = "collapse",
        debounce: tuple[float, float] | None = None,
        capacity: int | None = None,
        cancels: bool = False,
    ) -> int | tuple[str | int, ...]:
        """A job: id, payload, score, perform_at (a time, "+n", or None), ttl, priority. ``debounce``: it and max_wait,
        seconds. ``cancels``: what is in flight of an id is to end. ``capacity``: ids that may wait or be taken;
        ("QUEUEFULL", position...): these jobs don't fit; ("SCORES", ...): scores of the two kinds would meet.
        """
        if not repeat and token in self.repeated:
            return len(jobs)
        if repeat:
            self.repeated[token] = 1 if self.slot is None else self.slot[0]
            if token in self.pushed:
                return len(jobs)
        missing = [str(i) for i, job in enumerate(jobs) if job[2] is None]
        versions = [str(i) for i, job in enumerate(jobs) if job[2] is not None and job[2] < 1e9]
        scores = self.scores
        if scores == "clock" and versions and not (self.waiting or self.taken):
            scores = None
        scores = scores or ("explicit" if versions else "clock" if missing else None)
        if scores == "clock" and versions:
            return "SCORES", "given", *versions
        if scores == "explicit" and missing:
            return "SCORES", "missing", *missing
        for job_id in dict.fromkeys(job[0] for job in jobs):
            joining = [job[1] for job in jobs if job[0] == job_id]
            self._expire_before_merge(job_id, joining, now, is_latest=policy == "latest")
        if capacity is not None:
            self.sweep(now)
            unfit = self._unfit([job[0] for job in jobs], capacity)
            if unfit:
                self._note("full", is_used=True)
                return "QUEUEFULL", *unfit
        self.used = True
        self.scores = scores
        self._settle(now)
        clock = max(now, (self.clock or 0) + TICK)
        for job_id, payload, score, perform_at, ttl, level in jobs:
            at = min(clock, now + AHEAD)
            if isinstance(perform_at, str):
                at = max(at, min(now + float(perform_at), NEVER))
            elif perform_at is not None:
                at = max(at, min(perform_at, NEVER))
            job = self._debounced(job_id, now, at, level, debounce, is_timed=perform_at is not None)
            if level < job.level:
                job.time, job.level = job.perform_at, level
            if level > 0:
                self._note("priority", is_used=True)
            if ttl is not None:
                self._note("ttl", is_used=True)
            score = clock if score is None else score
            stored = appended(payload, clock) if policy == "append" else payload
            pushed = Waiting(at, {stored: score}, expires={} if ttl is None else {stored: now + ttl})
            if policy == "latest":
                keep_latest_with_times(pushed, job)
                job.payloads, job.expires = pushed.payloads, pushed.expires
            else:
                merge_with_times(job, pushed)
            if policy == "append":
                self.clock = clock
            clock += TICK
        for job_id, *_ in [job for job in jobs if cancels and job[3] is None]:
            if job_id in self.taken:
                self._mark(job_id, self.taken[job_id].mark or "s")
        self._note("latest", is_used=policy == "latest")
        is_debounced = any(job.deadline is not None for job in self.waiting.values())
        self._note("debounce", is_used=debounce is not None or ("debounce" in self.features and is_debounced))
        self._next_slot(int(now))
        self.pushed.insert(0, token)
        self.counters["pushed"] += len(jobs)
        return len(jobs)

    def _unfit(self, ids: list[str], capacity: int) -> list[int]:
        """Positions of the jobs that don't fit. One whose id waits, or comes again, fits if that does."""
        room = capacity - len(self.waiting) - len(self.taken)
        fresh = [job_id for job_id in dict.fromkeys(ids) if job_id not in self.waiting]
        return [position for position, job_id in enumerate(ids) if job_id in fresh[max(room, 0) :]]

    def make_room(self) -> None:
        """Those who wait for room are told that there may be some."""
        self._note("full", is_used=False)

    def _mark(self, job_id: str, mark: str) -> None:
        self.taken[job_id].mark = mark
        self._note("cancelled", is_used=True)

    def _drop_cancelled(self, job_id: str) -> None:
        """Nothing of what was in flight waits again, and what was pushed since starts afresh."""
        del self.taken[job_id]
        self._forget(job_id)
        self.counters["cancelled"] += 1

    def _note(self, feature: str, *, is_used: bool) -> None:
        if is_used and feature not in self.features:
            self.features.append(feature)
        elif not is_used and feature in self.features:
            self.features.remove(feature)

    def _debounced(
        self, job_id: str, now: float, at: float, level: int, debounce: tuple[float, float] | None, *, is_timed: bool
    ) -> Waiting:
        """The job that the payloads of an id join."""
        job = self.waiting.get(job_id)
        if job is None:
            job = self.waiting[job_id] = Waiting(at, level=level)
            if debounce is not None and not is_timed:
                job.perform_at, job.deadline = max(at, now + debounce[0]), now + debounce[1]
        elif debounce is not None and job.deadline is not None and job.perform_at > now:
            job.deadline = min(job.deadline, now + debounce[1])
            job.level = min(job.level, level)
            job.perform_at = min(now + debounce[0], job.deadline)
        return job

    def _next_slot(self, now: int) -> None:
        """All calls want to be remembered for `KEEP` seconds, and there are too few for any to be forgotten."""
        if self.slot is None:
            self.slot = 1, now + KEEP, 0, 0
            return
        slot, ends, length1, length2 = self.slot
        if now >= ends:
            self.slot = slot + 1, now + KEEP, len(self.pushed) - length1 - length2, length1
            self.repeated = {token: number for token, number in self.repeated.items() if number > slot + 1 - 3}

    # --- time ---

    def _settle(self, now: float) -> None:
        """What was due before the server's clock stepped back stays due, in its order."""
        if self.server_time is None or self.server_time - now <= AHEAD:
            return
        first = self.server_time if self.server_time_since is None else self.server_time_since
        step = self.server_time - now
        for job in self.waiting.values():
            base = job.level * LEVEL  # beside which times are rounded
            if base + first <= job.score <= base + self.server_time + AHEAD and job.score > base + now:
                job.time = job.score - step - job.level * LEVEL
        self.server_time, self.server_time_since = now, first - step

    def _horizon(self, now: float) -> float:
        return max(now, min(self.clock or 0, now + AHEAD))

    # --- the lease ---

    def _check(self, token: str) -> None:
        if self.lease is None or token != self.lease:
            raise Refused

    def acquire(self, now: float, nonce: str, *, charge: bool, left: Collection[str] = ()) -> tuple[Any, ...]:
        """("held",), ("resumed", fence of the token, fence), ("acquired", fence, restored, poisoned), or ("restoring",
        0, restored, poisoned) if this call leaves some in flight. Jobs whose owner died get their earliest time, and
        are named in `delayed`: up to `JITTER` later is right, too.
        """
        self.delayed = []
        own = nonce == self.owner
        if self.lease is not None and not (own and self.lease == f"{nonce}:{self.fence}"):
            return ("held",)
        if own:
            self.lease_ttl = self._lease_ttl
            self.lease = f"{nonce}:{self.fence}"
            self.owner_uncharged = False
            self.resumed_fence = self._next_fence(now)
            return ("resumed", self.fence, self.resumed_fence)
        restored, poisoned, cancelled = 0, [], []
        for job_id in [job_id for job_id in self.taken if job_id not in left]:
            flight = self.taken[job_id]
            if flight.mark == "x":
                self._drop_cancelled(job_id)
                cancelled.append(job_id)
                continue
            if not charge or self.is_uncharged:
                self._put_back(job_id, min(flight.perform_at, now), now)
            elif self.owner_uncharged and self.uncharged.get(job_id, 0) < 2:
                self.uncharged[job_id] = self.uncharged.get(job_id, 0) + 1
                self.crashes.setdefault(job_id, 0)
                self._put_back(job_id, min(flight.perform_at, now), now)
            elif self._crash(job_id, now, now + 0.05):
                poisoned.append(job_id)
                continue
            elif job_id in self.waiting:
                self.delayed.append(job_id)
            restored += 1
        self.make_room()
        if self.taken:
            self.lease = self.owner = None
            self.is_uncharged = self.is_uncharged or not charge
            return ("restoring", 0, restored, poisoned, cancelled)
        self.lease_ttl = self._lease_ttl
        self.fence, self.resumed_fence = self._next_fence(now), None
        self.used = True
        self.owner = nonce
        self.lease = f"{nonce}:{self.fence}"
        self.owner_uncharged = self.is_uncharged = False
        return ("acquired", self.fence, restored, poisoned, cancelled)

    def _next_fence(self, now: float) -> int:
        return max((self.fence or 0) + 1, (self.resumed_fence or 0) + 1, math.floor(now * 1e6))

    def surrender(self, token: str, *, leave: bool) -> int:
        self._check(token)
        if self.taken:
            self.owner_uncharged = self.owner_uncharged or leave
            return 1 if leave else 0
        self.lease = self.owner = None
        return 1

    def renew(self, token: str, now: float) -> list[Any]:
        self._check(token)
        marks = [(job_id, flight.delivery, flight.mark) for job_id, flight in sorted(self.taken.items()) if flight.mark]
        self._note("cancelled", is_used=bool(marks))
        due_cutoff = self._horizon(now)
        # Counted by scores: beside a level times are rounded, the due_cutoff, too.
        levels = ((job.level * 2.0**33, job.perform_at) for job in self.waiting.values())
        due = sum(level + perform_at <= level + due_cutoff for level, perform_at in levels)
        return [self.counters["pushed"], due + len(self.taken), len(self.taken), *([marks] if marks else [])]

    def _crash(self, job_id: str, now: float, not_before: float) -> bool:
        """Somebody died with the job in flight. True: it is poison, and buried."""
        self.crashes[job_id] = self.crashes.get(job_id, 0) + 1
        flight = self.taken[job_id]
        if self.crashes[job_id] >= self.max_crash_count:
            times = self.crashes[job_id]
            died = f"poison: its process died, or its batch exceeded ttr, {times} times with this job in flight"
            if self.uncharged.get(job_id):
                died += ", or was stopped and could not wait for it"
            self._expire(flight, now)
            self._expire_waiting(job_id, now)
            waiting = self.waiting.pop(job_id, None)
            if not flight.payloads and waiting is None:
                del self.taken[job_id]
                self._forget(job_id)
                return False
            if waiting is not None:
                merge_into(flight.payloads, waiting.payloads)
            died += _behind(self.attempts.get(job_id, []))
            self._bury(job_id, now, died, self.taken.pop(job_id).payloads)
            self._forget(job_id)
            return True
        self._put_back(job_id, not_before, now)
        self.solo.add(job_id)
        return False

    # --- a batch ---

    def take(self, now: float, token: str, *, last: int, limit: int, acks: list[tuple[str, int]]) -> Taken:
        self._check(token)
        acknowledged = 0
        for job_id, delivery in acks:
            if job_id in self.taken and self.taken[job_id].delivery == delivery:
                flight = self.taken.pop(job_id)
                acknowledged += 1
                if self.keeper:
                    seconds = max(now - flight.taken_at, 0)
                    self.finished[job_id] = f"{now:.3f} {seconds:.3f} {len(flight.payloads)} {self.keeper}"
                self.errors.pop(job_id, None)
                self.attempts.pop(job_id, None)
                self.crashes.pop(job_id, None)
                self.uncharged.pop(job_id, None)
                self.solo.discard(job_id)
        self.counters["processed"] += acknowledged
        if acknowledged:
            self.make_room()

        self._settle(now)
        due_cutoff = self._horizon(now)
        limit = 0 if self.paused is not None else limit
        self.sweep(now)
        if limit:
            for job_id in [job_id for job_id, flight in self.taken.items() if flight.delivery > last]:
                self._expire_taken(job_id, now)
        in_flight = set(self.taken)
        lost = sorted(job_id for job_id, flight in self.taken.items() if flight.delivery > last)
        delivery = self.counters["delivery"] + 1
        order = self._order_of_levels(delivery)
        due = [
            job_id
            for job_id, job in sorted(
                self.waiting.items(), key=lambda item: (order.index(item[1].level), item[1].score, item[0])
            )
            if job_id not in in_flight and job.perform_at <= due_cutoff
        ]
        reply = Taken(delivery, None, (self.paused is not None) + 2 * ("ttl" in self.features), acknowledged, [])
        room = self.max_bytes
        for job_id in lost + due:
            source: Flight | Waiting = self.taken[job_id] if job_id in lost else self.waiting[job_id]
            alone = source.retry_count >= 0 or job_id in self.solo
            chosen = self._choose(source.payloads, room, whole=bool(reply.jobs))
            if len(reply.jobs) >= limit or (reply.jobs and (alone or chosen is None)):
                break
            assert chosen is not None
            room -= sum(len(payload) + OVERHEAD for payload, _ in chosen)
            expires = {payload: source.expires[payload] for payload, _ in chosen if payload in source.expires}
            reply.jobs.append((job_id, source.perform_at, source.retry_count, chosen))
            reply.state += 32 * (job_id in self.solo)
            if source.expires:
                reply.ends += [job_id, min(source.expires.values())]
            if isinstance(source, Waiting):
                for payload, _ in chosen:
                    del source.payloads[payload]
                    source.expires.pop(payload, None)
                if not source.payloads:
                    del self.waiting[job_id]
            mark = source.mark if isinstance(source, Flight) else ""
            self.taken[job_id] = Flight(
                delivery, source.perform_at, source.retry_count, now, dict(chosen), expires, source.level, mark
            )
            if isinstance(source, Waiting):
                source.retry_count, source.deadline = -1, None
            if alone:
                break
        if reply.jobs:
            unsent = lost[len(reply.jobs) :]
            self.counters["delivery"] = delivery + 1 if unsent else delivery
            for job_id in unsent:  # not received, whatever the caller says of this delivery
                self.taken[job_id].delivery = delivery + 1
        if len(reply.jobs) < len(lost):
            reply.delay = self._delay(due_cutoff, now, due_cutoff)
        else:
            rest = [job.perform_at for job_id, job in self.waiting.items() if job_id not in in_flight]
            reply.delay = self._delay(min(rest), now, due_cutoff) if rest else None
        return reply

    def _order_of_levels(self, delivery: int) -> list[int]:
        """The most urgent first; at every tenth delivery the least urgent, at another one each level in turn."""
        levels = list(range(10))
        if delivery % 10 == 0:
            return levels[::-1]
        if delivery % 10 == 5:
            return sorted(levels, key=lambda level: level != delivery // 10 % 10)
        return levels

    def sweep(self, now: float) -> None:
        """What has expired of all that waits."""
        for job_id in list(self.waiting):
            self._expire_waiting(job_id, now)

    def _expire_waiting(self, job_id: str, now: float) -> None:
        job = self.waiting.get(job_id)
        if job is not None and self._expire(job, now) and not job.payloads:
            del self.waiting[job_id]
            self.make_room()
            if job_id not in self.taken:
                self._forget(job_id)

    def _expire_before_merge(self, job_id: str, payloads: list[bytes], now: float, *, is_latest: bool) -> None:
        """What would join payloads that have expired. Beside others that live, only equal ones go, or with ``latest``
        all of them.
        """
        job = self.waiting.get(job_id)
        if job is None:
            return
        if any(job.expires.get(payload, now + 1) > now for payload in job.payloads) and is_latest:
            self._expire(job, now)
        elif any(job.expires.get(payload, now + 1) > now for payload in job.payloads):
            for payload in payloads:
                if job.expires.get(payload, now + 1) <= now:
                    del job.expires[payload], job.payloads[payload]
                    self.counters["expired"] += 1
        else:
            self._expire_waiting(job_id, now)

    def _expire(self, job: Flight | Waiting, now: float) -> bool:
        expired = [payload for payload, at in job.expires.items() if at <= now]
        for payload in expired:
            del job.expires[payload], job.payloads[payload]
        self.counters["expired"] += len(expired)
        return bool(expired)

    def _expire_taken(self, job_id: str, now: float) -> None:
        """What is in flight and nobody performs."""
        flight = self.taken[job_id]
        if self._expire(flight, now) and not flight.payloads:
            del self.taken[job_id]
            self.make_room()
            if job_id not in self.waiting:
                self._forget(job_id)

    def _choose(self, payloads: dict[bytes, float], room: int, *, whole: bool) -> list[tuple[bytes, float]] | None:
        """The lowest payloads that fit, at least one; with `whole`, all that are allowed or None."""
        allowed = in_order(payloads)[: self.max_payloads]
        chosen: list[tuple[bytes, float]] = []
        for payload, score in allowed:
            room -= len(payload) + OVERHEAD
            if room < 0 and (chosen or whole):
                return None if whole else chosen
            chosen.append((payload, score))
        return chosen

    @staticmethod
    def _delay(perform_at: float, now: float, due_cutoff: float) -> int:
        """Microseconds. What the due_cutoff has reached is due."""
        return math.ceil((perform_at - (due_cutoff if perform_at <= due_cutoff else now)) * 1000000)

    def fail(
        self, now: float, token: str, delivery: int, failures: list[tuple[str, str, int, float, str]]
    ) -> list[int]:
        """A failure: id, verdict, retry_count, delay, error."""
        self._check(token)
        self.make_room()
        self._settle(now)
        reply = []
        for job_id, verdict, retry_count, delay, error in failures:
            flight = self._flight(job_id, delivery)
            if flight is not None and flight.mark == "x":
                self._drop_cancelled(job_id)
                reply.append(4)
                continue
            reply.append(1 if flight else 0)
            if flight is None:
                continue
            error = self._with_attempt(job_id, flight, error, now)
            if verdict == "solo":
                self._put_back(job_id, min(flight.perform_at, now), now)
                self.errors[job_id] = error
                self.solo.add(job_id)
                continue
            self.counters["failed"] += 1
            if verdict == "retry":
                self._put_back(job_id, min(now + delay, NEVER), now)
                self.waiting[job_id].retry_count = retry_count
                self.errors[job_id] = error
                self.solo.discard(job_id)
                continue
            self._expire(flight, now)
            if flight.payloads:
                payload, score = in_order(flight.payloads)[0]
                del flight.payloads[payload]
                flight.expires.pop(payload, None)
                self._bury(job_id, now, error, {payload: score})
            if flight.payloads:
                self._put_back(job_id, now, now)
                self.waiting[job_id].retry_count = -1
            else:
                del self.taken[job_id]
            self._forget(job_id)
        return reply

    def release(
        self, now: float, token: str, delivery: int, delays: list[tuple[str, float | None]], *, crashed: bool
    ) -> list[int]:
        self._check(token)
        self.make_room()
        self._settle(now)
        reply = []
        for job_id, delay in delays:
            flight = self._flight(job_id, delivery)
            if flight is None:
                reply.append(0)
                continue
            if flight.mark == "x":
                self._drop_cancelled(job_id)
                reply.append(4)
                continue
            if crashed:
                reply.append(2 if self._crash(job_id, now, now + (delay or 0)) else 1)
                continue
            self._expire_taken(job_id, now)
            if job_id not in self.taken:
                reply.append(3)
            else:
                at = min(flight.perform_at, now) if delay is None else min(now + delay, NEVER)
                self._put_back(job_id, at, now)
                self.counters["released"] += 1
                reply.append(1)
        return reply

    def bury_taken(
        self, now: float, token: str, delivery: int, job_id: str, reason: str, payloads: list[bytes]
    ) -> list[int]:
        self._check(token)
        self.make_room()
        flight = self._flight(job_id, delivery)
        if flight is None:
            return [0]
        self._expire_taken(job_id, now)
        going = {payload: score for payload, score in flight.payloads.items() if payload in payloads or not payloads}
        if not going:
            return [0]
        for payload in going:
            del flight.payloads[payload]
            flight.expires.pop(payload, None)
        error = self.errors.get(job_id, "")
        if not payloads and self.keeper:
            shown = error[: len(error) - len(_behind(self.attempts.get(job_id, [])))] if not reason else None
            self._bury(job_id, now, self._with_attempt(job_id, flight, reason, now, shown), going)
        else:
            self._bury(job_id, now, reason or error, going)
        if not flight.payloads:
            del self.taken[job_id]
            self._forget(job_id)
        return [1]

    def _with_attempt(self, job_id: str, flight: "Flight", error: str, now: float, shown: str | None = None) -> str:
        """The error as it is kept, with the five latest attempts behind it. ``shown``: another one in its place."""
        if not self.keeper:
            return error
        seconds, before = max(now - flight.taken_at, 0), self.attempts.get(job_id, [])
        attempt = f"{now:.3f} {seconds:.3f} {self.keeper} {len(error)}\n{error}"
        self.attempts[job_id] = [*before[-4:], attempt]
        return (error if shown is None else shown) + _behind(self.attempts[job_id])

    def _flight(self, job_id: str, delivery: int) -> Flight | None:
        flight = self.taken.get(job_id)
        return flight if flight is not None and flight.delivery == delivery else None

    def _put_back(self, job_id: str, perform_at: float, now: float) -> None:
        """The job waits again; its perform_at and retry_count win over those of one that came meanwhile."""
        latest = "latest" in self.features
        self._expire_before_merge(job_id, list(self.taken[job_id].payloads), now, is_latest=latest)
        flight = self.taken.pop(job_id)
        if job_id in self.waiting:  # a dead payload does not join one that lives
            self._expire(flight, now)
        job = self.waiting.setdefault(job_id, Waiting(perform_at, level=flight.level))
        job.level = min(job.level, flight.level)
        job.perform_at, job.deadline = perform_at, None
        job.retry_count = flight.retry_count
        self._merge(job, flight)

    def _merge(self, job: Waiting, source: "Flight | Waiting") -> None:
        """Payloads wait again."""
        if "latest" in self.features:
            keep_latest_with_times(job, source)
        else:
            merge_with_times(job, source)

    def _bury(self, job_id: str, now: float, reason: str, payloads: dict[bytes, float]) -> None:
        buried = self.morgue.setdefault(job_id, Buried(now, reason, {}))
        buried.at, buried.reason = now, reason
        merge_into(buried.payloads, payloads)
        self.counters["buried"] += 1

    def _forget(self, job_id: str) -> None:
        self.errors.pop(job_id, None)
        self.attempts.pop(job_id, None)
        self.crashes.pop(job_id, None)
        self.uncharged.pop(job_id, None)
        self.solo.discard(job_id)
        if job_id in self.waiting:
            self.waiting[job_id].retry_count = -1

    # --- administering ---

    def bury_waiting(self, now: float, job_ids: list[str], reason: str) -> list[int]:
        self.make_room()
        reply = []
        for job_id in job_ids:
            if job_id in self.taken:
                reply.append(3)
                continue
            self._expire_waiting(job_id, now)
            if job_id not in self.waiting:
                reply.append(0)
            else:
                why = reason or self.errors.get(job_id, "")
                self._bury(job_id, now, why, self.waiting.pop(job_id).payloads)
                self._forget(job_id)
                reply.append(1)
        return reply

    def kick(self, now: float, job_ids: list[str]) -> list[int]:
        reply = []
        for job_id in job_ids:
            buried = self.morgue.pop(job_id, None)
            reply.append(0 if buried is None else 1)
            if buried is None:
                continue
            self.counters["kicked"] += 1
            latest = "latest" in self.features
            self._expire_before_merge(job_id, list(buried.payloads), now, is_latest=latest)
            job = self.waiting.setdefault(job_id, Waiting(now))
            job.perform_at, job.level, job.deadline = now, 0, None
            self._merge(job, Waiting(now, buried.payloads))
            if job_id not in self.taken:  # what is known of one in flight is its flight's
                self._forget(job_id)
        return reply

    def delete(self, job_ids: list[str], where: str) -> list[int]:
        """``where``: "cancel": what waits is deleted, and what is in flight is to end."""
        self.make_room()
        counter = "cancelled" if where == "cancel" else "deleted"
        reply = []
        for job_id in job_ids:
            if job_id in self.taken:
                reply.append(3)
                if where == "cancel":
                    self.counters["cancelled"] += self.waiting.pop(job_id, None) is not None
                    self._mark(job_id, "x")
                continue
            found = 0
            if where != "morgue" and job_id in self.waiting:
                del self.waiting[job_id]
                self._forget(job_id)
                self.counters[counter] += 1
                found = 1
            if where in ("", "morgue") and job_id in self.morgue:
                del self.morgue[job_id]
                self.counters["deleted"] += 1
                found = 1
            reply.append(found)
        return reply

    def perform_now(self, now: float, job_ids: list[str]) -> list[int]:
        reply = []
        for job_id in job_ids:
            if job_id in self.waiting:
                job = self.waiting[job_id]
                job.time = min(job.score, job.level * LEVEL + now) - job.level * LEVEL
                job.deadline = None
                reply.append(1)
            else:
                reply.append(3 if job_id in self.taken else 0)
        return reply

    def pause(self, now: float) -> int:
        if self.paused is not None:
            return 0
        self.paused = now
        return 1

    def resume(self) -> int:
        changed = 0 if self.paused is None else 1
        self.paused = None
        return changed

    # --- what Redis should hold ---

    def _slot(self) -> str | None:
        if self.slot is None:
            return None
        slot, ends, length1, length2 = self.slot
        older = [KEEP if slot > number else 0 for number in (1, 2)]
        return " ".join(map(str, (ends, KEEP, slot, *older, length1, length2)))

    def snapshot(self) -> dict[str, Any]:
        """All keys, in the form of `ShardRig.snapshot`, with numbers in `meta`."""
        keys: dict[str, Any] = {
            "due": {job_id: job.score for job_id, job in self.waiting.items()},
            "retries": {i: job.retry_count for i, job in self.waiting.items() if job.retry_count >= 0},
            "debounced": {i: job.deadline for i, job in self.waiting.items() if job.deadline is not None},
            "errors": self.errors,
            "finished": self.finished,
            "solo": self.solo,
            "crashes": {
                job_id: f"{count} {self.uncharged[job_id]}" if job_id in self.uncharged else str(count)
                for job_id, count in self.crashes.items()
            },
            "taken": {
                job_id: (
                    flight.delivery,
                    flight.perform_at,
                    flight.retry_count,
                    f"{flight.level}{flight.mark}",
                    flight.taken_at,
                )
                for job_id, flight in self.taken.items()
            },
            "morgue": {job_id: buried.at for job_id, buried in self.morgue.items()},
            "morgue:errors": {job_id: buried.reason for job_id, buried in self.morgue.items()},
            "pushed": self.pushed,
            "repeated": self.repeated,
            "superseded": self.superseded,
            "lease": self.lease,
            "meta": {
                name: value
                for name, value in {
                    "shards_count": self.shards_count if self.used else None,
                    "clock": self.clock,
                    "server_time": self.server_time,
                    "server_time_since": self.server_time_since,
                    "scores": self.scores,
                    "fence": self.fence,
                    "resumed_fence": self.resumed_fence,
                    "owner": self.owner,
                    "lease_ttl": self.lease_ttl,
                    "paused": self.paused,
                    "uncharged": 2 if self.is_uncharged else 1 if self.owner_uncharged else None,
                    "repeated": 1 if self.repeated else None,
                    "slot": self._slot(),
                    "features": sorted(self.features) or None,
                    **{name: count or None for name, count in self.counters.items()},
                }.items()
                if value is not None
            },
        }
        keys["expires"] = {job_id: min(job.expires.values()) for job_id, job in self.waiting.items() if job.expires}
        keys |= {f"expires:{job_id}": job.expires for job_id, job in self.waiting.items()}
        keys |= {f"taken:expires:{job_id}": flight.expires for job_id, flight in self.taken.items()}
        keys |= {f"payloads:{job_id}": job.payloads for job_id, job in self.waiting.items()}
        keys |= {f"taken:payloads:{job_id}": flight.payloads for job_id, flight in self.taken.items()}
        keys |= {f"morgue:payloads:{job_id}": buried.payloads for job_id, buried in self.morgue.items()}
        return {key: value for key, value in keys.items() if value}
