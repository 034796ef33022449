"""However much there is, no call holds Redis for long, no reply is large, and nothing loads a queue into memory.

On a real server only. Times are compared with those of a walk over a hundred thousand ids on the same machine a moment
before, so that they hold on a slow one, too. What a call may take on average is the server's own processor time. The
limit for a single call is time on the clock, and so far above what the design allows because a busy machine stalls;
whatever walks over a million takes longer still. Where the machine stood still that is allowed for.
"""

import base64
import gc
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from lowq import Lowq
from lowq.job import Job
from lowq.operate.actions import MAX_IDS
from lowq.operate.jobs import MAX_BYTES, MAX_PAYLOADS
from lowq.queue import Queue
from lowq.store import parse_info
from lowq.store.keys import shard_prefix
from tests.redis_server import RedisServer
from tests.rows import case
from tests.rules.support import run_script

pytestmark = pytest.mark.slow  # it measures times, too

MILLION = 1_000_000
NOW = 1_800_000_000.0
LATER = NOW + 3600
PREFIX = shard_prefix("lowq", "Big", 0)
#: Walks over a hundred thousand ids, of which each takes some 30 ms: in which any single call must end, by the clock,
#: and which it may take on average, in processor time.
LONGEST, USUAL = 8, 0.6
MIB = 2**20

#: That walk.
WALK = """
for first = 0, 99999, 1000 do
  for _, id in ipairs(redis.call('ZRANGE', KEYS[1], first, first + 999)) do
    if string.find(id, 'x', 1, true) then return id end
  end
end
"""

#: Adds members "<head><number><tail>" to a sorted set: ten thousand at a time, all with one score.
FILL = """
for first = tonumber(ARGV[2]), tonumber(ARGV[2]) + 9999, 1000 do
  local pairs_ = {}
  for i = first, first + 999 do
    pairs_[#pairs_ + 1] = ARGV[1]
    pairs_[#pairs_ + 1] = string.format('%s%07d%s', ARGV[3], i, ARGV[4])
  end
  redis.call('ZADD', KEYS[1], unpack(pairs_))
end
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Of their own, as a million jobs are made once for all of these tests."""
    directory: Path = tmp_path_factory.mktemp("redis")
    with RedisServer(directory, slowlog_max_len=1000) as server:
        yield server


@pytest.fixture(scope="module")
def app(server: RedisServer) -> Iterator[Lowq]:
    app = Lowq(redis_url=server.url)
    fill(app, "due", LATER, "job-", "")
    # The shard's clock as pushes leave it. Payloads are not needed: an id without any is still a job.
    app.client.command("HSET", PREFIX + "meta", "shards_count", "1", "clock", repr(NOW))
    yield app
    app.close()


@pytest.fixture
def queue(app: Lowq) -> Queue:
    """One shard with a million jobs that are scheduled for one single moment."""
    return app.queue("Big", 1)


def fill(app: Lowq, key: str, score: float, head: str, tail: str, count: int = MILLION, prefix: str = PREFIX) -> None:
    for first in range(0, count, 10_000):
        app.client.command("EVAL", FILL, 1, prefix + key, repr(score), first, head, tail)


@contextmanager
def short_calls(app: Lowq) -> Iterator[None]:
    """Every call in the block is short, and none fills our memory."""
    clock, processor = walk(app)
    slower_than = ("CONFIG", "SET", "slowlog-log-slower-than", str(int(LONGEST * clock * 1e6)))
    app.client.commands([slower_than, ("SLOWLOG", "RESET"), ("CONFIG", "RESETSTAT")])
    before = processor_time(app)
    gc.collect()
    tracemalloc.start()
    try:
        with stalls() as stalled:
            yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    slow, stats = app.client.commands([("SLOWLOG", "GET", "-1"), ("INFO", "commandstats")])
    allowed = (LONGEST * clock + max(stalled)) * 1e6
    assert [(entry[2] / 1000, entry[3][:3]) for entry in slow if entry[2] > allowed] == []
    calls = int(parse_info(stats)["cmdstat_evalsha"].partition("calls=")[2].partition(",")[0])
    usual = (processor_time(app) - before) / calls
    assert usual < USUAL * processor, f"{usual * 1000:.1f} ms per call, {processor * 1000:.1f} ms for a walk"
    assert peak < 24 * MIB, f"{peak / MIB:.0f} MiB were in use at once"


