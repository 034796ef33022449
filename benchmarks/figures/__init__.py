"""lowq's own figures: what is measured, and what must be reached.

A figure's file has a function that measures it once, given how large it may be, and returns names of figures with
their values. A curve's file does the same for several points of one axis.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Figure:
    """A line of the table of what lowq is to reach."""

    #: Where its values are: "row/column" among the peers, or "figure"; or "one against another".
    key: str
    title: str
    unit: str
    must: float | None = None
    aim: float | None = None
    better: Literal["more", "less"] = "more"

    def reached(self, value: float) -> str:
        """'aim', 'must' or 'no'; '' when nothing is asked for."""
        if self.must is None:
            return ""
        for name, bound in (("aim", self.aim), ("must", self.must)):
            if bound is not None and (value >= bound if self.better == "more" else value <= bound):
                return name
        return "no"


#: In the order of the table. A key "row/column" is from the rows of lowq among the peers.
FIGURES = [
    Figure("lowq/drain", "drain, blank jobs, `batch_size=1`", "jobs/s", 65_000, 115_000),
    Figure("drain_middleware", "the same with a middleware", "jobs/s"),
    Figure("drain_plain", "the same without prefetch: one round trip a job", "jobs/s"),
    Figure("lowq, batch_size=100/drain", "drain, `batch_size=100`", "jobs/s", 88_000, 130_000),
    Figure("lowq/bulk", "bulk enqueue, one process", "jobs/s", 140_000, 200_000),
    Figure("lowq/single", "single enqueue", "jobs/s", 6_900, 7_500),
    Figure("single_evalsha", "the same, against calls of the script by redis-py's `evalsha`", "x", 1.05, 1.15),
    Figure("producers/coroutines_1", "`aperform_async`, 1 coroutine, against one thread in a loop", "x", 0.8, 1.0),
    Figure("producers/coroutines_100", "the same, 100 coroutines", "x", 4, 6),
    Figure("producers/coroutines_1000", "the same, 1,000 coroutines", "x", 6, 9),
    Figure("producers/threads_20", "`perform_async`, 20 threads, against one", "x", 2, 3),
    Figure("lowq/drain_cpu", "Redis CPU per job, drain", "µs", 11, 8, "less"),
    Figure("lowq/bulk_cpu", "Redis CPU per job, bulk enqueue", "µs", 5, 4, "less"),
    Figure("bytes_20", "bytes per queued job, payload of 20 B", "B", 330, 290, "less"),
    Figure("lowq/bytes", "bytes per queued job, payload of 100 B", "B", 1_250, 450, "less"),
    Figure("lowq/pickup_p50", "pickup when idle, p50", "ms", 1.0, 0.7, "less"),
    Figure("lowq/pickup_p99", "pickup when idle, p99", "ms", 2.0, 1.2, "less"),
    Figure("lowq/pickup_p50 against Sidekiq/pickup_p50", "the same, p50 against Sidekiq", "x", 1.8, 1.3, "less"),
    Figure("long_queue", "drain with 1,000,000 queued against 10,000", "x", 0.9, 1.0),
    Figure("struct_drain", "drain of `msgspec.Struct` payloads against dicts", "x", 0.95, 1.0),
    Figure("many_shards", "drain with 1,000 shards against 5", "x", 0.9, 1.0),
    Figure("two_processes", "two processes against one, handler of 200 µs CPU", "x", 1.5, 1.7),
    Figure("many_threads", "200 threads, 200 shards, handlers that wait 50 ms", "jobs/s", 3_700, 3_950),
    Figure("async_rate", "1,000 shards of an async worker that awaits 50 ms: of 20,000", "jobs/s", 17_000, 18_400),
    Figure("async_rate/SAQ", "the same work in SAQ, 1,000 jobs at once", "jobs/s"),
    Figure("async_rate/taskiq, stream", "the same in taskiq", "jobs/s"),
    Figure("async_rate/streaq", "the same in streaq", "jobs/s"),
    Figure("async_rate/arq, 10 ms poll", "the same in arq", "jobs/s"),
    Figure("async_drain", "drain of blank jobs, async worker against threads", "x", 0.5, 0.8),
    Figure("async_pickup", "pickup when idle, p50, async worker against threads", "x", 1.3, 1.1, "less"),
    Figure("async_memory", "memory of a node with 5,000 async jobs in flight", "MB", 200, 120, "less"),
    Figure("consumer_batches", "a consumer with `batches(100)` against a node with `batch_size=100`", "x", 0.7, 0.8),
    Figure("consumer_single", "`take()` and `ack()`, one job after the other", "jobs/s", 5_000),
    Figure("append_push", 'bulk enqueue with `merge="append"`, against none', "x", 0.85),
    Figure("append_drain", "the same, drain with `batch_size=100`", "x", 0.85),
    Figure("ttl_push", "bulk enqueue with a `ttl`, against none", "x", 0.8),
    Figure("ttl_drain", "the same, drain with `batch_size=100`", "x", 0.8),
    Figure("priority_push", "bulk enqueue with a `priority`, against none", "x", 0.8),
    Figure("priority_drain", "the same, drain with `batch_size=100`", "x", 0.8),
    Figure("expiry_seconds", "100,000 jobs expire at once: until all are gone", "s", 5, None, "less"),
    Figure("expiry_script", "the same: the longest script", "ms", 5, None, "less"),
    Figure("fair_p50", "a job beside 5,000 of 50 ms in another queue, 5 threads: delay, p50", "ms", 60, 15, "less"),
    Figure("fair_p99", "the same, p99", "ms", 250, 70, "less"),
    Figure("fair_left", "the same: part of all threads that the slow queue keeps", "x", 0.9, 0.95),
    Figure("fair_weights", "two queues with backlogs, weights 3:1: off by", "%", 10, 3, "less"),
    Figure("fair_alone", "the slow queue alone: part of all threads that it uses", "x", 0.9, 0.95),
    Figure("fair_bounded", "the slow queue with `max_threads=2`: threads that it uses", "threads", 2.05, None, "less"),
    Figure("urgent_p90", "50 jobs/s of priority 0 beside 500,000 that wait at 9: delay, p90", "s", 2, 0.1, "less"),
    Figure("limit_rate", "`lowq.Rate(100)` over two nodes: jobs that began in 10 s, against 1,000", "x", 0.95),
    Figure("limit_drain", "jobs of 1 ms with a `lowq.Concurrency` that is never reached, against none", "x", 0.95),
    Figure("replicated_single", 'single enqueue with `durability="replicated"`, against none', "x"),
    Figure("replicated_threads", "the same, 20 threads", "x"),
    Figure("replicated_bulk", "the same, bulk enqueue", "x"),
    Figure("fsynced_single", 'single enqueue with `durability="fsynced"`, `appendfsync always`, against none', "x"),
    Figure("fsynced_threads", "the same, 20 threads", "x"),
    Figure("fsynced_bulk", "the same, bulk enqueue", "x"),
    Figure("idle_cpu", "idle node with 100 shards, CPU", "%", 0.5, None, "less"),
    Figure("idle_trips", "idle node with 100 shards, round trips", "1/s", 2.0, None, "less"),
    Figure("start_up", "node start to first job", "s", 0.4, 0.2, "less"),
]

Measure = Callable[[bool], dict[str, float]]
