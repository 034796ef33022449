"""The values that the reading methods of handles and applications return."""

from lowq.observe.error_groups import ErrorGroup
from lowq.observe.histories import (
    Histogram,
    History,
    HistoryPoint,
    SlowBatch,
    Span,
    StretchTimes,
    Times,
    TotalTimes,
)
from lowq.operate.actions import Pause
from lowq.operate.deploy import DeployCheck, Interruption
from lowq.operate.explain import Description, LimitState, Why
from lowq.operate.findings import Finding, RedisInfo, Severity
from lowq.operate.job_filter import JobFilter, Snapshot
from lowq.operate.jobs import FoundJob, FoundPage, Page
from lowq.operate.nodes import NodeInfo, RunningBatch, StuckBatch
from lowq.operate.queries import Stack
from lowq.operate.schedules import ScheduleInfo
from lowq.operate.stats import Forecast, QueueOverview, ShardInfo, Statistics, Stats
from lowq.registrations import QueueInfo
from lowq.store.shard_operations import Finished

__all__ = [
    "DeployCheck", "Description", "ErrorGroup", "Finding", "Finished", "Forecast", "FoundJob", "FoundPage", "Histogram",
    "History", "HistoryPoint", "Interruption", "JobFilter", "LimitState", "NodeInfo", "Page", "Pause", "QueueInfo",
    "QueueOverview", "RedisInfo", "RunningBatch", "ScheduleInfo", "Severity", "ShardInfo", "SlowBatch", "Snapshot",
    "Span", "Stack", "Statistics", "Stats", "StretchTimes", "StuckBatch", "Times", "TotalTimes", "Why",
]  # fmt: skip
