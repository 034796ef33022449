"""Nodes and producers as real processes, and everything that the tests wait for."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import redis

import lowq
from lowq.errors import RedisUnavailable
from lowq.store.keys import shard_prefix
from tests import waiting
from tests.checker import Report, check
from tests.history import Event, History, Perform, Reader, performs_of

ROOT = Path(__file__).resolve().parents[2]
#: Seconds of the leases of most tests.
TTL = 1.0

NEVER = waiting.NEVER
PATIENCE = waiting.PATIENCE
until = waiting.until


def answered(look: Callable[[], bool]) -> bool:
    """What it gives; False: there was no answer."""
    try:
        return look()
    except RedisUnavailable:
        return False


class NodeProcess:
    """A node in a process of its own."""

    def __init__(self, rig: "Rig", environment: Mapping[str, object], *, name: str) -> None:
        self._rig = rig
        self.log_path = rig.folder / f"{name}.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                rig.command,
                cwd=ROOT,
                env=rig.environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def lines(self, part: str) -> list[str]:
        return [line for line in self.log.splitlines() if part in line]

    def says(self, part: str, timeout: float = PATIENCE) -> str:
        """Waits for a line of its log."""

        def line() -> str | None:
            assert part in self.log or self.process.poll() is None, f"the node ended:\n{self.log}"
            return next(iter(self.lines(part)), None)

        return until(line, f"{part!r} in the log of the node", timeout) or ""

    @property
    def nonce(self) -> str:
        """What the tokens of its leases begin with."""
        found = re.search(r":(\w+) starts", self.log)
        return found[1] if found else "none yet"

    def held(self) -> int:
        """How many shards it holds, as Redis knows it."""
        return sum(str(token).startswith(self.nonce) for token in self._rig.of_shards("lease").values())

    def holds_all(self, timeout: float = PATIENCE) -> "NodeProcess":
        self.says(" starts: ", timeout)
        until(lambda: self.held() == self._rig.shards_count, "leases of all shards", timeout)
        return self

    def stands_by(self) -> "NodeProcess":
        """Waits until it listens for the end of all leases, which others hold."""
        self.says(" starts: ")
        channels = [f"{self._rig.prefix(shard)}lease_released" for shard in range(self._rig.shards_count)]

        def listens() -> bool:
            return all(count for _, count in self._rig.client.pubsub_shardnumsub(*channels))

        until(listens, "a subscription to the end of every lease")
        return self

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def freeze(self, *, in_call: bool = False) -> None:
        """SIGSTOP, and the history knows it; SIGCONT ends it, or `thaw`. ``in_call``: see `History.frozen`."""
        self._rig.history.frozen(self.pid, in_call=in_call)
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT after `freeze`, and the history knows it."""
        self.signal(signal.SIGCONT)
        self._rig.history.thawed(self.pid)

    def kill(self) -> None:
        """SIGKILL, and the history knows it."""
        self.process.kill()
        self.wait()

    def wait(self, timeout: float = PATIENCE) -> int:
        """Its exit code."""
        code = self.process.wait(timeout)
        self._rig.history.gone(self.pid, code)
        return code

    def stop(self, timeout: float = PATIENCE) -> int:
        """SIGTERM; its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout)

    def processor_seconds(self) -> float:
        """Processor time that it has used so far (Linux)."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Rig:
    """One store, one history, and the processes of one test. Settings are those of all its nodes."""

    queue_name = "Orders"
    #: What nodes and producers run.
    module = "tests.processes.app_orders"
    #: Settings that a test may override.
    defaults: Mapping[str, object] = {}

    def __init__(self, url: str, folder: Path, **settings: object) -> None:
        self.url = url
        self.folder = folder
        self.settings: dict[str, object] = {"LOWQ_LEASE_TTL": TTL, **self.defaults, **settings}
        self.shards_count = int(str(self.settings.get("ORDERS_SHARDS", 5)))
        #: How often the queue was resharded.
        self.epoch = 0
        self.history = History(folder / "history")
        self.client: Any = self.connect(url)
        self.app = lowq.Lowq(redis_url=url)
        self.nodes: list[NodeProcess] = []
        self._producers: list[subprocess.Popen[bytes]] = []
        self._reader = Reader(self.history.path)

    def connect(self, url: str) -> Any:
        """The client by which the test looks into Redis."""
        return redis.Redis.from_url(url, decode_responses=True, socket_timeout=10)

    def end(self) -> None:
        """Kills what still runs, and closes connections."""
        for process in [*self._producers, *(node.process for node in self.nodes)]:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.client.close()
        self.app.close()

    def close(self) -> None:
        self.end()
        for node in self.nodes:  # pytest shows it when the test failed
            print(f"--- {node.log_path.name}\n{node.log}")  # noqa: T201

    # --- processes ---

    @property
    def command(self) -> list[str]:
        """The command line of a node."""
        return [sys.executable, "-m", self.module, "run"]

    def environment(self, more: Mapping[str, object]) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOWQ_", "ORDERS_"))}
        ours = {"LOWQ_REDIS_URL": self.url, "ORDERS_HISTORY": self.history.path, **self.settings, **more}
        return kept | {"PYTHONWARNINGS": "error"} | {name: str(value) for name, value in ours.items()}

    def node(self, **environment: object) -> NodeProcess:
        """Starts a node and returns at once."""
        node = NodeProcess(self, environment, name=f"node-{len(self.nodes)}")
        self.nodes.append(node)
        return node

    def produce(
        self, processes: int, *, ids: int, versions: int, rounds: int, pause: float = 0.0, first: int = 0
    ) -> Callable[[], None]:
        """Starts producers, each with ids of its own, counted from ``first``. The function returned waits until all
        was accepted. With 0 rounds they push until it is called.
        """
        started = []
        for number in range(processes):
            arguments = [number, first + number * ids, ids, versions, rounds, pause]
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", self.module, "produce", *map(str, arguments)],
                    cwd=ROOT,
                    env=self.environment({}),
                    stdin=subprocess.DEVNULL,
                )
            )

        self._producers += started

        def finished() -> None:
            if not rounds:
                Path(f"{self.history.path}.enough").touch()
            for producer in started:
                assert producer.wait(PATIENCE * 2) == 0

        return finished

    def push(self, job_id: object, version: int, **more: Any) -> None:
        """One change; `do`, `for_` and `once` go into the payload, the rest into the job."""
        payload = {"version": version}
        for name in ("do", "for_", "once"):
            if name in more:
                payload[name.rstrip("_")] = more.pop(name)
        with self.history.pushing([(str(job_id), version, float(version))]):
            job = {"id": str(job_id), "payload": payload, "score": version, **more}
            self.app.queue(self.queue_name, self.shards_count).push([job])

    # --- what Redis holds, asked for without lowq ---

    def prefix(self, shard: int) -> str:
        return shard_prefix("lowq", self.queue_name, shard, self.epoch)

    def resharded(self, shards_count: int) -> None:
        """From now on what Redis holds is looked for in the next layout."""
        self.shards_count, self.epoch = shards_count, self.epoch + 1

    def of_shards(self, key: str) -> dict[int, Any]:
        """Shard -> value of its key of that name, those that exist."""
        readers: dict[str, Callable[[str], Any]] = {
            "string": self.client.get,
            "hash": self.client.hgetall,
            "set": self.client.smembers,
            "zset": lambda name: dict(self.client.zrange(name, 0, -1, withscores=True)),
        }
        found = {}
        for shard in range(self.shards_count):
            name = self.prefix(shard) + key
            kind = self.client.type(name)
            if kind != "none":
                value = readers[kind](name)
                if value:
                    found[shard] = value
        return found

    def merged(self, key: str) -> dict[str, Any]:
        """A hash or sorted set of all shards."""
        return {name: value for part in self.of_shards(key).values() for name, value in part.items()}

    def buried(self) -> set[tuple[str, int]]:
        """(id, version) of what the morgue holds."""
        return {
            (job_id, json.loads(payload)["version"])
            for shard, ids in self.of_shards("morgue").items()
            for job_id in ids
            for payload in self._payloads(f"{self.prefix(shard)}morgue:payloads", job_id)
        }

    def _payloads(self, place: str, job_id: str) -> list[str]:
        if inline := self.client.hget(place, job_id):  # a single one: "score payload"
            return [inline.partition(" ")[2]]
        found: list[str] = self.client.zrange(f"{place}:{job_id}", 0, -1)
        return found

    def is_drained(self) -> bool:
        # At one moment: a job that moves between two looks is in neither.
        with self.client.pipeline(transaction=True) as together:
            for shard in range(self.shards_count):
                together.exists(f"{self.prefix(shard)}due", f"{self.prefix(shard)}taken")
            return not any(together.execute())

    def drained(self, timeout: float = PATIENCE) -> None:
        until(self.is_drained, "end of the work", timeout)

    # --- what happened ---

    def events(self, kind: str) -> list[Event]:
        return [event for event in self._reader.events() if event["event"] == kind]

    def performs(self, job_id: object = None, version: int | None = None) -> list[Perform]:
        return [
            perform
            for perform in performs_of(self._reader.events())
            if (job_id is None or str(job_id) in perform.jobs)
            and (version is None or version in perform.jobs.get(str(job_id), ()))
        ]

    def begun(self, job_id: object, version: int, times: int = 1, timeout: float = PATIENCE) -> list[Perform]:
        """Waits until that payload was handed over so many times."""

        def found() -> list[Perform]:
            performs = self.performs(job_id, version)
            return performs if len(performs) >= times else []

        return until(found, f"start {times} of id {job_id}, version {version}", timeout)

    def done(self, job_id: object, version: int, timeout: float = PATIENCE) -> Perform:
        """Waits until that payload was performed to the end."""

        def finished() -> Perform | None:
            return next((perform for perform in self.performs(job_id, version) if perform.ok), None)

        result = until(finished, f"end of id {job_id}, version {version}", timeout)
        assert result is not None
        return result

    def performed(self, count: int, timeout: float = PATIENCE) -> None:
        """Waits until there were so many performs."""
        until(lambda: len(self.events("end")) >= count, f"{count} performs", timeout)

    def report(self, *, expiring: Iterable[str] = (), ttl: float = math.inf) -> Report:
        return check(self._reader.events(), self.buried(), expiring=expiring, ttl=ttl)


def id_of_shard(shard: int, shards_count: int) -> str:
    """An id that belongs to the shard."""
    return next(f"s{number}" for number in range(10_000) if crc32(f"s{number}".encode()) % shards_count == shard)
