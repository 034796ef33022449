"""Turns of schedules: each tick is pushed once, whoever tries again, however late; pauses, new time tables, the end."""

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import msgspec
import pytest

import lowq
from lowq.errors import MiddlewareError, QueueFull, UnknownScheduleError
from lowq.node.schedules import FORGET_SECONDS, LOOK_SECONDS, QueueSchedules, take_turn
from lowq.operate.schedules import read_record, record_prefixes, set_record
from lowq.schedules import MOST_COUNTED, TICKS_TOGETHER, Record, Schedule
from lowq.sharding import shard_of
from lowq.store.keys import nodes_key
from lowq.testing import drain
from tests.mutants import break_scripts
from tests.rows import case
from tests.rules.support import run_script

#: A tick of every schedule of whole hours.
NOW = 1_800_000_000.0
HOUR = 3600.0
HOURLY = Schedule("report", 3600)
INTERNAL = "lowq:schedules:Report"


class Rig:
    """A worker whose schedules are worked by hand, as the code of the only node says them."""

    def __init__(self, url: str, *schedules: Schedule, settings: Mapping[str, Any], **options: Any) -> None:
        self.app = lowq.Lowq(redis_url=url, **settings)

        @self.app.worker(queue_name="Report", shards_count=3, **options)
        def report(job_id: str, payloads: list[Any]) -> None: ...

        self.worker = report
        self.declare(*schedules)

    def declare(self, *schedules: Schedule) -> None:
        self.known = {schedule.name: schedule for schedule in schedules}

    def turn(self, now: float, name: str = "report") -> float | None:
        return take_turn(self.app, self.worker.queue, name, lambda: self.known, now=now)

    def pushed(self, name: str = "report") -> list[float]:
        """planned_at of what waits."""
        found = self.worker.queue.peek(name)
        return [] if found is None else [payload["planned_at"] for payload, _ in found.payloads]

    def record(self, name: str = "report") -> tuple[bytes, Record]:
        """As it is kept, and read."""
        found = read_record(self.app, "Report", name)
        assert found.record is not None
        return found.raw, found.record

    def set_raw(self, name: str, expected: bytes, new: bytes) -> int:
        prefix = record_prefixes(self.app, "Report", name)[0]
        changed: int = run_script(self.app.client, "set_schedule", prefix, "", name, expected, new)
        return changed

    def register(self) -> None:
        """As nodes enter what they serve."""
        self.app.registrations.enter(INTERNAL, 1)
        self.app.registrations.enter("Report", 3, self.worker)

    def node(self, name: str, started_at: float, *schedules: Schedule) -> None:
        """A node that lives, and what its code says."""
        tables = {schedule.name: schedule.shown() for schedule in schedules}
        details = json.dumps({"started_at": started_at, "schedules": {"Report": tables}})
        run_script(self.app.client, "heartbeat", nodes_key("lowq"), "", name, "", details, 60)

    def gone(self, name: str) -> None:
        run_script(self.app.client, "heartbeat", nodes_key("lowq"), "", name, "", "", 60)


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(store_url: str) -> Iterator[MakeRig]:
    with ExitStack() as stack:

        def make(*schedules: Schedule, settings: Mapping[str, Any] = {}, **options: Any) -> Rig:
            rig = Rig(store_url, *schedules, settings=settings, **options)
            stack.enter_context(closing(rig.app))
            rig.app.client.command("FLUSHALL")
            return rig

        yield make


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig(HOURLY)


# --- each tick once ---


def test_a_schedule_begins_when_it_is_seen_first_and_each_tick_is_pushed_when_it_has_come(make_rig: MakeRig) -> None:
    rig = make_rig(HOURLY)
    assert rig.turn(NOW - 100) == LOOK_SECONDS  # what comes later than that is looked at before
    assert rig.turn(NOW - 10) == 10
    assert rig.turn(NOW - 0.001) == pytest.approx(0.001, abs=1e-6)
    assert rig.pushed() == []
    assert rig.turn(NOW) == LOOK_SECONDS
    assert rig.pushed() == [NOW]
    assert rig.turn(NOW + HOUR + 0.5) == LOOK_SECONDS
    assert rig.pushed() == [NOW, NOW + HOUR]
    often = make_rig(Schedule("report", 1.5, missed="all"))
    often.turn(NOW)
    often.turn(NOW + 4)
    found = often.worker.queue.peek("report")
    assert found is not None
    assert found.payloads == [({"planned_at": at}, at) for at in (NOW + 1.5, NOW + 3)]


