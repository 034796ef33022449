"""The way of consumers' calls to Redis and back: what gets lost on it, and what happens meanwhile."""

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
        #: Those who are in a take now.
        self.waiting = 0
        run_many, take_for = Client.run_many, Taker.take_for

        def lossy(client: Client, calls: Sequence[Any], *args: Any, **options: Any) -> list[Any]:
            takes = any(map(is_take, calls))
            if any(getattr(call, "script", "") == "ack_and_take" for call in calls):
                self.writes.append(calls)
            if takes and self.before:
                self.before.pop(0)()
            lost = [self.loses(call) for call in calls]
            sent = [call for call, how in zip(calls, lost, strict=True) if how in ("", "reply")]
            replies = iter(run_many(client, sent, *args, **options))
            errors: dict[str, Exception] = dict.fromkeys(("call", "reply"), RedisUnavailable("lost"))
            errors["error"] = ScriptError("failed")
            answers = [next(replies) if how in ("", "reply") else None for how in lost]
            if takes and self.after:
                self.after.pop(0)()
            return [errors.get(how, answer) for how, answer in zip(lost, answers, strict=True)]

        def taking(taker: Taker, *args: Any) -> list[ConsumerJob]:
            self.waiting += 1
            try:
                return take_for(taker, *args)
            finally:
                self.waiting -= 1

        monkeypatch.setattr(Client, "run_many", lossy)
        monkeypatch.setattr(Taker, "take_for", taking)


def is_take(call: Any) -> bool:
    return bool(getattr(call, "script", "") == "ack_and_take" and call.args[3] > 0)


def take(consumer: Consumer, count: int = 1) -> list[ConsumerJob]:
    """So many jobs, of as many takes as that needs."""
    jobs: list[ConsumerJob] = []
    while len(jobs) < count:
        taken = consumer.take(count - len(jobs), timeout=PATIENCE)
        assert taken
        jobs += taken
    return jobs
