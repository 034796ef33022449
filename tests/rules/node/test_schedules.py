"""Turns of schedules: each tick is pushed once, whoever tries again, however late; pauses, new time tables, the end."""

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pytest

import lowq
import lowq.testing
from lowq.errors import MiddlewareError, QueueFull, UnknownScheduleError
from lowq.inspection.schedules import read_record, record_prefixes, set_record
from lowq.node.schedules import FORGET_SECONDS, LOOK_SECONDS, TROUBLE_SECONDS, QueueSchedules, take_turn
from lowq.schedules import TICKS_TOGETHER, Record, Schedule
from lowq.sharding import shard_of
from lowq.store.keys import nodes_key, shard_prefix
from tests.mutants import break_scripts

#: Rules that no store sees.
on_redis = pytest.mark.parametrize("store_url", ["redis"], indirect=True)

#: A tick of every schedule of whole hours.
NOW = 1_800_000_000.0
HOUR = 3600.0


class Rig:
    """A worker with schedules, whose turns are taken by hand."""

    def __init__(self, url: str, *schedules: Schedule, **options: Any) -> None:
        self.app = lowq.Lowq(redis_url=url)

        @self.app.worker(queue_name="Report", shards_count=3, **options)
        def report(job_id: str, payloads: list[Any]) -> None: ...

        self.worker = report
        self.known: dict[str, Schedule] = {}
        self.declare(*schedules)

    def declare(self, *schedules: Schedule) -> None:
        """What the code of the only node says."""
        self.known = {schedule.name: schedule for schedule in schedules}

    def turn(self, now: float, name: str = "report") -> float | None:
        return take_turn(self.app, self.worker.queue, name, lambda: self.known, now=now)

    def pushed(self, name: str = "report") -> list[float]:
        """planned_at of what waits."""
        found = self.worker.queue.peek(name)
        return [] if found is None else [payload["planned_at"] for payload, _ in found.payloads]

    def raw(self, name: str = "report") -> bytes:
        return read_record(self.app, "Report", name).raw

    def node(self, name: str, started_at: float, *schedules: Schedule) -> None:
        """A node that lives, and what its code says."""
        tables = {schedule.name: schedule.shown() for schedule in schedules}
        details = json.dumps({"started_at": started_at, "schedules": {"Report": tables}})
        self.app.client.run("heartbeat", nodes_key("lowq"), "", name, "", details, 60)

    def gone(self, name: str) -> None:
        self.app.client.run("heartbeat", nodes_key("lowq"), "", name, "", "", 60)


HOURLY = Schedule("report", 3600)


