"""For tests of applications: performs everything that is due in the calling thread, on an embedded store if wanted,
with the scripts, middlewares and retry rules of a node::

    with lowq.testing.sandbox() as box:
        OrderSync.push(1, {"version": 1}, score=1)
        assert box.drain().performed == 1

For pytest `lowq_pytest` has fixtures.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

from lowq.application import Lowq, default
from lowq.job import Job
from lowq.limits import no_limits
from lowq.testing.drainer import Drained, adrain, drain, worker_of
from lowq.testing.pushes import Pushed
from lowq.testing.sandbox import Sandbox, SandboxClock, sandbox
from lowq.work.handler import Execution, current_execution
from lowq.work.time_limits import TimeLimits
from lowq.workers import time_limits_of

__all__ = [
    "Drained",
    "Pushed",
    "Sandbox",
    "SandboxClock",
    "adrain",
    "drain",
    "embedded",
    "execution",
    "sandbox",
]


@contextmanager
def embedded(*workers: type) -> Iterator[None]:
    """Puts the applications of these workers on empty in-memory stores for the time of the block."""
    apps = {id(item._app): item._app for item in map(worker_of, workers)} or {0: default}
    with ExitStack() as stack:
        for app in apps.values():
            assert isinstance(app, Lowq)
            stack.enter_context(app.embedded())
        yield


@contextmanager
def execution(
    worker: type,
    jobs: Mapping[str, Sequence[Any]] | Sequence[Job] = (),
    *,
    shard: int = 0,
    fence: int = 1,
    state: Any = None,
) -> Iterator[Execution]:
    """Provides `lowq.current` to a direct call of ``perform``. ``jobs``: payloads by id, or `Job` values. ``state``:
    what ``lowq.current().state`` is to be.

    ``deadline`` and ``touch`` work as in a node, but nothing happens when a limit passes.
    """
    if isinstance(jobs, Mapping):
        jobs = [
            Job(
                str(job_id), "taken", [(payload, float(score)) for score, payload in enumerate(payloads)], time.time(),
                payloads_count=len(payloads),
            )
            for job_id, payloads in jobs.items()
        ]  # fmt: skip
    limits = time_limits_of(worker)
    value = Execution(worker, shard, fence, jobs)
    value._limits = TimeLimits(*limits) if any(limits) else None
    if state is not None:
        given: Any = SimpleNamespace(values=state)
        value._state = given
    token = current_execution.set(value)
    try:
        with no_limits():
            yield value
    finally:
        current_execution.reset(token)
