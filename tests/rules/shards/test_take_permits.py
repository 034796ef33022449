"""Limits over all nodes: what is granted, to whom, and until when, by a clock that the tests move."""

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowq.store.keys import limit_key
from tests.rows import case
from tests.rules.queue_rig import QueueRig
from tests.rules.support import NOW, run_script
from tests.tiers import real_redis_often
from tests.waiting import PATIENCE, until

KEY = limit_key("lowq", "concurrency:api")
TTL = 60.0


class Reply(NamedTuple):
    granted: int
    waiting: int
    #: Microseconds.
    delay: int | None
    slot: int
    #: Microseconds.
    deferred: int | None = None


class Limit:
    """One limit, and who asks for it."""

    def __init__(self, rig: QueueRig, limit: int, per: float | None = None) -> None:
        self.rig = rig
        self.limit = limit
        self.per = per
        self.calls: defaultdict[str, int] = defaultdict(int)
        rig.client.command("DEL", KEY)

    def ask(
        self, holder: str, want: int, at: float = 0.0, *, has: int = 0, back: str = "", call: int | None = None,
        counted: int | None = None,
    ) -> Reply:  # fmt: skip
        """``at``: seconds after the beginning."""
        if call is None:
            self.calls[holder] += 1
            call = self.calls[holder]
        given = has if self.per is None or counted is not None else back
        per, more = "" if self.per is None else repr(self.per), () if counted is None else (counted,)
        reply = run_script(
            self.rig.client, "take_permits", KEY, repr(NOW + at), self.limit, per, holder, call, given, want, repr(TTL),
            *more,
        )  # fmt: skip
        return Reply(*reply)

    def defer(self, seconds: float, at: float = 0.0) -> None:
        assert run_script(self.rig.client, "defer_limit", KEY, repr(NOW + at), repr(seconds)) == 1


@pytest.fixture
def rig(store_url: str) -> Iterator[QueueRig]:
    rig = QueueRig(store_url)
    yield rig
    rig.close()


class Ask(NamedTuple):
    """A call, and how many permits it grants."""

    holder: str
    want: int
    at: float
    granted: int
    #: How many it keeps, of a limit on what runs at once.
    has: int = 0
    #: How many of its last call it gives back, of a rate.
    back: int = 0
    call: int | None = None
    #: Of a rate whose permits count later: how many count from now on.
    counted: int | None = None


