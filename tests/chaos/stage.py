"""One run of one fault: Redis, three nodes, producers, the harm that is planned, and what came of it."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

import lowq
from tests.chaos import clocks
from tests.chaos.load import Load, expiring_ids, poisonous_ids
from tests.chaos.proxy import Proxy
from tests.chaos.replicated import KINDS, Replicated
from tests.checker import Report, check_concurrency, recovery, rests
from tests.history import Event, read
from tests.processes.support import ROOT, NodeProcess, Rig
from tests.redis_server import RedisServer
from tests.waiting import until

#: Seconds that leases last.
TTL = 1.0
SHARDS = 20
NODES = 3
#: Seconds that a run may need to get all done after the load and the harm are over.
PATIENCE = 60.0
#: How Redis keeps data -> its options.
PERSISTENCE: dict[str, dict[str, str]] = {
    "none": {},
    "everysec": {"appendonly": "yes", "appendfsync": "everysec"},
    "always": {"appendonly": "yes", "appendfsync": "always"},
}
#: Keys that may be left when everything is drained and the morgue is empty: of each shard, and of all.
LEFT_OF_SHARDS = {"meta", "pushed", "repeated", "lease", "consumer"}
LEFT_OF_ALL = {"queues", "nodes", "audit"}
#: What lowq's doctor may find: how Redis is set up, that a replica is behind, and what its clock was made to do.
KNOWN = {"persistence", "memory", "clock", "clock_ahead", "replication"}
#: Words in a node's log that should never be there.
ALARMS = (
    " CRITICAL ", "failed outside of a worker", "keeping the leases failed", "listening for wake-ups failed",
    "Exception in thread", "Fatal Python error", " rests for ", "Exception ignored",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """Something that is done at a time of its own: planned before anything runs."""

    #: Seconds since the load began.
    at: float
    what: str
    #: Chooses among the nodes that live then, or is a number that `what` needs.
    number: int = 0

    def __str__(self) -> str:
        return f"{self.at:.3f} {self.what} {self.number}"


@dataclass(frozen=True)
class Fault:
    """What is done to nodes, Redis or the network, and under which load."""

    name: str
    #: As the matrix calls it.
    title: str
    plan: Callable[[random.Random, float], list[Step]]
    load: Load = field(default_factory=Load)
    #: Environment of the nodes.
    settings: Mapping[str, object] = field(default_factory=dict)
    persistence: Sequence[str] = ("none",)
    #: What Redis is: "" one server, or one of `tests.chaos.replicated.KINDS`.
    servers: str = ""
    #: Whether nodes and producers reach Redis through proxies.
    proxied: bool = False
    #: Options of Redis.
    redis: Mapping[str, str] = field(default_factory=dict)
    #: Whether jobs may end in the morgue.
    buries: bool = False
    #: Whether these are only those that kill their process: none has more than one suspect in flight at a time.
    spares: bool = False
    #: Words that this fault brings into the logs.
    expects: Sequence[str] = ()
    #: Whether the clock of Redis can be moved, and those of the producers are an hour off.
    clocks: bool = False
    #: Exit codes, besides 0, of nodes that were told to stop.
    exits: Sequence[int] = ()
    #: Whether somebody kills nodes that have been performing one batch for more than two leases.
    watched: bool = False
    #: Whether pushes, or acknowledgements, must have been refused in the course of it.
    refuses: bool = False
    #: Whether nothing that was pushed may be lost, not even by Redis: pushes wait until it is replicated.
    replicated: bool = False
    #: Whether processes end by themselves in the course of it; otherwise none may.
    deadly: bool = False
    #: Whether it passes unnoticed: nothing is performed again, and nobody is fenced.
    seamless: bool = False
    #: Whether the nodes are started by `lowq run`, so that HUP reloads them.
    deployed: bool = False
    #: Whether the nodes are processes of one supervisor: `lowq run --processes 3`.
    supervised: bool = False
    #: The numbers of shards that the queue is given, one after the other, by `lowq reshard`.
    reshards: Sequence[int] = ()
    #: Seconds in which all work is done once all is well: a lease, what waits for retries, and a busy machine. Less
    #: than the poll interval of some runs: a lost wake-up shows.
    settles: float = 10.0
    #: Seconds that a lease lasts; None: `TTL`.
    lease_ttl: float | None = None
    #: Whether the time until a shard is worked again says anything.
    timed: bool = True
    #: How many nodes, or consumers, there are.
    nodes: int = NODES

    #: The moments at which nodes kill themselves, one after the other (`tests.chaos.death`).
    dies: Callable[[random.Random], list[str]] | None = None

    def deaths(self, seed: int) -> list[str]:
        """The same for the same seed."""
        return self.dies(random.Random(f"{seed}/{self.name}/deaths")) if self.dies else []

    def steps(self, seed: int) -> list[Step]:
        """The same for the same seed."""
        steps = self.plan(random.Random(f"{seed}/{self.name}"), self.load.seconds)
        return sorted(steps, key=lambda step: step.at)


@dataclass(slots=True)
class Outcome:
    """What came of a run."""

    fault: str
    seed: int
    persistence: str
    report: Report
    recovery: float
    #: Things done to nodes, Redis and the network, and processes that ended by themselves or were killed for it.
    harm: int
    buried: int
    refused: int
    #: Moments that nodes were to kill themselves at, and did not come to.
    missed: list[str]
    #: Of a failover: seconds that a shard of the other primaries with work rested meanwhile, the longest of all.
    bystanders: float
    #: Seconds from the end of all harm and pushes to the end of the work.
    settled: float
    #: Seconds of the whole run.
    seconds: float
    problems: list[str]
    folder: Path


class Stage(Rig):
    """What a run happens on. `actions.ACTIONS` do their harm here."""

    module = "tests.chaos.app"

    def __init__(
        self, fault: Fault, seed: int, persistence: str = "none", *, folder: Path | None = None, broken: str = ""
    ) -> None:
        self.fault = fault
        self.seed = seed
        self.persistence = persistence
        self._keeps = folder is not None
        folder = folder or Path(tempfile.mkdtemp(prefix=f"chaos-{fault.name}-"))
        options = {**PERSISTENCE[persistence], **fault.redis}
        self.server = RedisServer(folder / "redis", **options)
        self.replicated: Replicated | None = None
        if fault.servers:
            self.replicated = KINDS[fault.servers](folder / "redis", **options)
        #: When a primary was harmed, when another one had its place, monotonic, and the shards of it; None: all.
        self.failovers: list[tuple[float, float, list[int] | None]] = []
        #: Primaries that have joined and not left again.
        self.joined: list[RedisServer] = []
        self.ttl = fault.lease_ttl or TTL
        self.proxies: dict[int, Proxy] = {}
        self.producers_proxy: Proxy | None = None
        #: Nodes that are frozen now -> when they go on, monotonic.
        self.frozen: dict[NodeProcess, float] = {}
        #: Things to do at a time, monotonic: heal, restart.
        self.later: list[tuple[float, Callable[[], object]]] = []
        #: When Redis could be reached again, monotonic.
        self.outages: list[float] = []
        self.problems: list[str] = []
        self.settled = 0.0
        #: Processes that ended by themselves, or had to be killed.
        self.deaths = 0
        #: How many nodes are to live, and at which moments the next ones kill themselves.
        self.nodes_wanted = 1 if fault.supervised else fault.nodes
        self.moments = fault.deaths(seed)
        self._dies: dict[int, str] = {}
        #: Those moments that came.
        self.died_at: list[str] = []
        self._next_watch = 0.0
        #: Monotonic time, and bytes that Redis had written to its log of commands then.
        self._log_sizes: deque[tuple[float, int]] = deque(maxlen=1000)
        #: The most ids of a shard that waited or were taken at one moment.
        self.fullest = 0
        #: The numbers of shards that the queue has still to be given, the command that is at it, and whether we killed
        #: that.
        self.reshards = list(fault.reshards)
        self.resharder: subprocess.Popen[bytes] | None = None
        self.resharder_killed = False
        #: What the shards of layouts before begin with.
        self.left_prefixes: list[str] = []
        self._harmless: set[int] = set()
        self._killed: set[int] = set()
        self._broken = broken
        self._folder = folder
        self._exits: list[str] = []

    def __enter__(self) -> Self:
        if self.fault.clocks:
            self.server.environment = clocks.environment(self._folder / "clock")
        (self.replicated or self.server).start()
        chance = random.Random(f"{self.seed}/{self.fault.name}/settings")
        settings = {
            "LOWQ_LEASE_TTL": self.ttl,
            "LOWQ_SHUTDOWN_TIMEOUT": 10,
            "LOWQ_POLL_INTERVAL": chance.choice((1, 30)),
            "ORDERS_SHARDS": SHARDS,
            "ORDERS_BATCH": chance.choice((1, 3, 10)),
            "ORDERS_ASYNC": "" if self.seed % 2 else "1",  # two runs: each kind of worker once
            "ORDERS_MAX_CRASHES": 1000,
            "ORDERS_MAX_RETRIES": 1000,
            "ORDERS_MAX_PAYLOADS": chance.choice((2, 1000)),
            "CHAOS_TAKES": "1" if self.fault.load.ttl else "",
            **self.fault.settings,
        }
        super().__init__((self.replicated or self.server).url, self._folder, **settings)
        if self.fault.proxied:
            self.producers_proxy = Proxy(self.server.port).__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()
        if self.resharder is not None and self.resharder.poll() is None:
            self.resharder.kill()
            self.resharder.wait()
        for proxy in [*self.proxies.values(), self.producers_proxy]:
            if proxy is not None:
                proxy.close()
        (self.replicated or self.server).close()
        if not self._keeps and not self.problems and exc is None:
            shutil.rmtree(self._folder)

    def connect(self, url: str) -> Any:
        return super().connect(url) if self.replicated is None else self.replicated.connect()

    def prefixes(self) -> list[str]:
        """Of the shards, in their order."""
        return [self.prefix(shard) for shard in range(self.shards_count)]

    def is_drained(self) -> bool:
        if self.replicated is None:
            return super().is_drained()
        try:  # a shard at one moment each
            return not any(self.client.exists(f"{prefix}due", f"{prefix}taken") for prefix in self.prefixes())
        except redis.RedisError:
            return False

    # --- another number of shards ---

    def reshard(self) -> None:
        """Starts the command for the next number of shards, if there is one."""
        if not self.reshards:
            self.resharder = None
            return
        self.resharder_killed = False
        self.resharder = subprocess.Popen(
            [sys.executable, "-m", "lowq", "reshard", self.queue_name, str(self.reshards[0])],
            cwd=ROOT, env=self.environment({}), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )  # fmt: skip

    def _tend_reshard(self) -> None:
        """Goes on where the command was killed, or with the next number."""
        command = self.resharder
        if command is None or command.poll() is None:
            return
        said = command.communicate()[1].decode("utf-8", "replace")
        with (self._folder / "reshard.log").open("a") as log:
            log.write(f"{command.returncode}: {said}\n")
        if command.returncode == 0:
            self.left_prefixes += self.prefixes()
            self.resharded(self.reshards.pop(0))
        elif not (
            self.resharder_killed or any(words in said for words in ("to go on", "does not answer", "is being changed"))
        ):
            self.problems.append(f"lowq reshard exited with {command.returncode}: {said[-500:]}")
        self.reshard()

    # --- a queue that begins again ---

    def drop(self) -> None:
        """`lowq drop` of the queue, in which nothing is left."""
        command = [sys.executable, "-m", "lowq", "drop", self.queue_name, "--yes", "--json"]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment({}), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=PATIENCE, check=False,
        )  # fmt: skip
        if done.returncode or json.loads(done.stdout)["removed"]:
            self.problems.append(f"lowq drop exited with {done.returncode}: {done.stdout}{done.stderr}")

    def remade(self, shards_count: int) -> None:
        """The nodes that are started from now on say that it has so many shards."""
        self.shards_count, self.epoch = shards_count, 0
        self.settings["ORDERS_SHARDS"] = shards_count

    # --- nodes ---

    @property
    def command(self) -> list[str]:
        if self.fault.supervised:
            app = "tests.chaos.deployed:app"
            return [sys.executable, "-m", "lowq", "run", "-r", app, "--processes", str(NODES)]
        if self.fault.deployed:
            return [sys.executable, "-m", "lowq", "run", "-r", "tests.chaos.deployed:app"]
        return super().command

    def children(self) -> list[int]:
        """The processes that have performed something lately, oldest first."""
        lately = time.monotonic() - 0.5
        found = {perform.pid: perform.start for perform in self.performs() if perform.end > lately}
        return [pid for pid in sorted(found) if pid not in self._harmless]

    def kill_child(self, pid: int) -> None:
        """SIGKILL to a process of the supervisor."""
        self._harmless.add(pid)
        os.kill(pid, signal.SIGKILL)
        self.history.gone(pid, -signal.SIGKILL)

    def start_node(self, **environment: object) -> NodeProcess:
        """One more node, with what is prepared for the next one."""
        more = {"CHAOS_DIE": self.moments.pop(0)} if self.moments else {}
        proxy = None
        if self.fault.proxied:
            proxy = Proxy(self.server.port).__enter__()
            environment["LOWQ_REDIS_URL"] = proxy.url
        if self._broken:
            environment["CHAOS_BROKEN"] = self._broken
        environment["ORDERS_NUMBER"] = len(self.nodes)
        node = self.node(**{**more, **environment})
        if more:
            self._dies[node.pid] = more["CHAOS_DIE"]
        if proxy is not None:
            self.proxies[node.pid] = proxy
        return node

    def live(self) -> list[NodeProcess]:
        """Nodes that run and were not told to end."""
        return [node for node in self.nodes if node.process.poll() is None and node.pid not in self._harmless]

    def chosen(self, number: int) -> NodeProcess | None:
        """One of the nodes that live and are not frozen."""
        able = [node for node in self.live() if node not in self.frozen]
        return able[number % len(able)] if able else None

    def ready(self) -> list[NodeProcess]:
        """Those that have started: Python takes its time to do so on a busy machine."""
        return [node for node in self.live() if " holding " in node.log]

    def dismiss(self, node: NodeProcess) -> None:
        """It is about to end by our order: its exit code is to be 0."""
        self._harmless.add(node.pid)

    def kill(self, node: NodeProcess) -> None:
        self._harmless.add(node.pid)
        self._killed.add(node.pid)
        node.kill()
        self.frozen.pop(node, None)

    def tend(self) -> None:
        """Notices who ended, starts others in their place, does what is due."""
        for node in self.nodes:
            code = node.process.poll()
            if code is None or node.log_path.name in self._exits:
                continue
            self._exits.append(node.log_path.name)
            node.wait()
            if node.pid in self._dies:
                moment = self._dies[node.pid]
                if code == -signal.SIGKILL and node.pid not in self._killed:
                    self.died_at.append(moment)
                else:  # another one comes to it, sooner
                    self.moments.append(moment.rpartition(":")[0] + ":1")
            if node.pid not in self._harmless:
                self.deaths += 1
            elif code not in (0, -signal.SIGKILL, *self.fault.exits) and not self._had_no_handlers(node, code):
                self.problems.append(f"{node.log_path.name} was told to stop and exited with {code}")
        for node, at in list(self.frozen.items()):
            if time.monotonic() >= at:
                del self.frozen[node]
                node.thaw()
        self._tend_reshard()
        due = [entry for entry in self.later if entry[0] <= time.monotonic()]
        for entry in due:
            self.later.remove(entry)
            entry[1]()
        if self.persistence == "everysec" and self.replicated is None:
            self._log_sizes.append((time.monotonic(), self._log_of_commands().stat().st_size))
        if "ORDERS_CAPACITY" in self.fault.settings:
            self._look_how_full()
        if self.fault.watched and time.monotonic() >= self._next_watch:
            self._next_watch = time.monotonic() + self.ttl / 2
            self._kill_hanging()
        while len(self.live()) < self.nodes_wanted:
            self.start_node()

    def _look_how_full(self) -> None:
        with self.client.pipeline(transaction=True) as together:
            for shard in range(self.shards_count):
                together.zrange(f"{self.prefix(shard)}due", 0, -1).hkeys(f"{self.prefix(shard)}taken")
            ids = together.execute()
        # What is left of an id that is taken waits meanwhile: that is one id.
        self.fullest = max(self.fullest, *(len({*due, *taken}) for due, taken in zip(ids[::2], ids[1::2], strict=True)))

    def _kill_hanging(self) -> None:
        hanging = {
            perform.pid
            for perform in self.performs()
            if perform.ok is None and time.monotonic() - perform.start > 2 * self.ttl
        }
        for node in self.live():
            if node.pid in hanging:
                self.deaths += 1
                self.kill(node)

    @staticmethod
    def _had_no_handlers(node: NodeProcess, code: int) -> bool:
        """Whether SIGTERM came before the node could handle it, or after it had stopped, or while it came back."""
        ended = max(node.log.rfind(" has stopped"), node.log.rfind(" has ended"))
        return code == -signal.SIGTERM and ended >= node.log.rfind(" starts: ")

    def wait_until(self, at: float) -> None:
        """Tends to everything until that time, monotonic."""
        while (left := at - time.monotonic()) > 0:
            self.tend()
            time.sleep(min(left, 0.005))

    def wait_for(self, condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> bool:
        """Tends to everything until that holds."""
        deadline = time.monotonic() + patience
        while not condition():
            if time.monotonic() > deadline:
                self.problems.append(f"after {patience:g} s there was still no {what}")
                return False
            self.tend()
            time.sleep(0.01)
        return True

    def step_clock(self, seconds: float) -> None:
        """Redis's clock is off by so many seconds from now on."""
        clocks.step(self._folder / "clock", seconds)

    def lose_power(self) -> None:
        """Redis ends, and of its log of commands only what is older than a second is still there."""
        self.server.kill()
        longest_ago = time.monotonic() - 1.0
        size = max((size for at, size in self._log_sizes if at <= longest_ago), default=0)
        os.truncate(self._log_of_commands(), size)
        self._log_sizes.clear()

    def _log_of_commands(self) -> Path:
        (found,) = self.server.directory.glob("appendonlydir/*.incr.aof")
        return found

    def all_leased(self) -> bool:
        return len(self.of_shards("lease")) == self.shards_count

    # --- producers ---

    def start_producers(self) -> None:
        environment: dict[str, object] = {}
        if self.producers_proxy is not None:
            environment["LOWQ_REDIS_URL"] = self.producers_proxy.url
        if self._broken:
            environment["CHAOS_BROKEN"] = self._broken
        extra: dict[str, str] = {}
        load = json.dumps(asdict(self.fault.load))
        for number in range(self.fault.load.producers):
            if self.fault.clocks:
                extra = clocks.environment(self._folder / f"clock-{number}", 3600 if number % 2 else -3600)
            self._producers.append(
                subprocess.Popen(
                    [sys.executable, "-m", self.module, "produce", str(self.seed), str(number), load],
                    cwd=ROOT,
                    env=self.environment(environment) | extra,
                    stdin=subprocess.DEVNULL,
                )
            )

    @property
    def producers(self) -> list[subprocess.Popen[bytes]]:
        """Those that have not ended."""
        return [producer for producer in self._producers if producer.poll() is None]

    def produced(self) -> bool:
        return not self.producers

    # --- what is left ---

    def leftovers(self) -> list[str]:
        """Keys that should not be there when nothing waits and the morgue is empty."""
        allowed = {prefix + name for prefix in self.prefixes() for name in LEFT_OF_SHARDS}
        allowed |= {prefix + name for prefix in self.left_prefixes for name in ("meta", "pushed", "repeated")}
        of_queue = (f"history:{self.queue_name}", f"error_groups:{self.queue_name}")
        allowed |= {f"lowq:v1:{name}" for name in (*LEFT_OF_ALL, *of_queue)}
        own = ("lowq:v1:{Ticks:", "lowq:v1:{lowq:schedules:Ticks:", "lowq:v1:history:Ticks")
        found = set(self.client.scan_iter(count=1000)) - allowed
        # The figures of a limit stay until they count no more.
        for_a_while = {key for key in found if key.startswith("lowq:v1:limit:") or key.endswith("}:finished")}
        found -= {key for key in for_a_while if self.client.pttl(key) != -1}
        return sorted(key for key in found if not (self.has_ticks and key.startswith(own)))

    def kept_problems(self, events: list[Event]) -> list[str]:
        """Whether exactly those are kept that have finished."""
        finished = {job_id for event in events if event["event"] == "acked" for job_id in event["ids"]}
        performed = {job_id for event in events if event["event"] == "start" for job_id in event["jobs"]}
        kept = {job_id for prefix in self.prefixes() for job_id in self.client.hkeys(f"{prefix}finished")}
        lost, made_up = sorted(finished - kept), sorted(kept - performed)
        return [f"{job_id} has finished, and is not kept" for job_id in lost] + [
            f"{job_id} is kept, and was never performed" for job_id in made_up
        ]

    @property
    def has_ticks(self) -> bool:
        return "CHAOS_TICKS" in self.fault.settings

    def tick_problems(self) -> list[str]:
        """Whether each tick of the schedule was pushed once, and performed or waits."""
        path = Path(f"{self.history.path}.ticks")
        app = lowq.Lowq(redis_url=self.url)
        try:
            queue = app.queue("Ticks", 1)
            job, pushed = queue.peek("tick"), queue.stats().pushed
        finally:
            app.close()
        ticks = {float(line) for line in (path.read_text() if path.exists() else "").split()}
        ticks |= {payload["planned_at"] for payload, _ in (job.payloads if job else [])}
        problems = []
        if pushed != len(ticks):
            problems.append(f"{pushed} ticks were pushed, of which {len(ticks)} are different ones")
        missing = {min(ticks) + number for number in range(len(ticks))} - ticks if ticks else set()
        if missing or len(ticks) < self.fault.load.seconds - 2:
            problems.append(f"{len(ticks)} ticks came, and these are missing: {sorted(missing)}")
        return problems

    def findings(self) -> list[str]:
        """What lowq's own doctor has to say when everything is done, and nodes still run."""
        app = lowq.Lowq(redis_url=self.url)
        try:
            found = app.examine(patience=self.ttl / 3 + 1)
        finally:
            app.close()
        return [
            f"the doctor: {one.code}: {one.what}" for one in found if one.severity != "ok" and one.code not in KNOWN
        ]

    def bystanders(self, events: Sequence[Event]) -> float:
        """Seconds that a shard of a primary that was left alone rested while another one was replaced."""
        seconds = [
            min(rest.end, until) - max(rest.begin, since)
            for rest in rests(events)
            for since, until, shards in self.failovers
            if shards is not None and rest.shard not in shards
        ]
        return max([0.0, *seconds])

    def alarms(self) -> list[str]:
        return [
            f"{node.log_path.name}: {line}"
            for node in self.nodes
            for line in node.log.splitlines()
            if any(word in line for word in ALARMS) and not any(word in line for word in self.fault.expects)
        ]


