"""The leases of a node, against a store of a few lines: who gets a shard, when it is tried for, when it is given up."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from lowq import clock
from lowq.broker.dispatcher import Dispatcher, is_ready
from lowq.broker.fairness import Share
from lowq.broker.leases import Leases
from lowq.broker.scheduler import LagScheduler
from lowq.broker.shard import Shard
from lowq.broker.wakeups import Listener
from lowq.errors import LeaseLost, RedisUnavailable, ScriptError
from lowq.store import Call, Client
from tests.waiting import PATIENCE, until

TTL = 15.0


class Store:
    """What Redis knows of the leases, and the client that asks it."""

    def __init__(self) -> None:
        #: Shard's prefix -> token.
        self.tokens: dict[str, str] = {}
        self.fence = 100
        #: Seconds that somebody else's lease still has.
        self.left = TTL
        self.age = float("inf")
        #: Replies by script and shard, for those that are to fail.
        self.errors: dict[tuple[str, str], Exception] = {}
        #: Where it is, if that may change.
        self.address: tuple[str, int] | None = None
        #: What is noticed while calls are being sent.
        self.on_send: Callable[[], None] = lambda: None
        self.calls: list[Call] = []
        self.executed_at = 0.0

    def run_many(self, calls: Sequence[Call], repeats: int = 0) -> list[Any]:
        self.executed_at = clock.now()
        self.on_send()
        sent = [call for call in calls if call.is_wanted()]
        self.calls += sent
        return [
            RedisUnavailable("not sent")
            if call not in sent
            else self.errors.get((call.script, call.key)) or getattr(self, call.script)(call.key, call.args)
            for call in calls
        ]

    def address_of(self, key: str) -> tuple[str, int] | None:
        return self.address

    def server_age(self) -> float:
        return self.age

    def asked(self, script: str) -> list[str]:
        return [call.key for call in self.calls if call.script == script]

    # --- scripts ---

    def acquire(self, key: str, args: list[Any]) -> Any:
        nonce, token = args[1], self.tokens.get(key)
        if token is not None and not token.startswith(f"{nonce}:"):
            return [b"held", round(self.left * 1000)]
        if token is not None:
            return [b"resumed", token.partition(":")[2].encode()]
        self.fence += 1
        self.tokens[key] = f"{nonce}:{self.fence}"
        return [b"acquired", str(self.fence).encode(), 0]

    def renew(self, key: str, args: list[Any]) -> Any:
        return 1 if self.tokens.get(key) == args[1] else LeaseLost("lost")

    def surrender(self, key: str, args: list[Any]) -> Any:
        if self.tokens.get(key) != args[1]:
            return LeaseLost("lost")
        del self.tokens[key]
        return 1

    def ack_and_take(self, key: str, args: list[Any]) -> Any:
        return [0, None, 0, 0] if self.tokens.get(key) == args[1] else LeaseLost("lost")


class Channels:
    """A listener that only remembers what it listens to."""

    def __init__(self) -> None:
        self.wakes: set[Shard] = set()
        self.frees: set[Shard] = set()
        self.error: Exception | None = None

    def _maybe_fail(self) -> None:
        if self.error is not None:
            raise self.error

    def holds(self, shards: Sequence[Shard]) -> None:
        self._maybe_fail()
        self.wakes |= set(shards)
        self.frees -= set(shards)

    def waits(self, shards: Sequence[Shard]) -> None:
        self._maybe_fail()
        self.frees |= set(shards)
        self.wakes -= set(shards)

    def forgets(self, shards: Sequence[Shard]) -> None:
        self.wakes -= set(shards)
        self.frees -= set(shards)


class Rig:
    """The leases of one node, "me", in a queue of three shards."""

    def __init__(self, store: Store | None = None, *, resumes: bool = False) -> None:
        self.store, self.channels = store or Store(), Channels()
        self.shards = [
            Shard(cast(Client, None), "lowq", "q", index, shards_count=3, nonce="me", load_payload=bytes.decode)
            for index in range(3)
        ]
        self.dispatcher = Dispatcher([self.shards], [{"q": LagScheduler()}], {"q": Share()})
        self.leases = Leases(
            cast(Client, self.store), self.shards, {"q": self.dispatcher}, cast(Listener, self.channels), TTL,
            resumes=resumes,
        )  # fmt: skip

    def acquire(self, in_seconds: float = 0.0) -> None:
        self.leases.acquire(clock.now() + in_seconds)

    def hold(self, *shards: Shard) -> None:
        """The node wants these, and gets them."""
        self.leases.want(shards)
        self.acquire()
        assert set(shards) <= set(self.leases.held)

    def others(self, shard: Shard) -> None:
        """Somebody else has got it."""
        self.store.tokens[shard.prefix] = "other:500"

    def work(self, shard: Shard) -> Shard:
        """A thread claims it."""
        self.dispatcher.wake(shard)
        claimed = self.dispatcher.wait(0)
        while claimed is not shard:  # one that it has got is looked at, too
            assert claimed is not None
            self.dispatcher.rest(claimed, 1000.0)
            self.dispatcher.unclaim(claimed)
            claimed = self.dispatcher.wait(0)
        return claimed


@pytest.fixture
def rig() -> Rig:
    return Rig()


def is_worked(rig: Rig, shard: Shard) -> bool:
    """Whether a thread would work it, had it a job."""
    rig.dispatcher.wake(shard)
    return is_ready(0, clock.now() + 0.001, shard)


# --- getting shards ---


def test_what_is_wanted_is_got_listened_to_and_looked_at(rig: Rig) -> None:
    a, b, _ = rig.shards
    rig.hold(a, b)
    assert rig.channels.wakes == {a, b}
    assert is_ready(0, clock.now(), a)  # nobody knows whether it has jobs
    assert rig.leases.next_try == float("inf")


def test_a_shard_of_somebody_else_is_tried_for_when_its_lease_runs_out(rig: Rig) -> None:
    a = rig.shards[0]
    rig.others(a)
    rig.store.left = 4.0
    rig.leases.want([a])
    before = clock.now()
    rig.acquire()
    after = clock.now()
    assert rig.channels.frees == {a}
    assert before + 4.0 <= rig.leases.next_try < after + 4.1
    rig.leases.acquire(before + 3.9)
    assert len(rig.store.asked("acquire")) == 1
    del rig.store.tokens[a.prefix]
    rig.leases.acquire(after + 4.1)
    assert rig.leases.held == [a]
    assert (rig.channels.wakes, rig.channels.frees) == ({a}, set())


def test_nobody_waits_longer_than_a_lease_whatever_redis_says(rig: Rig) -> None:
    rig.others(rig.shards[0])
    rig.store.left = 3600.0
    rig.leases.want(rig.shards[:1])
    rig.acquire()
    assert rig.leases.next_try < clock.now() + TTL + 0.1


OLD, NEXT = ("127.0.0.1", 1), ("127.0.0.1", 2)


def test_when_another_server_serves_it_a_shard_is_left_to_its_holder_for_a_lease(rig: Rig) -> None:
    """The replica that became it may lack the last renewal: its lease runs out before its holder stops."""
    a, b, _ = rig.shards
    rig.store.address = OLD
    rig.others(b)
    rig.leases.want([a, b])
    rig.acquire()
    assert rig.leases.held == [a]
    rig.store.address = NEXT
    rig.store.tokens.clear()
    before = clock.now()
    rig.leases.renew()
    after = clock.now()
    rig.acquire(TTL / 2)
    assert rig.leases.held == [a]  # its own one is got at once
    rig.leases.try_for(b, 0.0)
    rig.leases.acquire(before + TTL)
    assert rig.store.asked("acquire").count(b.prefix) == 1  # before the failover
    rig.leases.acquire(after + TTL + 0.1)
    assert rig.leases.held == [a, b]


def test_that_also_holds_for_a_shard_that_was_not_wanted_before(rig: Rig) -> None:
    """Its holder is gone together with the primary."""
    a = rig.shards[0]
    rig.store.address = OLD
    rig.leases.renew()
    rig.store.address = NEXT
    rig.leases.want([a])
    before = clock.now()
    rig.leases.acquire(before)
    assert rig.leases.held == []
    rig.leases.acquire(clock.now() + TTL + 0.1)
    assert rig.leases.held == [a]


def test_nor_is_it_got_when_that_is_noticed_while_it_is_asked_for(rig: Rig) -> None:
    a = rig.shards[0]
    rig.store.address = OLD
    rig.others(a)
    rig.leases.want([a])
    rig.acquire()
    rig.store.tokens.clear()
    rig.store.on_send = lambda: setattr(rig.store, "address", NEXT)
    rig.leases.try_for(a, 0.0)
    with pytest.raises(RedisUnavailable):
        rig.acquire()
    assert rig.leases.held == []
    assert len(rig.store.asked("acquire")) == 1


def test_a_process_that_starts_with_the_next_server_waits_for_nothing(rig: Rig) -> None:
    a = rig.shards[0]
    rig.store.address = NEXT
    rig.hold(a)


def test_what_is_not_wanted_any_more_is_not_tried_for(rig: Rig) -> None:
    a = rig.shards[0]
    rig.others(a)
    rig.leases.want([a])
    rig.acquire()
    rig.leases.want([])
    del rig.store.tokens[a.prefix]
    rig.leases.try_for(a, 0.0)  # word that it is free
    rig.acquire(100.0)
    assert rig.leases.held == []
    assert rig.leases.next_try == float("inf")
    assert rig.channels.frees == set()


def test_trouble_with_one_shard_keeps_no_other_from_being_got(rig: Rig) -> None:
    a, b, c = rig.shards
    rig.store.errors["acquire", a.prefix] = ScriptError("broken")
    rig.leases.want([a, b, c])
    rig.acquire()
    assert rig.leases.held == [b, c]
    assert isinstance(rig.leases.clear_trouble(), ScriptError)
    rig.store.errors.clear()
    rig.acquire(1.1)
    assert rig.leases.held == [a, b, c]


def test_what_is_got_is_worked_although_the_listener_fails(rig: Rig) -> None:
    a = rig.shards[0]
    rig.hold(a)
    rig.leases.want([])
    rig.leases.give_up()
    rig.leases.want([a])
    rig.channels.error = AttributeError("the connection was closed meanwhile")
    with pytest.raises(AttributeError):
        rig.acquire()
    assert rig.leases.held == [a]
    assert is_worked(rig, a)


# --- giving shards up ---


def test_a_shard_that_a_thread_works_is_kept_until_it_rests(rig: Rig) -> None:
    a = rig.shards[0]
    rig.hold(a)
    claimed = rig.work(a)
    rig.leases.want([])
    assert not rig.leases.give_up()
    rig.leases.renew()
    assert rig.leases.held == [a]
    assert claimed.dispatch.leaving  # no further batch
    rig.dispatcher.unclaim(claimed)
    assert not is_worked(rig, a)
    assert rig.leases.give_up()
    assert rig.store.tokens == {}


def test_what_is_wanted_again_before_it_was_given_up_is_worked_on(rig: Rig) -> None:
    a = rig.shards[0]
    rig.hold(a)
    claimed = rig.work(a)
    rig.leases.want([])
    rig.leases.give_up()
    rig.leases.want([a])
    rig.dispatcher.unclaim(claimed)
    assert not rig.leases.give_up()
    assert is_worked(rig, a)


def test_a_lease_in_doubt_of_what_is_not_wanted_does_not_make_it_worked_again(rig: Rig) -> None:
    a = rig.shards[0]
    rig.hold(a)
    claimed = rig.work(a)
    rig.leases.want([])
    rig.store.tokens.clear()
    rig.leases.renew()  # told that it is lost, while a thread works it
    rig.acquire()
    assert rig.leases.held == [a]  # nobody else gets it while that lasts
    rig.dispatcher.unclaim(claimed)
    assert not is_worked(rig, a)
    assert rig.leases.give_up()
    assert rig.store.tokens == {}


def test_a_shard_whose_surrender_got_no_answer_is_surrendered_again(rig: Rig) -> None:
    a, b, _ = rig.shards
    rig.hold(a, b)
    rig.leases.want([b])
    rig.store.errors["surrender", a.prefix] = ScriptError("no")
    rig.leases.give_up()
    assert rig.leases.held == [a, b]
    rig.store.errors.clear()
    assert rig.leases.give_up()
    assert rig.leases.held == [b]


def test_a_shard_that_was_lost_before_it_was_given_up_is_forgotten(rig: Rig) -> None:
    a = rig.shards[0]
    rig.hold(a)
    rig.others(a)
    rig.leases.want([])
    rig.leases.give_up()
    assert rig.leases.held == []
    assert rig.store.tokens[a.prefix] == "other:500"


def test_what_is_left_in_flight_is_spared(rig: Rig) -> None:
    a = rig.shards[0]
    rig.hold(a)
    rig.leases.want([])
    rig.leases.give_up()
    (call,) = [call for call in rig.store.calls if call.script == "surrender"]
    assert call.args[2] == 1  # not '', by which it would be refused: it would never be given up


# --- keeping them ---


def test_a_lease_lasts_from_before_its_renewal_was_sent(rig: Rig) -> None:
    a = rig.shards[0]
    rig.hold(a)
    assert a.lease.deadline <= rig.store.executed_at + TTL
    rig.leases.renew()
    assert rig.store.executed_at < a.lease.deadline <= rig.store.executed_at + TTL


def test_a_lease_that_was_lost_is_found_out_about_by_its_renewal(rig: Rig) -> None:
    a, b, _ = rig.shards
    rig.hold(a, b)
    rig.others(a)
    rig.leases.renew()
    rig.acquire()
    assert rig.leases.held == [b]
    assert rig.channels.frees == {a}


@pytest.mark.parametrize("look", ["refresh", "check"])
def test_a_lease_that_was_lost_is_found_out_about_by_a_look(look: str, rig: Rig) -> None:
    a = rig.shards[0]
    rig.hold(a)
    rig.others(a)
    if look == "refresh":
        rig.leases.refresh()
    else:
        rig.leases.try_for(a, 0.0)
    rig.acquire()
    assert rig.leases.held == []


def test_a_renewal_that_came_late_wakes_who_left_the_shard_alone(rig: Rig) -> None:
    a = rig.shards[0]
    rig.hold(a)
    a.lease.deadline = clock.now() - 1.0
    found: list[Shard | None] = []
    thread = threading.Thread(target=lambda: found.append(rig.dispatcher.wait(0)))
    thread.start()
    until(lambda: rig.dispatcher._idle == 1)
    rig.leases.renew()
    thread.join(PATIENCE)
    rig.dispatcher.close()
    assert found == [a]


def test_no_answer_at_all_is_an_outage(rig: Rig) -> None:
    rig.hold(*rig.shards)
    rig.store.errors |= {("renew", shard.prefix): RedisUnavailable("away") for shard in rig.shards}
    with pytest.raises(RedisUnavailable):
        rig.leases.renew()
    assert rig.leases.held == rig.shards


# --- after an outage ---


def test_whoever_held_a_shard_gets_a_head_start(rig: Rig) -> None:
    a, b, _ = rig.shards
    rig.hold(a)
    rig.others(b)
    rig.leases.want([a, b])
    rig.acquire()
    rig.store.tokens.clear()  # all leases ran out
    before = clock.now()
    rig.leases.was_away()
    after = clock.now()
    rig.leases.try_for(a, 0.0)
    rig.leases.try_for(b, 0.0)
    rig.leases.acquire(before + 0.1)
    assert rig.leases.held == [a]
    assert before + TTL / 3 <= rig.leases.next_try <= after + TTL / 3
    rig.leases.acquire(before + TTL / 3 - 0.5)
    assert rig.leases.held == [a]
    rig.leases.acquire(after + TTL / 3 + 0.1)  # it was the outage that counts, not the last attempt
    assert rig.leases.held == [a, b]


@pytest.mark.parametrize("lost", ["to others", "given up"])
def test_who_held_a_shard_earlier_has_no_head_start(lost: str, rig: Rig) -> None:
    a = rig.shards[0]
    rig.hold(a)
    if lost == "to others":
        rig.others(a)
        rig.leases.try_for(a, 0.0)
        rig.acquire()
    else:
        rig.leases.want([])
        rig.leases.give_up()
        rig.leases.want([a])
    rig.store.tokens.clear()
    rig.leases.was_away()
    rig.leases.try_for(a, 0.0)
    rig.acquire()
    assert rig.leases.held == []


def charged(rig: Rig) -> bool:
    return next(call for call in reversed(rig.store.calls) if call.script == "acquire").args[6] == ""


def test_a_crash_is_charged_only_when_redis_was_there_all_the_time(rig: Rig) -> None:
    a = rig.shards[0]
    rig.hold(a)
    assert charged(rig)
    rig.store.tokens.clear()
    rig.leases.was_away()
    rig.leases.try_for(a, 0.0)
    rig.acquire()
    assert not charged(rig)
    rig.leases.try_for(a, 0.0)
    rig.acquire(TTL + 1)
    assert charged(rig)
    rig.store.age = 3.0  # it was started anew
    rig.leases.try_for(a, 0.0)
    rig.acquire(TTL + 1)
    assert not charged(rig)


def test_the_start_of_a_server_gives_a_head_start_too(rig: Rig) -> None:
    a, b, _ = rig.shards
    rig.hold(a)
    rig.leases.want([a, b])
    rig.store.tokens.clear()
    rig.store.age = 1.0
    rig.leases._began -= 60.0  # this node is older than that
    rig.leases.try_for(a, 0.0)
    rig.acquire()
    assert rig.leases.held == [a]


# --- the end ---


def test_leaving_for_good_says_when_there_was_no_answer(rig: Rig) -> None:
    rig.hold(*rig.shards)
    rig.store.errors |= {("surrender", shard.prefix): RedisUnavailable("away") for shard in rig.shards}
    with pytest.raises(RedisUnavailable):
        rig.leases.leave(1.0)


def test_new_code_goes_on_with_the_leases_that_were_kept_for_it(rig: Rig) -> None:
    rig.hold(*rig.shards)
    tokens = dict(rig.store.tokens)
    rig.leases.keep("me")
    assert rig.store.asked("renew") == [shard.prefix for shard in rig.shards]
    assert rig.store.tokens == tokens
    anew = Rig(rig.store, resumes=True)
    anew.hold(*anew.shards)
    assert rig.store.tokens == tokens
    assert all(shard.lease.current is not None and shard.lease.current.resumed for shard in anew.shards)


def test_what_new_code_could_not_resume_or_has_no_use_for_is_given_up_before(rig: Rig) -> None:
    a, b, c = rig.shards
    rig.hold(a, b, c)
    TestReplacedLease.replace_lease(rig, a)
    rig.leases.surrender_replaced()
    rig.acquire()  # by another nonce
    rig.leases.want([a, b])
    rig.leases.keep("me")
    assert list(rig.store.tokens) == [b.prefix]


def test_new_code_that_is_to_hold_fewer_shards_gives_up_the_others(rig: Rig) -> None:
    rig.hold(*rig.shards)
    rig.leases.keep("me")
    anew = Rig(rig.store, resumes=True)
    anew.others(anew.shards[2])
    anew.hold(anew.shards[0])
    assert anew.leases.give_up()
    assert set(rig.store.tokens) == {anew.shards[0].prefix, anew.shards[2].prefix}
    assert anew.leases.held == [anew.shards[0]]
    assert anew.leases.next_try == float("inf")
    assert anew.channels.frees == set()


def fence_of(shard: Shard) -> int:
    lease = shard.lease.current
    assert lease is not None
    return lease.fence


class TestReplacedLease:
    """A thread was written off that had claimed the shard."""

    @staticmethod
    def replace_lease(rig: Rig, shard: Shard) -> int:
        """The present fence."""
        rig.dispatcher.withhold(shard)
        rig.leases.replace_lease(shard, shard.lease.token)
        return fence_of(shard)

    def test_a_shard_that_is_wanted_comes_back_at_once_with_a_higher_fence(self, rig: Rig) -> None:
        shard, other, _ = rig.shards
        rig.hold(shard, other)
        fence = self.replace_lease(rig, rig.work(shard))
        kept = other.lease.token
        assert rig.leases.surrender_replaced()
        assert rig.leases.held == [other]
        rig.acquire()
        assert fence_of(shard) > fence
        assert is_ready(0, clock.now(), shard)
        assert other.lease.token == kept
        assert not rig.leases.surrender_replaced()

    def test_until_then_no_thread_may_have_it_not_even_the_one_with_the_same_number(self, rig: Rig) -> None:
        shard = rig.shards[0]
        rig.hold(shard)
        self.replace_lease(rig, rig.work(shard))
        rig.dispatcher.wake(shard)
        assert rig.dispatcher.pick(0) is None
        rig.leases.want([])
        rig.leases.want([shard])  # which lets threads have what they hold
        assert rig.dispatcher.pick(0) is None
        assert not rig.leases.give_up()

    def test_one_that_is_not_wanted_any_more_is_given_up(self, rig: Rig) -> None:
        shard = rig.shards[0]
        rig.hold(shard)
        self.replace_lease(rig, rig.work(shard))
        rig.leases.want([])
        rig.leases.surrender_replaced()
        rig.acquire()
        assert rig.store.tokens == {}
        assert shard.lease.current is None
        assert rig.channels.wakes == set()
        assert rig.leases.next_try == float("inf")

    def test_while_redis_is_away_it_is_still_to_be_replaced(self, rig: Rig) -> None:
        shard = rig.shards[0]
        rig.hold(shard)
        fence = self.replace_lease(rig, rig.work(shard))
        rig.store.errors["surrender", shard.prefix] = RedisUnavailable("away")
        with pytest.raises(RedisUnavailable):
            rig.leases.surrender_replaced()
        assert not is_ready(0, clock.now(), shard)
        rig.store.errors.clear()
        rig.leases.surrender_replaced()
        rig.acquire()
        assert fence_of(shard) > fence

    def test_when_the_reply_was_lost_the_repeat_finds_it_surrendered(self, rig: Rig) -> None:
        shard = rig.shards[0]
        rig.hold(shard)
        fence = self.replace_lease(rig, rig.work(shard))
        del rig.store.tokens[shard.prefix]
        rig.leases.surrender_replaced()
        rig.acquire()
        assert fence_of(shard) > fence

    def test_a_lease_that_could_not_be_surrendered_is_not_resumed(self, rig: Rig) -> None:
        """As when jobs are in flight that could not be reported: it runs out, and its owner stays noted."""
        shard = rig.shards[0]
        rig.hold(shard)
        fence = self.replace_lease(rig, rig.work(shard))
        rig.store.errors["surrender", shard.prefix] = LeaseLost("run out")
        rig.leases.surrender_replaced()
        rig.acquire()  # for the store it is still the old one's
        assert rig.leases.held == []
        del rig.store.tokens[shard.prefix]
        rig.acquire(TTL + 1)
        assert fence_of(shard) > fence

    def test_one_that_was_lost_and_got_again_meanwhile_is_not_surrendered(self, rig: Rig) -> None:
        shard = rig.shards[0]
        rig.hold(shard)
        self.replace_lease(rig, rig.work(shard))
        del rig.store.tokens[shard.prefix]
        shard.lease.lose()
        rig.leases.try_for(shard, 0.0)
        rig.acquire()
        token = shard.lease.token
        rig.leases.surrender_replaced()
        assert shard.lease.token == token
        assert rig.store.asked("surrender") == []
        assert is_ready(0, clock.now(), shard)
