"""lowq: background jobs on Redis that stay in order per entity.

This is what an application uses at first. Beside it are, in modules of their own::

    lowq.consumer              `Consumer`, `ConsumerJob` and their async forms: jobs out by hand
    lowq.inspection            what is returned to people who look
    lowq.admin                 what is returned to people who act
    lowq.shards.splitter       the splitters
    lowq.shards.scheduler      the schedulers
    lowq.testing               jobs performed in the calling thread
    lowq.contrib               tracing, error reporting, databases and frameworks of others

docs/design.md follows a job through the packages.
"""

from typing import TYPE_CHECKING, Any

from lowq.application import Lowq, default
from lowq.call_limit import Limit
from lowq.decorators import every
from lowq.errors import (
    ConfigError,
    ConsumerClosed,
    JobCancelled,
    JobError,
    LeaseLost,
    LimitTimeout,
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
from lowq.guesses import APPLICATION
from lowq.job import Job, JobDict
from lowq.limits import Concurrency, Rate
from lowq.observe.callbacks import JobEvent
from lowq.queue import Queue
from lowq.settings import Config
from lowq.store import Durability
from lowq.version import VERSION
from lowq.work.handler import Execution, current
from lowq.work.loop import LogContext
from lowq.workers import Worker

__version__ = VERSION
#: The default application: ``lowq.worker`` and ``lowq.config`` are its own.
app = default
config: Config = default.config
worker = default.worker
limit = default.limit

__all__ = [
    "Concurrency",
    "Config",
    "ConfigError",
    "ConsumerClosed",
    "Durability",
    "Execution",
    "Job",
    "JobCancelled",
    "JobDict",
    "JobError",
    "JobEvent",
    "LeaseLost",
    "Limit",
    "LimitTimeout",
    "LogContext",
    "Lowq",
    "LowqError",
    "MiddlewareError",
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
    "ScriptError",
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
    "limit",
    "worker",
]

if not TYPE_CHECKING:  # which would take any name for one of the package's

    def __getattr__(name: str) -> Any:
        hint = f": {APPLICATION[name]}" if name in APPLICATION else ""
        raise AttributeError(f"module 'lowq' has no attribute {name!r}{hint}", name=name)