def run(
    fault: Fault,
    seed: int,
    persistence: str = "none",
    *,
    folder: Path | None = None,
    broken: str = "",
    patience: float = PATIENCE,
    examine: bool = True,
) -> Outcome:
    """Does what the fault plans, waits until all is done, and judges. ``folder``: kept, with history and logs; else it
    is kept only when there were problems. ``broken``: the build of lowq that runs (`tests.chaos.broken`). ``examine``:
    lowq's own doctor may find nothing either, which takes some seconds.
    """
    from tests.chaos.actions import ACTIONS

    began = time.monotonic()
    steps = fault.steps(seed)
    with Stage(fault, seed, persistence, folder=folder, broken=broken) as stage:
        stage.tend()
        for node in stage.nodes:
            node.says(" starts: ")
        # Tended to: one that is to die at its first surrender may do so as soon as another one comes.
        stage.wait_for(stage.all_leased, "lease of every shard", PATIENCE)
        stage.start_producers()
        until(lambda: stage.events("pushed"), "first push")
        load_began = time.monotonic()
        for step in steps:
            stage.wait_until(load_began + step.at)
            ACTIONS[step.what](stage, step.number)
        _settle(stage, patience, examine=examine)
        return _judge(stage, len(steps), time.monotonic() - began)


def _settle(stage: Stage, patience: float, *, examine: bool) -> None:
    """Everything is well again, and all work gets done."""
    stage.wait_for(lambda: not stage.later and not stage.frozen, "end of the harm", patience)
    for proxy in [*stage.proxies.values(), stage.producers_proxy]:
        if proxy is not None:
            proxy.heal()
    stage.wait_for(stage.produced, "end of the producers", patience)
    codes = [producer.poll() for producer in stage._producers]
    if any(codes):
        stage.problems.append(f"producers ended with {codes}")
    stage.wait_for(lambda: stage.resharder is None, "end of the reshard", patience)
    well_since = time.monotonic()
    if stage.wait_for(stage.is_drained, "end of the work", patience):
        stage.settled = time.monotonic() - well_since
        if stage.settled > stage.fault.settles:
            stage.problems.append(f"it took {stage.settled:.1f} s to get the work done when all was well")
        if examine:
            stage.problems += stage.findings()
    else:
        stage.problems += [f"left: {key} {stage.of_shards(key)}"[:500] for key in ("due", "taken", "lease")]
    for node in stage.live():
        stage.dismiss(node)
        node.signal(signal.SIGTERM)
    stage.nodes_wanted = 0
    stage.wait_for(lambda: all(node.process.poll() is not None for node in stage.nodes), "end of the nodes", patience)


