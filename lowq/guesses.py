"""Names that people guess, as other libraries have them, and lowq's own word for each: the errors name it."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

#: What bounds the time of a handler.
_TIME_LIMIT = "a handler is interrupted after time_limit seconds, and given up after ttr"
_PUSH_ONE = "{name}.push(42, payload) pushes a job"
_PUSH_MANY = "{name}.{many}(jobs) pushes any iterable of jobs"

#: Options of a worker.
OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(("max_retries", "retries"), "it is called max_retry_count"),
    **dict.fromkeys(("timeout", "job_timeout"), _TIME_LIMIT),
    **dict.fromkeys(("delay", "countdown"), "it belongs to a push: push(42, payload, delay=60)"),
    "eta": "it belongs to a push: push(42, payload, perform_at=...)",
    **dict.fromkeys(("retry_delay", "retry_backoff"), "it is called retry_in"),
    "concurrency": "max_threads bounds what a node performs of it at once; lowq.Concurrency all nodes together",
    "rate_limit": "it is called limit: limit=lowq.Rate(100, per=1)",
    "expires": "it is called ttl",
    **dict.fromkeys(("queue", "name"), "it is called queue_name"),
    "on_startup": "write def setup(self) in the worker",
    "on_shutdown": "write def teardown(self) in the worker",
}
#: Options and fields of a job.
JOB_FIELDS: Mapping[str, str] = {
    "countdown": "it is called delay, in seconds",
    **dict.fromkeys(("eta", "run_at"), "it is called perform_at"),
    "expires": "it is called ttl",
    "data": "it is called payload",
    **dict.fromkeys(("args", "kwargs"), "it is called payload, and is one JSON value"),
    "timeout": f"the worker says it: {_TIME_LIMIT}; timeout of a push is for room in a full queue",
    **dict.fromkeys(("max_retries", "retries"), "the worker says it: max_retry_count"),
}
#: Settings of an application.
SETTINGS: Mapping[str, str] = {
    "on_startup": "it is called on_server_init; @app.on_loop_start is for what async workers share",
    "on_shutdown": "it is called on_server_stop; @app.on_loop_stop is for what async workers share",
    **dict.fromkeys(("max_retries", "retries"), "each worker says it: max_retry_count"),
    "timeout": f"each worker says it: {_TIME_LIMIT}",
    "url": "it is called redis_url",
}
#: Attributes of workers and of handles of queues.
PUSHES: Mapping[str, str] = {
    "delay": f"{_PUSH_ONE}, and {{name}}.push(42, payload, delay=60) one for later",
    "perform_in": "{name}.push(42, payload, delay=60) pushes a job for later",
    "perform_at": "{name}.push(42, payload, perform_at=...) pushes a job for later",
    **dict.fromkeys(("apply_async", "send", "enqueue"), _PUSH_ONE),
    **dict.fromkeys(("enqueue_many", "push_many", "push_bulk"), _PUSH_MANY),
}
#: Attributes of an application, and of the package.
APPLICATION: Mapping[str, str] = {
    "on_startup": "write @app.on_loop_start above an async def for what async workers share, setup in a worker, or the "
    "setting on_server_init",
    "on_shutdown": "write @app.on_loop_stop above an async def for what async workers share, teardown in a worker, or "
    "the setting on_server_stop",
    **dict.fromkeys(("task", "job"), "it is called worker: @lowq.worker"),
    **dict.fromkeys(
        ("enqueue", "push"),
        "jobs are pushed to a worker: OrderSync.push(42, payload); or app.queue(name).push(42, payload)",
    ),
    "run": "a node is a process: lowq run shop.workers",
}
#: Verbs of the command line.
VERBS: Mapping[str, str] = {
    "top": "lowq stats --watch shows the queues again and again",
    "queues": "lowq stats shows all queues",
    "status": "lowq stats shows the queues, and lowq nodes the processes",
    "drain": "lowq quiet NODE has a node take nothing more, and lowq stop NODE end; lowq delete QUEUE --all empties a "
    "queue",
    **dict.fromkeys(("worker", "start"), "lowq run APP runs a node"),
    "list": "lowq jobs QUEUE shows the jobs",
    "retry": "lowq kick QUEUE ID... has dead jobs performed again, and lowq perform-now those that wait for a retry",
    "purge": "lowq delete QUEUE --all deletes the jobs that wait",
    "dead": "lowq jobs QUEUE --state morgue shows the dead jobs",
    "enqueue": "lowq push QUEUE --id 42 pushes a job",
}


def hint_for(guesses: Mapping[str, str], name: str, known: Iterable[str], near: str | None, what: str) -> str:
    """The end of the message about an unknown name: lowq's word for it, the one that is similar, or all there are.
    ``what``: the noun before these.
    """
    if name in guesses:
        return guesses[name]
    return f"did you mean {near!r}?" if near else f"{what} {', '.join(known)}"


class Guess:
    """An attribute that a class doesn't have: its error names the one that it has. A base that comes after the class in
    a subclass may have it. ``words``: put into the hint; ``name`` is by default that of the class.
    """

    def __init__(self, holder: type, name: str, hint: str, words: Mapping[str, str]) -> None:
        self._holder = holder
        self._name = name
        self._hint = hint
        self._words = words

    def __get__(self, instance: object, owner: type) -> Any:
        with suppress(AttributeError):
            return getattr(super(self._holder, owner if instance is None else instance), self._name)
        hint = self._hint.format(**{"name": owner.__name__, **self._words})
        raise AttributeError(f"{owner.__name__} has no {self._name!r}: {hint}", name=self._name, obj=owner)


def add_guesses(owner: type, guesses: Mapping[str, str], **words: str) -> None:
    """Adds the errors of these attributes to a class. Its own attributes, and those of subclasses, stay."""
    for name, hint in guesses.items():
        if not hasattr(owner, name):
            setattr(owner, name, Guess(owner, name, hint, words))
