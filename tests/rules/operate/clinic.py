"""A queue that is damaged by raw commands, as people and other programs do it, and a doctor that does not wait."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from lowq import Lowq
from lowq.codec import load_payload
from lowq.job import Job
from lowq.operate.findings import Finding, read_kinds
from lowq.sharding import shard_of
from lowq.shards.lease import Lease
from lowq.shards.shard import Shard
from lowq.store.keys import nodes_key, shard_prefix
from tests.leases import run_out

SHARDS = 3
TTL = 600.0
#: Findings about the server that the tests happen to run on.
OF_SERVERS = {"redis", "eviction", "persistence", "memory", "clock", "replication"}


def ids_of(shard: int) -> Iterator[str]:
    return (str(number) for number in range(10_000) if shard_of(str(number).encode(), SHARDS) == shard)


#: Ids of shard 1, which most of the damage is done to; and one of shard 2.
A, B = [job_id for job_id, _ in zip(ids_of(1), range(2), strict=False)]
OTHER = next(ids_of(2))


class PassingTime:
    """Stands for the module `time`: it passes while somebody sleeps, and only then. Something happens meanwhile."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self._happens = happens
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        self._happens()


class Clinic:
    """The queue "Orders" in a store that is emptied."""

    def __init__(self, url: str) -> None:
        self.app = Lowq(redis_url=url)
        self.client = self.app.client
        self.queue = self.app.queue("Orders", SHARDS)
        self.command = self.client.command
        self.command("FLUSHALL")  # of the row before
        self.app.registrations.enter("Orders", SHARDS)
        self._shards: dict[tuple[str, int], Shard] = {}

    def close(self) -> None:
        self.app.close()

    def push(self, job_id: str, **more: Any) -> None:
        self.queue.push({"id": job_id, "payload": {"version": 1}, "score": 1, **more})

    def push_two(self, job_id: str) -> None:
        """Payloads with a key of their own while they are in flight: a single one travels in the record."""
        self.push(job_id)
        self.push(job_id, payload={"version": 2}, score=2)

    def key(self, name: str, job_id: str = A) -> str:
        """A key of the shard of an id."""
        return shard_prefix("lowq", "Orders", shard_of(job_id.encode(), SHARDS)) + name

    def lose(self, place: str, job_id: str) -> None:
        """Payloads of an id of shard 1 are removed, whatever their form."""
        self.do("HDEL", place, job_id)
        self.do("DEL", f"{place}:{job_id}")

    def do(self, command: str, name: str, *words: Any) -> Any:
        """A command to a key of shard 1."""
        return self.command(command, self.key(name), *words)

    def key_names(self) -> set[str]:
        """Names of all keys of shard 1."""
        names = (raw.decode() for raw in self.command("KEYS", "*"))
        return {name.removeprefix(self.key("")) for name in names if name.startswith(self.key(""))}

    def job(self, job_id: str = A) -> Job:
        job = self.queue.peek(job_id)
        assert job is not None
        return job

    def shard(self, job_id: str = A, nonce: str = "tester") -> Shard:
        """The shard of an id, with a lease."""
        index = shard_of(job_id.encode(), SHARDS)
        shard = self._shards.get((nonce, index))
        if shard is None:
            shard = self._shards[nonce, index] = Shard(
                self.client, "lowq", "Orders", index, shards_count=SHARDS, nonce=nonce, load_payload=load_payload
            )
        if shard.lease.current is None:
            assert isinstance(shard.lease.acquire(TTL), Lease)
        return shard

    def take(self, job_id: str = A, nonce: str = "tester") -> Shard:
        shard = self.shard(job_id, nonce)
        assert job_id in [item.id for item in shard.in_flight.take(100).jobs]
        return shard

    def finish(self, job_id: str = A) -> None:
        shard = self.shard(job_id)
        shard.in_flight.finish([job_id])
        shard.in_flight.take(0)

    def handed_over(self) -> dict[str, list[Any]]:
        """What shard 1 hands out now."""
        shard = self.shard()
        shard.in_flight.take(0)
        return {item.id: item.payloads for item in shard.in_flight.take(100).jobs}

    def dies(self) -> None:
        """The owner of shard 1 is dead, and its lease has run out."""
        run_out(self.client, self.key(""))

    def node(
        self, nonce: str = "tester", *, queues: tuple[str, ...] = ("Orders",), ago: float = 0.0, **says: Any
    ) -> str:
        """A node in the registry, as its last heartbeat put it there."""
        name = f"host:1:{nonce}"
        seconds, microseconds = self.command("TIME")
        now = int(seconds) + int(microseconds) / 1e6 - ago
        details = json.dumps({"queues": list(queues), "version": "1", **says})
        self.command("HSET", nodes_key("lowq"), name, f"{now:.6f} 45 2 {{}}{details}")
        return name

    def examine(self, *queues: str, patience: float = 0.0, **options: Any) -> dict[str, Finding]:
        """code -> finding, of all that is wrong or was, but of the server."""
        findings = self.app.examine(*queues, patience=patience, **options)
        assert all(finding.code in OF_SERVERS or finding.code in read_kinds() for finding in findings)
        return {
            finding.code: finding
            for finding in findings
            if finding.severity != "ok" and finding.code not in {*OF_SERVERS, "queue_unserved", "lease_unknown"}
        }

    def finding(self, code: str) -> Finding | None:
        """The one with that code, whatever else is wrong."""
        return next((found for found in self.app.examine(patience=0) if found.code == code), None)

    def finds(self, code: str, *ids: str, severity: str = "error", repaired: bool = True) -> Finding:
        """The only thing that is wrong; a repair repairs it or leaves it, and a second one finds it repaired."""
        found = self.examine()
        assert found.keys() == {code}
        finding = found[code]
        assert (finding.severity, finding.ids, finding.queue) == (severity, ids, "Orders")
        assert finding.count == max(len(ids), len(finding.shards))
        assert finding.wrong
        assert finding.cause
        assert finding.effect
        assert finding.advice
        assert "{" not in finding.what + finding.cause + finding.effect + finding.advice
        after = self.examine(repair=True)
        assert after.keys() == {code}
        if repaired:
            assert finding.repairable
            assert after[code].repaired == finding.count
            assert not after[code].wrong
            assert self.examine() == {}
        else:
            assert after[code] == finding
            assert self.examine() == found
        return finding


@contextmanager
def new_clinic(store_url: str) -> Iterator[Clinic]:
    with closing(Clinic(store_url)) as clinic:
        yield clinic