def _without_number(moments: Sequence[str]) -> set[str]:
    return {moment.rpartition(":")[0] for moment in moments}


def _judge(stage: Stage, steps: int, seconds: float) -> Outcome:
    stage.tend()
    buried = stage.buried()
    report = stage.report(expiring=expiring_ids(stage.fault.load), ttl=stage.fault.load.ttl)
    problems = [*stage.problems, *report.problems]
    handle = lowq.Lowq(redis_url=stage.url).queue(stage.queue_name, stage.shards_count)
    if stage.fault.replicated:
        problems += [f"replicas had it: {lost}" for lost in report.lost]
    if stage.fault.load.ttl and not report.expired:
        problems.append("nothing has expired")
    if report.expired > handle.stats().expired:
        problems.append(f"{report.expired} payloads with a ttl are gone, and {handle.stats().expired} have expired")
    capacity = handle.stats().capacity
    if capacity is not None and stage.fullest * stage.shards_count > capacity:
        problems.append(f"a shard held {stage.fullest} ids, more than its part of the capacity of {capacity}")
    if capacity is not None and stage.fullest * stage.shards_count < capacity:
        problems.append(f"no shard was full: it held {stage.fullest} ids at most, and nobody waited for room")
    if stage.has_ticks:
        problems += stage.tick_problems()
    if buried and not stage.fault.buries:
        problems.append(f"buried: {sorted(buried)[:5]}")
    if stage.fault.spares:
        innocent = {job_id for job_id, _ in buried} - poisonous_ids(stage.seed, stage.fault.load)
        problems += [f"id {job_id} is innocent, and buried" for job_id in sorted(innocent)]
    known = ("the maintenance loop ran", "exceeded its ttr")
    if report.unexplained and not any(reason in node.log for reason in known for node in stage.nodes):
        problems += report.unexplained
    for _ in handle.bulk("delete", state="morgue"):
        pass
    problems += [f"left in Redis: {key}" for key in stage.leftovers()]
    problems += stage.alarms()
    events = read(stage.history.path)
    if "ORDERS_KEEP_FINISHED" in stage.fault.settings:
        problems += stage.kept_problems(events)
    at_once = stage.fault.settings.get("ORDERS_CALLS")
    problems += check_concurrency(events, None if at_once is None else int(str(at_once)))
    refused = sum(event["event"] == "refused" for event in events)
    if stage.fault.refuses and not refused:
        problems.append("nothing was refused")
    planned = {step.what for step in stage.fault.steps(stage.seed)}
    if planned == {"freeze_in_take"} and not any(event.get("in_call") for event in events):
        problems.append("nobody was frozen inside of a take")
    if stage.deaths and not stage.fault.deadly:
        problems.append(f"{stage.deaths} processes ended by themselves")
    if stage.fault.seamless and (report.repeats or report.fenced):
        problems.append(f"{report.repeats} payloads were performed again, {len(report.fenced)} performs fenced")
    stage.problems = problems
    return Outcome(
        stage.fault.name,
        stage.seed,
        stage.persistence,
        report,
        recovery(rests(events), stage.outages) if stage.fault.timed else 0.0,
        steps + stage.deaths,
        len(buried),
        refused,
        sorted(_without_number(stage.fault.deaths(stage.seed)) - _without_number(stage.died_at)),
        stage.bystanders(events),
        stage.settled,
        seconds,
        problems,
        stage.folder,
    )
