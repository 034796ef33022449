"""One story: a whole system that a seed draws, what is done to it, and whether lowq's guarantees held.

    outcome = tell(seed)            # the same each time
    outcome.problems == []
    tell(seed, without={3, 5})      # the same system, and the faults 3 and 5 do not happen

Real nodes, consumers, producers and operators of lowq run in it, each in a simulated process
(`tests.simulation.machine`), against the real scripts (`tests.simulation.servers`). They write the history that the
checker of the fault matrix judges. After the last fault all jobs have to be done within `PATIENCE`.
"""

import asyncio
import itertools
import json
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import lowq
import tests.history
from lowq.shards.shard import Shard
from lowq.store import urls
from lowq.store.keys import shard_prefix
from lowq.store.sentinels import FollowedPrimary
from lowq.work import threads
from tests.checker import Report, check, check_calls, check_concurrency
from tests.history import History
from tests.simulation import machine
from tests.simulation.performers import AWAY, CALLS, QUEUE, TICK, TICKS_SHARD, Performer
from tests.simulation.servers import REFUSALS, Address, Cluster, Link, Sentinel, Server, listen
from tests.simulation.world import BEGINNING, BEGINNING_WALL, Process, Stalled, World, simulating

#: Virtual seconds within which everything is performed once the last fault is over.
PATIENCE = 120.0
#: Virtual seconds in which jobs are pushed and faults happen.
BUSY = 15.0

# An interrupt of a thread goes to that of the simulation.
setattr(threads, "interrupt_of_this_thread", machine.interrupt_of_this_thread)  # noqa: B010 - mypy and a module
# Sets of shards are gone through in an order that is not that of their addresses: so a seed tells one story.
Shard.__hash__ = lambda self: hash(self.prefix)  # type: ignore[method-assign, attr-defined]


class _OfProcesses(dict[Any, Any]):
    """What each process keeps for itself."""

    def setdefault(self, name: Any, value: Any = None) -> Any:
        return super().setdefault((os.getpid(), name), value)


# Each process follows the primary that sentinels name by itself. Connections end in an order that is not that of their
# addresses.
_FOLLOWED = _OfProcesses()
setattr(urls, "_followed", _FOLLOWED)  # noqa: B010 - mypy and a module
FollowedPrimary._list_connections = lambda self: sorted(  # type: ignore[method-assign]
    (each for each in self._connections if each._sock is not None), key=lambda each: int(each._sock.fileno())
)

#: Virtual seconds after which an operator goes on with a reshard that keeps another one from its beginning.
ABANDONED = 5.0

