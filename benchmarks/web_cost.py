"""What the dashboard costs on a million jobs in a thousand shards: `make web-cost` prints it.

A page is left open (its stream of live figures is read) while the processor time of Redis is counted; then each page
is asked for a few times. All in one process with the server, so the times are those of a busy machine rather than
better ones.
"""

import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from lowq import Lowq
from lowq.sharding import shard_of
from lowq.store import parse_info
from lowq.store.keys import shard_prefix
from tests.browser.stage import Stage
from tests.redis_server import RedisServer
from tests.waiting import until

SHARDS, JOBS = 1000, 1_000_000

#: Adds jobs to a shard: those of these numbers, with their times.
FILL = """
local pairs_ = {}
for i = 2, #ARGV do
  local id = 'job-' .. ARGV[i]
  pairs_[#pairs_ + 1] = string.format('%.6f', tonumber(ARGV[1]) + tonumber(ARGV[i]) / 1000)
  pairs_[#pairs_ + 1] = id
  redis.call('SET', KEYS[1] .. 'payloads:' .. id, '1 {"version":1}')
end
redis.call('ZADD', KEYS[1] .. 'due', unpack(pairs_))
"""


def numbers_by_shard(shards: int, jobs: int) -> dict[str, list[int]]:
    """The prefix of each shard -> the numbers of its jobs."""
    found: dict[str, list[int]] = {shard_prefix("lowq", "Big", shard): [] for shard in range(shards)}
    prefixes = list(found)
    for number in range(jobs):
        found[prefixes[shard_of(f"job-{number}".encode(), shards)]].append(number)
    return found


def fill(app: Lowq, shards: int, jobs: int) -> None:
    """The queue "Big", of whose jobs half are due; the others are in the next minutes."""
    app.registrations.enter("Big", shards)
    begin = time.time() - jobs / 2000
    for prefix, numbers in numbers_by_shard(shards, jobs).items():
        for first in range(0, len(numbers), 500):
            some = numbers[first : first + 500]
            app.client.command("EVAL", FILL, 1, prefix, begin, *some, key=prefix)
        app.client.command("HSET", prefix + "meta", "shards_count", shards, "clock", "1", key=prefix)


def fail_some(app: Lowq, shards: int, jobs: int) -> None:
    """Those that are due in the nearer half of what is to come have failed before, as after an outage."""
    for prefix, numbers in numbers_by_shard(shards, jobs).items():
        failed = [number for number in numbers if jobs / 2 <= number < jobs * 3 / 4]
        pairs = [part for number in failed for part in (number % 5, f"job-{number}")]
        app.client.command("ZADD", prefix + "retries", *pairs, key=prefix)


def processor_seconds(app: Lowq) -> float:
    """Of Redis, so far."""
    info = parse_info(app.client.command("INFO", "cpu"))
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def left_open(app: Lowq, address: str, seconds: float) -> float:
    """The share of a processor that Redis takes while a dashboard is open."""
    over = threading.Event()

    def watch() -> None:
        with urllib.request.urlopen(f"{address}/live") as stream:
            while not over.is_set():
                stream.readline()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    time.sleep(2)
    before, began = processor_seconds(app), time.monotonic()
    time.sleep(seconds)
    share = (processor_seconds(app) - before) / (time.monotonic() - began)
    over.set()
    return share


#: A tab that is left open -> what it fetches again and again, and how often in seconds: as static/live.js does.
TABS: dict[str, dict[str, float]] = {
    "/": {"/live?queue=Big&queue=": 0, "/parts": 5},
    "/?span=day": {"/live?queue=Big&queue=": 0, "/parts": 5},
    "/queues/Big": {"/live?queue=Big&queue=": 0},
    "/queues/Big?state=morgue": {"/live?queue=Big&queue=": 0},
    "/jobs?state=morgue": {"/live?queue=": 0},
    "/queues/Big/job?id=one": {"/queues/Big/job?id=one": 5},
    "/queues/Big/shards": {"/queues/Big/shards": 5},
    "/queues/Big/times": {"/queues/Big/times": 30},
    "/errors": {"/errors": 30},
    "/nodes": {"/nodes": 5},
}


def ten_tabs(app: Lowq, address: str, process: int, seconds: float) -> tuple[float, float]:
    """The shares of a processor that Redis and the dashboard's process take while all of `TABS` are open."""
    over = threading.Event()

    def stream(path: str) -> None:
        while not over.is_set():  # it ends every few seconds, and the browser reconnects
            with urllib.request.urlopen(address + path) as events:
                while not over.is_set() and events.readline():
                    pass

    def fetch(path: str, every: float) -> None:
        while not over.is_set():
            with urllib.request.urlopen(address + path) as page:
                page.read()
            over.wait(every)

    threads = []
    for page, fetched in TABS.items():
        timed(address + page)
        for path, every in fetched.items():
            work = partial(fetch, path, every) if every else partial(stream, path)
            threads.append(threading.Thread(target=work, daemon=True))
            threads[-1].start()
    time.sleep(5)
    before, began = (processor_seconds(app), processor_seconds_of(process)), time.monotonic()
    time.sleep(seconds)
    after, passed = (processor_seconds(app), processor_seconds_of(process)), time.monotonic() - began
    over.set()
    return (after[0] - before[0]) / passed, (after[1] - before[1]) / passed


