"""Where scores come from: the option ``score``, and that versions and times don't meet in a queue."""

import asyncio
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import pydantic
import pytest

import lowq
from lowq.errors import ConfigError, PayloadError
from lowq.testing import drain
from tests.rows import case


class Struct(msgspec.Struct):
    version: int = 7


@dataclass
class Data:
    version: int


class Model(pydantic.BaseModel):
    version: int


def make(app: lowq.Lowq, payload_type: Any = Any, **options: Any) -> Any:
    @app.worker(shards_count=1, **options)
    class Orders(lowq.Worker[payload_type]):
        seen: ClassVar[dict[str, list[Any]]] = {}

        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            self.seen.update(payloads_by_id)

    return Orders


def scores(queue: Any, job_id: str = "a") -> list[float]:
    job = queue.peek(job_id)
    return [] if job is None else [score for _, score in job.payloads]


def test_the_option_gives_each_payload_its_score(app: lowq.Lowq, store_url: str) -> None:
    kinds: list[tuple[Any, Any, Any]] = [
        (Any, "version", {"version": 7}), (Any, lambda payload: payload[0] * 7, [1]),
        (Struct, "version", Struct(7)), (Struct, "version", {}),  # it has it by default
        (Data, "version", Data(7)), (Model, lambda payload: payload.version, {"version": 7}),
    ]  # fmt: skip
    for number, (payload_type, score, payload) in enumerate(kinds):
        made = make(app, payload_type, score=score, queue_name=f"Orders{number}")
        pushes: list[Callable[[], Any]] = [
            lambda: made.push("a", payload, delay=60, priority=1),  # noqa: B023
            lambda: made.perform_async([{"id": "a", "payload": payload}] * 200),  # noqa: B023
            lambda: asyncio.run(made.apush("a", payload)),  # noqa: B023
        ]
        for push in pushes:
            with case(number):
                assert push()
                assert scores(made.queue) == [7.0]
                made.queue.delete(["a"])
        made.push("a", payload, score=3)
        assert scores(made.queue) == [3.0], "what is given wins"
    with closing(lowq.Lowq(redis_url=store_url)) as other:  # which only knows the name
        assert scores(other.queue("Orders0"), other.queue("Orders0").put({"version": 5})) == [5.0]


def test_a_payload_that_has_no_score_is_refused_and_the_field_named(app: lowq.Lowq) -> None:
    def broken(_payload: Any) -> Any:
        raise RuntimeError("no clue")

    wrong: list[tuple[Any, Any, str]] = [
        ("version", {}, "'version', .* Orders .* is missing; put that right, or push it with score="),
        ("version", [1], "is missing"),
        ("version", {"version": "7"}, "str; it must be a number"),
        ("version", {"version": 2**53 + 1}, "beyond 2[*][*]53"),
        (lambda _payload: math.nan, {}, "nan is not a finite number"),
        (broken, {}, "function .*broken.* raised RuntimeError"),
    ]
    for number, (score, payload, why) in enumerate(wrong):
        with case(number):
            made = make(app, score=score, queue_name=f"Orders{number}")
            with pytest.raises(PayloadError, match=rf"queue 'Orders{number}': job 'a': .*{why}"):
                asyncio.run(made.apush("a", payload))
            with pytest.raises(PayloadError, match=why):
                made.perform_async([{"id": "b", "payload": {}, "score": 1}, {"id": "a", "payload": payload}])
    assert not app.client.command("KEYS", "*Orders*payloads*"), "nothing is written"
    for score in ("", 5, lambda: 1, asyncio.sleep):
        with case(score), pytest.raises(ConfigError, match=r"score=.* must be the name of a field"):
            app.queue("mail", 1, score=score)  # type: ignore[arg-type]


def test_a_version_that_was_pushed_without_its_score_does_not_pass_for_the_newest(app: lowq.Lowq) -> None:
    made = make(app)
    for version in (1, 5):
        made.push("a", {"version": version}, score=version)
    pushes: list[Any] = [made.push, made.queue.push, lambda *job: asyncio.run(made.apush(*job))]
    for push in pushes:
        with pytest.raises(PayloadError, match=r"job 'a' has no score, .* score='version'.*nothing was written"):
            push("a", {"version": 4})
    assert drain(made).performed == 1
    assert made.seen["a"][-1] == {"version": 5}
    with pytest.raises(PayloadError, match="has no score"):
        made.push("a", {"version": 6})  # also when nothing waits any more
    with pytest.raises(PayloadError, match="job 7 has no score"):
        made.perform_async([{"id": "a", "score": 7}, {"id": 7}, {"id": "b", "score": 1}])
    made.queue.drop()
    assert made.push("a", {"version": 6}) == 1


def test_a_version_is_refused_where_what_was_pushed_without_has_the_time(app: lowq.Lowq) -> None:
    made = make(app)
    made.push("a", {"version": 4})
    with pytest.raises(PayloadError, match=r"job 'a' has a score, 5, and others .*; nothing was written"):
        made.push("a", {"version": 5}, score=5)
    assert len(scores(made.queue)) == 1
    made.queue.bury(["a"])
    made.push("a", {"version": 5}, score=5)
    with pytest.raises(PayloadError, match="has no score"):
        made.push("a", {"version": 6})


def test_scores_that_may_be_times_and_huge_ones_go_with_both(app: lowq.Lowq) -> None:
    times, versions = app.queue("times", 1), app.queue("versions", 1)
    times.push("a")
    versions.push("a", score=5)
    for score in (1e9, 2**33 - 1, 2**40, 2**53):
        times.push("a", score, score=score)
        versions.push("a", score, score=score)
    for score in (-1, 1e9 - 1, 2**33, 2**40 - 1):
        versions.push("b", score=score)
        with case(score), pytest.raises(PayloadError):
            times.push("b", score=score)


def test_of_pushes_that_go_together_those_of_the_other_kind_fail(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 1)

    async def produce() -> list[Any]:
        await queue.apush("first", score=1)
        pushes = (queue.apush(n, score=n) if n % 3 else queue.apush(n) for n in range(30))
        return await asyncio.gather(*pushes, return_exceptions=True)

    for number, outcome in enumerate(asyncio.run(produce())):
        assert outcome == 1 if number % 3 else isinstance(outcome, PayloadError), outcome
    assert queue.stats().length == 21


def test_a_reshard_takes_along_which_kind_it_is(app: lowq.Lowq) -> None:
    kinds: list[tuple[str, dict[str, Any], dict[str, Any]]] = [("Orders", {"score": 1}, {}), ("Mail", {}, {"score": 1})]
    for name, first, other in kinds:
        queue = app.queue(name, 2)
        queue.push([{"id": number, **first} for number in range(30)])
        queue.reshard(3)
        for number in range(30):
            with pytest.raises(PayloadError):
                queue.push([{"id": number, **other}])
            assert queue.push([{"id": number, **first}]) == 1
