"""What really happened, written down by those who did it: producers, handlers, and whoever does harm to them.

Nothing here knows lowq. Everybody appends to one file, one JSON line per event, and `tests.checker` judges::

    with History(path).pushing(jobs): push(jobs)                  # producer
    with History(path).performing(...): the work                  # handler
    History(path).gone(pid, code)                                 # whoever saw a process end
    History(path).frozen(pid)                                     # whoever is about to freeze one

=========  ==================================================================================================
event      fields, besides `at` (monotonic seconds, the same clock in all processes), `wall`, `pid`, `thread`
=========  ==================================================================================================
pushing    push (its name), jobs: [[id, version, score or null], ...]; written before the push
pushed     push, jobs: those that were accepted for certain
start      perform (its name), shard, fence, jobs: {id: [version, ...] in the order handed over}, by_hand: by a
           consumer, which may perform several ids of a shard at a time; until: when its ttr passes, or null;
           limit: when its time limit passes, or the ttr of a node's handler, as its thread sees it, or null
end        perform, ok: whether the handler returned; without this line the process died in it
taken      sent: when the take was sent, monotonic; jobs: {id: [version, ...]} that Redis handed out. Written only where
           payloads expire
acked      shard, ids: Redis has confirmed that this process is done with what it last performed of them; perform: or
           with what it was given in that one, by a consumer, which may have begun with more of the id since
calling    call (its name); limit: the name of the limit around it; until: when its permit may be another's, or null
called     call: it has ended
cancelling cancel (its name), ids; written before the call, and again when that is repeated
cancelled  cancel: the call has returned
gone       gone: the id of a process that ended; code: its exit code, negative for a signal
frozen     frozen: the id of a process that is about to be stopped for a while (SIGSTOP, or a handler with the GIL);
           in_call: its only thread that performs waits for Redis then, so it is about to perform nothing
thawed     thawed: the id of a process that goes on
trouble    who: id of a process, or null for all. From now on it may not reach Redis
calm       who: from now on it can, again
lapse      seconds: Redis forgets leases now, and who held one may not know for so long; data: and what it knew besides;
           since: when that began, or null for now: what was accepted before that may not be lost; shards: of these
           only, or null for all; accepted: whether payloads whose push had returned may be lost
=========  ==================================================================================================

A version is a payload's number: unique within its id.
"""

import json
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]
#: id, version, score; without a score, versions of the id have to be handed over in the order in which they were pushed
PushedJob = tuple[str, int, float | None]

_numbers = count(time.monotonic_ns())  # a process may become another program, with the same id


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
    def performing(
        self,
        shard: int,
        fence: int,
        jobs: Mapping[str, Sequence[int]],
        *,
        by_hand: bool = False,
        until: float | None = None,
        limit: float | None = None,
    ) -> Iterator[str]:
        """Around a perform, which has the name that is returned. What is raised goes on, and is an end that finished
        nothing.
        """
        perform = f"{os.getpid()}-{next(_numbers)}"
        more = {} if limit is None else {"limit": limit}
        self.write("start", perform=perform, shard=shard, fence=fence, jobs=jobs, by_hand=by_hand, until=until, **more)
        ok = False
        try:
            yield perform
            ok = True
        finally:
            self.write("end", perform=perform, ok=ok)

    def taken(self, sent: float, jobs: Mapping[str, Sequence[int]]) -> None:
        """Redis has handed out these, to a take that was sent then."""
        self.write("taken", sent=sent, jobs=jobs)

    def acked(self, shard: int, ids: Sequence[str], perform: str | None = None) -> None:
        """Redis has confirmed that what this process performed last of these ids is finished, or what that one did."""
        self.write("acked", shard=shard, ids=ids, perform=perform)

    @contextmanager
    def calling(self, limit: str, until: float | None = None) -> Iterator[None]:
        """Around a call that a limit over all processes has let in."""
        call = f"{os.getpid()}-{next(_numbers)}"
        self.write("calling", call=call, limit=limit, until=until)
        try:
            yield
        finally:
            self.write("called", call=call)

    def cancelling(self, cancel: str, ids: Sequence[str]) -> None:
        """Somebody is about to cancel these, by a call that may be repeated."""
        self.write("cancelling", cancel=cancel, ids=ids)

    def cancelled(self, cancel: str) -> None:
        """That has returned: nothing of them that was pushed before waits any more, or will."""
        self.write("cancelled", cancel=cancel)

    def gone(self, pid: int, code: int | None = None) -> None:
        """The process has ended: what it performed ended then, at the latest."""
        self.write("gone", gone=pid, code=code)

    def frozen(self, pid: int, *, in_call: bool = False) -> None:
        """The process will be frozen for a while, perhaps for longer than its leases last. ``in_call``: and no perform
        that it begins later was handed out before.
        """
        self.write("frozen", frozen=pid, in_call=in_call)

    def thawed(self, pid: int) -> None:
        """It goes on."""
        self.write("thawed", thawed=pid)

    def trouble(self, pid: int | None = None) -> None:
        """From here to `calm` that process, or every process, may not reach Redis."""
        self.write("trouble", who=pid)

    def calm(self, pid: int | None = None) -> None:
        """The end of `trouble`."""
        self.write("calm", who=pid)

    def lapse(
        self,
        seconds: float,
        *,
        data: bool = True,
        since: float | None = None,
        shards: Sequence[int] | None = None,
        accepted: bool = True,
    ) -> None:
        """Redis forgets the leases that are held, and their holders learn of it in so many seconds; with ``data``, it
        forgets what it knew of jobs, too. ``since``: from then on only, monotonic. ``shards``: of these only.
        ``accepted``: also what it had accepted.
        """
        self.write("lapse", seconds=seconds, data=data, since=since, shards=shards, accepted=accepted)


def read(path: str | os.PathLike[str]) -> list[Event]:
    """All events so far, in the order written."""
    return list(Reader(path).events())


class Reader:
    """Reads a history that grows, each line once: for whoever looks at it again and again. Not for several threads."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._position = 0
        self._events: list[Event] = []

    def events(self) -> Sequence[Event]:
        """All events so far, in the order written."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._position)
                *lines, _ = file.read().split(b"\n")  # the last is empty, or just being written
            self._events += map(json.loads, lines)
            self._position += sum(len(line) + 1 for line in lines)
        return self._events


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
    #: Whether a consumer took the jobs, which may have several ids of a shard in hand.
    by_hand: bool = False
    #: From then on its jobs may be handed over to others.
    until: float = math.inf
    #: About then it may be ended, though its handler returns in that very moment.
    limit: float = math.inf

    def __str__(self) -> str:
        return f"{self.name} (fence {self.fence}, from {self.start:.3f} to {self.end:.3f}, ok {self.ok})"


def performs_of(events: Iterable[Event]) -> list[Perform]:
    """The performs of a history, in the order in which they began."""
    performs: dict[str, Perform] = {}
    gone: dict[int, float] = {}
    for event in events:
        if event["event"] == "start":
            performs[event["perform"]] = Perform(
                event["perform"], event["pid"], event["thread"], event["shard"], event["fence"], dict(event["jobs"]),
                event["at"], by_hand=event.get("by_hand", False), until=event.get("until") or math.inf,
                limit=event.get("limit") or math.inf,
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
