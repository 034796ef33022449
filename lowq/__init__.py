"""lowq: background jobs on Redis that stay in order per entity.

One job, file by file: `worker` declares who performs it; `push` validates it and `job` encodes it; ``lua/push.lua``
merges it into a shard's keys (`keys`), through `connection`. In a node (`node`), the `keeper` hears through
`membership` who shares the work, a `splitter` says which shards are this node's, and `leases` gets them; `dispatch`
with a `scheduler` hands the shard to a `thread`, `shard` takes the job with ``lua/take.lua``, `batch` performs it and
decides what becomes of it. `queue` and `queries` are for whoever looks and intervenes.
"""

from lowq.admin.actions import Acted
from lowq.admin.audit import AuditEntry
from lowq.admin.bulk import Snapshot, Step
from lowq.application import Lowq, default
from lowq.broker.scheduler import LagScheduler, SeqScheduler
from lowq.broker.splitter import BalancedSplitter, ByNodeSplitter, DefaultSplitter
from lowq.errors import (
    ConfigError,
    JobError,
    LeaseLost,
    LowqError,
    MiddlewareError,
    PayloadError,
    PushError,
    PushInterrupted,
    QueueInUse,
    RedisFull,
    RedisRefused,
    RedisUnavailable,
    ScriptError,
    ShardsCountError,
    UnknownNodeError,
    UnknownQueueError,
)
from lowq.inspection.explain import Why
from lowq.inspection.overview import QueueOverview
from lowq.inspection.paging import Page
from lowq.inspection.queries import NodeInfo, QueueInfo, ShardInfo, Stats
from lowq.inspection.server_info import RedisInfo
from lowq.job import Job, JobDict
from lowq.metrics.counters import Span
from lowq.metrics.history import History, PerformTimes, Rate
from lowq.node.execution import Execution, current
from lowq.node.node import Node
from lowq.producer import Jobs
from lowq.queue import Queue
from lowq.settings import Config
from lowq.version import VERSION
from lowq.workers import Worker

__version__ = VERSION
#: The default application: ``lowq.worker`` and ``lowq.config`` are its own.
app = default
config: Config = default.config
worker = default.worker

__all__ = [
    "Acted",
    "AuditEntry",
    "BalancedSplitter",
    "ByNodeSplitter",
    "Config",
    "ConfigError",
    "DefaultSplitter",
    "Execution",
    "History",
    "Job",
    "JobDict",
    "JobError",
    "Jobs",
    "LagScheduler",
    "LeaseLost",
    "Lowq",
    "LowqError",
    "MiddlewareError",
    "Node",
    "NodeInfo",
    "Page",
    "PayloadError",
    "PerformTimes",
    "PushError",
    "PushInterrupted",
    "Queue",
    "QueueInUse",
    "QueueInfo",
    "QueueOverview",
    "Rate",
    "RedisFull",
    "RedisInfo",
    "RedisRefused",
    "RedisUnavailable",
    "ScriptError",
    "SeqScheduler",
    "ShardInfo",
    "ShardsCountError",
    "Snapshot",
    "Span",
    "Stats",
    "Step",
    "UnknownNodeError",
    "UnknownQueueError",
    "Why",
    "Worker",
    "__version__",
    "app",
    "config",
    "current",
    "worker",
]
