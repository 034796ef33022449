"""What the dashboard costs on a million jobs in a thousand shards: `make web-cost` prints it.

A page is left open (its stream of live figures is read) while the processor time of Redis is counted; then each page
is asked for a few times. All in one process with the server, so the times are those of a busy machine rather than
better ones.
"""

import statistics
import threading
import time
import urllib.request
from collections.abc import Callable

from lowq import Lowq
from lowq.connection import parse_info
from lowq.keys import shard_prefix
from tests.browser.stage import Stage
from tests.redis_server import RedisServer

SHARDS, JOBS = 1000, 1_000_000

#: Adds jobs to a shard: id -> perform_at; payloads for the first few, as a page shows fifty.
FILL = """
for first = 0, tonumber(ARGV[2]) - 1, 500 do
  local pairs_ = {}
  for i = first, math.min(first + 499, tonumber(ARGV[2]) - 1) do
    pairs_[#pairs_ + 1] = string.format('%.6f', tonumber(ARGV[3]) + i)
    pairs_[#pairs_ + 1] = ARGV[1] .. '-' .. i
    redis.call('ZADD', KEYS[1] .. 'payloads:' .. ARGV[1] .. '-' .. i, 1, '{"version":1}')
  end
  redis.call('ZADD', KEYS[1] .. 'due', unpack(pairs_))
end
redis.call('HSET', KEYS[1] .. 'meta', 'shards_count', ARGV[4], 'clock', '1')
"""


def fill(app: Lowq, queue: str, shards: int, jobs: int) -> None:
    """Jobs of which half are due."""
    app.register(queue, shards)
    begin = time.time() - jobs / shards / 2
    for shard in range(shards):
        prefix = shard_prefix("lowq", queue, shard)
        app.client.command("EVAL", FILL, 1, prefix, f"job-{shard}", jobs // shards, begin, shards, key=prefix)


def fail_half(app: Lowq, queue: str, shards: int, jobs: int) -> None:
    """The earlier half of those that are to come has failed before: an outage, an hour later."""
    for shard in range(shards):
        prefix = shard_prefix("lowq", queue, shard)
        first = jobs // shards // 2
        pairs = [part for number in range(first, first + first // 2) for part in (number % 5, f"job-{shard}-{number}")]
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


def timed(address: str, read: Callable[[object], object] = lambda stream: stream.read()) -> float:  # type: ignore[attr-defined]  # a response
    began = time.monotonic()
    with urllib.request.urlopen(address) as stream:
        read(stream)
    return time.monotonic() - began


def main() -> None:
    with RedisServer() as server:
        stage = Stage(server.url)
        began = time.monotonic()
        fill(stage.app, "Big", SHARDS, JOBS)
        stage.app.queue("Big").push({"id": "one", "payload": {"version": 1}, "delay": 3600})
        print(f"{JOBS:,} jobs in {SHARDS:,} shards, filled in {time.monotonic() - began:.0f} s")  # noqa: T201
        with stage.serving() as address:
            idle = left_open_nobody(stage.app)
            print(f"Redis, nobody watching: {idle:.2%} of a processor")  # noqa: T201
            print(f"Redis, a dashboard left open: {left_open(stage.app, address, 30.0):.2%}")  # noqa: T201
            pages = ("/", "/queues/Big", "/queues/Big?state=due", "/queues/Big?reverse=1", "/queues/Big/job?id=one",
                     "/queues/Big/shards", "/nodes", "/audit", "/search?id=one", "/api/v1/stats", "/metrics",
                     "/api/v1/queues/Big/jobs")  # fmt: skip
            for path in pages:
                times = [timed(address + path) * 1000 for _ in range(7)]
                print(f"{path:28} median {statistics.median(times):5.0f} ms, worst {max(times):5.0f} ms")  # noqa: T201
            streamed(address, "/queues/Big?match=*99", "/queues/Big?match=nothing", "/queues/Big?order_by=id")
            fail_half(stage.app, "Big", SHARDS, JOBS)
            print("a quarter of them has failed before:")  # noqa: T201
            streamed(address, "/queues/Big?order_by=retry_count", "/queues/Big?order_by=retry_count&reverse=1",
                     "/queues/Big?order_by=retry_count&reverse=1&max=-1", "/queues/Big?state=scheduled",
                     "/queues/Big?state=retrying")  # fmt: skip
        stage.close()


def streamed(address: str, *paths: str) -> None:
    """When the first byte of a page comes, when its first row, and when all of it."""
    for path in paths:
        firsts, rows, wholes = zip(*(stream_times(address + path) for _ in range(3)), strict=True)
        print(  # noqa: T201
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
