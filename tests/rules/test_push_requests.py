"""What becomes of the requests of a push: their time, their outcomes, and what is sent again."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

import lowq
from lowq.errors import RedisFull, RedisUnavailable, ScriptError
from lowq.push.batcher import GroupCommit, ThreadRequest
from lowq.push.calls import Outcome, Part, Settled
from lowq.push.router import RefusedPush, Router
from lowq.push.write import Write, Writer
from lowq.sharding import Layout
from lowq.store import Client, Refusal, Wait
from lowq.store.pool import Pool
from tests.batches import within_batch
from tests.waiting import NEVER, PATIENCE


def part(*ids: str, shard: int = 0, words: bytes = b"") -> Part:
    target: Any = SimpleNamespace(queue="Orders")
    items: Any = [(job_id.encode(), b"1", b"", b"") for job_id in ids]
    return Part(target, Layout(4, 1), shard, f"shard-{shard}:", items, [{"id": job_id} for job_id in ids], words)


def request_of(*parts: Part, seconds: float = NEVER, room_until: float = 0.0) -> ThreadRequest:
    request = ThreadRequest(list(parts), len(parts), len(parts), seconds, room_until)
    request.expect()
    return request


@pytest.fixture
def client() -> Client:
    return Client("memory://", size=1, timeout=1.0)


def make_writer(client: Client, push_timeout: float = 2.0, wait: Wait | None = None) -> Writer:
    return Writer(client, push_timeout, wait, {})


class TestTime:
    def test_within_a_batch_redis_has_time_to_answer_a_push_that_waits_for_long(self, client: Client) -> None:
        writer = make_writer(client, wait=Wait("replicated", 5000.0))
        with within_batch(4000.0):
            write = Write(writer, [request_of(part("a"), seconds=7000.0)])
        assert write.begin().seconds > 0.5  # the first of several attempts

    def test_a_push_that_waits_for_room_ends_with_its_batch(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Router, "__missing__", lambda *_: SimpleNamespace(add=lambda _push: None))
        with within_batch(3.0):
            request = request_of(part("a"), seconds=2.0, room_until=time.monotonic() + 3.0)
        Router(client).take(make_writer(client), request)
        assert request.give_up_at <= request.deadline

    def test_the_batch_is_blamed_only_when_its_deadline_has_passed(self, client: Client) -> None:
        with within_batch(1000.0):
            cancelled = request_of(part("a"), seconds=2000.0)
        with within_batch(0.0):
            late = request_of(part("a"), seconds=2.0)
        for request, words in ((cancelled, "push_timeout=2 s"), (late, "the deadline of the batch")):
            make_writer(client).give_up(request)
            assert words in str(request.outcomes[request.parts[0]])

    def test_what_goes_to_several_servers_is_given_up_with_the_whole(self) -> None:
        whole = request_of(part("a"), part("b", shard=1))
        some = whole.some(whole.parts[1:])
        assert not some.is_abandoned()
        whole.abandoned = True
        assert some.is_abandoned()

    def test_a_large_push_waits_for_what_is_under_way(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        request = request_of(part("a"))

        def take(_router: Router, _writer: Writer, request: ThreadRequest, *, by_caller: bool) -> None:
            request.give_up_at = time.monotonic() - 1.0
            threading.Timer(0.1, answer).start()

        def answer() -> None:
            request.outcomes.setdefault(request.parts[0], True)
            request.wake_caller()

        monkeypatch.setattr(Router, "take", take)
        group = GroupCommit(client, PATIENCE)
        group.settle(Write(group.writer, [request]), [])
        assert request.outcomes[request.parts[0]] is True


OUT_OF_TURN = Refusal("OUTOFTURN", "token")


class TestOutcomes:
    @pytest.mark.parametrize("is_first", [True, False])
    def test_only_what_follows_a_failure_of_its_own_push_stays_out_of_turn(
        self, client: Client, *, is_first: bool
    ) -> None:
        """Other words have calls of their own, and the second one is shared."""
        mine = request_of(part("a", words=b" 1"), part("b", words=b" 2"))
        other = request_of(part("c", words=b" 2"))
        write = Write(make_writer(client), [mine, other] if is_first else [mine])
        write.share_calls()
        if not is_first:
            write.requests.append(other)
            write.calls[1].members.insert(0, (other, other.parts[0]))
        write.begin()
        write.settle([ScriptError("foreign key"), OUT_OF_TURN])
        assert list(mine.outcomes) == mine.parts
        assert (mine.again, other.again, other.outcomes) == ({}, {other.parts[0]: None}, {})

    def test_what_follows_a_failure_of_another_push_is_sent_again(self, client: Client) -> None:
        mine = request_of(part("a", words=b" 1"), part("b", words=b" 3"))
        other = request_of(part("c", words=b" 2"))
        write = Write(make_writer(client), [request_of(mine.parts[0]), other, request_of(mine.parts[1])])
        write.share_calls()
        for call in write.calls:
            call.members = [(mine, part) if part in mine.parts else (owner, part) for owner, part in call.members]
        write.begin()
        write.settle([1, ScriptError("foreign key"), OUT_OF_TURN])
        assert mine.outcomes == {mine.parts[0]: True}
        assert mine.again == {mine.parts[1]: None}

    def test_what_follows_a_failure_of_its_own_push_is_not_sent_again(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        added: list[RefusedPush] = []
        monkeypatch.setattr(Router, "__missing__", lambda *_: SimpleNamespace(add=added.append))
        request = request_of(part("a"), part("a", "b"), part("c", shard=1))
        request.outcomes[request.parts[0]] = RedisFull("no memory")
        request.again = dict.fromkeys(request.parts[1:])
        Router(client).take(make_writer(client), request)
        assert isinstance(request.outcomes[request.parts[1]], RedisFull)
        assert [push.parts for push in added] == [request.parts[2:]]

        request = request_of(part("a"), part("a", "b"))
        request.outcomes[request.parts[0]] = RedisFull("no memory")
        Router(client).take(make_writer(client), request)
        assert request.is_settled
        assert request.waiter.acquire(blocking=False), "its caller was woken"
        assert len(added) == 1

    def test_a_repeat_says_so_and_has_no_jobs_of_a_caller_that_has_given_up(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mine, other = request_of(part("a")), request_of(part("b"))
        sent: list[tuple[bytes, list[bytes]]] = []

        def start(calls: Any, **_: Any) -> Any:
            (call,) = calls
            assert call.leave_out_abandoned()
            sent.append((call.data[2], call.data[7::2]))
            other.abandoned = True
            return lambda: [1 if len(sent) > 1 else RedisUnavailable("no answer")]

        monkeypatch.setattr(client, "start", start)
        write = Write(make_writer(client), [mine, other])
        write.share_calls()
        write.send()
        assert sent == [(b"", [b"a", b"b"]), (b"1", [b"a"])]
        assert mine.outcomes == {mine.parts[0]: True}
        assert isinstance(other.outcomes[other.parts[0]], RedisUnavailable)

    def test_each_job_is_told_of_once_when_the_time_ends_while_the_caller_is_told(self, client: Client) -> None:
        parts = part("a"), part("b", shard=1)
        request = request_of(*parts)

        class Outcomes(dict[Part, Outcome]):
            time_is_up = False

            def setdefault(self, key: Part, default: Any = None) -> Any:
                found = super().setdefault(key, default)
                if not self.time_is_up:
                    self.time_is_up = True
                    request.fail(lowq.RedisUnavailable("its time is up"))
                return found

        request.outcomes = Outcomes()
        push = RefusedPush(make_writer(client), request, list(parts), {})
        push.give_up()
        push.end()
        told: list[Part] = []
        for one, outcome in request.outcomes.items():
            assert isinstance(outcome, Settled | Exception)
            told += [one] if isinstance(outcome, Exception) else [other for other, _ in outcome.pairs]
        assert told == list(parts)


def test_no_calls_need_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def checkout(*_args: object) -> None:
        raise AssertionError("it takes a connection")

    monkeypatch.setattr(Pool, "checkout", checkout)
    assert Client("redis://127.0.0.1:1/0", size=1, timeout=1.0).run_many([]) == []