@contextmanager
def stalls() -> Iterator[list[float]]:
    """How much later than it meant to a thread woke up, seconds, each time: Redis stood still, too."""
    found, over = [0.0], threading.Event()

    def watch() -> None:
        is_over = False
        while not is_over:  # the last time counts, too: it may be the one that the block has waited for
            since = time.monotonic()
            is_over = over.wait(0.01)
            found.append(time.monotonic() - since - 0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def walk(app: Lowq) -> tuple[float, float]:
    """Seconds of the walk: the longest of some by the clock, and of processor time."""
    took, before = [], processor_time(app)
    for _ in range(5):
        began = time.monotonic()
        app.client.command("EVAL", WALK, 1, PREFIX + "due")
        took.append(time.monotonic() - began)
    return max(took), (processor_time(app) - before) / len(took)


def processor_time(app: Lowq) -> float:
    """Seconds, of the thread that works all calls."""
    info = parse_info(app.client.command("INFO", "cpu"))
    return float(info["used_cpu_user_main_thread"]) + float(info["used_cpu_sys_main_thread"])


def found(job: Job | None) -> Job:
    assert job is not None
    return job


def test_looking_at_a_million_jobs(app: Lowq, queue: Queue) -> None:
    for number in range(0, MILLION, 100_000):
        app.client.command("ZADD", PREFIX + "retries", 3, f"job-{number:07d}")
    with short_calls(app):
        assert queue.stats(now=NOW).length == MILLION
        assert found(queue.peek("job-0500000", now=NOW)).state == "retrying"
        assert "due in 1 h" in queue.why("job-0999999", now=NOW).detail
        assert queue.why("job-0999999", now=LATER).reason == "no_owner"
        assert len(queue.jobs("retrying", limit=10, now=NOW)) == 10
        assert len(queue.jobs(order_by="retry_count", min=0, now=NOW)) == 10
        assert next(iter(queue.jobs(now=NOW))).id == "job-0000000"
        assert next(iter(queue.jobs(now=NOW, reverse=True))).id == "job-0999999"
    for reverse, expected in ((False, "job-0500000"), (True, "job-0499999")):
        with short_calls(app):  # in the middle of equal times
            gone = base64.urlsafe_b64encode(
                f"p{'-' if reverse else '+'}{LATER!r} {queue.name} job-0499999x".encode()
            ).decode()
            page = queue.jobs(after=gone, limit=1000, reverse=reverse, now=NOW)
        assert (len(page), page.jobs[0].id) == (1000, expected)
    with short_calls(app):  # has to look at every id
        page = queue.jobs(match="*77777", order_by="id", reverse=True, now=NOW)
    assert [job.id for job in page] == [f"job-0{i}77777" for i in range(9, -1, -1)]
    app.client.command("DEL", PREFIX + "retries")


def test_the_dearest_patterns_and_the_longest_ids(app: Lowq) -> None:
    key = shard_prefix("lowq", "Long", 0) + "due"
    app.client.command("ZADD", key, *(part for n in range(2000) for part in (LATER, "a" * 508 + f"{n:04d}")))
    for pattern in (
        "*" + "a" * 98 + "c",
        "*[" + "b" * 95 + "a]c",
        "*" + "?" * 98 + "c",
        "*a*a*a*b",
        "[ba]" * 200 + "*",
    ):
        with case(pattern), short_calls(app):
            app.queue("Long", 1).jobs(match=pattern)


def test_bulk_actions_and_drops_go_in_short_steps(app: Lowq) -> None:
    queue, small = app.queue("Moved", 1), app.queue("Small", 1)
    moved = shard_prefix("lowq", "Moved", 0)
    fill(app, "due", LATER, "job-", "", MILLION // 2, prefix=moved)
    app.client.command("HSET", moved + "meta", "shards_count", "1", "clock", repr(NOW))
    small.push({"id": i} for i in range(5000))
    with short_calls(app):
        for action, state in (("bury", "scheduled"), ("kick", None), ("delete", None)):
            *_, last = islice(queue.bulk(action, state, now=NOW), 26)  # type: ignore[arg-type]  # they are names
            assert last.done == 25 * MAX_IDS
            assert last.total >= last.done
        queue.drop()
    with short_calls(app):
        assert small.drop() == 5000


def test_a_million_payloads_of_one_id(app: Lowq, queue: Queue) -> None:
    fill(app, "payloads:heap", 1.0, "", "")
    app.client.command("ZADD", PREFIX + "due", NOW, "heap")
    with short_calls(app):
        heap = found(queue.peek("heap", now=NOW))
        assert (len(heap.payloads), heap.payloads_count) == (MAX_PAYLOADS, MILLION)
        assert queue.bury("heap").done == 1
        assert found(queue.peek("heap")).payloads_count == MILLION
        assert queue.kick("heap").done == 1
        assert queue.delete("heap").done == 1


def test_many_payloads_that_merge_with_others(app: Lowq, queue: Queue) -> None:
    count = 100_000
    for key in ("payloads:heap", "morgue:payloads:heap"):
        fill(app, key, 1.0, key[:1], "", count)
    app.client.commands([("ZADD", PREFIX + "due", NOW, "heap"), ("ZADD", PREFIX + "morgue", NOW, "heap")])
    with short_calls(app):
        assert queue.kick("heap", now=NOW).done == 1
    assert found(queue.peek("heap", now=NOW)).payloads_count == 2 * count
    queue.delete("heap")


def test_large_payloads_are_read_a_few_at_a_time(app: Lowq, queue: Queue) -> None:
    def put(job_id: str, count: int, head: str = "") -> None:
        for number in range(count):
            payload = f'"{head}{number:04d}{"x" * MIB}"'
            app.client.command("ZADD", f"{PREFIX}payloads:{job_id}", number, payload)
        app.client.command("ZADD", PREFIX + "due", NOW, job_id)

    ids = [*(f"fat-{i:02d}" for i in range(40)), "fattest"]
    for job_id in ids:
        put(job_id, 100 if job_id == "fattest" else 3)
    with short_calls(app):
        assert [len(found(queue.peek(job_id)).payloads) for job_id in ("fattest", "fat-00")] == [1, 1]
    reply = run_script(app.client, "fetch_jobs", PREFIX, repr(NOW), "", MAX_PAYLOADS, MAX_BYTES, *ids)
    assert sum(len(part) for job in reply for part in job if isinstance(part, bytes)) < 2 * MIB
    assert len(queue.fetch(ids)) == 41
    assert found(queue.peek("fattest")).payloads_count == 100
    with short_calls(app):
        assert queue.bury(ids).done == 41
    for job_id in ids:
        put(job_id, 3, "again")
    with short_calls(app):
        assert queue.kick(ids, now=NOW).done == 41
        assert queue.delete(ids).done == 41


def test_joining_what_is_alone_goes_in_short_steps(app: Lowq) -> None:
    queue = app.queue("Inline", 1)
    queue.push({"id": i, "payload": f"{i}{'x' * 4000}"} for i in range(2000))
    ids = [str(i) for i in range(2000)]
    with short_calls(app):
        assert queue.push({"id": i, "payload": "y"} for i in range(2000)) == 2000
        assert queue.bury(ids).done == 2000
        queue.push({"id": i, "payload": "z"} for i in range(2000))
        assert queue.kick(ids).done == 2000
        assert found(queue.peek("1999")).payloads_count == 3
        assert queue.drop() == 2000