class WholeTick(msgspec.Struct):
    planned_at: int


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(store_url: str) -> Iterator[MakeRig]:
    made: list[Rig] = []

    def make(*schedules: Schedule, **options: Any) -> Rig:
        made.append(Rig(store_url, *schedules, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.app.close()


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig(HOURLY)


class TestOnce:
    def test_a_schedule_begins_when_it_is_seen_first(self, rig: Rig) -> None:
        assert rig.turn(NOW - 10) == 10
        assert rig.pushed() == []
        assert rig.turn(NOW - 100) == LOOK_SECONDS  # what comes later than that is looked at before

    def test_a_tick_is_pushed_when_it_has_come(self, rig: Rig) -> None:
        rig.turn(NOW - 10)
        assert rig.turn(NOW - 0.001) == pytest.approx(0.001, abs=1e-6)
        assert rig.turn(NOW) == LOOK_SECONDS
        assert rig.pushed() == [NOW]
        assert rig.turn(NOW + HOUR + 0.5) == LOOK_SECONDS
        assert rig.pushed() == [NOW, NOW + HOUR]

    def test_planned_at_is_the_tick_and_orders_the_payloads(self, make_rig: MakeRig) -> None:
        rig = make_rig(Schedule("report", 1.5, missed="all"))
        rig.turn(NOW)
        rig.turn(NOW + 4)
        found = rig.worker.queue.peek("report")
        assert found is not None
        assert found.payloads == [({"planned_at": NOW + 1.5}, NOW + 1.5), ({"planned_at": NOW + 3}, NOW + 3)]

    @pytest.mark.parametrize("later", [0.0, 10.0, 50 * HOUR])
    def test_a_node_that_dies_before_the_release_has_pushed_it_once(self, make_rig: MakeRig, later: float) -> None:
        """The next holder takes the same turn again. Meanwhile the job may have been performed."""
        rig = make_rig(Schedule("report", "0 8 15 1 *"))  # NOW, and not again for a year
        rig.turn(NOW - 10)
        rig.turn(NOW)
        assert rig.pushed() == [NOW]
        lowq.testing.drain(rig.worker)
        rig.turn(NOW + later)
        assert rig.pushed() == []

    def test_a_node_that_was_frozen_before_the_push_comes_too_late(self, rig: Rig) -> None:
        assert self.late_push(rig) == [NOW]

    def test_the_record_is_what_forbids_it(self, make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
        """A build whose push does not look at it pushes the tick twice, and the test above notices."""
        any_record = {"HGET": "if key == KEYS[1] .. 'schedules' then return string.match(ARGV[5], 'ticks=(.-)>') end"}
        broken = break_scripts(["push"], calls=any_record)
        monkeypatch.setattr("lowq.store.pool.load_scripts", lambda: broken)
        assert self.late_push(make_rig(HOURLY)) == [NOW, NOW]

    def late_push(self, rig: Rig) -> list[float]:
        """What is performed when a node reads the record, and pushes after another one has done so."""
        performed: list[float] = []
        rig.turn(NOW - 10)
        before = read_record(rig.app, "Report", "report")
        assert before.record is not None
        rig.turn(NOW)
        performed += rig.pushed()
        lowq.testing.drain(rig.worker)
        after = before.record.changed(settled=NOW, last=NOW).encode()
        accepted = rig.worker.queue.push_ticks("report", [NOW], before.raw, after)
        performed += rig.pushed()
        assert accepted == (len(performed) > 1)
        return performed

    def test_a_push_whose_reply_was_lost_is_not_made_twice(self, rig: Rig) -> None:
        rig.turn(NOW - 10)
        rig.worker.perform_async([{"id": str(number)} for number in range(30)])  # makes the shards of the queue
        sent = []
        start = rig.app.group.writer.client.start

        def lost(calls: Sequence[Any], **options: Any) -> Callable[[], list[Any]]:
            finish = start(calls, **options)
            sent.append(calls)

            def answer() -> list[Any]:
                replies = finish()
                return [lowq.RedisUnavailable("lost") for _ in replies] if len(sent) == 1 else replies

            return answer

        rig.app.client.start = lost  # type: ignore[method-assign]
        rig.turn(NOW)
        del rig.app.client.start
        assert len(sent) == 2
        assert rig.pushed() == [NOW]
        assert rig.worker.queue.stats().pushed == 31

    @pytest.mark.parametrize("raw", [b"nonsense", b'{"table":{"at":"from another version"},"settled":1,"version":1}'])
    def test_a_record_that_cannot_be_read_begins_anew(self, rig: Rig, raw: bytes) -> None:
        prefix = record_prefixes(rig.app, "Report", "report")[0]
        rig.worker.queue.push("other")
        rig.app.client.run("set_schedule", prefix, "", "report", b"", raw)
        rig.turn(NOW - 10)
        assert rig.turn(NOW + 1) == LOOK_SECONDS
        assert rig.pushed()[-1] == NOW

    def test_a_dropped_queue_leaves_nothing(self, rig: Rig) -> None:
        rig.turn(NOW)
        rig.worker.queue.drop()
        assert rig.raw() == b""


@on_redis
class TestClock:
    def test_a_clock_that_is_put_back_repeats_no_tick(self, rig: Rig) -> None:
        rig.turn(NOW - 10)
        rig.turn(NOW + 2 * HOUR)
        rig.turn(NOW)
        assert rig.turn(NOW + HOUR) == LOOK_SECONDS
        assert rig.pushed() == [NOW + 2 * HOUR]

    def test_a_clock_that_was_wrong_altogether_does_not_silence_a_schedule(self, rig: Rig) -> None:
        rig.turn(NOW + 1000 * HOUR)
        assert rig.turn(NOW - 10) == 10
        rig.turn(NOW)
        assert rig.pushed() == [NOW]


@on_redis
class TestMissed:
    """After an outage of three hours and a half."""

    def after_an_outage(self, rig: Rig) -> list[float]:
        rig.turn(NOW - 1800)
        rig.turn(NOW + 3 * HOUR - 1800)
        return rig.pushed()

    def test_one(self, rig: Rig) -> None:
        assert self.after_an_outage(rig) == [NOW + 2 * HOUR]

    def test_all(self, make_rig: MakeRig) -> None:
        assert self.after_an_outage(make_rig(Schedule("report", 3600, missed="all"))) == [
            NOW, NOW + HOUR, NOW + 2 * HOUR,
        ]  # fmt: skip

    def test_skip(self, make_rig: MakeRig) -> None:
        rig = make_rig(Schedule("report", 3600, missed="skip"))
        assert self.after_an_outage(rig) == []
        rig.turn(NOW + 3 * HOUR + 30)  # another node has taken over half a minute late
        assert rig.pushed() == [NOW + 3 * HOUR]

    def test_very_many_are_pushed_in_several_turns(self, make_rig: MakeRig) -> None:
        rig = make_rig(Schedule("report", 1, missed="all"))
        rig.turn(NOW)
        waits = [rig.turn(NOW + TICKS_TOGETHER + 10) for _ in range(3)]
        assert waits == [0, 1, 1]
        assert rig.worker.queue.stats().pushed == TICKS_TOGETHER + 10


@on_redis
class TestPause:
    def begun(self, rig: Rig) -> None:
        rig.turn(NOW - 10)
        rig.app.register("lowq:schedules:Report", 1)
        rig.app.register("Report", 3, rig.worker)
        rig.node("host:1:a", 1.0, *rig.known.values())

    def test_no_tick_is_pushed_until_it_is_resumed(self, rig: Rig) -> None:
        self.begun(rig)
        assert rig.app.pause_schedule("report", by="Zoë Ω")
        assert not rig.app.pause_schedule("report")
        assert rig.turn(NOW) == LOOK_SECONDS
        assert rig.pushed() == []
        info = rig.app.schedule("report")
        assert (info.paused_by, info.next_at) == ("Zoë Ω", None)
        assert info.paused_at is not None
        assert rig.app.resume_schedule("report")
        assert not rig.app.resume_schedule("report")
        rig.turn(NOW + 5 * HOUR)
        assert rig.pushed() == [NOW + 5 * HOUR]
        assert rig.app.schedule("report").last_at == NOW + 5 * HOUR

    def test_once_it_is_paused_a_push_that_was_prepared_before_is_refused(self, rig: Rig) -> None:
        self.begun(rig)
        before = read_record(rig.app, "Report", "report")
        assert before.record is not None
        rig.app.pause_schedule("report")
        after = before.record.changed(settled=NOW, last=NOW).encode()
        assert not rig.worker.queue.push_ticks("report", [NOW], before.raw, after)
        assert rig.pushed() == []

    def test_a_pause_that_comes_late_does_nothing(self, rig: Rig) -> None:
        """A call of a connection that was given up: it was repeated, and ended since."""
        self.begun(rig)
        before = read_record(rig.app, "Report", "report")
        assert before.record is not None
        pause = before.record.changed(paused_at=NOW).encode()
        prefix = record_prefixes(rig.app, "Report", "report")[0]
        for expected in 1, 1:  # the second is the repeat
            assert rig.app.client.run("set_schedule", prefix, "", "report", before.raw, pause) == expected
        rig.app.resume_schedule("report")
        assert rig.app.client.run("set_schedule", prefix, "", "report", before.raw, pause) == 0
        assert rig.app.schedule("report").paused_at is None

    def test_a_paused_schedule_runs_by_hand(self, rig: Rig) -> None:
        self.begun(rig)
        rig.app.pause_schedule("report")
        planned_at = rig.app.run_schedule_now("report")
        assert rig.pushed() == [planned_at]
        assert type(planned_at) is int  # as ticks are
        assert rig.app.schedule("report").last_at is None  # the time table goes on as it is

    def test_a_job_by_hand_has_the_type_of_the_payloads(self, store_url: str) -> None:
        app = lowq.Lowq(redis_url=store_url)

        @app.worker
        class Typed(lowq.Worker[WholeTick]):
            def perform_one(self, job_id: str, payloads: list[WholeTick]) -> None:
                """Nothing."""

        lowq.every(3600, name="report")(Typed)
        for queue, count in ("Typed", Typed.shards_count), ("lowq:schedules:Typed", 1):
            app.register(queue, count)
        found = read_record(app, "Typed", "report", NOW)
        assert set_record(app, "Typed", "report", found.raw, Record(HOURLY.shown(), NOW).encode())
        planned_at = app.run_schedule_now("report", "Typed")
        job = Typed.queue.peek("report")
        assert job is not None
        assert job.payloads == [({"planned_at": int(planned_at)}, planned_at)]
        app.close()

    def test_all_of_a_queue_are_paused_with_the_internal_queue(self, rig: Rig) -> None:
        self.begun(rig)
        rig.app.queue("lowq:schedules:Report").pause(by="me")
        info = rig.app.schedule("report")
        assert (info.paused_by, info.paused_at is None) == ("me", False)

    def test_a_name_that_there_is_not_is_refused(self, rig: Rig) -> None:
        self.begun(rig)
        with pytest.raises(UnknownScheduleError, match="there is no schedule 'dayly'; known are: 'report'"):
            rig.app.pause_schedule("dayly")
        with pytest.raises(UnknownScheduleError, match="no schedule 'report' of the queue 'Other'"):
            rig.app.run_schedule_now("report", "Other")

    def test_one_name_in_two_queues_needs_the_queue(self, rig: Rig) -> None:
        self.begun(rig)

        @rig.app.worker(queue_name="Other", shards_count=1)
        def other(job_id: str, payloads: list[Any]) -> None: ...

        take_turn(rig.app, other.queue, "report", lambda: rig.known, now=NOW)
        rig.app.register("Other", 1, other)
        rig.app.register("lowq:schedules:Other", 1)
        with pytest.raises(UnknownScheduleError, match="several schedules 'report': say which queue, of 'Other', 'Rep"):
            rig.app.schedule("report")
        assert rig.app.pause_schedule("report", "Other")
        assert [info.paused_at is None for info in rig.app.schedules()] == [False, True]


@on_redis
class TestNewCode:
    def test_ticks_of_the_new_time_table_begin_where_the_old_one_ends(self, rig: Rig) -> None:
        """One that was due before is not lost, though the code that knew it is gone; none comes twice."""
        rig.turn(NOW - 10)
        rig.declare(Schedule("report", 1800, missed="all"))
        assert rig.turn(NOW + 60) == LOOK_SECONDS
        assert rig.pushed() == [NOW]
        rig.turn(NOW + HOUR)
        assert rig.pushed() == [NOW, NOW + 1800, NOW + HOUR]

    def test_a_time_table_that_comes_more_often_has_not_missed_what_was_before_it(self, rig: Rig) -> None:
        rig.turn(NOW + 1)
        rig.declare(Schedule("report", 60, missed="all"))
        rig.turn(NOW + 1830)
        assert rig.pushed() == []
        rig.turn(NOW + 1860)
        assert rig.pushed() == [NOW + 1860]

    def test_while_it_is_paused_nothing_is_settled(self, rig: Rig) -> None:
        TestPause().begun(rig)
        rig.app.pause_schedule("report")
        rig.declare(Schedule("report", 60))
        rig.turn(NOW + 90)
        rig.app.resume_schedule("report")
        rig.turn(NOW + 90)
        assert rig.pushed() == [NOW]


@on_redis
class TestEnd:
    def test_one_that_no_node_knows_rests_and_is_removed_after_an_hour(self, rig: Rig) -> None:
        rig.turn(NOW - 10)
        rig.declare()
        assert rig.turn(NOW + 1) == LOOK_SECONDS
        assert rig.turn(NOW + FORGET_SECONDS) == LOOK_SECONDS
        assert rig.turn(NOW + FORGET_SECONDS + 2) is None
        assert (rig.pushed(), rig.raw()) == ([], b"")
        assert rig.turn(NOW + FORGET_SECONDS + 2) is None  # a repeat

    def test_one_that_comes_back_in_time_has_missed_its_ticks(self, rig: Rig) -> None:
        rig.turn(NOW - 10)
        rig.declare()
        rig.turn(NOW - 5)
        rig.declare(HOURLY)
        rig.turn(NOW + 1800)
        assert rig.pushed() == [NOW]
        rig.declare()
        rig.turn(NOW + 1801)
        assert rig.turn(NOW + 1801 + FORGET_SECONDS) == LOOK_SECONDS  # the hour begins anew


@on_redis
class TestInNode:
    """What a node knows of other nodes' code."""

    def schedules(self, rig: Rig, *own: Schedule) -> QueueSchedules:
        rig.worker._schedules = own
        rig.app.register("Report", 3, rig.worker)
        return QueueSchedules(rig.app, rig.worker)

    def perform(self, schedules: QueueSchedules, *names: str) -> Mapping[str, tuple[str, Any]]:
        with lowq.testing.execution(schedules.worker, {name: [""] for name in names}) as execution:
            schedules.worker().perform({name: [""] for name in names})
            return dict(execution._outcomes)

    def table(self, rig: Rig, name: str = "report") -> Mapping[str, Any] | None:
        record = read_record(rig.app, "Report", name).record
        return None if record is None else record.table

    def test_the_node_that_started_last_is_right(self, rig: Rig) -> None:
        old, new = Schedule("report", 60), Schedule("report", 90)
        rig.node("host:1:old", 1.0, old)
        rig.node("host:2:new", 2.0, new)
        for own in old, new:  # whichever performs it
            self.perform(self.schedules(rig, own), "report")
            assert self.table(rig) == new.shown()
        rig.gone("host:2:new")
        self.perform(self.schedules(rig, old), "report")
        assert self.table(rig) == old.shown()

    def test_what_only_old_nodes_know_goes_on_until_they_are_gone(self, rig: Rig) -> None:
        rig.node("host:1:old", 1.0, HOURLY, Schedule("former", 60))
        rig.node("host:2:new", 2.0, HOURLY)
        schedules = self.schedules(rig, HOURLY)
        assert self.perform(schedules, "former")["former"][0] == "release"
        assert self.table(rig, "former") == Schedule("former", 60).shown()
        rig.gone("host:1:old")
        self.perform(schedules, "former")
        record = read_record(rig.app, "Report", "former").record
        assert record is not None
        assert record.unknown_since is not None
        assert self.perform(schedules, "never seen") == {}  # done with

    def test_whatever_goes_wrong_it_is_tried_again_and_never_fails(
        self, rig: Rig, caplog: pytest.LogCaptureFixture
    ) -> None:
        schedules = self.schedules(rig, Schedule("report", 1), Schedule("second", 1))
        self.perform(schedules, "report")

        def refuse(*_: Any) -> Any:
            raise LookupError("what nobody expects")

        rig.app.client.run = refuse  # type: ignore[method-assign,assignment]
        outcomes = [self.perform(schedules, "second") for _ in range(3)]
        assert outcomes == [{"second": ("release", TROUBLE_SECONDS)}] * 3
        said = [record.getMessage() for record in caplog.records]
        (text,) = said
        assert text.endswith("'second' of queue 'Report' could not push its ticks, and tries again: LookupError('what "
                             "nobody expects')")  # fmt: skip

    def test_jobs_of_the_schedules_are_entered_and_found_again(self, rig: Rig) -> None:
        clock = [0.0]
        rig.worker._schedules = (Schedule("report", 60), Schedule("second", 60))
        rig.app.register("lowq:schedules:Report", 1)
        schedules = QueueSchedules(rig.app, rig.worker, clock=lambda: clock[0])
        assert schedules.enter(rig.app.client) == 30
        queue = rig.app.queue("lowq:schedules:Report")
        assert [job.id for job in queue.jobs()] == ["report", "second"]
        queue.delete("second")
        assert schedules.enter(rig.app.client) == 30
        assert len(queue.jobs()) == 1
        clock[0] = 30.0
        assert schedules.enter(rig.app.client) == 60
        assert len(queue.jobs()) == 2

    def test_when_the_clock_of_redis_steps_back_they_do_not_wait_for_as_long(self, rig: Rig) -> None:
        clock = [0.0]
        rig.worker._schedules = (HOURLY,)
        rig.app.register("lowq:schedules:Report", 1)
        schedules = QueueSchedules(rig.app, rig.worker, clock=lambda: clock[0])
        schedules.enter(rig.app.client)
        queue = rig.app.queue("lowq:schedules:Report")
        queue.delete("report")
        queue.push(
            {"id": "report", "payload": "", "delay": 2 * 86400}
        )  # until the next tick, by the clock that was wrong
        clock[0] = 30.0
        schedules.enter(rig.app.client)
        assert queue.stats().due == 0
        clock[0] = 1000.0  # here time passes, and by Redis's clock none does
        schedules.enter(rig.app.client)
        assert queue.stats().due == 1

    def test_thousands_are_entered_as_well(self, rig: Rig) -> None:
        rig.worker._schedules = tuple(Schedule(f"report{number}", 60) for number in range(4001))
        rig.app.register("lowq:schedules:Report", 1)
        QueueSchedules(rig.app, rig.worker).enter(rig.app.client)
        assert rig.app.queue("lowq:schedules:Report").stats().length == 4001

    def test_middlewares_and_events_of_the_application_have_nothing_to_do_with_it(self, store_url: str) -> None:
        called: list[str] = []

        def middleware(worker: Any, payloads: Any, call: Any) -> None:
            called.append(worker.queue_name)
            call(payloads)

        app = lowq.Lowq(
            redis_url=store_url, server_middlewares=[middleware], on_job_event=lambda event: called.append(event.queue)
        )

        @lowq.every(60)
        @app.worker(shards_count=1)
        def report(job_id: str, payloads: list[Any]) -> None: ...

        schedules = QueueSchedules(app, report)
        app.register("report", 1, report)
        lowq.testing.drain(schedules.worker)
        schedules.enter(app.client)
        assert lowq.testing.drain(schedules.worker, limit=1).batches == 1
        app.flush_events()
        app.close()
        assert called == []

    def test_a_codec_of_the_application_does_not_concern_the_internal_queue(self, store_url: str) -> None:
        app = lowq.Lowq(redis_url=store_url, dump_payload=pickle.dumps, load_payload=pickle.loads)

        @lowq.every(60)
        @app.worker(shards_count=1)
        def report(job_id: str, payloads: list[Any]) -> None: ...

        schedules = QueueSchedules(app, report)
        app.register("report", 1, report)
        lowq.testing.drain(schedules.worker)
        schedules.enter(app.client)
        assert lowq.testing.drain(schedules.worker, limit=1).batches == 1
        assert read_record(app, "report", "report").record is not None
        assert app.queue("lowq:schedules:report").stats().morgue_length == 0
        app.close()


@on_redis
class TestPushed:
    """The push of a tick is one like others."""

    def test_a_full_queue_has_it_later(self, make_rig: MakeRig) -> None:
        rig = make_rig(HOURLY, capacity=3)
        rig.turn(NOW - 10)
        shard = shard_of(b"report", 3)
        filler = next(f"f{i}" for i in range(100) if shard_of(f"f{i}".encode(), 3) == shard)
        rig.worker.push(filler)
        for _ in range(2):
            with pytest.raises(QueueFull):
                rig.turn(NOW)
        rig.worker.queue.delete(filler)
        rig.turn(NOW)
        assert rig.pushed() == [NOW]

    def test_async_client_middlewares_see_it(self, make_rig: MakeRig) -> None:
        rig = make_rig(Schedule("report", 60))

        async def pass_on(_worker: Any, _jobs: list[dict[str, Any]], call: Any) -> None:
            await call()

        rig.app.config.client_middlewares = [pass_on]
        rig.turn(NOW)
        rig.turn(NOW + 60)
        assert rig.pushed() == [NOW + 60]

    def test_a_client_middleware_may_want_none_of_it(self, make_rig: MakeRig) -> None:
        rig = make_rig(Schedule("report", 60))

        def clear(_worker: Any, jobs: list[dict[str, Any]], call: Any) -> None:
            jobs.clear()
            call()

        rig.app.config.client_middlewares = [clear]
        rig.turn(NOW)
        assert rig.turn(NOW + 60) == 60
        assert rig.pushed() == []

    def test_a_client_middleware_must_leave_it_its_id(self, make_rig: MakeRig) -> None:
        rig = make_rig(Schedule("report", 60))

        def rename(_worker: Any, jobs: list[dict[str, Any]], call: Any) -> None:
            jobs[0]["id"] = "other"
            call()

        rig.app.config.client_middlewares = [rename]
        rig.turn(NOW)
        with pytest.raises(MiddlewareError, match="gave jobs of the schedule 'report' another id"):
            rig.turn(NOW + 60)
        assert rig.pushed("other") == []


@on_redis
class TestLists:
    def test_next_last_and_who_knows_it(self, make_rig: MakeRig) -> None:
        rig = make_rig(Schedule("report", "0 8 * * 1", "Europe/Berlin", "skip"), Schedule("often", 2.5))
        rig.app.register("lowq:schedules:Report", 1)
        now = lowq.inspection.schedules.read_record(rig.app, "Report", "report").now
        for name in rig.known:
            rig.turn(now, name)
        rig.node("host:1:a", 1.0, Schedule("often", 2.5))
        rig.turn(now + 2.5, "often")
        often, report = rig.app.schedules()
        assert (often.name, often.queue, often.at, often.tz, often.missed, often.is_known) == (
            "often", "Report", 2.5, None, "one", True,
        )  # fmt: skip
        assert often.last_at == Schedule("often", 2.5).next(now)
        assert often.next_at is not None
        assert often.next_at > often.last_at
        assert (report.text, report.missed, report.next_at, report.is_known) == (
            "0 8 * * 1 Europe/Berlin", "skip", None, False,
        )  # fmt: skip

    def test_a_record_of_somebody_elses_is_left_out(self, rig: Rig) -> None:
        rig.app.register("lowq:schedules:Report", 1)
        rig.app.register("Report", 3, rig.worker)
        rig.turn(NOW)
        prefix = shard_prefix("lowq", "Report", 0)
        rig.app.client.run("set_schedule", prefix, "", "x", b"", b"nonsense")
        rig.app.client.run("set_schedule", prefix, "", "y", b"", b'{"table":{},"settled":1,"version":1}')
        assert [info.name for info in rig.app.schedules()] == ["report"]


@on_redis
class TestDrain:
    def test_a_drain_performs_the_ticks_that_have_come(self, store_url: str) -> None:
        app = lowq.Lowq(redis_url=store_url)
        performed: list[Any] = []

        @lowq.every(HOUR, missed="all")
        @app.worker(shards_count=1)
        def report(job_id: str, payloads: list[Any]) -> None:
            performed.extend(payload["planned_at"] for payload in payloads)

        assert lowq.testing.drain(report).performed == 0
        begun = read_record(app, "report", "report").record
        assert begun is not None
        first = Schedule("s", HOUR).next(begun.settled)
        assert lowq.testing.drain(report, now=first + HOUR).performed == 1
        assert lowq.testing.drain(report, now=first + HOUR).performed == 0
        assert performed == [first, first + HOUR]
        app.close()

    def test_an_async_worker_has_its_ticks_in_one_step(self, store_url: str) -> None:
        app = lowq.Lowq(redis_url=store_url)
        performed: list[Any] = []

        @lowq.every("0 8 * * 1", tz="Europe/Berlin", name="weekly")
        @app.worker(shards_count=1)
        async def report(job_id: str, payloads: list[Any]) -> None:
            performed.append((job_id, [payload["planned_at"] for payload in payloads]))

        now = read_record(app, "report", "weekly").now
        monday = Schedule("s", "0 8 * * 1", "Europe/Berlin").next(now + 1)
        assert lowq.testing.drain(report, now=monday).performed == 1
        assert performed == [("weekly", [monday])]
        app.close()
