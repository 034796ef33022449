"""One shard under the tests' hands: push into it, own it under several names, look at every key it has."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from lowq import Lowq
from lowq.codec import EncodedJob, load_payload
from lowq.shards.delivery import Delivery, Failure
from lowq.shards.lease import Lease
from lowq.shards.shard import Shard
from lowq.store import Call, Client
from lowq.store.keys import SHARD_KEYS, shard_prefix
from lowq.store.shard import TakeReply
from tests.leases import run_out
from tests.waiting import PATIENCE

#: The frozen time of most tests, Unix seconds. The fraction has no short decimal form, so that it shows when
#: microseconds get lost.
NOW = 2_100_000_000.123457
#: The latest time that is kept, Unix seconds.
NEVER = 2**33 - 1
#: Seconds that a lease of the tests lasts: longer than any test.
TTL = 600.0
#: One tick of a shard's monotonic clock, seconds.
TICK = 0.000001

#: What may be left of a shard when nothing waits, nothing is in flight and the morgue is empty.
REMAINS = {"meta", "pushed", "lease"}
#: What repeated calls may leave besides, for a while.
REMEMBERED = {"repeated", "superseded"}


def job(
    job_id: str,
    payload: Any = "",
    score: float | None = None,
    *,
    perform_at: float | None = None,
    delay: float | None = None,
    ttl: float | None = None,
    priority: int = 0,
) -> EncodedJob:
    """A job as push takes it. Bytes are a payload as they are, everything else becomes JSON."""
    at = b"" if perform_at is None else repr(perform_at).encode()
    if delay is not None:
        at = b"+" + repr(delay).encode()
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    plain = job_id.encode(), data, b"" if score is None else repr(score).encode(), at
    if ttl is None and not priority:
        return plain
    return *plain, b"" if ttl is None else repr(ttl).encode(), b"%d" % priority if priority else b""


def retry(job_id: str, retry_count: int = 0, delay: float = 10.0, error: bytes = b"boom") -> Failure:
    return Failure(job_id, "retry", retry_count, delay, error)


def exhausted(job_id: str, error: bytes = b"given up") -> Failure:
    return Failure(job_id, "exhausted", 0, 0.0, error)


def solo(job_id: str, error: bytes = b"in company") -> Failure:
    return Failure(job_id, "solo", -1, 0.0, error)


def report(shard: Shard, kind: str, jobs: Sequence[Any], now: float | None = None, **options: Any) -> None:
    """Writes what becomes of jobs that its holder has taken. ``kind``: "fail", "release" or "bury"."""
    made = getattr(shard.in_flight, f"{kind}_report")(jobs, now, **options)
    shard.in_flight.write([made])


def handed(delivery: Delivery) -> dict[str, list[Any]]:
    """What a delivery brought, id -> payloads, in the order of the reply."""
    return {item.id: item.payloads for item in delivery.jobs}


def jobs_of(reply: list[Any]) -> list[list[bytes]]:
    """The jobs in a reply of `ack_and_take`: [id, perform_at, retry_count, payload, score...]."""
    jobs, items = [], iter(TakeReply.of(reply).items)
    for item in items:
        if isinstance(item, list):
            jobs.append(item)
        else:  # a fresh job with a single payload: id, perform_at, "score payload"
            perform_at, (score, _, payload) = next(items), next(items).partition(b" ")
            jobs.append([item, perform_at, b"-1", payload, score.partition(b",")[0]])
    return jobs


def expiries_of(reply: list[Any]) -> dict[bytes, bytes]:
    """When the jobs in a reply of `ack_and_take` expire, of those that do."""
    taken = TakeReply.of(reply)
    found, items = dict(zip(taken.expiries[1::2], taken.expiries[2::2], strict=True)), iter(taken.items)
    for item in items:
        if not isinstance(item, list):
            _, (head, _, _) = next(items), next(items).partition(b" ")
            found |= {item: head.partition(b",")[2]} if b"," in head else {}
    return found


def as_redis_answers(call: Call[Any]) -> Call[Any]:
    """The same call, whose reply has no names."""
    return Call(call.script, call.key, call.args, call.data)


def run_script(client: Client, script: str, key: str, *args: str | bytes | int | float) -> Any:
    """Runs a script; its reply is as Redis has it."""
    return client.call(Call[Any](script, key, args))


class ShardRig:
    """A shard in an empty store.

    `shard` belongs to the process "first", without a lease until `own()`. What is written is read back by
    `read` (one key) or `snapshot` (all of them), as Python values: a ZSET is member -> score, payloads are
    decoded when they are JSON, a record of `taken` is a tuple.
    """

    queue = "Orders"
    index = 3
    shards_count = 5

    def __init__(self, url: str, *, client: Client | None = None, **options: Any) -> None:
        self.client = client or Client(url, size=4, timeout=PATIENCE, socket_timeout=PATIENCE)
        self.prefix = shard_prefix("lowq", self.queue, self.index)
        self._options = options
        self._tokens = itertools.count(1)
        self.shard = self.owner("first")

    def close(self) -> None:
        self.client.close()

    def renew(self) -> None:
        """The shard is untouched again, in an empty store: for the next row of a table."""
        self.client.command("FLUSHALL")
        self.shard = self.owner("first")

    # --- who works it ---

    def owner(self, nonce: str, **options: Any) -> Shard:
        """The shard as another process sees it, without a lease."""
        settings: dict[str, Any] = {"max_payloads": 1000, "max_crash_count": 3, **self._options, **options}
        return Shard(
            self.client,
            "lowq",
            self.queue,
            self.index,
            shards_count=self.shards_count,
            nonce=nonce,
            load_payload=load_payload,
            **settings,
        )

    def own(self, nonce: str = "first", now: float | None = NOW, **options: Any) -> Shard:
        """The shard with its lease."""
        shard = self.shard if nonce == "first" and not options else self.owner(nonce, **options)
        lease = shard.lease.acquire(TTL, now)
        assert isinstance(lease, Lease), lease
        return shard

    def crash(self, nonce: str, now: float = NOW) -> Shard:
        """Whoever owned the shard is dead: its lease runs out, and the process `nonce` acquires it."""
        self.lease_runs_out()
        return self.own(nonce, now)

    def lease_runs_out(self) -> None:
        run_out(self.client, self.prefix)

    # --- calls ---

    def push(
        self,
        *jobs: EncodedJob,
        now: float | None = NOW,
        token: str | None = None,
        repeat: bool = False,
        shards_count: int | None = None,
        keep: int = 15,
        after: str = "",
        words: str = "",
    ) -> int:
        width = max(map(len, jobs), default=4)
        reply: int = self.run(
            "push",
            "" if now is None else repr(now),
            token or f"token-{next(self._tokens)}",
            "1" if repeat else "",
            self.shards_count if shards_count is None else shards_count,
            f"{width}{words} anew=1",
            keep,
            after,
            *(part for item in jobs for part in (*item, b"", b"")[:width]),
        )
        return reply

    def run(self, script: str, *args: str | bytes | int | float) -> Any:
        return run_script(self.client, script, self.prefix, *args)

    def lose_reply(self, call: Call[Any]) -> None:
        """The call gets through, and its reply gets lost."""
        (reply,) = self.client.run_many([call])
        assert not isinstance(reply, Exception), reply

    def server_time(self) -> float:
        seconds, microseconds = self.client.command("TIME")
        return int(seconds) + int(microseconds) / 1e6

    # --- what is there ---

    def names(self) -> set[str]:
        """The names of all keys of the store, without the shard's prefix. An inline payload counts as a key."""
        names = {raw.decode().removeprefix(self.prefix) for raw in self.client.command("KEYS", "*")}
        for place in _PLACES & names:
            names |= {f"{place}:{raw.decode()}" for raw in self.client.command("HKEYS", self.prefix + place)}
        return names - _PLACES

    def read(self, key: str) -> Any:
        """The content of a key; an absent one is an empty dict."""
        with_records = {"taken": "hash"} if key.startswith(_TAKEN) else {}
        return self._read(self._types([key]) | with_records)[key]

    def form(self, key: str) -> str:
        """How payloads are kept: "inline", "zset", "record" (inline, in `taken`), or "none"."""
        (kind,) = self._kinds([key])
        return "record" if kind == "none" and key.startswith(_TAKEN) and self.read(key) else kind

    def snapshot(self) -> dict[str, Any]:
        """All keys of the store with their content, but for `leased_until`, which is only told to people."""
        found = self._read(self._types(sorted(self.names())))
        found.get("meta", {}).pop("leased_until", None)
        times = {key: min(found[key].values()) for key in found if key.startswith("expires:")}
        index = {f"expires:{job_id}": at for job_id, at in found.get("expires", {}).items()}
        assert index == times, "the index of what expires"
        return found

    def meta(self, name: str) -> str | None:
        value: str | None = self.read("meta").get(name)
        return value

    def count(self, name: str) -> int:
        """A counter in `meta`."""
        return int(self.meta(name) or 0)

    def set_clock(self, clock: float, since: float | None = None) -> None:
        """The server's clock had been there already, when something was pushed; ``since`` when without a jump."""
        fields = {"clock": clock, "server_time": clock, "server_time_since": clock if since is None else since}
        self.client.command("HSET", self.prefix + "meta", *(part for f, t in fields.items() for part in (f, repr(t))))

    def _read(self, types: Mapping[str, str]) -> dict[str, Any]:
        wanted = [
            self._inline(key) if kind == "inline" else (_READ[kind][0], self.prefix + key, *_READ[kind][1:])
            for key, kind in types.items()
        ]
        replies = self.client.commands(wanted, self.prefix) if wanted else []
        found = {}
        for (key, kind), raw in zip(types.items(), replies, strict=True):
            if key == "taken":
                found[key], carried = _records(raw)
                found |= carried
            else:
                found.setdefault(key, {})
                found[key] = found[key] | _readable(key, kind, raw) if found[key] else _readable(key, kind, raw)
            if kind == "inline" and (expires := raw.partition(b" ")[0].partition(b",")[2]):
                found["expires:" + key.removeprefix("payloads:")] = dict.fromkeys(found[key], float(expires))
        return found

    def _types(self, keys: Sequence[str]) -> dict[str, str]:
        """The type that each key must have: a key of another type is an error when it is read."""
        found = {key: _TYPES.get(key, "string" if key.startswith(_TRACES) else "") for key in keys}
        payloads = [key for key, kind in found.items() if not kind]
        for key, kind in zip(payloads, self._kinds(payloads), strict=True):
            assert key.startswith(_PAYLOADS), f"{key} is no key of the wire format"
            found[key] = "inline" if kind == "inline" else "zset"
        return found

    def _kinds(self, keys: Sequence[str]) -> list[str]:
        asked = [("TYPE", self.prefix + key) for key in keys]
        there = [("HEXISTS", *self._inline(key)[1:]) for key in keys if key.startswith(_INLINE)]
        replies = self.client.commands([*asked, *there], self.prefix) if asked else []
        inline = iter(replies[len(keys) :])
        return [
            "inline" if key.startswith(_INLINE) and next(inline) else kind.decode()
            for key, kind in zip(keys, replies, strict=False)
        ]

    def inline(self, key: str) -> bytes:
        """The text of an inline payload that is there, as "payloads:<id>" names it."""
        found: bytes = self.client.command(*self._inline(key))
        return found

    def _inline(self, key: str) -> tuple[str, str, str]:
        """What reads the inline payload that counts as this key."""
        head = next(head for head in _INLINE if key.startswith(head))
        return "HGET", self.prefix + head.removesuffix(":"), key.removeprefix(head)


