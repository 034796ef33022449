"""The leases of a node: who gets a shard, when it is tried for, when it is given up; by a clock that the tests move."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from secrets import token_hex
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lowq.codec import load_payload
from lowq.errors import LeaseLost, RedisUnavailable, ScriptError
from lowq.shards.dispatcher import Dispatcher
from lowq.shards.lease import Lease
from lowq.shards.leases import Leases
from lowq.shards.permits import Share
from lowq.shards.scheduler import LagScheduler, is_ready
from lowq.shards.shard import Shard
from lowq.shards.wakeups import Listener
from lowq.store import Call, Client
from tests.leases import run_out
from tests.rows import case
from tests.rules.shards.dispatching import Waiting, delivery
from tests.rules.support import TTL, job, run_script
from tests.waiting import PATIENCE

pytestmark = pytest.mark.parametrize("store_url", ["memory"], indirect=True)

AWAY = RedisUnavailable("away")
POLL = 2.0
OLD, NEXT = ("127.0.0.1", 1), ("127.0.0.1", 2)


class Line:
    """The way to Redis. What is noticed on it, and which calls fail, without having got there."""

    def __init__(self, url: str) -> None:
        self.client = Client(url, size=2, timeout=PATIENCE)
        self.errors: dict[tuple[str, str], Exception] = {}
        #: The server, if that may change, and for how many seconds it has been running.
        self.address: tuple[str, int] | None = None
        self.age = float("inf")
        self.on_send: Callable[[], object] = lambda: None
        self.calls: list[Call[Any]] = []

    def run_many(self, calls: Sequence[Call[Any]], repeats: int = 0) -> list[Any]:
        self.on_send()
        replies: list[Any] = []
        for call in calls:
            error = self.errors.get((call.script, call.key))
            if error is None and (call.only_if is None or call.only_if(call)):
                self.calls.append(call)
                replies += self.client.run_many([call])
            else:
                replies.append(error or AWAY)
        return replies

    def address_of(self, key: str) -> tuple[str, int] | None:
        return self.address

    def server_age(self) -> float:
        return self.age


class Rig:
    """The leases of a node in a queue of three shards. `heard`: of which shards it listens to which channel."""

    def __init__(self, url: str, line: Line | None = None, *, resumes: bool = False) -> None:
        self.now = 1000.0
        self.line = line or Line(url)
        self.shards = [self._shard(index, "me") for index in range(3)]
        self.heard: dict[Shard, str] = {}
        self.listener = SimpleNamespace(
            listen_for_wakes=lambda shards: self.heard.update(dict.fromkeys(shards, "wake")),
            listen_for_releases=lambda shards: self.heard.update(dict.fromkeys(shards, "free")),
            ignore=lambda shards: [self.heard.pop(shard, None) for shard in shards],
        )
        self.dispatcher = Dispatcher(
            self.shards, [{"q": LagScheduler()}], {"q": Share()}, clock=lambda: self.now
        )  # fmt: skip
        self.leases = Leases(
            cast(Client, self.line), self.shards, {"q": self.dispatcher}, cast(Listener, self.listener), TTL,
            poll_interval=POLL, resumes=resumes, clock=lambda: self.now,
        )  # fmt: skip

    def _shard(self, index: int, nonce: str) -> Shard:
        return Shard(
            self.line.client, "lowq", "q", index, shards_count=3, nonce=nonce, load_payload=load_payload,
            clock=lambda: self.now,
        )  # fmt: skip

    def acquire(self, after: float = 0.0) -> list[Shard]:
        """Tries for what is due, so many seconds later; returns all that are held then."""
        self.now += after
        self.leases.acquire(self.now)
        return self.leases.held

    def hold(self, *shards: Shard) -> None:
        """The node wants these, and gets them."""
        self.leases.want(shards)
        assert set(shards) <= set(self.acquire())

    def run_out(self, *shards: Shard) -> None:
        for shard in shards:
            run_out(self.line.client, shard.prefix)

    def others(self, shard: Shard, seconds: float = TTL) -> None:
        """Somebody else has got it."""
        self.run_out(shard)
        assert isinstance(self._shard(shard.index, "other").lease.acquire(seconds), Lease)

    def tokens(self) -> dict[Shard, str]:
        found = {shard: self.line.client.command("GET", f"{shard.prefix}lease") for shard in self.shards}
        return {shard: raw.decode() for shard, raw in found.items() if raw is not None}

    def asked(self, script: str, shard: Shard) -> int:
        return sum(call.script == script and call.key == shard.prefix for call in self.line.calls)

    def work(self, shard: Shard) -> Shard:
        """A thread claims it."""
        for other in self.shards:
            self.dispatcher.rest(other, TTL)
        self.dispatcher.wake(shard)
        assert self.dispatcher.pick(0) is shard
        return shard

    def push(self, shard: Shard, *, job_id: str = "x", delay: float = 0.0, ttl: float | None = None) -> None:
        """Pushes a job. The message of it is lost."""
        more = job(job_id, delay=delay, ttl=ttl)
        run_script(
            self.line.client, "push", shard.prefix, "", token_hex(4), "", 3, f"{len(more)} anew=1", 15, "", *more
        )  # fmt: skip

    def look(self, after: float = 0.0, *, renews: bool = True) -> list[Shard]:
        """Renews the leases, so many seconds later, and asks what is to be asked; returns what a thread would work."""
        self.now += after
        if renews:
            self.leases.renew()
        self.leases.refresh(self.now)
        return [shard for shard in self.shards if is_ready(0, self.now, shard)]

    def is_worked(self, shard: Shard) -> bool:
        """Whether a thread would work it, had it a job."""
        self.dispatcher.wake(shard)
        return is_ready(0, self.now, shard)


@pytest.fixture
def rig(store_url: str) -> Iterator[Rig]:
    made = Rig(store_url)
    yield made
    made.line.client.close()


def fence_of(shard: Shard) -> int:
    assert shard.lease.current is not None
    return shard.lease.current.fence


# --- getting shards ---


def test_what_is_wanted_is_got_listened_to_and_looked_at(rig: Rig) -> None:
    a, b, _ = rig.shards
    rig.hold(a, b)
    assert rig.heard == {a: "wake", b: "wake"}
    assert is_ready(0, rig.now, a), "nobody knows whether it has jobs"
    assert rig.leases.next_try == float("inf")


def test_a_shard_of_somebody_else_is_tried_for_when_its_lease_runs_out(rig: Rig) -> None:
    a = rig.shards[0]
    for seconds, most in ((TTL / 2, TTL / 2), (6 * TTL, TTL)):  # no longer than a lease, whatever Redis says
        with case(seconds):
            rig.others(a, seconds)
            rig.line.client.command("HDEL", f"{a.prefix}meta", "lease_ttl")
            rig.leases.want([a])
            rig.leases.try_for(a, 0.0)
            rig.acquire()
            assert rig.heard == {a: "free"}
            assert most - PATIENCE < rig.leases.next_try - rig.now < most + 0.1
            asked = rig.asked("acquire", a)
            rig.acquire(most - PATIENCE)
            assert rig.asked("acquire", a) == asked
            rig.run_out(a)
            assert rig.acquire(PATIENCE + 0.1) == [a]
            assert rig.heard == {a: "wake"}


def test_when_another_server_serves_it_a_shard_is_left_to_its_holder_for_a_lease(rig: Rig) -> None:
    """The replica that became it may lack the last renewal: its lease runs out before its holder stops."""
    a, b, c = rig.shards
    rig.line.address = OLD
    rig.others(b)
    rig.leases.want([a, b])  # c is wanted later: its holder is gone together with the primary
    assert rig.acquire() == [a], "which a process that starts with a server gets at once"
    rig.leases.renew()
    rig.line.address = NEXT
    rig.run_out(a, b)
    rig.leases.renew()
    rig.leases.want([a, b, c])
    assert rig.acquire() == [a], "its own one is got at once"
    rig.leases.try_for(b, 0.0)
    assert rig.acquire(TTL - 1) == [a]
    assert rig.asked("acquire", b) == 1, "before the failover"
    assert rig.acquire(1.1) == [a, b, c]


def test_nor_is_it_got_when_that_is_noticed_while_it_is_asked_for(rig: Rig) -> None:
    a = rig.shards[0]
    rig.line.address = OLD
    rig.others(a)
    rig.leases.want([a])
    rig.acquire()
    rig.run_out(a)
    rig.line.on_send = lambda: setattr(rig.line, "address", NEXT)
    rig.leases.try_for(a, 0.0)
    with pytest.raises(RedisUnavailable):
        rig.acquire()
    assert rig.tokens() == {}


def test_what_is_not_wanted_any_more_is_not_tried_for(rig: Rig) -> None:
    a = rig.shards[0]
    rig.others(a)
    rig.leases.want([a])
    rig.acquire()
    rig.leases.want([])
    rig.run_out(a)
    rig.leases.try_for(a, 0.0)  # word that it is free
    assert rig.acquire(TTL) == []
    assert rig.leases.next_try == float("inf")
    assert rig.heard == {}


def test_trouble_with_one_shard_or_the_listener_keeps_no_other_from_being_got(rig: Rig) -> None:
    a, b, c = rig.shards
    rig.line.errors["acquire", a.prefix] = ScriptError("broken")
    rig.leases.want([a, b, c])
    assert rig.acquire() == [b, c]
    assert isinstance(rig.leases.clear_trouble(), ScriptError)
    rig.line.errors.clear()
    rig.listener.listen_for_wakes = lambda _: rig.missing  # type: ignore[attr-defined]  # as of a connection that was closed
    with pytest.raises(AttributeError):
        rig.acquire(1.1)
    assert rig.leases.held == [a, b, c]
    assert rig.is_worked(a)


# --- giving shards up ---


def test_a_shard_that_a_thread_works_is_kept_until_it_rests(rig: Rig) -> None:
    a = rig.shards[0]
    rig.hold(a)
    claimed = rig.work(a)
    rig.leases.want([])
    assert not rig.leases.give_up()
    rig.leases.renew()
    assert rig.leases.held == [a]
    assert rig.dispatcher.pick(0) is None, "no further batch"
    rig.leases.want([a])
    assert not rig.leases.give_up()
    assert rig.dispatcher.pick(0) is a, "as it is wanted again"
    rig.leases.want([])
    rig.dispatcher.unclaim(claimed)
    assert not rig.is_worked(a)
    assert rig.leases.give_up()
    assert (rig.tokens(), rig.heard, rig.leases.held) == ({}, {}, [])


def test_a_lease_in_doubt_of_what_is_not_wanted_does_not_make_it_worked_again(rig: Rig) -> None:
    a = rig.shards[0]
    rig.hold(a)
    claimed = rig.work(a)
    rig.leases.want([])
    rig.run_out(a)
    rig.leases.renew()  # told that it is lost, while a thread works it
    assert rig.acquire() == [a], "nobody else gets it while that lasts"
    rig.dispatcher.unclaim(claimed)
    assert not rig.is_worked(a)
    assert rig.leases.give_up()
    assert rig.tokens() == {}


def test_a_surrender_without_an_answer_is_repeated_and_one_of_a_lost_shard_is_not(rig: Rig) -> None:
    a, b, c = rig.shards
    rig.hold(a, b, c)
    rig.others(c)
    rig.leases.want([b])
    rig.line.errors["surrender", a.prefix] = ScriptError("no")
    rig.leases.give_up()
    assert rig.leases.held == [a, b]
    rig.line.errors.clear()
    assert rig.leases.give_up()
    assert rig.leases.held == [b]
    assert set(rig.tokens()) == {b, c}


def test_what_is_left_in_flight_of_a_shard_that_is_given_up_is_not_charged(rig: Rig) -> None:
    a, client = rig.shards[0], rig.line.client
    rig.hold(a)
    run_script(client, "push", a.prefix, "", "token", "", 3, "4 anew=1", 15, "", *job("x"))
    a.in_flight.take(1)
    rig.leases.want([])
    rig.leases.give_up()
    assert rig.leases.held == []
    rig.run_out(a)
    rig.others(a)
    assert client.command("HGETALL", f"{a.prefix}crashes") == [b"x", b"0 1"]


# --- keeping them ---


def test_a_lease_lasts_from_before_its_renewal_was_sent(rig: Rig) -> None:
    a = rig.shards[0]
    rig.line.on_send = lambda: setattr(rig, "now", rig.now + 5.0)
    rig.hold(a)
    assert a.lease.deadline == 1000.0 + TTL
    rig.leases.renew()
    assert a.lease.deadline == 1005.0 + TTL


def test_a_lease_that_may_have_run_out_is_acquired_anew_though_redis_still_has_it(rig: Rig) -> None:
    """The server may be a new primary, with a clock behind that of the old one, where another node had the shard."""
    a, b, _ = rig.shards
    rig.hold(a, b)
    tokens, fences = rig.tokens(), (fence_of(a), fence_of(b))
    rig.now += TTL - 1
    rig.leases.asked.add(b)
    rig.leases.renew(only_asked=True)
    rig.now += 1
    assert not rig.is_worked(a)
    rig.leases.renew()
    assert not rig.is_worked(a), "its renewal doesn't count"
    assert rig.is_worked(b)
    assert set(rig.acquire()) == {a, b}
    assert (fence_of(a) > fences[0], fence_of(b)) == (True, fences[1])
    assert (rig.is_worked(a), rig.tokens()) == (True, tokens)


def test_a_lease_that_is_asked_for_while_others_are_renewed_is_renewed_next(rig: Rig) -> None:
    a, b, _ = rig.shards
    rig.hold(a, b)
    rig.leases.asked.add(a)
    ask = partial(rig.leases.asked.add, b)  # as the listener leaves it to the maintenance loop
    rig.leases.renew(only_asked=True)
    ask()
    rig.leases.renew(only_asked=True)
    assert (rig.asked("renew", a), rig.asked("renew", b)) == (1, 1)


def test_a_lease_that_was_lost_is_found_out_about(rig: Rig) -> None:
    a, b, _ = rig.shards
    for how in ("renewed", "asked", "told"):
        with case(how):
            rig.run_out(a)
            rig.leases.try_for(a, 0.0)
            rig.hold(a, b)
            if how == "asked":
                rig.dispatcher.note_delivery(a, a.dispatch.wakes, delivery())
                rig.push(a, job_id=token_hex(4))
                rig.leases.renew()
            rig.others(a)
            if how == "told":
                rig.leases.try_for(a, 0.0)
            else:
                rig.leases.renew() if how == "renewed" else rig.leases.refresh(rig.now)
                assert not rig.is_worked(a), "nothing of it is begun meanwhile"
            assert rig.acquire() == [b]
            assert rig.heard == {a: "free", b: "wake"}


def test_a_renewal_that_came_late_wakes_who_left_the_shard_alone(rig: Rig, waiting: Waiting) -> None:
    a = rig.shards[0]
    rig.hold(a)
    dispatch = Dispatcher(rig.shards, [{"q": LagScheduler()}], {"q": Share()}, clock=waiting.clock)
    rig.leases = Leases(
        cast(Client, rig.line),
        rig.shards,
        {"q": dispatch},
        cast(Listener, rig.listener),
        TTL,
        poll_interval=POLL,
        clock=waiting.clock,
    )
    a.lease.deadline = 0.0
    future = waiting.wait(dispatch, 0)
    assert not future.done()
    rig.leases.renew()
    rig.leases.acquire(waiting.clock())
    assert future.result(PATIENCE) is a


# --- wake-ups that get lost ---


def test_work_that_nobody_has_announced_is_found_with_the_next_renewal(rig: Rig) -> None:
    a, b, c = rig.shards
    rig.hold(a, b, c)
    for shard in rig.shards:
        rig.dispatcher.note_delivery(shard, shard.dispatch.wakes, delivery())
    assert rig.look() == []
    rig.push(a, delay=100.0)
    assert rig.look() == []
    assert a.next_due == pytest.approx(rig.now + 100.0, abs=PATIENCE)
    rig.push(b)
    rig.push(c, ttl=1000.0, delay=50.0)
    assert rig.look() == [b]
    assert c.in_flight.has_ttl, "it is to be swept"
    asked = rig.asked("ack_and_take", b)
    assert rig.look() == [b]
    assert rig.asked("ack_and_take", b) == asked, "what is known is not asked again"


def test_whatever_a_holder_may_have_missed_is_found_with_the_next_renewal(rig: Rig) -> None:
    a = rig.shards[0]
    for what in ("resumed", "in flight, in nobody's hand", "full no more"):
        with case(what):
            rig.line.client.command("FLUSHALL")
            rig.leases.try_for(a, 0.0)
            rig.hold(a)
            rig.push(a)
            paused = what == "resumed"
            if what == "in flight, in nobody's hand":
                a.in_flight.take(1)
                a.in_flight.drop_delivery()
            a.in_flight.full_under = a.lease.current if what == "full no more" else None
            known = delivery(0.0 if paused or what == "full no more" else None, paused=paused)
            rig.dispatcher.note_delivery(a, a.dispatch.wakes, known)
            assert not is_ready(0, rig.now, a)
            assert rig.look() == [a]


def test_while_wake_ups_get_lost_idle_shards_are_asked_again_and_again(rig: Rig) -> None:
    a, b, _ = rig.shards
    rig.hold(a, b)
    for shard in (a, b):
        rig.dispatcher.note_delivery(shard, shard.dispatch.wakes, delivery())
    rig.push(a)
    assert rig.look() == [a]
    rig.push(b)
    assert rig.look(0.5, renews=False) == [a], "perhaps the message is only late"
    assert rig.look(0.6, renews=False) == [a, b], "it was lost: others may be, too"
    calls = len(rig.line.calls)
    for _ in range(100):
        rig.look(1.0, renews=False)
    assert 2 * 60 / POLL <= len(rig.line.calls) - calls + 2 <= 2 * (60 / POLL + 2)
    assert rig.leases.refresh(rig.now) == float("inf"), "none was lost since"


def test_a_message_that_is_only_late_has_nobody_asked_again(rig: Rig) -> None:
    a, b, _ = rig.shards
    rig.hold(a, b)
    rig.dispatcher.note_delivery(a, a.dispatch.wakes, delivery())
    rig.push(a)
    assert a in rig.look()
    rig.dispatcher.wake(a)
    calls = len(rig.line.calls)
    rig.look(1.1, renews=False)
    rig.look(POLL, renews=False)
    assert len(rig.line.calls) == calls


def test_no_answer_at_all_is_an_outage(rig: Rig) -> None:
    rig.hold(*rig.shards)
    for script in ("renew", "surrender"):
        rig.line.errors |= {(script, shard.prefix): AWAY for shard in rig.shards}
    with pytest.raises(RedisUnavailable):
        rig.leases.renew()
    assert rig.leases.held == rig.shards
    with pytest.raises(RedisUnavailable):
        rig.leases.leave(1.0)


# --- after an outage ---


def test_whoever_held_a_shard_gets_a_head_start(rig: Rig) -> None:
    a, b, _ = rig.shards
    rig.hold(a)
    rig.others(b)
    rig.leases.want([a, b])
    rig.acquire()
    for what in ("Redis was away", "its server was started anew"):
        with case(what):
            rig.others(b)
            rig.leases.try_for(b, 0.0)
            rig.acquire(2 * TTL)
            rig.run_out(a, b)
            rig.line.age = float("inf") if what == "Redis was away" else 0.0
            if what == "Redis was away":
                rig.leases.was_away()
            rig.leases.try_for(a, 0.0)
            rig.leases.try_for(b, 0.0)
            assert rig.acquire() == [a]
            assert rig.leases.next_try == rig.now + TTL / 3
            rig.line.age += TTL / 3
            assert rig.acquire(TTL / 3) == [a, b], "it was the outage that counts, not the last attempt"


def test_who_has_given_a_shard_up_has_no_head_start(rig: Rig) -> None:
    a = rig.shards[0]
    rig.hold(a)
    rig.leases.want([])
    rig.leases.give_up()
    rig.leases.want([a])
    rig.leases.was_away()
    assert rig.acquire() == []


def test_a_crash_is_charged_only_when_redis_was_there_all_the_time(rig: Rig) -> None:
    a = rig.shards[0]

    def is_charged(after: float = 0.0) -> bool:
        rig.leases.try_for(a, 0.0)
        rig.acquire(after)
        return rig.line.calls[-1].args[6] == ""

    rig.hold(a)
    assert is_charged()
    rig.run_out(a)
    rig.leases.was_away()
    assert not is_charged()
    assert is_charged(TTL + 1)
    rig.line.age = 3.0  # it was started anew
    assert not is_charged(TTL + 1)


# --- new code ---


def test_new_code_goes_on_with_the_leases_that_were_kept_for_it_and_gives_up_the_others(rig: Rig) -> None:
    a, b, c = rig.shards
    rig.hold(a, b, c)
    tokens = [rig.tokens()[shard] for shard in (a, b, c)]
    rig.leases.keep("me")
    assert list(rig.tokens().values()) == tokens
    anew = Rig("", rig.line, resumes=True)
    anew.others(anew.shards[2])
    anew.hold(*anew.shards[:2])
    assert list(anew.tokens().values())[:2] == tokens[:2]
    assert all(shard.lease.current and shard.lease.current.resumed for shard in anew.shards[:2])
    anew.leases.want(anew.shards[:1])
    assert anew.leases.give_up()
    assert set(anew.tokens()) == {anew.shards[0], anew.shards[2]}
    assert anew.leases.held == anew.shards[:1]
    assert (anew.leases.next_try, anew.heard) == (float("inf"), {anew.shards[0]: "wake"})


def test_what_new_code_could_not_resume_or_has_no_use_for_is_given_up_before(rig: Rig) -> None:
    a, b, c = rig.shards
    rig.hold(a, b, c)
    replace_lease(rig, a)
    rig.leases.surrender_replaced()
    rig.acquire()  # by another nonce
    rig.leases.want([a, b])
    rig.leases.keep("me")
    assert list(rig.tokens()) == [b]


# --- a thread was written off that had claimed the shard ---


def replace_lease(rig: Rig, shard: Shard) -> int:
    """The present fence."""
    rig.dispatcher.suspend(shard)
    rig.leases.replace_lease(shard, shard.lease.token)
    return fence_of(shard)


def test_a_lease_that_is_replaced_comes_back_at_once_with_a_higher_fence(rig: Rig) -> None:
    shard, other, _ = rig.shards
    rig.hold(shard, other)
    kept = other.lease.token
    fence = replace_lease(rig, rig.work(shard))
    rig.dispatcher.wake(shard)
    rig.leases.want([other])
    rig.leases.want([shard, other])  # which lets threads have what they hold
    assert rig.dispatcher.pick(0) is None, "not even the thread with the same number"
    assert not rig.leases.give_up()
    assert rig.leases.surrender_replaced()
    assert rig.leases.held == [other]
    rig.acquire()
    assert fence_of(shard) > fence
    assert is_ready(0, rig.now, shard)
    assert other.lease.token == kept
    assert not rig.leases.surrender_replaced()
    replace_lease(rig, rig.work(shard))
    rig.leases.want([other])
    rig.leases.surrender_replaced()
    assert rig.acquire() == [other], "one that is not wanted any more is given up"
    assert list(rig.tokens()) == [other]
    assert (rig.heard, rig.leases.next_try) == ({other: "wake"}, float("inf"))


@pytest.mark.parametrize("trouble", ["Redis is away", "it has run out", "it was got again"])
def test_whatever_becomes_of_the_surrender_the_next_lease_has_a_higher_fence(rig: Rig, trouble: str) -> None:
    shard = rig.shards[0]
    rig.hold(shard)
    fence = replace_lease(rig, rig.work(shard))
    if trouble == "it was got again":
        rig.others(shard)
        rig.run_out(shard)
        shard.lease.lose()
        rig.leases.try_for(shard, 0.0)
        rig.acquire()
    elif trouble == "Redis is away":
        rig.line.errors["surrender", shard.prefix] = AWAY
        with pytest.raises(RedisUnavailable):
            rig.leases.surrender_replaced()
        assert not is_ready(0, rig.now, shard)
        rig.line.errors.clear()
    else:  # as far as is known; for Redis it is still the old one's
        rig.line.errors["surrender", shard.prefix] = LeaseLost("run out")
        rig.leases.surrender_replaced()
        assert rig.acquire() == []
        rig.run_out(shard)
        rig.now += TTL + 1
    rig.leases.surrender_replaced()
    rig.acquire()
    assert fence_of(shard) > fence
    assert is_ready(0, rig.now, shard)
    assert rig.asked("surrender", shard) == (trouble == "Redis is away")
