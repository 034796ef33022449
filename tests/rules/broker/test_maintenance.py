"""The maintenance loop's round: when it is told of members, when it divides anew, and what a failure keeps it from."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lowq import clock
from lowq.broker.leases import Leases
from lowq.broker.maintenance import MaintenanceLoop
from lowq.broker.membership import Identity, Membership
from lowq.broker.outage import Outage
from lowq.broker.shard import Shard
from lowq.broker.splitter import Members
from lowq.broker.sweeper import Sweeper
from lowq.clock import Clock
from lowq.duration import LONGEST_WAIT
from lowq.errors import RedisUnavailable, ScriptError, ShardsCountError
from lowq.store import Call, Client, Refusal
from tests.waiting import until

#: Seconds. A third of it is longer than a test waits, so no round comes by itself meanwhile.
TTL = 600.0
ME = Identity("0123456789", {"q": 4}, 1, "1", host="me", pid=1)


class Registry:
    """The client: it answers heartbeats with the parts of these nodes."""

    is_cluster = False

    def __init__(self) -> None:
        self.others: list[str] = []
        #: Seconds until the first of them will have been silent for too long.
        self.first_silent = b""
        self.heartbeats: list[Call] = []
        self.registered = 0
        self.error: Exception | None = None
        self.fails_once = False
        self.refusal: Refusal | None = None
        #: Runs while a heartbeat is under way.
        self.meanwhile: Callable[[], object] = lambda: None

    def run_many(self, calls: Sequence[Call], repeats: int = 0) -> list[Any]:
        if self.fails_once:
            self.fails_once = False
            return [RedisUnavailable("cut") for _ in calls]
        if self.error is not None:
            return [self.error for _ in calls]
        self.heartbeats += [call for call in calls if call.script == "heartbeat"]
        self.registered += sum(call.script == "register" for call in calls)
        reply: list[bytes] = [self.first_silent, b"1800000000.000000"]
        part = str(calls[0].args[2])
        for name, its_part in [(ME.name, part), *((other, '{"queues": {"q": 4}}') for other in self.others)]:
            reply += [name.encode(), its_part.encode()] if its_part else []
        self.meanwhile()
        return [reply if call.script == "heartbeat" else self.refusal or 1 for call in calls]

    def close(self) -> None:
        pass


class Wishes:
    """Leases that only remember what is wanted of them."""

    def __init__(self) -> None:
        self.wanted: list[Any] = []
        self.tried: list[Shard] = []
        self.away = 0
        self.rounds = 0
        self.gives_up = False
        self.trouble: Exception | None = None
        self.held: list[Shard] = []
        self.next_try = float("inf")
        self.renewed = 0

    def want(self, shards: Any) -> None:
        self.wanted.append(list(shards))

    def try_for(self, shard: Shard, at: float) -> None:
        self.tried.append(shard)

    def was_away(self) -> None:
        self.away += 1

    def give_up(self) -> bool:
        self.rounds += 1
        return self.gives_up

    def renew(self) -> None:
        self.renewed += 1

    def surrender_replaced(self) -> bool:
        return False

    def acquire(self, now: float) -> None:
        pass

    def refresh(self) -> None:
        pass

    def log_held(self) -> bool:
        return False

    def clear_trouble(self) -> Exception | None:
        trouble, self.trouble = self.trouble, None
        return trouble


class Rig:
    """A maintenance loop among fakes. ``shares``: whether its splitter looks at the members."""

    def __init__(self, *, shares: bool = True, seconds: float = TTL, clock: Clock = clock.now) -> None:
        self.registry, self.wishes = Registry(), Wishes()
        #: How often shares were asked for, and what to do then.
        self.divisions: list[Members] = []
        self.divide: Callable[[Members], list[Any]] = sorted
        self.ready = 0
        self.fatal: list[BaseException] = []
        self.membership = Membership(ME, "lowq", silence=TTL, shares=shares)
        self.loop = MaintenanceLoop(
            cast(Client, self.registry), self.membership, cast(Leases, self.wishes), list, Outage(),
            divide=self._divide, lease_ttl=seconds, poll_interval=1000.0 * seconds,
            registrations=lambda: [Call("register", "q", ["", "q", 4])],
            on_ready=self._on_ready, on_fatal=self.fatal.append, sweeper=Sweeper(list, [], 500), clock=clock,
        )  # fmt: skip

    def _divide(self, members: Members) -> list[Any]:
        self.divisions.append(members)
        return self.divide(members)

    def _on_ready(self) -> None:
        self.ready += 1

    def tick(self, in_seconds: float = 0.0) -> float:
        return self.loop._tick(clock.now() + in_seconds)

    def run(self) -> None:
        self.loop.start()
        until(lambda: self.ready)
        until(lambda: not self.loop._nudge.is_set())


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.loop.stop()


# --- its waits ---


@pytest.mark.parametrize("where", ["asleep", "in a call"])
def test_it_says_how_late_it_ran_wherever_it_was_held_up(where: str, caplog: pytest.LogCaptureFixture) -> None:
    held_up = 0.0
    rig = Rig(clock=lambda: clock.now() + held_up)

    def hold_up() -> None:
        nonlocal held_up
        held_up = TTL

    if where == "in a call":
        rig.registry.meanwhile = hold_up
    try:
        rig.run()
        if where == "asleep":
            hold_up()
            rig.loop.nudge()
        until(lambda: caplog.messages)
    finally:
        rig.loop.stop()
    (late,) = re.findall(r"the maintenance loop ran ([\d.]+) s late", caplog.text)
    # A loop that sleeps is woken early here: what is left of its pause is not late.
    assert float(late) == pytest.approx(TTL if where == "in a call" else TTL * 2 / 3, abs=60)


def test_waiting_for_a_redis_that_is_away_is_not_running_late(caplog: pytest.LogCaptureFixture) -> None:
    waited = 0.0
    rig = Rig(clock=lambda: clock.now() + waited)

    def wait() -> None:
        nonlocal waited
        waited += TTL
        rig.registry.meanwhile = lambda: None
        raise RedisUnavailable("timeout")

    rig.registry.meanwhile = wait
    rig.run()
    rig.loop.stop()
    assert waited == TTL
    assert "late" not in caplog.text


def test_it_never_waits_longer_than_a_thread_can() -> None:
    rig = Rig(seconds=1e12)
    assert rig.tick() == LONGEST_WAIT


def test_a_lease_that_is_told_to_become_free_in_centuries_is_tried_for_when_it_must_have_run_out(rig: Rig) -> None:
    asked: list[float] = []
    rig.wishes.try_for = lambda _, at: asked.append(at)  # type: ignore[method-assign,assignment]
    shard = cast(Shard, SimpleNamespace(lease=SimpleNamespace(current=None)))
    latest = time.monotonic() + TTL
    rig.loop.lease_released(shard, 1e10)
    rig.tick()
    (at,) = asked
    assert latest <= at <= time.monotonic() + TTL


# --- members ---


def test_shares_are_asked_for_once_and_then_whenever_members_change(rig: Rig) -> None:
    rig.tick()
    rig.tick(TTL / 3)
    assert [sorted(members) for members in rig.divisions] == [[ME.name]]
    rig.registry.others = ["b"]
    rig.tick(2 * TTL / 3 + 1)
    assert [sorted(members) for members in rig.divisions] == [[ME.name], ["b", ME.name]]
    assert rig.wishes.wanted[-1] == ["b", ME.name]


def test_an_announcement_while_a_heartbeat_is_under_way_makes_another(rig: Rig) -> None:
    def announce() -> None:  # after Redis has answered
        rig.registry.meanwhile = lambda: None
        rig.registry.others = ["b"]
        rig.loop.members_changed()

    rig.registry.meanwhile = announce
    rig.tick()
    assert rig.wishes.wanted == [[ME.name]]
    rig.tick()
    assert rig.wishes.wanted[-1] == ["b", ME.name]


def test_an_announcement_is_not_forgotten_when_the_heartbeat_fails(rig: Rig) -> None:
    rig.tick()
    rig.registry.others = ["b"]
    rig.loop.members_changed()
    rig.registry.error = RedisUnavailable("away")
    with pytest.raises(RedisUnavailable):
        rig.tick()
    rig.registry.error = None
    rig.tick()
    assert rig.wishes.wanted[-1] == ["b", ME.name]


def test_it_looks_when_somebody_has_been_silent_for_too_long(rig: Rig) -> None:
    rig.registry.others, rig.registry.first_silent = ["b"], b"2.0"
    assert 2.0 <= rig.tick() + 0.01 < 2.2
    rig.registry.others, rig.registry.first_silent = [], b""
    rig.tick(1.9)
    assert len(rig.wishes.wanted) == 1
    rig.tick(2.2)
    assert rig.wishes.wanted[-1] == [ME.name]


def test_others_are_told_when_shards_were_given_up(rig: Rig) -> None:
    rig.tick()
    before = len(rig.registry.heartbeats)
    rig.wishes.gives_up = True
    rig.tick()
    assert len(rig.registry.heartbeats) == before + 1


def test_queues_are_registered_with_every_heartbeat(rig: Rig) -> None:
    rig.tick()
    rig.tick(TTL / 3)
    assert rig.registry.registered == len(rig.registry.heartbeats) == 2


def test_another_number_of_shards_in_the_registry_ends_the_node(rig: Rig) -> None:
    rig.registry.refusal = Refusal("SHARDSCOUNT", "8")
    rig.loop.start()
    until(lambda: rig.fatal)
    assert isinstance(rig.fatal[0], ShardsCountError)


# --- quiet ---


def test_quiet_leaves_the_members_and_wants_nothing(rig: Rig) -> None:
    rig.registry.others = ["b"]
    rig.run()
    rig.loop.quiet()
    until(lambda: len(rig.wishes.wanted) == 2)
    assert rig.wishes.wanted[-1] == []
    assert rig.registry.heartbeats[-1].args[2] == ""
    assert json.loads(str(rig.registry.heartbeats[-1].args[3]))["quiet"]


def test_quiet_wants_nothing_although_it_was_no_member() -> None:
    rig = Rig(shares=False)
    rig.divide = lambda _members: ["a", "b"]
    rig.tick()
    rig.loop.quiet()
    rig.tick()
    assert rig.wishes.wanted == [["a", "b"], []]


def test_quiet_while_shares_are_asked_for_is_not_overheard(rig: Rig) -> None:
    def divide(members: Members) -> list[Any]:
        rig.loop.quiet()  # the main thread, just now
        return sorted(members)

    rig.divide = divide
    rig.tick()
    rig.tick()
    assert rig.wishes.wanted[-1] == []


def test_quiet_before_the_first_round_gets_ready_all_the_same(rig: Rig) -> None:
    rig.loop.quiet()
    rig.tick()
    assert rig.wishes.wanted == [[]]
    assert rig.ready == 1


# --- troubles ---


def test_trouble_with_one_shard_keeps_nobody_from_getting_ready(rig: Rig) -> None:
    rig.wishes.trouble = ScriptError("broken")
    rig.wishes.clear_trouble = lambda: ScriptError("broken")  # type: ignore[method-assign]  # in every round
    with pytest.raises(ScriptError):
        rig.tick()
    assert rig.ready == 1
    assert rig.wishes.rounds == 1


def test_one_cut_connection_is_no_outage_and_two_are(rig: Rig) -> None:
    rig.run()
    rig.registry.error = RedisUnavailable("away")
    rig.loop.members_changed()
    until(lambda: rig.wishes.away)
    rig.registry.error = None
    until(lambda: not rig.loop._members_asked)
    away = rig.wishes.away

    rig.registry.fails_once = True
    before = len(rig.registry.heartbeats)
    rig.loop.members_changed()
    until(lambda: len(rig.registry.heartbeats) > before)
    assert not rig.registry.fails_once
    assert rig.wishes.away == away


# --- nudges ---


@pytest.mark.parametrize("word", ["left", "check"])
def test_a_word_of_a_thread_makes_a_round_at_once(word: str, rig: Rig) -> None:
    rig.run()
    rounds = rig.wishes.rounds
    shard = cast(Shard, object())
    threading.Thread(target=getattr(rig.loop, word), args=(shard,)).start()
    until(lambda: rig.wishes.rounds > rounds)
    assert rig.wishes.tried == ([shard] if word == "check" else [])


def test_word_that_a_shard_is_free_is_for_those_who_do_not_hold_it(rig: Rig) -> None:
    shard = Shard(cast(Client, None), "lowq", "q", 0, shards_count=4, nonce="me", load_payload=bytes.decode)
    rig.loop.lease_released(shard, 0.0)
    rig.tick()
    assert rig.wishes.tried == [shard]
    shard.lease.acquired([b"acquired", b"1", 0], clock.now() + TTL)
    rig.loop.lease_released(shard, 0.0)
    rig.tick()
    assert rig.wishes.tried == [shard]
