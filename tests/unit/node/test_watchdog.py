"""When the watchdog looks, and what it does then, with a clock that the tests move."""

import logging
from typing import cast

import pytest

from lowq.broker.activity import Performing
from lowq.broker.shard import Shard
from lowq.node.activity import BatchActivity, ThreadActivity
from lowq.node.time_limits import DROPPED_AFTER, TimeLimits
from lowq.node.watchdog import Watchdog
from lowq.store import Client


class Rig:
    """A watchdog over two threads. The workers have these limits."""

    def __init__(self, *limits: float, warn_after: float = 0.0) -> None:
        self.now = 1000.0
        self.interrupted = 0
        self.written_off: list[BatchActivity] = []
        self.activities = [ThreadActivity(number) for number in range(2)]
        self.shard = Shard(cast(Client, None), "lowq", "q", 3, shards_count=4, nonce="me", load_payload=bytes.decode)
        self.watchdog = Watchdog(
            lambda: list(self.activities), limits, warn_after,
            write_off=self.written_off.append, on_fatal=self.fail, clock=lambda: self.now,
        )  # fmt: skip

    def fail(self, error: BaseException) -> None:
        raise error

    def perform(self, thread: int, *, time_limit: float | None = None, ttr: float | None = None) -> None:
        """A thread begins a batch."""
        activity = self.activities[thread]
        activity.performing = Performing(self.shard, ["a", "b"], self.now)
        if time_limit or ttr:
            activity.limits = TimeLimits(time_limit, ttr, interrupt=self._interrupt, clock=lambda: self.now)
            activity.limits._begin()

    def _interrupt(self, _exception: object) -> None:
        self.interrupted += 1

    def end(self, thread: int) -> None:
        self.activities[thread].performing = self.activities[thread].limits = None

    def look(self, at: float) -> float:
        """``at``: seconds since the beginning."""
        self.now = 1000.0 + at
        return self.watchdog.look()


def test_without_any_limit_there_is_no_thread() -> None:
    rig = Rig()
    rig.watchdog.start()
    assert not rig.watchdog._thread.is_alive()
    rig.watchdog.stop()


@pytest.mark.parametrize("warn_after", [0.0, 60.0])
def test_while_nothing_is_performed_it_looks_as_often_as_a_batch_could_pass_the_shortest_limit(
    warn_after: float,
) -> None:
    assert Rig(30, 5, 90, warn_after=warn_after).look(0) == 5


def test_a_batch_is_looked_at_when_it_passes_its_limit_whenever_it_began() -> None:
    rig = Rig(10)
    rig.look(0)
    rig.now += 7
    rig.perform(0, time_limit=10)
    assert rig.look(10) == 7
    assert rig.interrupted == 0
    assert rig.look(17) == DROPPED_AFTER
    assert rig.interrupted == 1


def test_while_a_long_batch_runs_a_thread_may_begin_a_shorter_one() -> None:
    rig = Rig(5, 100)
    rig.perform(0, ttr=100)
    assert rig.look(0) == 5
    assert rig.look(98) == 2


def test_past_ttr_the_batch_is_written_off_once() -> None:
    rig = Rig(10)
    rig.perform(1, ttr=10)
    assert rig.look(9) == 1
    assert rig.written_off == []
    rig.look(10)
    rig.look(20)
    assert rig.written_off == [rig.activities[1]]


def test_a_batch_that_has_ended_is_left_alone() -> None:
    rig = Rig(10)
    rig.perform(0, time_limit=10, ttr=20)
    limits = rig.activities[0].limits
    assert limits is not None
    limits._end()
    rig.look(30)
    assert (rig.interrupted, rig.written_off) == (0, [])


def test_a_batch_that_runs_for_long_is_named_again_after_twice_as_long(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(warn_after=60)
    rig.perform(1)
    with caplog.at_level(logging.WARNING, "lowq.node"):
        assert [rig.look(at) for at in (0, 60, 119, 120, 130)] == [60, 60, 1, 60, 60]
        assert rig.look(230) == 10
        rig.look(240)
    assert [record.__dict__["seconds"] for record in caplog.records] == [60, 120, 240]
    record = caplog.records[0].__dict__
    assert (record["queue"], record["shard"], record["ids"], record["thread_number"]) == ("q", 3, ["a", "b"], 1)
    assert "thread 1 still performs q:3 ids a, b for" in caplog.text


def test_the_next_batch_has_its_own_time(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(warn_after=60)
    rig.perform(0)
    with caplog.at_level(logging.WARNING, "lowq.node"):
        rig.look(60)
        rig.perform(0)
        assert rig.look(61) == 59
        rig.look(120)
    assert len(caplog.records) == 2


def test_what_raises_in_it_stops_the_node() -> None:
    rig = Rig(10)
    rig.activities.append(cast(ThreadActivity, None))
    seen: list[BaseException] = []
    rig.watchdog._on_fatal = seen.append
    rig.watchdog._run()
    assert [type(error) for error in seen] == [AttributeError]