def test_a_node_that_dies_before_the_release_has_pushed_it_once(make_rig: MakeRig) -> None:
    """The next holder takes the same turn again. Meanwhile the job may have been performed."""
    for later in (0.0, 50 * HOUR):
        with case(later):
            rig = make_rig(Schedule("report", "0 8 15 1 *"))  # NOW, and not again for a year
            rig.turn(NOW - 10)
            rig.turn(NOW)
            assert rig.pushed() == [NOW]
            drain(rig.worker)
            rig.turn(NOW + later)
            assert rig.pushed() == []


def late_push(rig: Rig) -> list[float]:
    """What is performed when a node reads the record, and pushes after another one has done so."""
    rig.turn(NOW - 10)
    raw, record = rig.record()
    rig.turn(NOW)
    performed = rig.pushed()
    drain(rig.worker)
    accepted = rig.worker.queue.push_ticks("report", [NOW], raw, record.changed(settled=NOW, last=NOW).encode())
    performed += rig.pushed()
    assert accepted == (len(performed) > 1)
    return performed


def test_a_node_that_was_frozen_before_the_push_comes_too_late(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is what forbids it: a build whose push does not look at it pushes the tick twice."""
    assert late_push(make_rig(HOURLY)) == [NOW]
    any_record = {"HGET": "if key == KEYS[1] .. 'schedules' then return string.match(ARGV[5], 'ticks=(.-)>') end"}
    broken = break_scripts(["push"], calls=any_record)
    monkeypatch.setattr("lowq.store.pool.load_scripts", lambda: broken)
    assert late_push(make_rig(HOURLY)) == [NOW, NOW]


def test_a_push_whose_reply_was_lost_is_not_made_twice(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.turn(NOW - 10)
    rig.worker.perform_async([{"id": str(number)} for number in range(30)])  # makes the shards of the queue
    sent = []
    start = rig.app.group.writer.client.start

    def lost(calls: Sequence[Any], **options: Any) -> Callable[[], list[Any]]:
        finish = start(calls, **options)
        if calls[0].script != "push":
            return finish
        sent.append(calls)

        def answer() -> list[Any]:
            replies = finish()
            return [lowq.RedisUnavailable("lost") for _ in replies] if len(sent) == 1 else replies

        return answer

    monkeypatch.setattr(rig.app.client, "start", lost)
    rig.turn(NOW)
    monkeypatch.undo()
    assert len(sent) == 2
    assert rig.pushed() == [NOW]
    assert rig.worker.queue.stats().pushed == 31


def test_a_record_that_cannot_be_read_begins_anew_and_is_not_listed(make_rig: MakeRig) -> None:
    for raw in (b"nonsense", *(b'{"table":{%s},"settled":1,"version":1}' % at for at in (b'"at":"of another"', b""))):
        with case(raw):
            rig = make_rig(HOURLY)
            rig.register()
            rig.worker.queue.push("other")
            rig.set_raw("report", b"", raw)
            assert rig.app.schedules() == []
            rig.turn(NOW - 10)
            assert rig.turn(NOW + 1) == LOOK_SECONDS
            assert rig.pushed()[-1] == NOW
            assert [info.name for info in rig.app.schedules()] == ["report"]


def test_a_dropped_queue_leaves_nothing(rig: Rig) -> None:
    rig.turn(NOW)
    rig.worker.queue.drop()
    assert read_record(rig.app, "Report", "report").raw == b""


def test_a_clock_that_is_put_back_repeats_no_tick_and_a_wrong_one_silences_no_schedule(make_rig: MakeRig) -> None:
    rig = make_rig(HOURLY)
    for at in (NOW - 10, NOW + 2 * HOUR, NOW, NOW + HOUR):
        rig.turn(at)
    assert rig.pushed() == [NOW + 2 * HOUR]
    wrong = make_rig(HOURLY)
    wrong.turn(NOW + 1000 * HOUR)
    assert wrong.turn(NOW - 10) == 10
    wrong.turn(NOW)
    assert wrong.pushed() == [NOW]


def test_what_was_missed_is_made_up_for_as_declared(make_rig: MakeRig) -> None:
    rows: list[tuple[Any, list[float]]] = [
        ("one", [NOW + 2 * HOUR]), ("all", [NOW, NOW + HOUR, NOW + 2 * HOUR]), ("skip", []),
    ]  # fmt: skip
    for missed, expected in rows:
        with case(missed):
            rig = make_rig(Schedule("report", 3600, missed=missed))
            rig.turn(NOW - 1800)
            rig.turn(NOW + 3 * HOUR - 1800)
            assert rig.pushed() == expected
            assert rig.record()[1].missed == 3
            rig.turn(NOW + 3 * HOUR + 30)  # another node has taken over half a minute late
            assert rig.pushed() == [*expected, NOW + 3 * HOUR]
            assert rig.record()[1].missed == 3
    many = make_rig(Schedule("report", 1, missed="all"))
    many.turn(NOW)
    assert [many.turn(NOW + TICKS_TOGETHER + 10) for _ in range(3)] == [0, 1, 1]
    assert many.worker.queue.stats().pushed == TICKS_TOGETHER + 10
    assert many.record()[1].missed == TICKS_TOGETHER + 10 - 61, "those later than a minute"


def test_missed_ticks_are_counted_once_up_to_a_bound_also_those_of_a_pause(make_rig: MakeRig) -> None:
    rig = make_rig(Schedule("report", 1))
    rig.turn(NOW)
    rig.turn(NOW + 7 * 86400)
    assert rig.record()[1].missed == MOST_COUNTED
    rig.turn(NOW + 7 * 86400)
    assert rig.record()[1].missed == MOST_COUNTED
    rig.register()
    rig.node("host:1:a", 1.0, *rig.known.values())
    assert rig.app.pause_schedule("report")
    rig.turn(NOW + 8 * 86400)
    assert rig.app.schedule("report").missed_count == MOST_COUNTED
    assert rig.app.resume_schedule("report")
    rig.turn(NOW + 7 * 86400 + 100)
    assert rig.app.schedule("report").missed_count == MOST_COUNTED + 39


# --- pauses ---


@pytest.fixture
def begun(rig: Rig) -> Rig:
    rig.turn(NOW - 10)
    rig.register()
    rig.node("host:1:a", 1.0, *rig.known.values())
    return rig


def test_no_tick_is_pushed_until_it_is_resumed(begun: Rig) -> None:
    raw, record = begun.record()
    assert begun.app.pause_schedule("report", by="Zoë Ω")
    assert not begun.app.pause_schedule("report")
    prepared = record.changed(settled=NOW, last=NOW).encode()
    assert not begun.worker.queue.push_ticks("report", [NOW], raw, prepared), "prepared before"
    assert begun.turn(NOW) == LOOK_SECONDS
    assert begun.pushed() == []
    info = begun.app.schedule("report")
    assert (info.paused_by, info.next_at, info.paused_at is None) == ("Zoë Ω", None, False)
    planned_at = begun.app.run_schedule_now("report")  # by hand it runs
    assert begun.pushed() == [planned_at]
    assert type(planned_at) is int  # as ticks are
    assert begun.app.schedule("report").last_at is None  # the time table goes on as it is
    begun.declare(Schedule("report", 60))  # of which nothing is settled meanwhile
    begun.turn(NOW + 90)
    assert begun.app.resume_schedule("report")
    assert not begun.app.resume_schedule("report")
    begun.turn(NOW + 90)
    assert begun.pushed() == [planned_at, NOW] or begun.pushed() == [NOW, planned_at]
    assert begun.app.schedule("report").last_at == NOW
    begun.app.queue(INTERNAL).pause(by="me")  # with all of its queue
    assert begun.app.schedule("report").paused_by == "me"


def test_a_pause_that_comes_late_does_nothing(begun: Rig) -> None:
    """A call of a connection that was given up: it was repeated, and ended since."""
    raw, record = begun.record()
    pause = record.changed(paused_at=NOW).encode()
    assert [begun.set_raw("report", raw, pause) for _ in range(2)] == [1, 1]  # the second is the repeat
    begun.app.resume_schedule("report")
    assert begun.set_raw("report", raw, pause) == 0
    assert begun.app.schedule("report").paused_at is None


class WholeTick(msgspec.Struct):
    planned_at: int


def test_a_job_by_hand_has_the_type_of_the_payloads(app: lowq.Lowq) -> None:
    @lowq.every(3600, name="report")
    @app.worker
    class Typed(lowq.Worker[WholeTick]):
        def perform_one(self, job_id: str, payloads: list[WholeTick]) -> None:
            """Nothing."""

    for queue, count in ("Typed", Typed.shards_count), ("lowq:schedules:Typed", 1):
        app.registrations.enter(queue, count)
    found = read_record(app, "Typed", "report", NOW)
    assert set_record(app, "Typed", "report", found.raw, Record(HOURLY.shown(), NOW).encode())
    planned_at = app.run_schedule_now("report", "Typed")
    job = Typed.queue.peek("report")
    assert job is not None
    assert job.payloads == [({"planned_at": int(planned_at)}, planned_at)]


def test_a_name_that_there_is_not_or_twice_is_refused(begun: Rig) -> None:
    @begun.app.worker(queue_name="Other", shards_count=1)
    def other(job_id: str, payloads: list[Any]) -> None: ...

    with pytest.raises(UnknownScheduleError, match="there is no schedule 'dayly'; known are: 'report'"):
        begun.app.pause_schedule("dayly")
    with pytest.raises(UnknownScheduleError, match="no schedule 'report' of the queue 'Other'"):
        begun.app.run_schedule_now("report", "Other")
    take_turn(begun.app, other.queue, "report", lambda: begun.known, now=NOW)
    begun.app.registrations.enter("Other", 1, other)
    begun.app.registrations.enter("lowq:schedules:Other", 1)
    with pytest.raises(UnknownScheduleError, match="several schedules 'report': say which queue, of 'Other', 'Rep"):
        begun.app.schedule("report")
    assert begun.app.pause_schedule("report", "Other")
    assert [info.paused_at is None for info in begun.app.schedules()] == [False, True]


def test_the_list_says_what_each_is_when_it_comes_and_who_knows_it(make_rig: MakeRig) -> None:
    rig = make_rig(Schedule("report", "0 8 * * 1", "Europe/Berlin", "skip"), Schedule("often", 2.5))
    rig.app.registrations.enter(INTERNAL, 1)
    now = read_record(rig.app, "Report", "report").now
    for name in rig.known:
        rig.turn(now, name)
    rig.node("host:1:a", 1.0, Schedule("often", 2.5))
    rig.turn(now + 2.5, "often")
    often, report = rig.app.schedules()
    assert (often.name, often.queue, often.at, often.tz, often.missed) == ("often", "Report", 2.5, None, "one")
    assert often.last_at == Schedule("often", 2.5).next(now)
    assert often.next_at is not None
    assert often.next_at > often.last_at
    assert (report.text, report.missed, report.next_at) == ("0 8 * * 1 Europe/Berlin", "skip", None)
    assert (often.is_known, report.is_known) == (True, False)


# --- new code, and the end ---


def test_ticks_of_a_new_time_table_begin_where_the_old_one_ends(make_rig: MakeRig) -> None:
    """One that was due before is not lost, though the code that knew it is gone; none comes twice."""
    rig = make_rig(HOURLY)
    rig.turn(NOW - 10)
    rig.declare(Schedule("report", 1800, missed="all"))
    assert rig.turn(NOW + 60) == LOOK_SECONDS
    assert rig.pushed() == [NOW]
    rig.turn(NOW + HOUR)
    assert rig.pushed() == [NOW, NOW + 1800, NOW + HOUR]
    other = make_rig(HOURLY)
    other.turn(NOW + 1)
    other.declare(Schedule("report", 60, missed="all"))
    other.turn(NOW + 1830)
    assert other.pushed() == []  # it has not missed what was before it
    other.turn(NOW + 1860)
    assert other.pushed() == [NOW + 1860]


def test_one_that_no_node_knows_rests_and_is_removed_after_an_hour(rig: Rig) -> None:
    rig.turn(NOW - 10)
    rig.declare()
    rig.turn(NOW - 5)
    rig.declare(HOURLY)
    rig.turn(NOW + 1800)
    assert rig.pushed() == [NOW]  # what it missed before it came back in time
    rig.declare()
    assert rig.turn(NOW + 1801) == LOOK_SECONDS
    assert rig.turn(NOW + 1800 + FORGET_SECONDS) == LOOK_SECONDS  # the hour begins anew
    assert [rig.turn(NOW + 1803 + FORGET_SECONDS) for _ in range(2)] == [None, None]  # and a repeat
    assert read_record(rig.app, "Report", "report").raw == b""


# --- in a node, among others ---


@pytest.fixture
def code(make_app: Callable[..., lowq.Lowq]) -> Callable[..., QueueSchedules]:
    """What a node has of code that declares these schedules."""

    def make(*own: Schedule, clock: Callable[[], float] = lambda: 0.0, **settings: Any) -> QueueSchedules:
        app = make_app(namespace="lowq", **settings)

        @app.worker(queue_name="Report", shards_count=3)
        def report(job_id: str, payloads: list[Any]) -> None: ...

        for schedule in own:
            lowq.every(schedule.at, name=schedule.name)(report)
        app.registrations.enter("Report", 3, report)
        app.registrations.enter(INTERNAL, 1)
        return QueueSchedules(app, report, clock=clock)

    return make


def perform(schedules: QueueSchedules, name: str, rig: Rig) -> str | None:
    """The state of the schedule's job after its turn; None: it is done with."""
    queue = rig.app.queue(INTERNAL, 1)
    queue.push(name, "")
    queue.perform_now(name)
    drain(schedules.worker, limit=1)
    job = queue.peek(name)
    return None if job is None else job.state


def test_the_node_that_started_last_is_right(rig: Rig, code: Callable[..., QueueSchedules]) -> None:
    old, new = Schedule("report", 60), Schedule("report", 90)
    rig.node("host:1:old", 1.0, old)
    rig.node("host:2:new", 2.0, new)
    for own in old, new:  # whichever performs it
        perform(code(own), "report", rig)
        assert rig.record()[1].table == new.shown()
    rig.gone("host:2:new")
    perform(code(old), "report", rig)
    assert rig.record()[1].table == old.shown()


def test_what_only_old_nodes_know_goes_on_until_they_are_gone(rig: Rig, code: Callable[..., QueueSchedules]) -> None:
    rig.node("host:1:old", 1.0, HOURLY, Schedule("former", 60))
    rig.node("host:2:new", 2.0, HOURLY)
    schedules = code(HOURLY)
    assert perform(schedules, "former", rig) == "scheduled"
    assert rig.record("former")[1].table == Schedule("former", 60).shown()
    rig.gone("host:1:old")
    perform(schedules, "former", rig)
    assert rig.record("former")[1].unknown_since is not None
    assert perform(schedules, "never seen", rig) is None


def test_whatever_goes_wrong_it_is_tried_again_and_never_fails(
    rig: Rig, code: Callable[..., QueueSchedules], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise LookupError("what nobody expects")

    schedules = code(HOURLY)
    monkeypatch.setattr("lowq.node.schedules.read_record", refuse)
    assert [perform(schedules, "report", rig) for _ in range(3)] == ["scheduled"] * 3
    (said,) = [record.getMessage() for record in caplog.records if "could not push its ticks" in record.getMessage()]
    assert "'report' of queue 'Report' could not push its ticks, and tries again: LookupError('what nobo" in said


def test_jobs_of_the_schedules_are_entered_and_found_again(rig: Rig, code: Callable[..., QueueSchedules]) -> None:
    clock = [0.0]
    schedules = code(HOURLY, Schedule("second", 60), clock=lambda: clock[0])
    queue = rig.app.queue(INTERNAL, 1)
    assert schedules.enter(rig.app.client) == 30
    assert [job.id for job in queue.jobs()] == ["report", "second"]
    queue.delete("second")
    assert schedules.enter(rig.app.client) == 30
    assert len(queue.jobs()) == 1
    clock[0] = 30.0
    assert schedules.enter(rig.app.client) == 60
    assert len(queue.jobs()) == 2
    queue.delete("report")
    queue.push({"id": "report", "payload": "", "delay": 2 * 86400})  # until the next tick, by a clock that was wrong
    clock[0] = 60.0
    schedules.enter(rig.app.client)
    assert queue.stats().scheduled == 1
    clock[0] = 1000.0  # here time passes, and by Redis's clock none does
    schedules.enter(rig.app.client)
    assert queue.stats().scheduled == 0


def test_thousands_are_entered_as_well(rig: Rig, code: Callable[..., QueueSchedules]) -> None:
    code(*(Schedule(f"report{number}", 60) for number in range(4001))).enter(rig.app.client)
    assert rig.app.queue(INTERNAL, 1).stats().length == 4001


def test_what_an_application_has_around_its_jobs_has_nothing_to_do_with_the_internal_queue(
    rig: Rig, code: Callable[..., QueueSchedules]
) -> None:
    called: list[str] = []

    def middleware(worker: Any, payloads: Any, call: Any) -> None:
        called.append(worker.queue_name)
        call(payloads)

    schedules = code(
        HOURLY, server_middlewares=[middleware], on_job_event=lambda event: called.append(event.queue),
        dump_payload=pickle.dumps, load_payload=pickle.loads,
    )  # fmt: skip
    schedules.enter(rig.app.client)
    assert drain(schedules.worker, limit=1).batches == 1
    assert rig.record()[1].table == HOURLY.shown()
    assert rig.app.queue(INTERNAL).stats().morgue_length == 0
    assert called == []


# --- the push of a tick is one like others ---


def test_a_full_queue_has_it_later(make_rig: MakeRig) -> None:
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


def test_client_middlewares_see_it_and_may_want_none_of_it_but_must_leave_it_its_id(make_rig: MakeRig) -> None:
    async def pass_on(_worker: Any, _jobs: list[dict[str, Any]], call: Any) -> None:
        await call()

    def clear(_worker: Any, jobs: list[dict[str, Any]], call: Any) -> None:
        jobs.clear()
        call()

    def rename(_worker: Any, jobs: list[dict[str, Any]], call: Any) -> None:
        jobs[0]["id"] = "other"
        call()

    for middleware, pushed in ((pass_on, [NOW]), (clear, [])):
        with case(middleware):
            rig = make_rig(HOURLY, settings={"client_middlewares": [middleware]})
            rig.turn(NOW - 10)
            assert rig.turn(NOW) == LOOK_SECONDS
            assert rig.pushed() == pushed
    rig = make_rig(HOURLY, settings={"client_middlewares": [rename]})
    rig.turn(NOW - 10)
    with pytest.raises(MiddlewareError, match="gave jobs of the schedule 'report' another id"):
        rig.turn(NOW)
    assert rig.pushed("other") == []


@pytest.mark.parametrize("is_async", [False, True])
def test_a_drain_performs_the_ticks_that_have_come(app: lowq.Lowq, is_async: bool) -> None:
    performed: list[float] = []

    def report(job_id: str, payloads: list[Any]) -> None:
        performed.extend(payload["planned_at"] for payload in payloads)

    async def areport(job_id: str, payloads: list[Any]) -> None:
        report(job_id, payloads)

    handler: Any = areport if is_async else report
    worker = lowq.every(HOUR, missed="all", name="r")(app.worker(shards_count=1, queue_name="Report")(handler))
    assert drain(worker).performed == 0
    begun = read_record(app, "Report", "r").record
    assert begun is not None
    first = HOURLY.next(begun.settled)
    assert [drain(worker, now=first + HOUR).performed for _ in range(2)] == [1, 0]
    assert performed == [first, first + HOUR]
