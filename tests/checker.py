"""Judges a history (`tests.history`) by lowq's guarantees, without asking lowq or Redis for anything.

    report = check(read(path), buried=...)
    assert report.problems == []

==========  =================================================================================================
found       what it means
==========  =================================================================================================
lost        accepted, and neither in a perform whose handler returned nor buried
unknown     performed, and nobody ever began to push it
overlap     two performs of one shard at a time (of one id, where a consumer has several in hand), or one that begins
            under a lower fence than was seen before.
            Allowed, and `fenced`: the earlier of two goes on under a lower fence; whoever was frozen may have
            been between its last look at its lease and the handler, one perform per thread, unless it waited for
            Redis then; whoever holds a lease that Redis has lost; and whoever goes on past its ttr
fence       two processes worked one shard under the same fence
step back   handed over after one with a higher score, unless it arrived later than that, or is handed over
            again: with nothing between but what was in flight with it, or because it was pushed again. Of an id that
            is pushed without scores: for the first time after one that was pushed later, be it in the same call
returned    handed over again after Redis had confirmed that it is finished, and not pushed again
excess      handed over again, though it was neither in flight at a fault nor within `UNACKED` of one, and its handler
            returned before its time limit
hasty       never taken, as if it had expired, though something behind it in its id was taken before it did
stale       taken from Redis after it had expired
revived     handed over again after it was cancelled, waiting or in flight, and not pushed since
late ack    Redis took a consumer's acknowledgement of what it had handed over again before: another's job ended with it
==========  =================================================================================================

After Redis has lost data (`lapse`), what was finished or accepted before may be unknown to it: then a payload that is
lost is counted and is no problem, and the order of an id is judged up to the loss and anew from there. Where it is
known which moments and which shards were lost (a failover to a replica), that holds for these alone.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.history import Event, Perform, performs_of

#: Seconds before a fault within which a payload may have finished and not been acknowledged. lowq's own bound is about
#: 10 ms; the rest is for a busy machine, and for whoever notices the end of a process. `Report.repeated_work` is exact.
UNACKED = 1.0
#: Seconds by which Redis's clock, by which payloads expire, may have gone slower or faster than that of the history.
DRIFT = 0.05
#: Seconds before the time limit of a handler in which its return and its end by the limit may cross.
MOMENT = 0.005
#: A perform shorter than this is a fast one, seconds.
FAST = 0.01

Key = tuple[str, int]


@dataclass(slots=True)
class Report:
    """What `check` found."""

    #: Payloads whose push returned.
    accepted: int = 0
    performs: int = 0
    #: Payloads that a handler has finished, each counted once.
    performed: int = 0
    #: Payloads handed over once more, each time counted.
    repeats: int = 0
    #: Of these: finished before, and not yet acknowledged when something happened to their owner.
    repeats_of_finished: int = 0
    #: Seconds of fast performs that one shard had to repeat after one change of owner, the most of all.
    repeated_work: float = 0.0
    #: Performs under a fence that was not the highest any more, where that is allowed: (old, new).
    fenced: list[tuple[Perform, Perform]] = field(default_factory=list)
    #: Those of `fenced` whose older owner had no trouble that anybody knows of. Right only if its machine was slow.
    unexplained: list[str] = field(default_factory=list)
    #: What breaks a guarantee, in words. Of what is lost there is an excuse where Redis has lost it: `unexcused`.
    lost: list[str] = field(default_factory=list)
    unexcused: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    overlaps: list[str] = field(default_factory=list)
    fences: list[str] = field(default_factory=list)
    steps_back: list[str] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)
    excess: list[str] = field(default_factory=list)
    hasty: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    late_acks: list[str] = field(default_factory=list)
    #: Whether Redis itself has lost data.
    lapsed: bool = False
    #: Payloads with a ttl that were accepted, and neither performed nor buried.
    expired: int = 0
    #: The same of ids that were cancelled after these were pushed.
    cancelled: int = 0
    revived: list[str] = field(default_factory=list)

    @property
    def out_of_order(self) -> int:
        return len(self.steps_back) + len(self.returned)

    @property
    def problems(self) -> list[str]:
        return [
            *self.unexcused, *self.unknown, *self.overlaps, *self.fences, *self.steps_back, *self.returned,
            *self.excess, *self.hasty, *self.stale, *self.late_acks, *self.revived,
        ]  # fmt: skip


def check(
    events: Sequence[Event], buried: Iterable[Key] = (), *, expiring: Iterable[str] = (), ttl: float = math.inf
) -> Report:
    """Judges a history after everything was performed. ``buried``: (id, version) of what the morgue holds.
    ``expiring``: ids whose payloads have a ttl, and that, seconds.
    """
    report = Report()
    performs = performs_of(events)
    report.performs = len(performs)
    pushes = _Pushes(events)
    report.accepted = len(pushes.accepted)
    faults = _Faults(events)
    report.lapsed = bool(faults.losses)

    finished = {
        (job_id, version)
        for perform in performs
        if perform.ok
        for job_id, versions in perform.jobs.items()
        for version in versions
    }
    report.performed = len(finished)
    expiring, expired, cancels = set(expiring), set(), _cancels(events)
    shards = {job_id: perform.shard for perform in performs for job_id in perform.jobs}
    for job_id, version in sorted(pushes.accepted.keys() - finished - set(buried)):
        if job_id in expiring:
            report.expired += 1
            expired.add((job_id, version))
            continue
        if any(pushes.attempts[job_id, version][-1] <= end for _, end in cancels.get(job_id, ())):
            report.cancelled += 1
            continue
        report.lost.append(f"id {job_id}: version {version} was accepted, never performed, and is not buried")
        if not faults.may_lack(shards.get(job_id), pushes.accepted[job_id, version]):
            report.unexcused.append(report.lost[-1])

    _check_takes(events, pushes, expiring, ttl, report)
    _check_expired(events, pushes, expired, ttl, report)
    late = _check_overlaps(performs, faults, report)
    _check_fences(performs, report)
    judged = [perform for perform in performs if perform.name not in late]  # a late one is refused by the fence
    by_id: dict[str, list[Perform]] = defaultdict(list)
    for perform in judged:
        for job_id in perform.jobs:
            by_id[job_id].append(perform)
    acknowledged = _acknowledged(events)
    _check_late_acks(events, performs, pushes, faults, report)
    for job_id, those in by_id.items():
        for epoch in faults.epochs(those):
            _check_order(job_id, epoch, pushes, report)
        _check_returned(job_id, those, pushes, acknowledged, faults, report)
        _check_revived(job_id, those, pushes, cancels.get(job_id, ()), faults, report)
    _check_repeats(judged, pushes, faults, report)
    return report


class _Pushes:
    """What was pushed, and when."""

    def __init__(self, events: Iterable[Event]) -> None:
        #: (id, version) -> when the push that brought it last returned.
        self.accepted: dict[Key, float] = {}
        #: (id, version) -> lowest score: equal payloads are merged.
        self.score: dict[Key, float] = {}
        #: (id, version) -> when pushes of it began.
        self.attempts: dict[Key, list[float]] = defaultdict(list)
        #: (id, version), pushed without a score -> its place in the order in which its producer pushed them first.
        self.order: dict[Key, int] = {}
        for event in events:
            if event["event"] not in ("pushing", "pushed"):
                continue
            jobs: dict[Key, float] = {}  # equal ones of one push are merged before anybody sees them
            for job_id, version, given in event["jobs"]:
                key = job_id, version
                score = self.order.setdefault(key, len(self.order)) if given is None else given
                jobs[key] = min(score, jobs.get(key, math.inf))
            for key, score in jobs.items():
                if event["event"] == "pushed":
                    self.accepted[key] = event["at"]
                else:
                    self.attempts[key].append(event["at"])
                    self.score[key] = min(score, self.score.get(key, math.inf))

    def may_have_arrived_after(self, key: Key, at: float) -> bool:
        """Whether a push of it was under way then, or began later."""
        return self.accepted.get(key, math.inf) > at or self.attempts[key][-1] > at

    def may_be_late(self, key: Key, at: float) -> bool:
        """The same where its order counts. Never of one without a score: its producer pushes the next ones of its id
        when it has been accepted.
        """
        return key not in self.order and self.may_have_arrived_after(key, at)


class _Faults:
    """What was done to processes and to Redis."""

    def __init__(self, events: Iterable[Event]) -> None:
        #: Process -> when it was frozen, and may have been about to perform something.
        self.freezes: dict[int, list[float]] = defaultdict(list)
        #: Process, or None for all -> [from, until] when it may not have reached Redis.
        self._troubles: dict[int | None, list[list[float]]] = defaultdict(list)
        #: Process -> when it ended, and whether it ended in good order.
        self.gone: dict[int, tuple[float, bool]] = {}
        #: The times in which owners may not know that Redis lost their leases, and those in which it lost data, too.
        self.lapses: list[_Lapse] = []
        self.losses: list[_Lapse] = []
        for event in events:
            at: float = event["at"]
            match event["event"]:
                case "frozen":
                    if not event.get("in_call"):
                        self.freezes[event["frozen"]].append(at)
                    self._troubles[event["frozen"]].append([at, math.inf])
                case "thawed":
                    self._end(event["thawed"], at)
                case "trouble":
                    self._troubles[event["who"]].append([at, math.inf])
                case "calm":
                    self._end(event["who"], at)
                case "gone":
                    self.gone.setdefault(event["gone"], (at, event.get("code") == 0))
                case "lapse":
                    since, shards = event.get("since"), event.get("shards")
                    begin = at if since is None else since
                    of = None if shards is None else frozenset(shards)
                    ends, loses = at + event["seconds"], event.get("accepted", True)
                    self.lapses.append(_Lapse(begin, ends, of, is_exact=since is not None, loses_accepted=loses))
                    if event.get("data", True):
                        self.losses.append(self.lapses[-1])

    def _end(self, who: int | None, at: float) -> None:
        for span in self._troubles[who]:
            span[1] = min(span[1], at)

    def cut_off(self, pid: int, since: float, until: float) -> bool:
        """Whether the process may not have reached Redis at some moment between."""
        spans = [*self._troubles[pid], *self._troubles[None]]
        return any(begin <= until and end >= since for begin, end in spans)

    def lapsed(self, shard: int, at: float) -> bool:
        """Whether an owner may not know at that time that its lease was lost."""
        return any(lapse.begin <= at <= lapse.end for lapse in self.lapses if lapse.is_of(shard))

    def forgotten(self, shard: int, earlier: float, later: float) -> bool:
        """Whether Redis has lost data between, or the owners did not know yet."""
        return any(lapse.begin <= later and lapse.end >= earlier for lapse in self.losses if lapse.is_of(shard))

    def may_lack(self, shard: int | None, accepted: float) -> bool:
        """Whether Redis may have lost what was accepted then. None: it is not known of which shard that is."""
        return any(
            not lapse.is_exact or lapse.begin <= accepted <= lapse.end
            for lapse in self.losses
            if lapse.loses_accepted and (shard is None or lapse.is_of(shard))
        )

    def epochs(self, performs: Sequence[Perform]) -> Iterator[list[Perform]]:
        """The performs of an id between two losses of data."""
        losses = [(lapse.begin, lapse.end) for lapse in self.losses if lapse.is_of(performs[0].shard)]
        since = -math.inf
        for begin, end in [*sorted(losses), (math.inf, math.inf)]:  # they may overlap
            if since < begin:
                yield [perform for perform in performs if since < perform.start < begin]
            since = max(since, end)


@dataclass(frozen=True, slots=True)
class _Lapse:
    begin: float
    end: float
    #: None: all.
    shards: frozenset[int] | None
    #: Whether nothing is lost that was accepted before it began.
    is_exact: bool
    #: Whether payloads whose push had returned may be among it.
    loses_accepted: bool

    def is_of(self, shard: int) -> bool:
        return self.shards is None or shard in self.shards


# --- who worked a shard ---


def _check_overlaps(performs: Sequence[Perform], faults: _Faults, report: Report) -> set[str]:
    """Returns the names of those that began too late, where that is allowed."""
    running: dict[int, list[Perform]] = defaultdict(list)
    highest: dict[int, Perform] = {}
    fences: dict[int, dict[int, int]] = defaultdict(dict)  # shard -> process -> the fence of what it began last
    excused: dict[tuple[int, int], float] = {}  # process and thread -> the freeze that excused it last
    late: set[str] = set()
    for perform in performs:
        shard = perform.shard
        running[shard] = [other for other in running[shard] if other.end > perform.start]
        known = highest.get(shard)
        if known is not None and perform.fence < known.fence:
            if _was_in_hand(perform, known, fences[shard]):
                running[shard].append(perform)
                continue
            who = perform.pid, perform.thread
            freeze = max((at for at in faults.freezes.get(perform.pid, ()) if at < perform.start), default=None)
            if faults.lapsed(shard, perform.start):
                late.add(perform.name)
                report.fenced.append((perform, known))
            elif freeze is None or excused.get(who) == freeze:
                report.overlaps.append(f"shard {shard}: {perform} began after {known}, whose fence is higher")
            else:
                excused[who] = freeze
                late.add(perform.name)
                report.fenced.append((perform, known))
            continue
        for other in running[shard]:
            if perform.by_hand and other.pid == perform.pid and not perform.jobs.keys() & other.jobs.keys():
                continue
            if other.until <= perform.start:
                report.fenced.append((other, perform))
                continue
            if other.fence < perform.fence:
                report.fenced.append((other, perform))
                if not faults.cut_off(other.pid, other.start - UNACKED, perform.start) and not faults.lapsed(
                    shard, perform.start
                ):
                    report.unexplained.append(f"shard {shard}: {perform} began during {other}")
            else:
                report.overlaps.append(f"shard {shard}: {perform} began during {other}")
        highest[shard], fences[shard][perform.pid] = perform, perform.fence
        running[shard].append(perform)
    return late


def _was_in_hand(perform: Perform, known: Perform, fences: Mapping[int, int]) -> bool:
    """Whether a consumer had the job in hand before it got a higher fence for others, and nobody else got one since:
    its thread has begun with it later. ``fences``: process -> its fence of that shard.
    """
    is_alone = all(fence < perform.fence for pid, fence in fences.items() if pid != perform.pid)
    return perform.by_hand and known.pid == perform.pid and is_alone and not perform.jobs.keys() & known.jobs.keys()


def _check_fences(performs: Sequence[Perform], report: Report) -> None:
    owners: dict[tuple[int, int], Perform] = {}
    for perform in performs:
        first = owners.setdefault((perform.shard, perform.fence), perform)
        if first.pid != perform.pid:
            report.fences.append(f"shard {perform.shard}: {perform} and {first} have one fence and two processes")


def _check_takes(events: Iterable[Event], pushes: _Pushes, expiring: set[str], ttl: float, report: Report) -> None:
    """A payload was there when its push returned, so it has expired a ttl later, whatever came in between. One whose
    push is repeated may have come anew.
    """
    for event in events:
        if event["event"] != "taken":
            continue
        for job_id in event["jobs"].keys() & expiring:
            for key in ((job_id, version) for version in event["jobs"][job_id]):
                accepted = pushes.accepted.get(key, math.inf)
                if pushes.attempts[key][-1] < accepted and event["sent"] > accepted + ttl + DRIFT:
                    late = event["sent"] - accepted - ttl
                    report.stale.append(f"id {job_id}: {key[1]} was taken {late:.3f} s after it had expired")


def _check_expired(events: Iterable[Event], pushes: _Pushes, expired: set[Key], ttl: float, report: Report) -> None:
    """What was never taken has expired: before that, nothing behind it in its id was taken."""
    takes: dict[str, list[tuple[float, float, list[int]]]] = defaultdict(list)  # id -> when it was sent, and answered
    for event in events:
        if event["event"] == "taken":
            for job_id, versions in event["jobs"].items():
                takes[job_id].append((event["sent"], event["at"], versions))
    for job_id, version in sorted(expired):
        key, those = (job_id, version), takes[job_id]
        if any(version in versions for *_, versions in those):
            continue
        accepted, expires = pushes.accepted[key], pushes.attempts[key][0] + ttl - DRIFT
        for sent, answered, versions in those:
            behind = any(pushes.score.get((job_id, other), -math.inf) > pushes.score[key] for other in versions)
            if accepted < sent and answered < expires and behind:
                report.hasty.append(f"id {job_id}: {version} is gone, and {versions} were taken before it expired")
                break


# --- order ---


def _check_order(job_id: str, performs: Sequence[Perform], pushes: _Pushes, report: Report) -> None:
    began: dict[int, float] = {}  # version -> when it was last handed over
    arrivals: dict[int, int] = defaultdict(lambda: 1)  # version -> how many pushes have brought it
    in_flight: set[int] = set()  # what may still come again
    top, top_at = -math.inf, -math.inf  # the highest score handed over, and since when

    for perform in performs:
        versions = perform.jobs[job_id]
        unknown = [version for version in versions if (job_id, version) not in pushes.score]
        if unknown:
            report.unknown.append(f"id {job_id}: {perform} was given {unknown}, which nobody pushed")
            continue
        scores = [pushes.score[job_id, version] for version in versions]
        # What was pushed again without a score has its place among those that came then.
        places = [
            score
            for version, score in zip(versions, scores, strict=True)
            if (job_id, version) not in pushes.order
            or version not in began
            or arrivals[version] == len(pushes.attempts[job_id, version])
        ]
        if places != sorted(places) or len(set(versions)) != len(versions):
            report.steps_back.append(f"id {job_id}: {perform} was given {versions}, out of order")
        again = [version for version in versions if version in began]
        for version, score in zip(versions, scores, strict=True):
            key = job_id, version
            if version in began:
                if version in in_flight:
                    continue
                if arrivals[version] < len(pushes.attempts[key]):
                    arrivals[version] += 1  # a push that was given up may be carried out late, and is pushed again
                    continue
                report.steps_back.append(f"id {job_id}: {perform} was given {version} again, after newer ones")
            elif score < top and not pushes.may_be_late(key, top_at):
                report.steps_back.append(f"id {job_id}: {perform} was given {version} after a higher score, {top:g}")
        in_flight = set(versions) | (in_flight if in_flight.intersection(again) else set())
        began.update(dict.fromkeys(versions, perform.start))
        if scores and max(scores) > top:
            top, top_at = max(scores), perform.start


# --- what came again ---


def _acknowledged(events: Iterable[Event]) -> dict[Key, list[float]]:
    """(id, version) -> when Redis had confirmed that it is finished."""
    last: dict[tuple[int, int, str], list[int]] = {}  # process, shard, id -> what it finished last
    started: dict[str, Event] = {}
    found: dict[Key, list[float]] = defaultdict(list)
    for event in events:
        match event["event"]:
            case "start":
                started[event["perform"]] = event
            case "end" if event["ok"]:
                start = started[event["perform"]]
                for job_id, versions in start["jobs"].items():
                    last[event["pid"], start["shard"], job_id] = versions
            case "acked":
                for job_id in event["ids"]:
                    versions = last.get((event["pid"], event["shard"], job_id), [])
                    if event.get("perform"):
                        versions = started[event["perform"]]["jobs"][job_id]
                    for version in versions:
                        found[job_id, version].append(event["at"])
    return found


def _check_late_acks(
    events: Iterable[Event], performs: Sequence[Perform], pushes: _Pushes, faults: _Faults, report: Report
) -> None:
    by_name = {perform.name: perform for perform in performs}
    handed: dict[Key, list[Perform]] = defaultdict(list)
    for perform in performs:
        for job_id, versions in perform.jobs.items():
            for version in versions:
                handed[job_id, version].append(perform)
    for event in events:
        if event["event"] != "acked" or not event.get("perform"):
            continue
        perform = by_name[event["perform"]]
        for job_id in event["ids"]:
            keys = [(job_id, version) for version in perform.jobs[job_id]]
            # What was pushed twice may have come again because of that.
            later = [one for key in keys if len(pushes.attempts[key]) == 1 for one in handed[key]]
            again = [one for one in later if perform.start < one.start < event["at"]]
            if again and not faults.forgotten(perform.shard, perform.start, event["at"]):
                report.late_acks.append(f"id {job_id}: {perform} was acknowledged, though {again[0]} had it by then")


def _check_returned(
    job_id: str,
    performs: Sequence[Perform],
    pushes: _Pushes,
    acknowledged: Mapping[Key, Sequence[float]],
    faults: _Faults,
    report: Report,
) -> None:
    seen: dict[int, int] = defaultdict(int)  # version -> times that it was handed over after its acknowledgement
    taken: dict[int, float] = {}  # version -> when it was handed over last
    for perform in performs:
        for version in perform.jobs[job_id]:
            key = job_id, version
            acks = [at for at in acknowledged.get(key, ()) if at < perform.start]
            # What has lost that it was taken can't note that it is finished.
            since = min([*acks[-1:], taken.get(version, math.inf)])
            taken[version] = perform.start
            if not acks or faults.forgotten(perform.shard, since, perform.start):
                continue
            seen[version] += 1
            if seen[version] >= len(pushes.attempts[key]):
                report.returned.append(f"id {job_id}: {perform} was given {version}, which was acknowledged before")


def _check_repeats(performs: Sequence[Perform], pushes: _Pushes, faults: _Faults, report: Report) -> None:
    last_sign = _signs_of_life(performs)
    before: dict[Key, Perform] = {}
    handed: dict[Key, int] = defaultdict(int)
    repeated_work: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for perform in performs:
        for job_id, versions in perform.jobs.items():
            for version in versions:
                key = job_id, version
                handed[key] += 1
                earlier = before.get(key)
                before[key] = perform
                if earlier is None:
                    continue
                report.repeats += 1
                if not earlier.ok or earlier.end > perform.start:
                    continue  # it was in flight
                was_pushed_again = handed[key] <= len(pushes.attempts[key]) or pushes.attempts[key][-1] > earlier.start
                if was_pushed_again or faults.forgotten(perform.shard, earlier.start, perform.start):
                    continue
                report.repeats_of_finished += 1
                length = earlier.end - earlier.start
                if length <= FAST:
                    repeated_work[earlier.shard, earlier.fence][earlier.name] = length
                if not _may_come_again(earlier, perform, faults, last_sign):
                    report.excess.append(f"id {job_id}: {perform} was given {version} again, finished by {earlier}")
    report.repeated_work = max((sum(parts.values()) for parts in repeated_work.values()), default=0.0)


def _cancels(events: Iterable[Event]) -> dict[str, list[tuple[float, float]]]:
    """Id -> when each call that cancelled it began, the first time, and when it returned; inf: it never did."""
    begun: dict[str, tuple[float, Sequence[str]]] = {}
    ended: dict[str, float] = {}
    for event in events:
        if event["event"] == "cancelling":
            begun.setdefault(event["cancel"], (event["at"], event["ids"]))
        elif event["event"] == "cancelled":
            ended[event["cancel"]] = event["at"]
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for cancel, (at, ids) in begun.items():
        for job_id in ids:
            found[job_id].append((at, ended.get(cancel, math.inf)))
    return found


def _check_revived(
    job_id: str,
    performs: Sequence[Perform],
    pushes: _Pushes,
    cancels: Iterable[tuple[float, float]],
    faults: _Faults,
    report: Report,
) -> None:
    """What was in flight at a cancel goes on or begins once more, by whoever has it in hand, and never after that."""
    for begin, end in cancels:
        handed: dict[int, Perform] = {}
        for perform in performs:
            for version in perform.jobs[job_id]:
                key = job_id, version
                if perform.end <= end or key not in pushes.accepted or pushes.may_have_arrived_after(key, begin):
                    continue
                first = handed.setdefault(version, perform)
                if first is perform or perform.start < first.end or min(first.until, first.limit) <= perform.start:
                    continue
                is_excused = faults.cut_off(first.pid, first.start, first.end) or faults.forgotten(
                    first.shard, begin, perform.start
                )
                if not is_excused:
                    report.revived.append(
                        f"id {job_id}: version {version} was cancelled at {begin:.3f}, during {first} or before, and "
                        f"handed over again to {perform}"
                    )


def _signs_of_life(performs: Iterable[Perform]) -> dict[tuple[int, int], float]:
    """(shard, fence) -> when its owner last began or ended to perform something of it."""
    found: dict[tuple[int, int], float] = {}
    for perform in performs:
        at = perform.end if perform.ok is not None else perform.start
        found[perform.shard, perform.fence] = max(at, found.get((perform.shard, perform.fence), at))
    return found


def _may_come_again(
    earlier: Perform, again: Perform, faults: _Faults, last_sign: Mapping[tuple[int, int], float]
) -> bool:
    """Whether it was in flight, or its acknowledgement under way, when something happened to its owner, or its ttr
    passed.
    """
    if earlier.end > earlier.until - UNACKED or earlier.end >= earlier.limit - MOMENT:
        return True
    # A lease that nobody could renew may also run out a moment later, and be resumed.
    begin = earlier.start - UNACKED if again.pid == earlier.pid else earlier.start
    if faults.cut_off(earlier.pid, begin, earlier.end + UNACKED) or faults.lapsed(again.shard, again.start):
        return True
    gone_at, in_good_order = faults.gone.get(earlier.pid, (math.inf, False))
    if gone_at <= again.start:
        return not in_good_order and gone_at - earlier.end <= UNACKED
    # It lives, and has lost the lease all the same: then it was slow, and these were the last that it did there.
    return again.fence > earlier.fence and last_sign[earlier.shard, earlier.fence] - earlier.end <= UNACKED


# --- limits ---


def check_concurrency(events: Sequence[Event], most: int | None, apart: Collection[int] = ()) -> list[str]:
    """Where nodes performed more batches at a time than their limit allows, but for those who may have been cut off
    from Redis, or whose permits it has lost. None: there is no limit. ``apart``: shards that it does not concern.
    """
    faults, found, running = _Faults(events), [], list[Perform]()
    for perform in performs_of(events) if most is not None else ():
        if perform.by_hand or perform.shard in apart:
            continue
        running = [other for other in [*running, perform] if other.end > perform.start or other is perform]
        known = [
            other
            for other in running
            if other.limit > perform.start  # past its ttr it is written off
            and not faults.cut_off(other.pid, other.start, perform.start)
            and not faults.lapsed(other.shard, perform.start)
        ]
        if most is not None and len(known) > most:
            found.append(f"{len(known)} batches at a time, where {most} are allowed: {', '.join(map(str, known))}")
    return found


def check_calls(events: Sequence[Event], most: int | None) -> list[str]:
    """Where more calls ran at a time than the limit around them allows, but for those whose process may have been cut
    off from Redis, or whose permits it has lost. None: there is no limit.
    """
    faults, found, running = _Faults(events), [], dict[str, Event]()
    for event in events if most is not None else ():
        at = event["at"]
        if event["event"] == "called":
            running.pop(event["call"], None)
        elif event["event"] == "gone":
            running = {name: call for name, call in running.items() if call["pid"] != event["gone"]}
        elif event["event"] == "calling":
            running[event["call"]] = event
            known = [
                name
                for name, call in running.items()
                if (call["until"] or math.inf) > at
                and not faults.cut_off(call["pid"], call["at"], at)
                and not any(lapse.begin <= at and lapse.end >= call["at"] for lapse in faults.lapses)
            ]
            if most is not None and len(known) > most:
                found.append(f"{len(known)} calls at {at:.3f}, where {most} are allowed: {', '.join(known)}")
    return found


# --- how long shards rested ---


@dataclass(frozen=True, slots=True)
class Rest:
    """A shard had work and nobody performed it."""

    shard: int
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def rests(events: Sequence[Event], least: float = 0.05) -> list[Rest]:
    """Times of at least so many seconds in which a shard rested though something that was then performed had been
    accepted, and was not in flight. What waits for a retry or comes back from a crash counts from its last hand-over.
    """
    accepted: dict[Key, float] = {}
    for event in events:
        if event["event"] == "pushed":
            for job_id, version, _ in event["jobs"]:
                accepted.setdefault((job_id, version), event["at"])
    busy_until: dict[int, float] = defaultdict(lambda: -math.inf)
    freezes = _Faults(events).freezes
    found = []
    for perform in performs_of(events):
        shard = perform.shard
        waiting_since = min(
            (accepted.get((job_id, version), math.inf) for job_id in perform.jobs for version in perform.jobs[job_id]),
            default=math.inf,
        )
        begin = max(waiting_since, busy_until[shard])
        if perform.start - begin >= least:
            found.append(Rest(shard, begin, perform.start))
        end = perform.end if perform.end < math.inf else perform.start
        end = min([end, *(at for at in freezes.get(perform.pid, ()) if at > perform.start)])
        busy_until[shard] = max(busy_until[shard], end)
    return found


def recovery(resting: Iterable[Rest], outages: Iterable[float] = ()) -> float:
    """Seconds that a shard with work rested, the longest of all. ``outages``: when Redis could be reached again,
    monotonic; what a shard rested before that is not lowq's.
    """
    ends = sorted(outages)
    longest = 0.0
    for rest in resting:
        position = bisect_left(ends, rest.end) - 1
        since = max(rest.begin, ends[position]) if position >= 0 else rest.begin
        longest = max(longest, rest.end - since)
    return longest