@contextmanager
def emptied_rig(url: str) -> Iterator[ShardRig]:
    """An untouched shard, without what another row of a table has left in the store."""
    with closing(ShardRig(url)) as rig:
        rig.client.command("FLUSHALL")
        yield rig


@contextmanager
def emptied_app(url: str) -> Iterator[Lowq]:
    """An application that has used nothing, without what another row of a table has left in the store."""
    with closing(Lowq(redis_url=url, push_timeout=PATIENCE)) as app:
        app.client.command("FLUSHALL")
        yield app


_TYPES = {key.name: key.types[0] for key in SHARD_KEYS if key.is_one}
# How each type is read whole.
_READ: dict[str, tuple[str | int, ...]] = {
    "zset": ("ZRANGE", 0, -1, "WITHSCORES"),
    "hash": ("HGETALL",),
    "set": ("SMEMBERS",),
    "list": ("LRANGE", 0, -1),
    "string": ("GET",),
}
#: Hashes of inline payloads, and what each of these is called here.
_PLACES = {"payloads", "morgue:payloads"}
_INLINE = ("payloads:", "morgue:payloads:")
_TAKEN = "taken:payloads:"
_TRACES = ("traces:", "taken:traces:")
_PAYLOADS = ("payloads:", _TAKEN, "morgue:payloads:", "expires:", "taken:expires:")


