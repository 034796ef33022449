"""What becomes of the payloads of an id: `collapse`, `append`, `latest`, or a function."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

import lowq
import lowq.testing
from lowq.errors import PayloadError
from lowq.queue import Queue
from lowq.workers import Worker
from tests.rows import case
from tests.rules.conftest import MakeApp


def emptied(app: lowq.Lowq) -> lowq.Lowq:
    """The application, on a store without what another row has left."""
    app.client.command("FLUSHALL")
    return app


class Site:
    """A worker that notes what it gets, and fails when it is told to."""

    def __init__(self, app: lowq.Lowq, **options: Any) -> None:
        self.seen: list[dict[str, list[Any]]] = []
        self.fails = False

        @app.worker(queue_name="q", shards_count=1, **options)
        def work(payloads_by_id: dict[str, list[Any]]) -> None:
            self.seen.append(payloads_by_id)
            if self.fails:
                raise ValueError("not now")

        self.worker: type[Worker[Any]] = work
        self.queue: Queue = work.queue

    def push(self, *payloads: Any, score: float | None = None, job_id: str = "x") -> None:
        for payload in payloads:
            self.worker.perform_async({"id": job_id, "payload": payload} | ({} if score is None else {"score": score}))

    def drain(self, later: float = 0.0) -> list[Any]:
        """What the worker gets by then: the payloads of each run."""
        self.seen.clear()
        lowq.testing.drain(self.worker, now=time.time() + later if later else None)
        return [payloads for by_id in self.seen for payloads in by_id.values()]

    def waiting(self) -> list[Any]:
        found = self.queue.peek("x")
        return [] if found is None else [payload for payload, _ in found.payloads]


# --- append ---


def test_equal_payloads_stay_two_in_the_order_of_scores_and_arrival(app: lowq.Lowq) -> None:
    site = Site(app, merge="append", max_payloads=3000)
    site.push("b", "a", "b", "c", score=1)
    site.push("first", score=0)
    assert site.waiting() == ["first", "b", "a", "b", "c"]
    assert site.drain() == [["first", "b", "a", "b", "c"]]
    site.worker.perform_async({"id": "x", "payload": "same", "score": 2} for _ in range(2500))
    assert site.drain() == [["same"] * 2500]


def test_whatever_is_pushed_comes_back(make_app: MakeApp) -> None:
    payload: Any
    for payload in ("", {"k": [1, None]}, "x" * 4079, "x" * 4080, "x" * 5000, "\0\0a"):
        with case(len(payload), payload):
            site = Site(emptied(make_app()), merge="append")
            site.push(payload)
            assert site.waiting() == [payload]
            site.push(payload)
            assert site.drain() == [[payload, payload]]


def test_what_failed_and_what_was_buried_meets_equal_payloads_that_came_meanwhile(make_app: MakeApp) -> None:
    site = Site(make_app(), merge="append", max_retry_count=0)
    site.push("a", "a")
    site.fails = True
    site.drain()  # each of them is the oldest once
    assert [payload for payload, _ in site.queue.jobs("morgue").jobs[0].payloads] == ["a", "a"]
    site.queue.kick("x")
    site.push("a")
    retried = Site(make_app(), merge="append")
    retried.fails = True
    assert retried.drain() == [["a", "a", "a"]]
    retried.push("a")
    retried.fails = False
    assert retried.drain(later=3600) == [["a", "a", "a", "a"]]


def test_with_one_payload_at_a_time_an_id_is_a_queue_of_its_own(app: lowq.Lowq) -> None:
    site = Site(app, merge="append", max_payloads=1)
    site.push("a", "a", "b")
    site.push("a", job_id="y")
    assert sorted(site.drain()) == [["a"], ["a"], ["a"], ["b"]]
    assert [by_id["x"] for by_id in site.seen if "x" in by_id] == [["a"], ["a"], ["b"]]


def test_hooks_and_jobs_in_hand_see_what_was_pushed(app: lowq.Lowq) -> None:
    found: list[Any] = []

    class Sync(lowq.Worker[Any]):
        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            found.extend(job.payloads for job in lowq.current().jobs)
            raise ValueError

        def retries_exhausted(self, jobs: list[lowq.Job]) -> None:
            found.extend(job.payloads for job in jobs)

    app.worker(merge="append", max_retry_count=0)(Sync)
    Sync.perform_async({"id": 1, "payload": "a", "score": 5})
    lowq.testing.drain(Sync)
    assert found == [[("a", 5.0)], [("a", 5.0)]]


def test_what_a_codec_of_ones_own_can_not_decode_is_buried(make_app: MakeApp) -> None:
    known = {b"a": "a", b"b": "b"}
    site = Site(make_app(dump_payload=str.encode, load_payload=known.__getitem__), merge="append")
    site.push("a", "spoilt", "spoilt", "b")
    assert site.drain() == [["a", "b"]]
    assert site.queue.stats().morgue_length == 1
    assert site.queue.jobs("morgue").jobs[0].payloads_count == 2


def test_a_payload_that_looks_like_lowqs_own_is_refused(make_app: MakeApp) -> None:
    for merge in ("collapse", "append", "latest"):
        with case(merge):
            site = Site(emptied(make_app(dump_payload=lambda value: value, load_payload=bytes)), merge=merge)
            with pytest.raises(PayloadError, match="must give bytes, without"):
                site.push(b"\0\0a" + b"0" * 20)
            assert site.drain() == []
            site.push(b"\0\0b", b"\0\0")
            assert site.drain() == [[b"\0\0b", b"\0\0"]] if merge != "latest" else [[b"\0\0"]]


# --- latest ---


def test_only_the_highest_score_stays_also_of_what_comes_back(app: lowq.Lowq) -> None:
    site = Site(app, merge="latest")
    for payload, score, waiting in (("a", 5, "a"), ("old", 3, "a"), ("b", 7, "b"), ("c", 7, "c")):
        site.push(payload, score=score)
        assert site.waiting() == [waiting]
    with site.queue.consumer() as consumer:
        (job,) = consumer.take()
        assert job.payloads == ["c"]
        site.push("d", score=8)
        job.fail("no", delay=0)
        assert site.waiting() == ["d"]
        (job,) = consumer.take()
        site.push("stale", score=1)
        job.release()
        assert site.waiting() == ["d"]


def test_a_kicked_payload_is_the_latest_or_gone(app: lowq.Lowq) -> None:
    site = Site(app, merge="latest", max_retry_count=0)
    site.fails = True
    for payload in ("a", "b"):
        site.push(payload)
        site.drain()
    assert site.queue.peek("x", "morgue") is not None
    site.queue.kick("x")
    assert site.waiting() == ["b"]
    site.queue.bury("x")
    site.push("c")
    site.queue.kick("x")
    assert site.waiting() == ["c"]


# --- a policy that changes ---


def test_a_policy_may_change_while_jobs_wait(make_app: MakeApp) -> None:
    rows: list[tuple[Sequence[str], list[str]]] = [
        (("collapse", "append"), ["a", "a", "b", "b"]),
        (("append", "collapse"), ["a", "b", "b", "a", "b"]),
        (("collapse", "latest"), ["b"]),
        (("append", "latest"), ["b"]),
        (("latest", "collapse"), ["b", "a"]),
        (("latest", "append"), ["b", "a", "b", "b"]),
    ]
    for policies, handed in rows:
        with case(*policies):
            emptied(make_app())
            sites = [Site(make_app(), merge=policy) for policy in policies]
            for site in sites:
                site.push("a", "b", "b")
            expected = handed if policies[0] != "collapse" or policies[1] != "append" else ["a", "b", "a", "b", "b"]
            assert sites[1].drain() == [expected]
            sites[1].push("c")
            assert sites[1].drain() == [["c"]]


# --- a function ---


def total(payloads: list[int]) -> list[int]:
    return [sum(payloads)]


def test_a_function_makes_of_the_payloads_what_is_handed_over(app: lowq.Lowq) -> None:
    site = Site(app, merge=total, batch_size=10)
    site.push(3, 4, 4, 5)
    assert site.waiting() == [3, 4, 5]
    assert site.drain() == [[12]]
    site.push(1, "two", job_id="x")
    site.push(1, 2, job_id="y")
    assert site.drain() == [[3]], "what can not be merged is kept"
    job = site.queue.fetch("x")["x"]
    assert (job.retry_count, [payload for payload, _ in job.payloads]) == (0, [1, "two"])
    assert "unsupported operand" in (job.error or "")


def test_a_function_that_gives_no_list_or_spoils_its_own_fails_the_job(app: lowq.Lowq) -> None:
    site = Site(app, merge=lambda payloads: payloads.pop())
    site.push(1, 2)
    assert site.drain() == []
    assert site.waiting() == [1, 2]
    job = site.queue.fetch("x")["x"]
    assert "gave 2; it must return the list of payloads" in (job.error or "")


def test_a_job_of_which_nothing_is_left_is_done(app: lowq.Lowq) -> None:
    site = Site(app, merge=lambda payloads: [payload for payload in payloads if payload], batch_size=2)
    site.push(0)
    site.push(0, 1, job_id="y")
    assert site.drain() == [[1]]
    assert site.queue.stats().length == 0
    site.push(0)
    with site.queue.consumer() as consumer:
        assert consumer.take(timeout=0) == []
        assert site.queue.stats().length == site.queue.stats().taken == 0


def test_an_async_worker_has_merged_payloads_as_well(app: lowq.Lowq) -> None:
    seen: list[Any] = []

    @app.worker(merge=total, shards_count=1)
    async def work(payloads_by_id: dict[str, list[Any]]) -> None:
        seen.append(payloads_by_id)

    work.perform_async({"id": "x", "payload": n} for n in (1, 2))
    lowq.testing.drain(work)
    assert seen == [{"x": [3]}]


def test_a_consumer_gets_merged_payloads_and_fails_what_can_not_be_merged(app: lowq.Lowq) -> None:
    queue = app.queue("mail", 1, merge=total)
    queue.push([{"id": "x", "payload": "one"}, *({"id": job_id, "payload": 2} for job_id in "xy")])
    queue.push("y", 3)
    with queue.consumer() as consumer:
        (job,) = consumer.take(10)
        assert (job.id, job.payloads) == ("y", [5])
        job.release()
    found = queue.fetch(["x", "y"])
    assert (found["x"].retry_count, [payload for payload, _ in found["x"].payloads]) == (0, ["one", 2])
    assert [payload for payload, _ in found["y"].payloads] == [2, 3]
