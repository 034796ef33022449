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

import importlib
import typing

from lowq.application import Lowq, default
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
from lowq.observe.callbacks import JobEvent
from lowq.observe.log_context import LogContext
from lowq.push.target import Jobs
from lowq.queue import Queue
from lowq.settings import Config
from lowq.shards.scheduler import LagScheduler, Schedulable, Scheduler, SeqScheduler
from lowq.shards.splitter import BalancedSplitter, ByNodeSplitter, DefaultSplitter
from lowq.store import Durability
from lowq.version import VERSION
from lowq.work.execution import Execution, current
from lowq.workers import Worker

#: What is imported when it is asked for: a process that only pushes needs none of it.
_ON_DEMAND = {
    "AsyncConsumer": "lowq.consumer",
    "AsyncConsumerJob": "lowq.consumer",
    "Consumer": "lowq.consumer",
    "ConsumerJob": "lowq.consumer",
    "Node": "lowq.node.node",
}

if typing.TYPE_CHECKING:
    from lowq.consumer import AsyncConsumer, AsyncConsumerJob, Consumer, ConsumerJob
    from lowq.node.node import Node
else:  # hidden from type checkers: they would take every misspelt name for one that may be there

    def __getattr__(name: str) -> object:
        if name not in _ON_DEMAND:
            raise AttributeError(f"module 'lowq' has no attribute {name!r}")
        return getattr(importlib.import_module(_ON_DEMAND[name]), name)


__version__ = VERSION
#: The default application: ``lowq.worker`` and ``lowq.config`` are its own.
app = default
config: Config = default.config
worker = default.worker

__all__ = [
    "AsyncConsumer",
    "AsyncConsumerJob",
    "BalancedSplitter",
    "ByNodeSplitter",
    "Concurrency",
    "Config",
    "ConfigError",
    "Consumer",
    "ConsumerClosed",
    "ConsumerJob",
    "DefaultSplitter",
    "Durability",
    "Execution",
    "Job",
    "JobDict",
    "JobError",
    "JobEvent",
    "Jobs",
    "LagScheduler",
    "LeaseLost",
    "LogContext",
    "Lowq",
    "LowqError",
    "MiddlewareError",
    "Node",
    "NotReplicated",
    "NotTaken",
    "PayloadError",
    "PushError",
    "PushInterrupted",
    "Queue",
    "QueueFull",
    "QueueInUse",
    "Rate",
    "RedisFull",
    "RedisNotReady",
    "RedisRefused",
    "RedisUnavailable",
    "Resharding",
    "Schedulable",
    "Scheduler",
    "ScriptError",
    "SeqScheduler",
    "SessionInUse",
    "ShardsCountError",
    "TimeLimitExceeded",
    "UnknownNodeError",
    "UnknownQueueError",
    "UnknownScheduleError",
    "Worker",
    "__version__",
    "app",
    "config",
    "current",
    "every",
    "worker",
]