STORIES: dict[str, tuple[int, float | None, list[Ask]]] = {
    "so many at once over all holders": (3, None, [Ask("a", 2, 0, 2), Ask("b", 2, 0, 1), Ask("c", 1, 0, 0)]),
    "what is not needed any more is somebody else's": (
        3, None, [Ask("a", 3, 0, 3), Ask("a", 0, 0, 0, has=1), Ask("b", 3, 0, 2)]
    ),
    "what a silent holder has is free after its ttl": (
        1, None, [Ask("a", 1, 0, 1), Ask("b", 1, TTL - 0.1, 0), Ask("b", 1, TTL, 1)]
    ),
    "one that says that it needs it keeps it": (
        1, None, [Ask("a", 1, 0, 1), Ask("a", 0, TTL / 2, 0, has=1), Ask("b", 1, TTL + 1, 0)]
    ),
    "a repeat changes nothing and says the same": (
        3, None, [Ask("a", 2, 0, 2, call=1), Ask("a", 2, 0, 2, call=1), Ask("b", 3, 0, 1)]
    ),
    "an earlier call that comes late changes nothing": (
        3, None, [Ask("a", 1, 0, 1, call=2), Ask("a", 3, 0, 0, call=1), Ask("b", 3, 0, 2)]
    ),
    "who waits longer comes first, and behind the others who gives back and wants it again": (
        1, None,
        [
            Ask("a", 1, 0, 1), Ask("b", 1, 0.1, 0), Ask("c", 1, 0.2, 0), Ask("a", 1, 0.3, 0), Ask("c", 1, 0.4, 0),
            Ask("b", 1, 0.5, 1), Ask("b", 0, 0.6, 0), Ask("a", 1, 0.7, 0), Ask("c", 1, 0.8, 1),
        ],
    ),
    "nobody waits long for one that does not come": (
        1, None,
        [Ask("a", 1, 0, 1), Ask("dead", 1, 0.1, 0), Ask("a", 0, 0.2, 0), Ask("b", 1, 0.3, 0), Ask("b", 1, 4.2, 1)],
    ),
    "one that wants nothing any more does not wait": (
        1, None, [Ask("a", 1, 0, 1), Ask("b", 1, 0, 0), Ask("b", 0, 0, 0), Ask("a", 0, 0, 0), Ask("c", 1, 0.1, 1)]
    ),
    "a clock that steps back leaves what is held, and an hour is as if its holder had been silent": (
        1, None, [Ask("a", 1, 50, 1), Ask("b", 1, 10, 0), Ask("b", 1, -3600, 1)]
    ),
    "so many begin within the time": (10, 1.0, [Ask("a", 4, 0, 4), Ask("b", 10, 0.5, 6), Ask("c", 1, 0.9, 0)]),
    "what is given back is there at once": (
        10, 1.0, [Ask("a", 10, 0, 10), Ask("b", 1, 0, 0), Ask("a", 0, 0.01, 0, back=7), Ask("b", 10, 0.02, 7)]
    ),
    "what is given back twice counts once": (
        10, 1.0, [Ask("a", 10, 0, 10), *[Ask("a", 0, 0, 0, back=3, call=2)] * 3, Ask("b", 10, 0, 3)]
    ),
    "a repeat of a rate's counts once": (
        10, 1.0, [Ask("a", 4, 0, 4, call=1), Ask("a", 4, 0.2, 4, call=1), Ask("b", 10, 0.2, 6)]
    ),
    "a clock that steps back grants no more than once more": (
        10, 1.0, [Ask("a", 10, 100, 10), Ask("a", 10, 0, 0), Ask("a", 10, 1.1, 10)]
    ),
    "what counts later is held until then, and counts from then on": (
        3, 1.0,
        [
            Ask("a", 3, 0, 3, counted=0), Ask("b", 1, 5, 0, counted=0), Ask("a", 0, 6, 0, has=1, counted=2),
            Ask("b", 1, 6.9, 0, counted=0), Ask("b", 3, 7.1, 2, counted=0),
        ],
    ),
    "what counts later and is not used is there at once": (
        3, 1.0, [Ask("a", 3, 0, 3, counted=0), Ask("a", 0, 0, 0, has=1, counted=0), Ask("b", 3, 0, 2, counted=0)]
    ),
    "what counts later and what counts at once count together": (
        3, 1.0, [Ask("a", 2, 0, 2), Ask("b", 1, 0, 1, counted=0), Ask("c", 3, 1.1, 2), Ask("b", 0, 1.1, 0, counted=1)]
    ),
    "what counts later counts once, also if the call is repeated": (
        3, 9.0,
        [Ask("a", 2, 0, 2, counted=0), *[Ask("a", 0, 0, 0, counted=2, call=2)] * 3, Ask("b", 3, 0, 1, counted=0)],
    ),
    "what a silent holder had that counts later counts from the end of its ttl": (
        2, 9.0,
        [
            Ask("a", 2, 0, 2, counted=0), Ask("b", 1, TTL + 1, 0, counted=0), Ask("b", 1, TTL + 8.9, 0, counted=0),
            Ask("b", 2, TTL + 9.2, 2, counted=0),
        ],
    ),
}  # fmt: skip


def test_what_is_granted(rig: QueueRig) -> None:
    for name, (most, per, asks) in STORIES.items():
        limit, slots = Limit(rig, most, per), dict[str, int]()
        for number, ask in enumerate(asks):
            with case(name, number, ask):
                back = f"{slots[ask.holder]} {ask.back}" if ask.back else ""
                reply = limit.ask(
                    ask.holder, ask.want, ask.at, has=ask.has, back=back, call=ask.call, counted=ask.counted
                )
                assert reply.granted == ask.granted
                if not ask.back:
                    slots[ask.holder] = reply.slot


def test_who_waits_for_what_is_held_is_told_how_many_wait_and_no_time(rig: QueueRig) -> None:
    limit = Limit(rig, 3)
    limit.ask("a", 2)
    limit.ask("b", 2)
    assert limit.ask("c", 1) == (0, 1, None, 0, None), "b still waits for its second"


