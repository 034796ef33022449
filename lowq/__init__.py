"""lowq: background jobs on Redis that stay in order per entity.

One job, package by package::

    workers      declares who performs it
    producer     validates it (`job`, `codec`), finds its shard (`sharding`), and pushes it
    store        merges it into the shard's keys (`keys`) with ``lua/push.lua``, through `client`
    broker       `membership` says which nodes share the work, a splitter which shards are this node's, `leases` gets
                 them; `maintenance` keeps them. A wake-up (`wakeups`) makes the `dispatcher` hand the shard to a
                 thread, and `shard` takes the job with ``lua/ack_and_take.lua``
    node         `worker_thread` waits for such a shard; `execution` performs the job, decides its outcome, reports it
    metrics      counts it

`consumer` is the other way out: a broker and the caller's own code, which takes jobs and says what became of each.

For people who look and act: `queue` is the handle, `operate` reads, acts by hand, examines and repairs. `application`
holds the settings and the connections. `supervisor` runs several nodes as processes, `cli` is the command line,
`testing` performs jobs in the calling thread.
"""

from lowq.application import Lowq, default
from lowq.consumer import AsyncConsumer, AsyncConsumerJob, Consumer, ConsumerJob
from lowq.errors import (
    ConfigError,
    ConsumerClosed,
    JobError,
    LeaseLost,
    LowqError,
    MiddlewareError,
    NotReplicated,
    NotTaken,
    PayloadError,
    PushError,
    PushInterrupted,
    QueueFull,
    QueueInUse,
    RedisFull,
    RedisNotReady,
    RedisRefused,
    RedisUnavailable,
    Resharding,
    ScriptError,
    SessionInUse,
    ShardsCountError,
    TimeLimitExceeded,
    UnknownNodeError,
    UnknownQueueError,
    UnknownScheduleError,
)
from lowq.every import every
from lowq.job import Job, JobDict
from lowq.limits import Concurrency, Rate
from lowq.node.node import Node
from lowq.observe.counters import Span
from lowq.observe.history import History, HistoryPoint
from lowq.observe.job_events import JobEvent
from lowq.observe.log_context import LogContext
from lowq.observe.slowest import SlowBatch
from lowq.observe.times import Histogram, StretchTimes, Times, TotalTimes
from lowq.operate.actions import Acted
from lowq.operate.all_queues import FoundJob, FoundPage
from lowq.operate.audit import AuditEntry
from lowq.operate.bulk import Step
from lowq.operate.explain import Description, LimitState, Why
from lowq.operate.job_filter import JobFilter, Snapshot
from lowq.operate.nodes import NodeInfo
from lowq.operate.paging import Page
from lowq.operate.queues import QueueInfo
from lowq.operate.schedules import ScheduleInfo
from lowq.operate.server import RedisInfo
from lowq.operate.stats import Forecast, QueueOverview, ShardInfo, Statistics, Stats
from lowq.push.producer import Jobs
from lowq.queue import Queue
from lowq.settings import Config
from lowq.shards.scheduler import LagScheduler, Schedulable, Scheduler, SeqScheduler
from lowq.shards.splitter import BalancedSplitter, ByNodeSplitter, DefaultSplitter
from lowq.store import Durability
from lowq.version import VERSION
from lowq.work.execution import Execution, current
from lowq.workers import Worker

__version__ = VERSION
#: The default application: ``lowq.worker`` and ``lowq.config`` are its own.
app = default
config: Config = default.config
worker = default.worker

__all__ = [
    "Acted",
    "AsyncConsumer",
    "AsyncConsumerJob",
    "AuditEntry",
    "BalancedSplitter",
    "ByNodeSplitter",
    "Concurrency",
    "Config",
    "ConfigError",
    "Consumer",
    "ConsumerClosed",
    "ConsumerJob",
    "DefaultSplitter",
    "Description",
    "Durability",
    "Execution",
    "Forecast",
    "FoundJob",
    "FoundPage",
    "Histogram",
    "History",
    "HistoryPoint",
    "Job",
    "JobDict",
    "JobError",
    "JobEvent",
    "JobFilter",
    "Jobs",
    "LagScheduler",
    "LeaseLost",
    "LimitState",
    "LogContext",
    "Lowq",
    "LowqError",
    "MiddlewareError",
    "Node",
    "NodeInfo",
    "NotReplicated",
    "NotTaken",
    "Page",
    "PayloadError",
    "PushError",
    "PushInterrupted",
    "Queue",
    "QueueFull",
    "QueueInUse",
    "QueueInfo",
    "QueueOverview",
    "Rate",
    "RedisFull",
    "RedisInfo",
    "RedisNotReady",
    "RedisRefused",
    "RedisUnavailable",
    "Resharding",
    "Schedulable",
    "ScheduleInfo",
    "Scheduler",
    "ScriptError",
    "SeqScheduler",
    "SessionInUse",
    "ShardInfo",
    "ShardsCountError",
    "SlowBatch",
    "Snapshot",
    "Span",
    "Statistics",
    "Stats",
    "Step",
    "StretchTimes",
    "TimeLimitExceeded",
    "Times",
    "TotalTimes",
    "UnknownNodeError",
    "UnknownQueueError",
    "UnknownScheduleError",
    "Why",
    "Worker",
    "__version__",
    "app",
    "config",
    "current",
    "every",
    "worker",
]