def processor_seconds_of(process: int) -> float:
    """Of a process, so far."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def own_process(url: str) -> Iterator[tuple[str, int]]:
    """A dashboard in a process of its own: its address and pid."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "lowq", "web", "--redis-url", url, "--bind", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as running:
        address = f"http://127.0.0.1:{port}"
        until(partial(answers, address), "the dashboard")
        yield address, running.pid
        running.terminate()


def answers(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/healthz").close()
    except OSError:
        return False
    return True


def timed(address: str, read: Callable[[object], object] = lambda stream: stream.read()) -> float:  # type: ignore[attr-defined]  # a response
    began = time.monotonic()
    with urllib.request.urlopen(address) as stream:
        read(stream)
    return time.monotonic() - began


def main() -> None:
    with RedisServer() as server:
        stage = Stage(server.url)
        began = time.monotonic()
        fill(stage.app, SHARDS, JOBS)
        stage.app.queue("Big").push({"id": "one", "payload": {"version": 1}, "delay": 3600})
        print(f"{JOBS:,} jobs in {SHARDS:,} shards, filled in {time.monotonic() - began:.0f} s")
        with own_process(server.url) as (address, process):
            idle = left_open_nobody(stage.app)
            of_redis, of_dashboard = ten_tabs(stage.app, address, process, 60.0)
            print(
                f"ten tabs open on different pages: Redis {of_redis:.2%}, {of_redis - idle:.2%} more than with none; "
                f"the dashboard {of_dashboard:.2%}"
            )
        with stage.serving() as address:
            idle = left_open_nobody(stage.app)
            print(f"Redis, nobody watching: {idle:.2%} of a processor")
            print(f"Redis, a dashboard left open: {left_open(stage.app, address, 30.0):.2%}")
            pages = (
                "/", "/queues/Big", "/queues/Big?state=due", "/queues/Big?reverse=1", "/queues/Big/job?id=one",
                "/queues/Big/shards", "/queues/Big/times", "/nodes", "/jobs?state=morgue", "/errors", "/parts",
                "/audit", "/search?id=one", "/api/v1/stats", "/metrics", "/api/v1/queues/Big/jobs",
            )  # fmt: skip
            for path in pages:
                times = [timed(address + path) * 1000 for _ in range(7)]
                print(f"{path:28} median {statistics.median(times):5.0f} ms, worst {max(times):5.0f} ms")
            streamed(address, "/queues/Big?match=*99", "/queues/Big?match=nothing", "/queues/Big?order_by=id")
            fail_some(stage.app, SHARDS, JOBS)
            print("a quarter of them has failed before:")
            streamed(address, "/queues/Big?order_by=retry_count", "/queues/Big?order_by=retry_count&reverse=1",
                     "/queues/Big?order_by=retry_count&reverse=1&max=0", "/queues/Big?state=scheduled",
                     "/queues/Big?state=retrying")  # fmt: skip
        stage.close()


def streamed(address: str, *paths: str) -> None:
    """When the first byte of a page comes, when its first row, and when all of it."""
    for path in paths:
        firsts, rows, wholes = zip(*(stream_times(address + path) for _ in range(3)), strict=True)
        print(
            f"{path:50} first bytes {statistics.median(firsts) * 1000:5.0f} ms, first row "
            f"{statistics.median(rows) * 1000:5.0f} ms, all after {statistics.median(wholes):.2f} s"
        )


def stream_times(address: str) -> tuple[float, float, float]:
    """Seconds until the first byte, the first row (or the end, if there is none) and the end."""
    began = time.monotonic()
    first = row = 0.0
    with urllib.request.urlopen(address) as stream:
        read = b""
        while some := stream.read1():
            first = first or time.monotonic() - began
            if not row:
                read += some
                row = time.monotonic() - began if b'class="id"' in read else 0.0
    whole = time.monotonic() - began
    return first, row or whole, whole


def left_open_nobody(app: Lowq, seconds: float = 10.0) -> float:
    """The share of a processor that Redis takes by itself."""
    before, began = processor_seconds(app), time.monotonic()
    time.sleep(seconds)
    return (processor_seconds(app) - before) / (time.monotonic() - began)


if __name__ == "__main__":
    main()