@pytest.mark.parametrize("per", [None, 1.0])
def test_nobody_gets_any_while_it_is_deferred(rig: QueueRig, per: float | None) -> None:
    limit = Limit(rig, 3, per)
    assert limit.ask("a", 1).granted == 1
    limit.defer(30, at=1)
    limit.defer(10, at=1)  # the latest end holds
    reply = limit.ask("b", 1, at=2, has=0)
    assert (reply.granted, reply.delay, reply.deferred) == (0, 29_000_000, 29_000_000)
    assert limit.ask("a", 0, at=2, has=1).deferred == 29_000_000, "who uses what it has again learns of it, too"
    assert limit.ask("b", 1, at=30.9).granted == 0
    assert limit.ask("b", 1, at=31.1).granted == 1
    limit.defer(5, at=32)
    limit.defer(0, at=33)
    assert limit.ask("c", 1, at=34)[0] == 1, "it was called off"


def test_a_deferral_outlives_the_key_and_has_bounds(rig: QueueRig) -> None:
    limit, before = Limit(rig, 3), time.monotonic()
    limit.defer(3600)
    for most in (3602, math.inf):
        left = rig.client.command("PTTL", KEY) / 1000
        assert 3600 - (time.monotonic() - before) < left <= most
        limit.ask("a", 1)
    values = "nonsense", "nan", "inf", "1e300", "-5", "", *(f"{NOW + 9} {each}" for each in ("nan", "1e300", "-5", ""))
    for value in (*values, f"{NOW + 9}", "nan 9", "1e300 1e300"):
        with case(value):
            rig.client.command("HSET", KEY, "deferred", value)
            assert limit.ask("b", 1).granted == 1
            limit.ask("b", 0)


def test_a_deferral_is_no_longer_than_was_asked_for_when_the_clock_steps_back(rig: QueueRig) -> None:
    limit, hour = Limit(rig, 3), 3600
    limit.defer(30, at=hour)
    assert limit.ask("a", 1, at=0).deferred == 30_000_000
    assert limit.ask("a", 1, at=20).deferred == 10_000_000, "it goes by, though its first end is an hour ahead"
    assert limit.ask("a", 1, at=30.1).granted == 1
    limit.defer(30, at=hour)
    limit.defer(10, at=0)  # the latest end holds, of those that were asked for
    assert limit.ask("b", 1, at=9.9).deferred == 20_100_000
    limit.defer(10, at=29)
    assert limit.ask("b", 1, at=39.1).granted == 1


def test_those_who_use_their_permits_again_are_told_of_a_deferral(rig: QueueRig) -> None:
    subscription = rig.client.subscribe()
    subscription.add([KEY])
    until(lambda: subscription.get(0.1) is not None)
    Limit(rig, 3).defer(2.5)
    event = subscription.get(PATIENCE)
    assert event is not None
    assert event[2] == b"! 2.500000"
    subscription.close()


def test_a_lower_limit_holds_from_then_on(rig: QueueRig) -> None:
    limit = Limit(rig, 5)
    limit.ask("a", 4)
    limit.limit = 2
    assert limit.ask("b", 1).granted == 0
    limit.ask("a", 0, has=1)
    assert limit.ask("b", 5).granted == 1


def test_it_is_gone_some_time_after_the_last_call(rig: QueueRig) -> None:
    Limit(rig, 1).ask("a", 1)
    assert 1.4 * TTL < rig.client.command("PTTL", KEY) / 1000 <= 2 * TTL + 1


class TestRate:
    def test_it_says_when_there_is_more(self, rig: QueueRig) -> None:
        limit = Limit(rig, 10, per=1.0)
        limit.ask("a", 4)
        limit.ask("a", 6, 0.5)
        reply = limit.ask("b", 1, 0.6)
        assert reply.granted == 0
        assert reply.delay is not None
        assert 0.4e6 < reply.delay <= 0.43e6
        assert limit.ask("b", 1, 0.6 + reply.delay / 1e6 - 0.02).granted == 0
        assert limit.ask("b", 10, 0.6 + reply.delay / 1e6).granted == 4

    def test_who_waits_behind_others_looks_soon_after_there_is_one_for_them(self, rig: QueueRig) -> None:
        limit = Limit(rig, 1, per=30.0)
        limit.ask("a", 1)
        waits = limit.ask("dead", 1, 1.0).delay
        assert waits is not None
        free_at = 1.0 + waits / 1e6
        assert 30.0 < free_at <= 30.7
        for at in (2.0, free_at + 0.5):
            delay = limit.ask("b", 1, at).delay
            assert delay is not None
            assert at + delay / 1e6 < max(free_at, at) + 1.01
        assert limit.ask("b", 1, free_at + 3.01).granted == 1

    def test_its_fields_are_bounded(self, rig: QueueRig) -> None:
        limit = Limit(rig, 1_000_000, per=1.0)
        for number in range(400):
            limit.ask("a", 1, number / 50)
        assert rig.client.command("HLEN", KEY) <= 410


