"""What really happened, written down by those who did it, and a checker of lowq's guarantees over that.

Nothing here knows lowq: producers and handlers append to a file, one JSON line per event, and `check` judges::

    with History(path).pushing(jobs): push(jobs)                  # producer
    with History(path).performing(...): the work                  # handler
    History(path).gone(pid)                                       # whoever saw a process end
    History(path).frozen(pid)                                     # whoever is about to freeze one

    report = check(read(path), buried=...)
    assert report.problems == []

=========  ==================================================================================================
event      fields, besides `at` (monotonic seconds, the same clock in all processes), `wall`, `pid`, `thread`
=========  ==================================================================================================
pushing    push (its name), jobs: [[id, version, score], ...]; written before the push
pushed     push, jobs: those that were accepted for certain
start      perform (its name), shard, fence, jobs: {id: [version, ...] in the order handed over}
end        perform, ok: whether the handler returned; without this line the process died in it
gone       gone: the id of a process that ended
frozen     frozen: the id of a process that is about to be stopped for a while (SIGSTOP)
=========  ==================================================================================================

A version is a payload's number: unique within its id.
"""

import json
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]
#: id, version, score
PushedJob = tuple[str, int, float]

_numbers = count(1)


class History:
    """Appends events to a file that many processes and threads share."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path

    def write(self, event: str, **fields: Any) -> None:
        # One write of one line, to a file opened for appending: never mixed with another process's, and in the
        # file whatever becomes of this process on the next line.
        says = {"event": event, "at": time.monotonic(), "wall": time.time(), "pid": os.getpid()}
        line = json.dumps({**says, "thread": threading.get_ident(), **fields}) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    @contextmanager
    def pushing(self, jobs: Sequence[PushedJob]) -> Iterator[None]:
        """Around a push of all these jobs. One that raises is not accepted; the jobs may be in all the same."""
        push = f"{os.getpid()}-{next(_numbers)}"
        self.write("pushing", push=push, jobs=jobs)
        yield
        self.write("pushed", push=push, jobs=jobs)

    @contextmanager
    def performing(self, shard: int, fence: int, jobs: Mapping[str, Sequence[int]]) -> Iterator[None]:
        """Around a perform. What is raised goes on, and is an end that finished nothing."""
        perform = f"{os.getpid()}-{next(_numbers)}"
        self.write("start", perform=perform, shard=shard, fence=fence, jobs=jobs)
        ok = False
        try:
            yield
            ok = True
        finally:
            self.write("end", perform=perform, ok=ok)

    def gone(self, pid: int) -> None:
        """The process has ended: what it performed ended then, at the latest."""
        self.write("gone", gone=pid)

    def frozen(self, pid: int) -> None:
        """The process will be frozen for a while, perhaps for longer than its leases last."""
        self.write("frozen", frozen=pid)


def read(path: str | os.PathLike[str]) -> list[Event]:
    """All events so far, in the order written."""
    file = Path(path)
    if not file.exists():
        return []
    lines = file.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1]]  # the last is empty, or just being written


@dataclass(slots=True)
class Perform:
    """One call of a handler."""

    name: str
    pid: int
    thread: int
    shard: int
    fence: int
    jobs: dict[str, list[int]]
    start: float
    end: float = math.inf
    #: Whether the handler returned; False: it raised; None: it never ended.
    ok: bool | None = None

    def __str__(self) -> str:
        return f"{self.name} (fence {self.fence}, from {self.start:.3f} to {self.end:.3f}, ok {self.ok})"


@dataclass(slots=True)
class Report:
    """What `check` found."""

    #: Payloads whose push returned.
    accepted: int = 0
    performs: int = 0
    #: Payloads handed over once more, each time counted.
    repeats: int = 0
    #: Performs under a fence that was not the highest any more, where that is allowed: (old, new).
    fenced: list[tuple[Perform, Perform]] = field(default_factory=list)
    #: What breaks a guarantee, in words.
    lost: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    overlaps: list[str] = field(default_factory=list)
    steps_back: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        return [*self.lost, *self.unknown, *self.overlaps, *self.steps_back]


def performs_of(events: Iterable[Event]) -> list[Perform]:
    """The performs of a history, in the order in which they began."""
    performs: dict[str, Perform] = {}
    gone: dict[int, float] = {}
    for event in events:
        if event["event"] == "start":
            performs[event["perform"]] = Perform(
                event["perform"], event["pid"], event["thread"], event["shard"], event["fence"], dict(event["jobs"]),
                event["at"],
            )  # fmt: skip
        elif event["event"] == "end":
            performs[event["perform"]].end = event["at"]
            performs[event["perform"]].ok = event["ok"]
        elif event["event"] == "gone":
            gone.setdefault(event["gone"], event["at"])
    for perform in performs.values():
        if perform.ok is None:
            perform.end = gone.get(perform.pid, math.inf)
    return sorted(performs.values(), key=lambda perform: perform.start)


def check(events: Sequence[Event], buried: Iterable[tuple[str, int]] = ()) -> Report:
    """Judges a history after everything was performed. ``buried``: (id, version) of what the morgue holds.

    lost        accepted, and neither in a perform whose handler returned nor buried
    unknown     performed, and nobody ever began to push it
    overlap     two performs of one shard at a time, or one that begins under a lower fence than was seen before.
                Allowed, and `fenced`: the earlier of two goes on under a lower fence; and whoever was frozen may
                have been between its last look at its lease and the handler: one perform per thread
    step back   handed over after one with a higher score, unless it arrived later than that, or is handed over
                again: with nothing between but what was in flight with it, or because it was pushed again
    """
    report = Report()
    performs = performs_of(events)
    report.performs = len(performs)
    pushes = _Pushes(events)
    report.accepted = len(pushes.accepted)

    finished = {
        (job_id, version)
        for perform in performs
        if perform.ok
        for job_id, versions in perform.jobs.items()
        for version in versions
    }
    for job_id, version in sorted(pushes.accepted.keys() - finished - set(buried)):
        report.lost.append(f"id {job_id}: version {version} was accepted, never performed, and is not buried")

    late = _check_overlaps(performs, _freezes(events), report)
    by_id: dict[str, list[Perform]] = defaultdict(list)
    for perform in performs:
        if perform.name in late:
            continue  # it is refused; whoever guards by the fence doesn't see it
        for job_id in perform.jobs:
            by_id[job_id].append(perform)
    for job_id, those in by_id.items():
        _check_order(job_id, those, pushes, report)
    return report


class _Pushes:
    """What was pushed, and when."""

    def __init__(self, events: Iterable[Event]) -> None:
        #: (id, version) -> when the push that brought it last returned.
        self.accepted: dict[tuple[str, int], float] = {}
        #: (id, version) -> lowest score: equal payloads are merged.
        self.score: dict[tuple[str, int], float] = {}
        #: (id, version) -> when pushes of it began.
        self.attempts: dict[tuple[str, int], list[float]] = defaultdict(list)
        for event in events:
            if event["event"] not in ("pushing", "pushed"):
                continue
            for job_id, version, score in event["jobs"]:
                key = job_id, version
                if event["event"] == "pushed":
                    self.accepted[key] = event["at"]
                else:
                    self.attempts[key].append(event["at"])
                    self.score[key] = min(score, self.score.get(key, math.inf))

    def may_have_arrived_after(self, key: tuple[str, int], at: float) -> bool:
        """Whether a push of it was under way then, or began later."""
        return self.accepted.get(key, math.inf) > at or self.attempts[key][-1] > at


def _freezes(events: Iterable[Event]) -> dict[int, list[float]]:
    """Process -> when it was frozen."""
    found: dict[int, list[float]] = defaultdict(list)
    for event in events:
        if event["event"] == "frozen":
            found[event["frozen"]].append(event["at"])
    return found


def _check_overlaps(performs: Sequence[Perform], freezes: Mapping[int, Sequence[float]], report: Report) -> set[str]:
    """Returns the names of those that began too late, where that is allowed."""
    running: dict[int, list[Perform]] = defaultdict(list)
    highest: dict[int, Perform] = {}
    excused: dict[tuple[int, int], float] = {}  # process and thread -> the freeze that excused it last
    late: set[str] = set()
    for perform in performs:
        shard = perform.shard
        running[shard] = [other for other in running[shard] if other.end > perform.start]
        known = highest.get(shard)
        if known is not None and perform.fence < known.fence:
            who = perform.pid, perform.thread
            freeze = max((at for at in freezes.get(perform.pid, ()) if at < perform.start), default=None)
            if freeze is None or excused.get(who) == freeze:
                report.overlaps.append(f"shard {shard}: {perform} began after {known}, whose fence is higher")
            else:
                excused[who] = freeze
                late.add(perform.name)
                report.fenced.append((perform, known))
            continue
        for other in running[shard]:
            if other.fence < perform.fence:
                report.fenced.append((other, perform))
            else:
                report.overlaps.append(f"shard {shard}: {perform} began during {other}")
        highest[shard] = perform
        running[shard].append(perform)
    return late


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
        if scores != sorted(scores) or len(set(versions)) != len(versions):
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
            elif score < top and not pushes.may_have_arrived_after(key, top_at):
                report.steps_back.append(f"id {job_id}: {perform} was given {version} after a higher score, {top:g}")
        report.repeats += len(again)
        in_flight = set(versions) | (in_flight if in_flight.intersection(again) else set())
        began.update(dict.fromkeys(versions, perform.start))
        if scores and scores[-1] > top:
            top, top_at = scores[-1], perform.start
