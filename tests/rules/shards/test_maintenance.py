"""The maintenance loop: when it hears of members, when it divides anew, and what a failure keeps it from."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lowq import clock
from lowq.errors import RedisUnavailable, ScriptError, ShardsCountError
from lowq.shards.leases import Leases
from lowq.shards.maintenance import MaintenanceLoop
from lowq.shards.membership import Identity, Membership
from lowq.shards.outage import Outage
from lowq.shards.shard import Shard, Sweeper
from lowq.shards.splitter import Members
from lowq.store import Call, Client, Refusal
from lowq.store.registry import HeartbeatReply, Registration
from tests.waiting import PATIENCE, until

#: Seconds. A third of it is longer than a test waits, so no round comes by itself meanwhile.
TTL = 600.0
ME = Identity("0123456789", {"q": 4}, 1, "1", host="me", pid=1)


class Registry:
    """The client: it answers heartbeats with this node and others."""

    has_several_primaries = False

    def __init__(self) -> None:
        self.others: list[str] = []
        #: Seconds until the first of them will have been silent for too long.
        self.first_silent = b""
        self.heartbeats: list[Call[Any]] = []
        self.refusal: Refusal | None = None
        #: What happens while heartbeats are under way. One that returns an error keeps the answer from coming.
        self.meanwhile: list[Callable[[], object]] = []

    def run_many(self, calls: Sequence[Call[Any]], repeats: int = 0) -> list[Any]:
        reply: list[bytes] = [self.first_silent, b"1800000000.000000"]
        if part := str(calls[0].args[2]):
            reply += [ME.name.encode(), part.encode()]
        for other in self.others:
            reply += [other.encode(), b'{"queues": {"q": 4}}']
        self.heartbeats.append(calls[0])
        error = self.meanwhile.pop(0)() if self.meanwhile else None
        if isinstance(error, Exception):
            return [error for _ in calls]
        named = HeartbeatReply.of(reply)
        return [named if call.script == "heartbeat" else self.refusal or 1 for call in calls]


class Rig:
    """A maintenance loop whose leases only remember what is wanted of them."""

    def __init__(self, *, shares: bool = True) -> None:
        self.registry = Registry()
        self.late = 0.0
        self.wanted: list[list[Any]] = []
        self.away = self.ready = 0
        self.fatal: list[BaseException] = []
        self.divide: Callable[[Members], list[Any]] = sorted
        self.registered: Callable[[], None] = lambda: None
        self.leases = SimpleNamespace(
            want=lambda shards: self.wanted.append(list(shards)), was_away=self._was_away, held=[],
            names_stopping=False, asked=set(),
            next_try=float("inf"), acquire=lambda _now: None, try_for=lambda _shard, _at: None, trouble=None,
            refresh=lambda _now: float("inf"),
        )  # fmt: skip
        for name in ("renew", "clear_trouble"):
            setattr(self.leases, name, lambda: None)
        for name in ("give_up", "surrender_replaced", "log_held"):
            setattr(self.leases, name, lambda: False)
        membership = Membership(
            ME, "lowq", silence=TTL, shares=shares, registrations=lambda: [Registration("queues", "q", 4)]
        )
        self.loop = MaintenanceLoop(
            cast(Client, self.registry), membership, cast(Leases, self.leases), list, Outage(),
            divide=lambda members: self.divide(members),  # noqa: PLW0108  # it may change
            lease_ttl=TTL, renewal_interval=TTL / 3, on_ready=self._on_ready, on_fatal=self.fatal.append,
            on_registered=lambda _call, _reply: self.registered(),
            sweeper=Sweeper(list, [], 500), clock=lambda: clock.now() + self.late,
        )  # fmt: skip

    def _was_away(self) -> None:
        self.away += 1

    def _on_ready(self) -> None:
        self.ready += 1

    def run(self) -> None:
        self.loop.start()
        until(lambda: self.ready)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.loop.stop()


def test_it_says_how_late_it_ran_but_not_that_it_waited_for_a_redis_that_is_away(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    def hold_up() -> None:
        rig.late += TTL

    def wait_in_vain() -> Exception:
        hold_up()
        return RedisUnavailable("timeout")

    rig.registry.meanwhile = [wait_in_vain]
    rig.run()
    assert "late" not in caplog.text
    rig.registry.meanwhile = [hold_up]
    rig.loop.members_changed()
    until(lambda: "late" in caplog.text)
    (late,) = re.findall(r"the maintenance loop ran ([\d.]+) s late", caplog.text)
    assert float(late) == pytest.approx(TTL, abs=PATIENCE)


def test_an_announcement_while_a_heartbeat_is_under_way_or_fails_makes_another(rig: Rig) -> None:
    def announce() -> None:  # after Redis has answered
        rig.registry.others = ["b"]
        rig.loop.members_changed()

    def fail() -> Exception:
        return RedisUnavailable("cut")

    rig.registry.meanwhile = [announce]
    rig.run()
    until(lambda: len(rig.wanted) == 2)
    rig.registry.others = []
    rig.registry.meanwhile = [fail]
    rig.loop.members_changed()
    until(lambda: len(rig.wanted) == 3)
    assert rig.wanted == [[ME.name], ["b", ME.name], [ME.name]]
    assert rig.away == 0, "one cut connection is no outage"
    rig.registry.meanwhile = [fail, fail]
    rig.loop.members_changed()
    until(lambda: rig.away)


def test_members_that_change_while_a_registration_cannot_be_followed_are_not_forgotten(rig: Rig) -> None:
    def fail() -> None:
        raise RuntimeError("can't start new thread")

    rig.run()
    rig.registry.others, rig.registered = ["b"], fail
    rig.loop.members_changed()
    until(lambda: len(rig.registry.heartbeats) == 2)
    rig.registered = lambda: None
    rig.loop.members_changed()
    until(lambda: rig.wanted[-1] == ["b", ME.name])


def test_it_looks_when_somebody_has_been_silent_for_too_long(rig: Rig) -> None:
    rig.registry.others, rig.registry.first_silent = ["b"], b"0.05"
    rig.registry.meanwhile = [lambda: None, rig.registry.others.clear]
    rig.run()
    until(lambda: rig.wanted[-1] == [ME.name])


def test_another_number_of_shards_in_the_registry_ends_the_node(rig: Rig) -> None:
    rig.registry.refusal = Refusal("SHARDSCOUNT", "8")
    rig.loop.start()
    until(lambda: rig.fatal)
    assert isinstance(rig.fatal[0], ShardsCountError)


@pytest.mark.parametrize("shares", [True, False])
def test_quiet_leaves_the_members_and_wants_nothing_whenever_it_is_said(shares: bool) -> None:
    for when in ("before the first round", "while shares are asked for", "at rest"):
        rig = Rig(shares=shares)

        def divide(_members: Members) -> list[Any]:
            if when == "while shares are asked for":  # noqa: B023
                rig.loop.quiet()  # the main thread, just now  # noqa: B023
            return ["a", "b"]

        if when == "before the first round":
            rig.loop.quiet()
        rig.divide = divide
        rig.run()
        if when == "at rest":
            rig.loop.quiet()
        until(lambda: rig.wanted[-1] == [])  # noqa: B023
        rig.loop.stop()
        assert rig.registry.heartbeats[-1].args[2] == ""
        assert json.loads(str(rig.registry.heartbeats[-1].args[3]))["quiet"]


@pytest.mark.parametrize("shares", [True, False])
def test_unquiet_joins_the_members_again_unless_it_never_was_one(shares: bool) -> None:
    rig = Rig(shares=shares)
    rig.divide = lambda _: ["a"]
    rig.run()
    part = rig.registry.heartbeats[-1].args[2]
    rig.loop.quiet()
    until(lambda: rig.wanted[-1] == [])
    rig.loop.unquiet({"Orders": 2})
    until(lambda: rig.wanted[-1] != [])
    rig.loop.stop()
    assert rig.registry.heartbeats[-1].args[2] == (json.dumps({"queues": {"Orders": 2}}) if shares else part)
    assert not json.loads(str(rig.registry.heartbeats[-1].args[3]))["quiet"]


def test_trouble_with_one_shard_keeps_nobody_from_getting_ready(rig: Rig) -> None:
    rig.leases.clear_trouble = lambda: ScriptError("broken")  # in every round
    rig.run()
    assert not rig.fatal


def test_word_that_a_shard_is_free_is_for_who_does_not_hold_it_and_no_lease_lasts_for_ever(rig: Rig) -> None:
    asked: list[tuple[Any, float]] = []
    rig.leases.try_for = lambda shard, at: asked.append((shard, at))
    free, held = (cast(Shard, SimpleNamespace(lease=SimpleNamespace(current=lease))) for lease in (None, "lease"))
    rig.loop.lease_released(held, 0.0)
    before = clock.now()
    rig.loop.lease_released(free, 1e10)
    rig.run()
    ((shard, at),) = asked
    assert shard is free
    assert before + TTL <= at <= clock.now() + TTL
    rig.loop.check(held)  # which a thread doubts
    until(lambda: len(asked) == 2)
