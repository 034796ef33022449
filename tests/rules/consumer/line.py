"""The way of consumers' calls to Redis and back: what gets lost on it, and what happens meanwhile."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lowq.consumer import Consumer, ConsumerJob
from lowq.consumer.takes import Taker
from lowq.errors import RedisUnavailable, ScriptError
from lowq.store import Client
from tests.waiting import PATIENCE

Hook = Callable[[], object]


class Line:
    """Every client's calls take it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        #: Of a call: "" nothing, "call" it does not get there, "reply" the reply does not come back; "error": it fails.
        self.loses: Callable[[Any], str] = lambda _call: ""
        #: What is done before a write that takes, and behind Redis's answer; once each.
        self.before: list[Hook] = []
        self.after: list[Hook] = []
        #: Writes that take or acknowledge: the calls of each.
        self.writes: list[Sequence[Any]] = []
        #: How many of these were sent ahead, and whether the last one was.
        self.ahead, self.is_ahead = 0, False
        #: Those who are in a take now.
        self.waiting = 0
        run_many, start, take_for = Client.run_many, Client.start, Taker.take_for
        inside = threading.local()

        def sent(client: Client, calls: Sequence[Any], send: Callable[[list[Any]], Callable[[], list[Any]]]) -> Any:
            takes = any(map(is_take, calls))
            if any(map(is_take_or_ack, calls)):
                self.writes.append(calls)
            if takes and self.before:
                self.before.pop(0)()
            lost = [self.loses(call) for call in calls]
            receive = send([call for call, how in zip(calls, lost, strict=True) if how in ("", "reply")])
            errors: dict[str, Exception] = dict.fromkeys(("call", "reply"), RedisUnavailable("lost"))
            errors["error"] = ScriptError("failed")

            def finish() -> list[Any]:
                replies = iter(receive())
                answers = [next(replies) if how in ("", "reply") else None for how in lost]
                if takes and self.after:
                    self.after.pop(0)()
                return [errors.get(how, answer) for how, answer in zip(lost, answers, strict=True)]

            return finish

        def lossy(client: Client, calls: Sequence[Any], *args: Any, **options: Any) -> Any:
            self.is_ahead = False

            def send(left: list[Any]) -> Callable[[], list[Any]]:
                inside.is_running = True
                try:
                    replies = run_many(client, left, *args, **options)
                finally:
                    inside.is_running = False
                return lambda: replies

            return sent(client, calls, send)()

        def lossy_ahead(client: Client, calls: Sequence[Any], **options: Any) -> Any:
            if getattr(inside, "is_running", False) or not any(map(is_take_or_ack, calls)):
                return start(client, calls, **options)
            self.ahead, self.is_ahead = self.ahead + 1, True
            return sent(client, calls, lambda left: start(client, left, **options))

        def taking(taker: Taker, *args: Any) -> list[ConsumerJob]:
            self.waiting += 1
            try:
                return take_for(taker, *args)
            finally:
                self.waiting -= 1

        monkeypatch.setattr(Client, "run_many", lossy)
        monkeypatch.setattr(Client, "start", lossy_ahead)
        monkeypatch.setattr(Taker, "take_for", taking)


def is_take_or_ack(call: Any) -> bool:
    return bool(getattr(call, "script", "") == "ack_and_take")


def is_take(call: Any) -> bool:
    return bool(is_take_or_ack(call) and call.args[3] > 0)


def take(consumer: Consumer, count: int = 1) -> list[ConsumerJob]:
    """So many jobs, of as many takes as that needs."""
    jobs: list[ConsumerJob] = []
    while len(jobs) < count:
        taken = consumer.take(count - len(jobs), timeout=PATIENCE)
        assert taken
        jobs += taken
    return jobs