def _readable(key: str, kind: str, raw: Any) -> Any:
    if kind == "string":
        return None if raw is None else raw.decode()
    if kind == "inline":
        head, _, payload = raw.partition(b" ")
        assert len(payload) <= 4096, f"{key}: so long a payload is never kept inline"
        return {_payload(payload): float(head.partition(b",")[0])}
    if kind == "list":
        return [item.decode() for item in raw]
    if kind == "set":
        return {item.decode() for item in raw}
    members: dict[Any, Any] = dict(zip(raw[::2], raw[1::2], strict=True))
    if kind == "zset":
        payloads = key.startswith(_PAYLOADS)
        return {(_payload(m) if payloads else m.decode()): float(score) for m, score in members.items()}
    return {name.decode(): value.decode() for name, value in members.items()}


def _payload(data: bytes) -> Any:
    try:
        value = json.loads(data)
    except ValueError:
        return data
    return value if isinstance(value, str | int | float) else data.decode()


def _records(raw: list[bytes]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of `taken`: id -> (delivery, perform_at, retry_count, level and mark, taken_at), and its payloads as if they had
    keys.
    """
    records: dict[str, Any] = {}
    carried: dict[str, Any] = {}
    for name, record in zip(raw[::2], raw[1::2], strict=True):
        delivery, perform_at, retry_count, level, taken_at, *inline = record.split(maxsplit=5)
        records[name.decode()] = int(delivery), float(perform_at), int(retry_count), level.decode(), float(taken_at)
        if inline:
            assert record.endswith(b"\n"), "a record that carries a payload ends so"
            carried[_TAKEN + name.decode()] = payloads = _readable("", "inline", inline[0][:-1])
            if expires := inline[0].partition(b" ")[0].partition(b",")[2]:
                carried["taken:expires:" + name.decode()] = dict.fromkeys(payloads, float(expires))
    return records, carried


class Channel:
    """What is published on a channel of the shard; with ``key``, on the channel of that name."""

    def __init__(self, rig: ShardRig, name: str = "", key: str = "") -> None:
        self._rig = rig
        self._name = key or rig.prefix + name
        self._subscription = rig.client.subscribe()
        self._subscription.add([self._name])
        self._until(lambda event: event[0] == "subscribe")

    def messages(self) -> list[bytes]:
        """All messages since the last call."""
        # Messages keep their order: when this one is here, all earlier ones are.
        self._rig.client.command("SPUBLISH", self._name, "that is all")
        return self._until(lambda event: event[2] == b"that is all")

    def close(self) -> None:
        self._subscription.close()

    def _until(self, last: Callable[[tuple[str, str, bytes]], bool]) -> list[bytes]:
        data: list[bytes] = []
        give_up_at = time.monotonic() + PATIENCE
        while time.monotonic() < give_up_at:
            event = self._subscription.get(0.1)
            if event is None:
                continue
            if last(event):
                return data
            data.append(event[2])
        raise AssertionError(f"nothing more came on {self._name}")