def test_very_many_holders_that_are_silent_hold_nobody_up(rig: QueueRig) -> None:
    limit = Limit(rig, 1)
    records = [text for number in range(9000) for text in (f"holder:{number}", f"1 0 0 0 0 0 {NOW - TTL:.0f} {TTL}")]
    rig.client.command("HSET", KEY, *records)
    assert limit.ask("a", 1).granted == 1
    assert rig.client.command("HLEN", KEY) == 1


@pytest.mark.parametrize("per", [None, 3600.0])
def test_who_needs_none_any_more_wakes_the_next(rig: QueueRig, per: float | None) -> None:
    limit = Limit(rig, 1, per)
    subscription = rig.client.subscribe()
    subscription.add([KEY])
    until(lambda: subscription.get(0.1) is not None)
    slot = limit.ask("a", 1).slot
    limit.ask("first", 1, 0.1)
    limit.ask("second", 1, 0.2)
    limit.ask("a", 0, 0.3, back="" if per is None else f"{slot} 1")
    limit.ask("first", 0, 0.4)
    woken: list[str] = []
    while "second" not in woken:
        event = subscription.get(PATIENCE)
        assert event is not None, woken
        woken += [] if event[2].startswith(b"?") else event[2].decode().split()
    assert woken == ["first", "second"]
    subscription.close()


@real_redis_often
@given(data=st.data())
def test_never_more_than_the_limit_in_any_story(store_url: str, data: st.DataObject) -> None:
    rig = QueueRig(store_url)
    try:
        most, per = data.draw(st.integers(1, 5), "limit"), data.draw(st.sampled_from([None, 0.5, 2.0]), "per")
        is_late = per is not None and data.draw(st.booleans(), "counts later")
        limit = Limit(rig, most, per)
        ended: list[tuple[float, float]] = []  # of each that counts later: its permit, and its end
        begun = defaultdict[str, list[float]](list)
        at, held, granted = 0.0, defaultdict[str, int](int), list[tuple[float, int]]()
        latest: dict[str, tuple[int, int]] = {}  # of each holder: its slot, and its place in `granted`
        for _ in range(data.draw(st.integers(1, 25), "calls")):
            at += data.draw(st.sampled_from([0.0, 0.003, 0.1, 0.4, 1.0]))
            holder, want = data.draw(st.sampled_from("abc")), data.draw(st.integers(0, 6))
            if per is None:
                held[holder] -= data.draw(st.integers(0, held[holder]))
                held[holder] += limit.ask(holder, want, at, has=held[holder]).granted
                assert sum(held.values()) <= most
                continue
            if is_late and per is not None:
                over = [begun[holder].pop() for _ in range(data.draw(st.integers(0, len(begun[holder]))))]
                ended += [(moment, at) for moment in over]
                reply = limit.ask(holder, want, at, has=len(begun[holder]), counted=len(over))
                begun[holder] += [at] * reply.granted
                # Wherever between its permit and its end each is measured, no stretch has more.
                running = [(moment, at) for some in begun.values() for moment in some]
                assert sum(end > at - per for _, end in [*ended, *running]) <= most
                continue
            back = ""
            if holder in latest and data.draw(st.booleans()):
                slot, place = latest[holder]
                moment, has = granted[place]
                count = data.draw(st.integers(0, has))
                back, granted[place] = f"{slot} {count}", (moment, has - count)
            reply = limit.ask(holder, want, at, back=back)
            latest[holder] = reply.slot, len(granted)
            granted.append((at, reply.granted))
            # The latest stretch of that length: each is looked at when it ends with a grant.
            assert sum(count for moment, count in granted if at - per < moment <= at) <= most
    finally:
        rig.close()


def test_what_is_no_record_harms_nothing(rig: QueueRig) -> None:
    fields = ["", "nonsense", "slot:nan", "slot:-5", "slot:" + "9" * 400, "holder:", "holder:x"]
    values = ["", "nan", "-7", "1 2 3", "nan " * 8, "inf " * 8, "1e300 " * 8]
    for per, field, value in itertools.product([None, 1.0], fields, values):
        with case(per, field, value):
            limit = Limit(rig, 3, per)
            rig.client.command("HSET", KEY, field, value)
            assert limit.ask("a", 3).granted in range(4)
            assert limit.ask("a", 3, 2 * TTL).granted == 3
            assert limit.ask("a", 0, 2 * TTL).granted == 0