#: What is done to the system -> how often it is drawn.
FAULTS = {
    "kill": 4,
    "freeze": 4,
    "stop": 2,
    "reset connections": 3,
    "lose messages": 3,
    "repeat messages": 3,
    "delay messages": 2,
    "pause server": 3,
    "restart server": 2,
    "lose writes": 2,
    "isolate": 2,
    "refuse": 2,
    "flush scripts": 1,
    "cut off": 3,
    "step clock": 1,
    "pause queue": 1,
    "act on jobs": 2,
    "reshard": 1,
    "leave reshard": 1,
}
#: The same in stories with sentinels: these are added.
OF_SENTINELS = {"pause sentinel": 2, "restart sentinel": 2, "isolate sentinel": 3, "isolate": 2, "lose writes": 1}
#: Virtual seconds within which every client uses the primary that all sentinels name: they are asked once a second, and
#: less often after they did not answer, which may concern one of them, or more.
LEFT_AFTER = (1.5, 11.0)
#: What the doctor says of faults that are over.
TOLD = {"maintenance_late"}
#: After these a server lacks what it has answered.
LOSING = ("lose writes", "isolate")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is done to the system. ``at``: virtual seconds after the beginning."""

    number: int
    at: float
    name: str
    #: Of what there are several of, which one; taken modulo their number.
    which: int
    seconds: float
    #: Steps that the process still goes.
    steps: int

    def __str__(self) -> str:
        return f"fault {self.number}: {self.name} {self.which} for {self.seconds:.3f} s, after {self.steps} steps"


@dataclass(slots=True)
class Plan:
    """What a seed draws."""

    seed: int
    servers: int
    shards: int
    performers: list[str]
    #: Of each producer: whether it pushes from an event loop.
    producers: list[bool]
    ids: int
    pushes: int
    lease_ttl: float
    batch_size: int
    ttr: float | None
    time_limit: float | None
    switch_share: float
    faults: list[Fault]
    #: Payloads of an id in one delivery, at most.
    max_payloads: int
    #: Seconds that replicas are behind, and whether pushes wait for them; 0.0: there are none.
    lag: float
    #: Whether there is a schedule with a tick each second.
    has_ticks: bool
    #: Batches of all nodes together at a time; None: any number.
    concurrency: int | None
    #: Whether a push cancels what runs of its id.
    cancels_running: bool
    #: Calls of handlers of all nodes at a time, by a limit around them; None: there is none.
    calls: int | None
    #: Sentinels that name the primary; 0: its address is known.
    sentinels: int


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    chance = random.Random(f"plan {seed}")
    faults = [
        Fault(
            number, chance.uniform(0.2, BUSY), chance.choices([*FAULTS], [*FAULTS.values()])[0], chance.randrange(1000),
            chance.choice((0.01, 0.2, 1.0, 2.5)) * chance.uniform(0.5, 2.0), chance.randrange(60),
        )
        for number in range(chance.choice((5, 10, 20, 20, 30)))
    ]  # fmt: skip
    others = random.Random(f"cancels {seed}")  # of their own: each seed keeps the faults that it had before
    faults += [
        Fault(len(faults) + number, others.uniform(0.2, BUSY), "cancel", others.randrange(1000), 0.0, 0)
        for number in range(others.choice((0, 0, 3, 8)))
    ]
    servers = chance.choice((1, 1, 1, 3))
    watched = random.Random(f"sentinels {seed}")
    sentinels = 3 if servers == 1 and watched.random() < 0.3 else 0
    if sentinels:
        faults += [
            Fault(
                len(faults) + number, watched.uniform(0.2, BUSY),
                watched.choices([*OF_SENTINELS], [*OF_SENTINELS.values()])[0], watched.randrange(1000),
                watched.choice((0.2, 1.0, 2.5)) * watched.uniform(0.5, 2.0), 0,
            )
            for number in range(watched.choice((3, 5, 8)))
        ]  # fmt: skip
    if any(fault.name in LOSING for fault in faults):
        # A clock that steps back after a failover has lost a lease makes the fence of that lease anew.
        faults = [fault for fault in faults if fault.name != "step clock"]
    return Plan(
        seed,
        servers=servers,
        shards=chance.randint(1, 5),
        performers=chance.choices(Performer.KINDS, (6, 3, 2, 1), k=chance.choice((1, 2, 2, 3))),
        producers=[chance.random() < 0.3 for _ in range(chance.randint(1, 3))],
        ids=chance.choice((3, 8, 20)),
        pushes=chance.randint(40, 120),
        lease_ttl=chance.choice((1.0, 2.0, 3.0)),
        batch_size=chance.choice((1, 1, 3)),
        ttr=chance.choice((None, None, 1.5)),
        time_limit=chance.choice((None, None, 0.7)),
        switch_share=chance.choice((0.0, 0.02, 0.1, 0.3)),
        faults=sorted(faults, key=lambda fault: fault.at),
        max_payloads=chance.choice((1, 2, 2, 1000)),
        lag=chance.choice((0.0, 0.0, 0.01, 0.3)),
        has_ticks=chance.random() < 0.2,
        concurrency=chance.choice((None, None, None, 1, 2)),
        cancels_running=others.random() < 0.15,
        calls=random.Random(f"calls {seed}").choice((None, None, None, 1, 2)),
        sentinels=sentinels,
    )


def changed(plan: Plan, changes: Mapping[str, Any]) -> Plan:
    """That plan with other values. ``faults``: their names, which take turns; when they happen is as it was. Or all of
    them, as fields by their names.
    """
    changes = dict(changes)
    if "faults" in changes and isinstance(next(iter(changes["faults"]), None), Mapping):
        changes["faults"] = [Fault(number, **fields) for number, fields in enumerate(changes["faults"])]
    elif "faults" in changes:
        names = itertools.cycle(changes["faults"])
        changes["faults"] = [replace(fault, name=name) for fault, name in zip(plan.faults, names, strict=False)]
    return replace(plan, **changes)


@dataclass(slots=True)
class Outcome:
    """How a story ended."""

    plan: Plan
    problems: list[str] = field(default_factory=list)
    report: Report | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    #: Virtual seconds that it took, steps of threads, commands of servers.
    seconds: float = 0.0
    steps: int = 0
    commands: int = 0
    #: Of everything that happened: a seed has the same each time.
    fingerprint: int = 0
    log: list[str] = field(default_factory=list)


def tell(seed: int, without: Collection[int] = (), *, plan: Plan | None = None) -> Outcome:
    """Tells the story of a seed. ``without``: faults that do not happen."""
    random.seed(seed)
    plan = plan or draw(seed)
    with simulating(World(seed, plan.switch_share)) as world:
        return Story(world, plan, [fault for fault in plan.faults if fault.number not in without]).run()


class _Recorded(History):
    """A history in memory."""

    def __init__(self) -> None:
        super().__init__("")
        self.events: list[dict[str, Any]] = []
        tests.history._numbers = itertools.count()  # the same names in each story

    def write(self, event: str, **fields: Any) -> None:
        pid, thread = os.getpid(), threading.get_ident()
        self.events.append({"event": event, "at": time.monotonic(), "pid": pid, "thread": thread, **fields})


class _Log(logging.Handler):
    """What lowq logs, with who logged it."""

    def __init__(self, world: World, lines: list[str]) -> None:
        super().__init__(logging.INFO)
        self._world, self._lines = world, lines

    def emit(self, record: logging.LogRecord) -> None:
        who, at = self._world.task, self._world.now - BEGINNING
        self._lines.append(f"{at:9.4f} {who} {record.levelname} {record.getMessage()}")
        if record.exc_info and record.exc_info[1] is not None:
            self._lines.append(f"          {record.exc_info[1]!r}")


class Story:
    """The system of a plan."""

    def __init__(self, world: World, plan: Plan, faults: Sequence[Fault]) -> None:
        self.world = world
        self.plan = plan
        self.faults = faults
        recorded = _Recorded()
        self.history: History = recorded
        self.outcome = Outcome(plan, events=recorded.events)
        self.link = Link()
        self.cluster = Cluster() if plan.servers > 1 else None
        addresses: list[Address] = [(f"10.0.0.{number + 1}", 6379) for number in range(plan.servers)]
        self.servers = [Server(world, address, self.link, self.cluster) for address in addresses]
        if self.cluster is not None:
            self.cluster.primaries = self.servers
        self.durability: Literal["replicated", "none"] = "replicated" if plan.lag else "none"
        #: Whom an address belongs to.
        self.sentinels = [
            Sentinel(world, (f"10.0.2.{number + 1}", 26379), addresses[0]) for number in range(plan.sentinels)
        ]
        self.by_address = {server.address: server for server in (*self.servers, *self.sentinels)}
        listen(self.by_address)
        _FOLLOWED.clear()
        #: How often there was a failover.
        self._epoch = 0
        for server in self.servers:
            server.lag = plan.lag
        hosts = ",".join(f"{host}:{port}" for host, port in addresses)
        self.url = f"redis://{hosts}/0" if self.cluster is None else f"redis+cluster://{hosts}"
        if self.sentinels:
            hosts = ",".join(f"{host}:{port}" for host, port in (sentinel.address for sentinel in self.sentinels))
            self.url = f"redis+sentinel://{hosts}/orders/0"
        self.performers: list[Performer] = []
        self._pids = 0
        #: Producers and operators at work.
        self._busy = 0
        #: Until when somebody may be down or out of reach.
        self._troubled_until = BEGINNING
        #: As many as the last reshard has made that an operator saw the end of.
        self._wanted_shards: int | None = None
        #: A server has lost what was moved, and no replica had to confirm it.
        self._is_set_back = False
        self._is_resharded = any("reshard" in fault.name for fault in faults)
        #: (id, version) -> how often its handler has failed.
        self._raised: dict[tuple[str, int], int] = {}
        self._slept: set[tuple[str, int]] = set()
        #: Those that were performed.
        self.ticks: set[tuple[str, int]] = set()

    def note(self, text: str) -> None:
        self.outcome.log.append(f"{self.world.now - BEGINNING:9.4f} --- {text}")

    def new_process(self, name: str) -> Process:
        self._pids += 1
        return Process(self.world, f"{name}.{self._pids}", self._pids)

    def new_app(self) -> lowq.Lowq:
        return lowq.Lowq(
            redis_url=self.url, lease_ttl=self.plan.lease_ttl, poll_interval=1.0, push_timeout=2.0, pool_timeout=2.0,
            shutdown_timeout=2.0, client_pool_size=4,
        )  # fmt: skip

    # --- its course ---

    def run(self) -> Outcome:
        world, outcome = self.world, self.outcome
        handler, log = _Log(world, outcome.log), logging.getLogger("lowq")
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
        try:
            self._begin()
            self._wait_until(self._is_calm, BEGINNING + BUSY + PATIENCE)
            self._operate(self._settle)
            self._wait_until(self._is_over, world.now + PATIENCE)
            self._operate(self._examine)
            self._wait_until(lambda: not self._busy, world.now + PATIENCE)
        except Stalled as error:
            outcome.problems.append(f"{error}: {self.left()}")
            outcome.log.append(world.stacks())
        finally:
            log.removeHandler(handler)
        outcome.problems += world.crashed
        outcome.report = check(outcome.events, self.buried())
        outcome.problems += outcome.report.problems
        outcome.problems += check_concurrency(outcome.events, self.plan.concurrency, (TICKS_SHARD,))
        outcome.problems += check_calls(outcome.events, self.plan.calls)
        outcome.problems += [f"tick {tick} was never performed" for tick in self._missed_ticks()]
        outcome.seconds, outcome.steps = world.now - BEGINNING, world.steps
        outcome.commands = sum(server.executed for server in self.servers)
        outcome.fingerprint = hash(json.dumps(outcome.events, default=str))
        return outcome

    def _begin(self) -> None:
        for number, kind in enumerate(self.plan.performers):
            self.performers.append(Performer(self, f"{kind} {number}", kind))
            self.performers[-1].start()
        for number, is_async in enumerate(self.plan.producers):
            self._busy += 1
            self.world.spawn(self.new_process(f"producer {number}"), self._producing(number, is_async), "main")
        for fault in self.faults:
            self.world.at(BEGINNING + fault.at, self._harming(fault))
            before = fault.at - (self.plan.lag or 1.0) - 0.001
            if fault.name in LOSING and before > 0:
                self.world.at(BEGINNING + before, self._take_snapshots)

    def _take_snapshots(self) -> None:
        for server in self.servers:
            server.take_snapshot()

    def _wait_until(self, done: Callable[[], bool], limit: float) -> None:
        found: list[bool] = []

        def look() -> None:
            if done():
                found.append(True)
            else:
                self.world.after(0.1, look)

        look()
        self.world.run(lambda: bool(found), limit)

    def _is_calm(self) -> bool:
        last = max((fault.at for fault in self.faults), default=0.0)
        return not self._busy and self.world.now > max(self._troubled_until, BEGINNING + last)

    def _is_over(self) -> bool:
        return not self._busy and not self.left()

    def _settle(self, queue: Any) -> None:
        """What an operator does who looks at the queue when all is over: a failover may have lost what he has done."""
        queue.resume()
        if self._wanted_shards is not None:
            self._go_on(queue)
            self._reshard_to(queue, self._wanted_shards)

    # --- what Redis holds, asked for beside all that is simulated ---

    def left(self) -> dict[str, Any]:
        """What waits or is in flight still."""
        found = {}
        for server in self.servers:
            for key in server.ask(b"KEYS", b"*{[OT]*}:due"):
                found[key.decode()] = server.ask(b"ZRANGE", key, b"0", b"-1")
            for key in server.ask(b"KEYS", b"*{[OT]*}:taken"):
                found[key.decode()] = server.ask(b"HKEYS", key)
        return found

    def buried(self) -> set[tuple[str, int]]:
        """(id, version) of what the morgue holds."""
        found = set()
        for server in self.servers:
            buried = [
                (key.partition(b"}:morgue:payloads:")[2], server.ask(b"ZRANGE", key, b"0", b"-1"))
                for key in server.ask(b"KEYS", b"*}:morgue:payloads:*")
            ]
            for key in server.ask(b"KEYS", b"*}:morgue:payloads"):
                inline = server.ask(b"HGETALL", key)
                buried += [
                    (name, [text.partition(b" ")[2]]) for name, text in zip(inline[::2], inline[1::2], strict=True)
                ]
            for name, payloads in buried:
                read = map(json.loads, payloads)
                found |= {(name.decode(), int(payload.get("version") or payload["planned_at"])) for payload in read}
        return found

    def _missed_ticks(self) -> list[int]:
        """Those between the first and the last one that nobody has performed."""
        ticks = {version for job_id, version in [*self.ticks, *self.buried()] if job_id == TICK}
        return [tick for tick in range(min(ticks, default=0), max(ticks, default=0)) if tick not in ticks]

    def tick(self, planned_at: float) -> None:
        """A tick is performed: for the checker it was pushed at its time."""
        key, now = (TICK, int(planned_at)), time.monotonic()
        if key not in self.ticks:
            self.ticks.add(key)
            at = min(planned_at - BEGINNING_WALL + BEGINNING, now)
            for event in ("pushing", "pushed"):
                self.history.write(event, push=f"tick {key[1]}", jobs=[(*key, planned_at)], at=at)

    def _examine(self, queue: Any) -> None:
        """What the doctor finds at the end."""
        found: list[Any] = []
        for _ in range(3):
            found = [each for each in queue._backend.examine() if each.severity == "error" and each.code not in TOLD]
            if not found:
                return
            time.sleep(3 * self.plan.lease_ttl)
        self.outcome.problems += [f"doctor: {each.code}: {each.what}" for each in found]

    # --- jobs ---

    def _producing(self, number: int, is_async: bool) -> Callable[[], None]:
        plan, chance = self.plan, random.Random(f"{self.plan.seed} producer {number}")
        ids = [str(each) for each in range(plan.ids) if each % len(plan.producers) == number] or [f"p{number}"]
        versions = dict.fromkeys(ids, 0)
        count = plan.pushes // len(plan.producers)

        def next_jobs() -> list[dict[str, Any]]:
            jobs = []
            for job_id in chance.choices(ids, k=chance.choice((1, 1, 1, 2, 4))):
                versions[job_id] += 1
                payload = {"version": versions[job_id], **_doing(chance, is_limited=bool(plan.ttr or plan.time_limit))}
                jobs.append({"id": job_id, "payload": payload, "score": 2**40 + versions[job_id]})
            return jobs

        def pauses() -> float:
            return chance.uniform(0.0, 2 * 0.8 * BUSY / count)

        def produce() -> None:
            app = self.new_app()
            queue = app.queue(QUEUE, plan.shards)
            for _ in range(count):
                time.sleep(pauses())
                pending = next_jobs()
                while pending:
                    with self.pushing(pending):
                        queue.push(pending, durability=self.durability)
                    time.sleep(0.05)
            self._busy -= 1
            app.close()

        async def aproduce() -> None:
            app = self.new_app()
            queue = app.queue(QUEUE, plan.shards)

            async def push(pending: list[dict[str, Any]]) -> None:
                while pending:
                    with self.pushing(pending):
                        await queue.apush(pending, durability=self.durability)
                    await asyncio.sleep(0.05)

            for _ in range(count // 3):
                await asyncio.sleep(3 * pauses())
                async with asyncio.TaskGroup() as group:
                    for _ in range(3):
                        group.create_task(push(next_jobs()))
            self._busy -= 1
            app.close()

        return (lambda: asyncio.run(aproduce())) if is_async else produce

    def pushing(self, pending: list[dict[str, Any]]) -> "_Pushing":
        return _Pushing(self.history, pending)

    def seconds_of(self, job_id: str, payload: Mapping[str, Any]) -> float:
        """How long a handler takes for a payload the first time: perhaps longer than its ttr or time limit."""
        key = job_id, payload["version"]
        is_first = key not in self._slept
        self._slept.add(key)
        return float(payload.get("for", 0.0)) if is_first else 0.0

    def may_raise(self, job_id: str, payload: Mapping[str, Any], batch: Any = None) -> None:
        """A handler's error, as often as the payload says. ``batch``: of a node."""
        key = job_id, payload["version"]
        if self._raised.get(key, 0) < payload.get("raise", 0):
            self._raised[key] = self._raised.get(key, 0) + 1
            if batch is not None and payload.get("release"):
                batch.release(job_id)
            raise RuntimeError("told to fail")

    def is_call(self, payload: Mapping[str, Any]) -> bool:
        """Whether the handler of a node works that payload within the limit around calls."""
        return self.plan.calls is not None and payload["version"] % 2 == 0

    def limit_of(self, app: lowq.Lowq) -> lowq.Limit:
        """The limit around calls."""
        return app.limit(CALLS, lowq.Concurrency(self.plan.calls or 1))

    def pushing_on(self, job_id: str, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What a handler pushes."""
        version = payload["version"]
        return [{"id": f"{job_id}+", "payload": {"version": version}, "score": 2**40 + version}]

    # --- faults ---

    def trouble_until(self, seconds: float) -> None:
        """The story goes on for so long at least."""
        self._troubled_until = max(self._troubled_until, self.world.now + seconds)

    def _trouble(self, seconds: float, pid: int | None = None) -> None:
        """From now on that process, or all, may not reach Redis, for so long and until they have found it again."""
        self.history.trouble(pid)
        self.trouble_until(seconds)
        self.world.after(seconds + 2 * self.plan.lease_ttl + 3.0, lambda: self.history.calm(pid))

    def _harming(self, fault: Fault) -> Callable[[], None]:
        def harm() -> None:
            self.note(str(fault))
            self._harm(fault)

        return harm

    def _harm(self, fault: Fault) -> None:
        world, seconds, link, which = self.world, fault.seconds, self.link, fault.which
        server = self.servers[which % len(self.servers)]
        performer = self.performers[which % len(self.performers)]
        sentinel = self.sentinels[which % len(self.sentinels)] if self.sentinels else None
        match fault.name:
            case "kill":
                performer.kill_after(fault.steps, restart_in=seconds)
            case "freeze":
                performer.freeze_after(fault.steps, seconds)
            case "stop":
                performer.stop(restart_in=seconds)
            case "reset connections":
                self._trouble(0.0)
                server.break_connections(world.chance.uniform(0.3, 1.0))
            case "lose messages":
                self._trouble(seconds)
                link.lost_requests = link.lost_replies = 0.05
                world.after(seconds, link.calm)
            case "repeat messages":
                self._trouble(seconds + link.lateness)
                link.belated = 0.05
                world.after(seconds, link.calm)
            case "refuse":
                self._trouble(seconds)
                server.refusal = REFUSALS[which // 3 % len(REFUSALS)]
                world.after(seconds, lambda: setattr(server, "refusal", b""))
            case "isolate" if self.sentinels:
                self._fail_over(server, seconds if which % 2 else None)
            case "isolate":
                self._isolate(server, seconds)
            case "pause sentinel" if sentinel:  # it answers late
                sentinel.process.freeze(seconds)
            case "restart sentinel" if sentinel:  # or not at all
                sentinel.stop()
                world.after(seconds, sentinel.start)
            case "isolate sentinel" if sentinel:  # or with a primary that is none any more
                sentinel.deaf_until = max(sentinel.deaf_until, world.now + seconds)
            case "delay messages":
                self._trouble(seconds)
                link.late = 0.1
                world.after(seconds, link.calm)
            case "pause server":
                self._trouble(seconds)
                server.process.freeze(seconds)
            case "restart server":
                self._trouble(seconds)
                server.stop()
                world.after(seconds, lambda: self._come_back(server, 0.0))
            case "lose writes" if self.sentinels:
                self._fail_over(server, seconds, is_killed=True)
            case "lose writes":  # as by a failover to a replica, or what was not yet on the disk is gone
                self._trouble(seconds)
                server.stop()
                behind = world.chance.uniform(0.0, self.plan.lag or 1.0)
                world.after(seconds, lambda: self._come_back(server, seconds + behind))
            case "flush scripts":
                server.flush_scripts()
            case "cut off":
                process = performer.process
                self._trouble(seconds, process.pid)
                server.cut_off.add(process)
                world.after(seconds, lambda: server.cut_off.discard(process))
            case "step clock":
                self.history.lapse(1.5 * self.plan.lease_ttl, data=False)  # should it jump forward
                server.process.wall_ahead += which % 101 - 50
            case "pause queue":
                self._operate(
                    lambda queue: queue.pause(by="an operator"),
                    lambda _queue: time.sleep(seconds),
                    lambda queue: queue.resume(),
                )
            case "act on jobs":
                ids = [str(which % self.plan.ids), str(which // 7 % self.plan.ids)]
                self._operate(lambda queue: queue.perform_now(ids))
            case "cancel":
                ids = [str(which % self.plan.ids), str(which // 7 % self.plan.ids)]
                self._operate(lambda queue: self._cancel(queue, f"cancel {fault.number}", ids))
            case "reshard":
                self._operate(lambda queue: self._reshard(queue, which % 5 + 1))
            case "leave reshard":  # who does it dies in the middle, and another one begins it again
                begun, again = [self._operate(lambda queue: queue.reshard(which % 5 + 1))], seconds
                world.after(0.001 * fault.steps, lambda: self._leave(begun[0], again, which % 5 + 1))

    def _cancel(self, queue: Any, name: str, ids: list[str]) -> None:
        self.history.cancelling(name, ids)
        queue.cancel(ids)
        self.history.cancelled(name)

    def _leave(self, operator: Process, again_in: float, shards: int) -> None:
        if operator.is_alive:
            self.note(f"{operator} dies")
            self.trouble_until(again_in)
            operator.die()
            self._busy -= 1
        self.world.after(again_in, lambda: self._operate(lambda queue: self._reshard(queue, shards)))

    def _isolate(self, server: Server, seconds: float) -> None:
        """Clients reach a primary that its replica and the others don't reach, and the replica is promoted."""
        if server.isolated_at is not None or not server.process.is_alive:
            return
        world, behind, promotion = self.world, self.world.chance.uniform(0.0, self.plan.lag or 0.1), 0.5
        self._trouble(promotion + seconds)
        since = server.isolated_at = world.now

        def promote() -> None:
            address = server.address if self.cluster is None else (f"10.0.1.{len(self.by_address)}", 6379)
            self.note(f"{server.process} is isolated, and replaced by {address[0]}, which is {behind:.3f} s behind")
            heir = self.by_address[address] = server.promote(behind, address)
            self.servers[place] = heir

        def end() -> None:
            server.stop()
            if self.cluster is not None:  # it comes back as a replica, which tells clients where the primary is
                server.cluster = self.cluster
                server.start()
            lost = (at for at, _ in server.log if at > since - behind)
            self._lapse(self.servers[place], min(lost, default=world.now))

        place = self.servers.index(server)
        world.after(promotion, promote)
        world.after(promotion + seconds, end)

    def _fail_over(self, server: Server, seconds: float | None, *, is_killed: bool = False) -> None:
        """Sentinels make its replica the primary, each of them at its time: it is isolated, though clients reach it, or
        was killed. So many seconds later it is back, as a replica; None: never, and it goes on to answer.
        """
        if server.isolated_at is not None or not server.process.is_alive:
            return
        world, behind = self.world, self.world.chance.uniform(0.0, self.plan.lag or 0.1)
        self._trouble(2.0)
        since = server.isolated_at = world.now
        if is_killed:
            server.stop()
        for sentinel in self.sentinels:
            world.after(world.chance.uniform(0.1, 0.5), partial(sentinel.see_down, server.address))
        self._busy += 1
        self._epoch += 1
        epoch, unaware = self._epoch, [*self.sentinels]
        troubled = {fault.which % len(unaware) for fault in self.faults if fault.name.endswith("sentinel")}
        left_after = LEFT_AFTER[len(troubled) > 1]

        def promote() -> None:
            address = f"10.0.1.{epoch}", 6379
            self.note(f"{server.address[0]} is replaced by {address[0]}, which is {behind:.3f} s behind")
            self.servers[0] = self.by_address[address] = server.promote(behind, address)
            for sentinel in self.sentinels:
                world.after(world.chance.uniform(0.0, 1.5), partial(sentinel.hear, address, epoch, heard))

        def heard() -> None:
            self._trouble(left_after)
            unaware.pop()
            if not unaware:
                world.after(left_after, left)

        def left() -> None:
            self._busy -= 1
            lost = (at for at, _ in server.log if at > since - behind)
            self._lapse(self.servers[0], min(lost, default=world.now))

        def come_back() -> None:
            self.note(f"{server.address[0]} is a replica")
            if not is_killed:
                server.stop()
            server.is_replaced = True
            server.start()

        world.after(0.5, promote)
        if seconds is not None:
            world.after(0.5 + seconds, come_back)

    def _reshard(self, queue: Any, shards: int) -> None:
        give_up_at = time.monotonic() + ABANDONED
        while True:
            try:
                self._reshard_to(queue, shards)
                break
            except lowq.Resharding:
                if time.monotonic() >= give_up_at:
                    self._go_on(queue)
                time.sleep(0.1)
        self._wanted_shards = shards

    def _go_on(self, queue: Any) -> None:
        """Goes on with the reshard that is under way. Redis may have lost its end, after which nobody else does."""
        progress = queue.reshard_progress()
        if progress is not None:
            self._reshard_to(queue, progress.after.shards_count)

    def _reshard_to(self, queue: Any, shards: int) -> None:
        """What is moved may be older than what was performed, where a server was set back without replicas. A reshard
        that does not know whether it may move that is refused, and the operator does what it says.
        """
        if self._is_set_back:
            self.history.lapse(2 * self.plan.lease_ttl, since=BEGINNING)
        try:
            queue.reshard(shards)
        except lowq.RedisRefused as error:
            told = re.search(r"redis-cli -c (HSET) '(\S+)' (fed) (1)", str(error))
            if told is not None:
                queue._backend.client.command(*told.groups(), key=told[2])
            raise

    def _come_back(self, server: Server, lost: float) -> None:
        since = server.start(lost)
        if since is not None:
            self._lapse(server, since)

    def _lapse(self, server: Server, since: float) -> None:
        """That server lacks what was written from then on."""
        shards = None
        if self._is_resharded and not self.plan.lag:  # what was moved there, and nobody has confirmed, may be older
            since, self._is_set_back = BEGINNING, True
        if self.cluster is not None and not self._is_resharded:
            prefixes = {shard: shard_prefix("lowq", QUEUE, shard) for shard in range(self.plan.shards)}
            shards = [shard for shard, prefix in prefixes.items() if self.cluster.owner(prefix) is server]
            shards.append(TICKS_SHARD)  # the schedule's own shard may be there
        # With replicas that confirm, what was accepted is not among it.
        self.history.lapse(2 * self.plan.lease_ttl, since=since, shards=shards, accepted=not self.plan.lag)

    def _operate(self, *acts: Callable[[Any], object]) -> Process:
        """What an operator does, one after the other, each again and again until it succeeds."""
        self._busy += 1

        def run() -> None:
            app, pending = self.new_app(), [*acts]
            while pending:
                try:
                    pending[0](app.queue(QUEUE, self.plan.shards))
                    del pending[0]
                except (*AWAY, lowq.Resharding):
                    time.sleep(0.1)
                except lowq.UnknownQueueError:  # nobody has used it yet
                    time.sleep(0.1)
            app.close()
            self._busy -= 1
            operator.die()

        operator = self.new_process("operator")
        self.world.spawn(operator, run, "main")
        return operator


class _Pushing:
    """Around one attempt to push: notes what is accepted, and leaves in ``pending`` what is to be pushed again."""

    def __init__(self, history: History, pending: list[dict[str, Any]]) -> None:
        self._pending = pending
        self._history = history
        self._around = history.pushing(_pushed(pending))

    def __enter__(self) -> None:
        self._around.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if error is None:
            self._around.__exit__(None, None, None)
            self._pending.clear()
        elif isinstance(error, lowq.PushError):
            rest = [*error.unsafe, *error.rest]
            kept = {id(job) for job in rest}
            self._history.write("pushed", push="part", jobs=_pushed([j for j in self._pending if id(j) not in kept]))
            self._pending[:] = rest
        return isinstance(error, (lowq.PushError, *AWAY))


def _pushed(jobs: Sequence[Mapping[str, Any]]) -> list[tests.history.PushedJob]:
    return [(job["id"], job["payload"]["version"], job["score"]) for job in jobs]


def _doing(chance: random.Random, *, is_limited: bool) -> dict[str, Any]:
    """What a payload has its handler do."""
    dice = chance.random()
    if dice < 0.5:
        return {"for": chance.choice((0.005, 0.05, 0.05, 0.3))}
    if dice < 0.54:
        return {"raise": chance.choice((1, 1, 2, 9)), "release": chance.random() < 0.2}
    if dice < 0.6:
        return {"push": 1}
    if dice < 0.62:
        return {"cancel": 1, "raise": 1}
    if dice < 0.64 and is_limited:
        return {"for": 4.0}
    return {}
