"""Time tables, both changes of the clocks, which missed ticks are made up for, and what a decoration refuses."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from typing import Annotated, Any, TypedDict
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lowq
from lowq.errors import ConfigError
from lowq.schedules import GRACE_SECONDS, TICKS_TOGETHER, Missed, Record, Schedule, grace_of
from lowq.workers import schedules_of
from tests.rows import case

BERLIN = "Europe/Berlin"
LORD_HOWE = "Australia/Lord_Howe"


def unix(text: str, zone: str = BERLIN) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


#: A cron string, a zone, the moment after which it is asked, and the next ticks.
TICKS: list[tuple[str, str, str, list[str]]] = [
    ("0 8 * * 1", BERLIN, "2027-01-04T08:00", ["01-11 08:00+01:00", "01-18 08:00+01:00"]),
    # An hour that is left out moves its ticks behind it, several are one.
    ("30 2 * * *", BERLIN, "2027-03-27T12:00", ["03-28 03:00+02:00", "03-29 02:30+02:00", "03-30 02:30+02:00"]),
    ("15,45 2 * * *", BERLIN, "2027-03-27T12:00", ["03-28 03:00+02:00", "03-29 02:15+02:00", "03-29 02:45+02:00"]),
    # A tick in the hour that comes twice comes once.
    ("30 2 * * *", BERLIN, "2027-10-30T12:00", ["10-31 02:30+02:00", "11-01 02:30+01:00", "11-02 02:30+01:00"]),
    # A change of half an hour, from 2:00+10:30 to 2:30+11:00.
    ("15 2 * * *", LORD_HOWE, "2027-10-02T12:00", ["10-03 02:30+11:00", "10-04 02:15+11:00"]),
    ("0 2 * * *", LORD_HOWE, "2027-10-02T12:00", ["10-03 02:30+11:00", "10-04 02:00+11:00"]),
    ("*/15 * * * *", LORD_HOWE, "2027-10-03T01:30", ["10-03 01:45+10:30", "10-03 02:30+11:00", "10-03 02:45+11:00"]),
    ("0 * * * *", LORD_HOWE, "2027-10-03T00:30", ["10-03 01:00+10:30", "10-03 03:00+11:00", "10-03 04:00+11:00"]),
    # And from 2:00+11:00 to 1:30+10:30.
    ("45 1 * * *", LORD_HOWE, "2027-04-03T12:00", ["04-04 01:45+11:00", "04-05 01:45+10:30"]),
    ("*/15 * * * *", LORD_HOWE, "2027-04-04T01:30",
     ["04-04 01:45+11:00", "04-04 01:30+10:30", "04-04 01:45+10:30", "04-04 02:00+10:30"]),
    ("45 * * * *", LORD_HOWE, "2027-04-04T01:30", ["04-04 01:45+11:00", "04-04 01:45+10:30", "04-04 02:45+10:30"]),
]  # fmt: skip


class TestCron:
    def test_the_clock_on_the_wall_shows_these_ticks(self) -> None:
        for at, zone, since, expected in TICKS:
            with case(at, zone, since):
                found = islice(Schedule("s", at, zone).after(unix(since, zone)), len(expected))
                shown = [datetime.fromtimestamp(tick, ZoneInfo(zone)).isoformat(" ", "minutes") for tick in found]
                assert [text.removeprefix("2027-") for text in shown] == expected

    def test_without_a_time_zone_it_is_utc_which_needs_none_of_the_system(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lowq.schedules.ZoneInfo", None)
        since = datetime(2027, 6, 1, 7, tzinfo=UTC).timestamp()
        assert Schedule("s", "0 8 * * *").next(since) == Schedule("s", "0 8 * * *", "UTC").next(since) == since + 3600

    def test_a_tick_is_not_after_itself(self) -> None:
        schedule = Schedule("s", "* * * * *")
        tick = schedule.next(1_800_000_001)
        assert schedule.next(tick - 0.001) == tick
        assert schedule.next(tick) == tick + 60

    def test_begun_in_the_second_of_both_hours_the_first_does_not_come_again(self) -> None:
        second = datetime(2027, 10, 31, 2, 10, tzinfo=ZoneInfo(BERLIN), fold=1).timestamp()
        assert Schedule("s", "30 2 * * *", "Europe/Berlin").next(second) == unix("2027-11-01T02:30")

    def test_every_quarter_of_an_hour_goes_by_the_time_that_passes(self) -> None:
        schedule = Schedule("s", "*/15 * * * *", "Europe/Berlin")
        for day in "2027-03-28", "2027-10-31":
            since, until = unix(f"{day}T00:00"), unix(f"{day}T06:00")
            found = list(takewhile(lambda tick, until=until: tick <= until, schedule.after(since)))  # type: ignore[misc]
            assert [tick - since for tick in found] == [900.0 * i for i in range(1, len(found) + 1)]
            assert found[-1] == until

    @given(
        st.sampled_from(["30 2 * * *", "*/20 * * * *", "0,30 1-3 * * *", "45 * * * *", "* 2 * * *", "15 */2 * * *"]),
        st.sampled_from(
            [
                (LORD_HOWE, "2027-10-02T12:00"),
                (LORD_HOWE, "2027-04-03T12:00"),
                ("America/New_York", "2027-11-06T12:00"),
                ("Pacific/Apia", "2011-12-29T06:00"),  # the day after that was left out
            ]
        ),
        st.integers(0, 2 * 86400),
    )
    def test_ticks_are_the_same_wherever_one_begins(self, at: str, place: tuple[str, str], since: int) -> None:
        zone, day = place
        begin = unix(day, zone)
        schedule = Schedule("s", at, zone)
        everything = list(takewhile(lambda tick: tick <= begin + 3 * 86400, schedule.after(begin)))
        assert schedule.next(begin + since) == next(tick for tick in everything if tick > begin + since)

    def test_one_that_comes_once_in_four_years(self) -> None:
        schedule = Schedule("s", "0 0 29 2 *")
        leap = datetime(2028, 2, 29, tzinfo=UTC).timestamp()
        assert schedule.next(1_800_000_000) == leap
        assert schedule.latest(leap - 5, leap + 3 * 365 * 86400) == leap

    @given(
        st.sampled_from(["30 2 * * *", "*/20 * * * *", "0,30 1-3 * * *", "5 3 * * 0", "* 2 * * *"]),
        st.sampled_from(["2027-03-28T01:00", "2027-10-31T00:30", "2027-07-01T12:00"]),
        st.integers(0, 3 * 86400),
        st.integers(0, 2 * 86400),
    )
    def test_the_latest_is_the_last_of_all_wherever_one_begins(self, at: str, day: str, since: int, span: int) -> None:
        schedule, begin = Schedule("s", at, "Europe/Berlin"), unix(day) - 86400
        everything = list(takewhile(lambda tick: tick <= begin + since + span, schedule.after(begin)))
        later = [tick for tick in everything if tick > begin + since]
        assert schedule.latest(begin + since, begin + since + span) == (later[-1] if later else None)
        assert list(takewhile(lambda tick: tick <= begin + since + span, schedule.after(begin + since))) == later


class TestInterval:
    @given(st.sampled_from([1, 1.1, 30, 86400, 0.9 + 0.4]), st.floats(1e9, 2e9))
    def test_ticks_are_multiples_whenever_one_begins(self, seconds: float, moment: float) -> None:
        first, second = islice(Schedule("s", seconds).after(moment), 2)
        assert moment < first <= moment + seconds + 1e-6
        number = round(first / seconds)
        assert (first, second) == pytest.approx((number * seconds, (number + 1) * seconds), abs=1e-6)
        assert Schedule("s", seconds).next(first) == second

    def test_a_whole_second_is_a_whole_number(self) -> None:
        tick = Schedule("s", 30).next(1_800_000_001.5)
        assert (tick, type(tick)) == (1_800_000_030, int)


class TestMissed:
    NOW = 1_800_000_000.0  # a tick of an hourly schedule

    def due(self, missed: Missed, since: float, now: float, at: str | float = 3600) -> tuple[list[float], float]:
        return Schedule("s", at, missed=missed).due(since, now, GRACE_SECONDS)

    def test_a_tick_is_due_when_it_comes_and_never_again(self) -> None:
        every: list[Missed] = ["one", "all", "skip"]
        for missed in every:
            with case(missed):
                assert self.due(missed, self.NOW, self.NOW + 3599) == ([], self.NOW + 3599)
                assert self.due(missed, self.NOW - 10, self.NOW + 10) == ([self.NOW], self.NOW + 10)
                assert self.due(missed, self.NOW + 5, self.NOW - 7200) == ([], self.NOW + 5), "a clock stepped back"

    def test_after_an_outage_missed_ticks_are_made_up_for_as_declared(self) -> None:
        rows: list[tuple[Missed, list[float]]] = [
            ("one", [self.NOW]), ("all", [self.NOW - 7200, self.NOW - 3600, self.NOW]), ("skip", []),
        ]  # fmt: skip
        for missed, ticks in rows:
            with case(missed):
                assert self.due(missed, self.NOW - 3 * 3600, self.NOW + 600) == (ticks, self.NOW + 600)

    def test_skip_gives_all_that_are_not_late(self) -> None:
        begun = self.NOW - self.NOW % 20
        found, settled = self.due("skip", begun - 3600, begun, 20)
        assert (found, settled) == ([begun - 60, begun - 40, begun - 20, begun], begun)

    def test_skip_waits_for_as_long_as_another_node_needs_to_take_over(self) -> None:
        assert grace_of(lease_ttl=15) == GRACE_SECONDS
        assert grace_of(lease_ttl=300) == 600

    def test_very_many_are_settled_step_by_step(self) -> None:
        found, settled = self.due("all", self.NOW, self.NOW + 86400, at=1)
        assert (len(found), settled) == (TICKS_TOGETHER, found[-1])
        assert self.due("all", settled, self.NOW + 86400, at=1)[0][0] == settled + 1

    def test_of_very_many_only_the_last_are_looked_at(self) -> None:
        looked = 0

        class Counted(Schedule):
            def after(self, moment: float) -> Any:
                nonlocal looked
                for tick in Schedule.after(self, moment):
                    looked += 1
                    yield tick

        assert Counted("s", 1).latest(0.0, self.NOW) == self.NOW
        assert looked < 100


class TestRecord:
    RECORD = Record({"at": "0 8 * * 1", "tz": "Europe/Berlin", "missed": "one"}, 1.5, 1, 2.5, "Zoë = b > c", 3.0, 7)

    def test_it_is_read_as_it_was_written(self) -> None:
        assert Record.decode(self.RECORD.encode()) == self.RECORD
        assert Record.decode(Record({}, 0.0).encode()) == Record({}, 0.0)

    def test_it_fits_into_an_option_of_a_push(self) -> None:
        assert not set(b" =>\t\n") & set(self.RECORD.encode())
        assert self.RECORD.encode().isascii()

    def test_it_never_becomes_again_what_it_was(self) -> None:
        paused = self.RECORD.changed(paused_at=None)
        assert paused.changed(paused_at=self.RECORD.paused_at).encode() != self.RECORD.encode()

    def test_what_is_none_is_none(self) -> None:
        samples: list[bytes] = [
            b"", b"{}", b"[]", b"\xff", b'{"table":[],"settled":1,"version":1}', b"1", b"a b",
            b'{"table":{},"settled":"x","version":1}', b'{"table":{},"settled":1}',
            b'{"table":{},"settled":1e308,"version":1}', b"[" * 100_000,
            b'{"table":{},"settled":%b,"version":1}' % (b"9" * 400), b'{"table":{},"settled":-1e18,"version":1}',
        ]  # fmt: skip
        for data in samples:
            with case(data):
                assert Record.decode(data) is None

    def test_a_time_table_of_another_version_is_none(self) -> None:
        assert Record({"at": {"moon": "full"}}, 0.0).schedule("s") is None
        assert Record({"at": "0 8 * * moon", "missed": "one"}, 0.0).schedule("s") is None

    def test_a_time_table_is_checked_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each look reads those of all nodes."""
        table = {"at": "0 8 * * 1", "tz": "Europe/Berlin", "missed": "one"}
        found = Schedule.of("checked once", table)
        monkeypatch.setattr("lowq.schedules._checked", None)
        assert Schedule.of("checked once", dict(table)) == found == Schedule("checked once", **table)  # type: ignore[arg-type]

    @pytest.mark.parametrize(("at", "text"), [(30, "every 30 s"), (1_036_800, "every 1036800 s"), (1.5, "every 1.5 s")])
    def test_an_interval_is_shown_as_it_is(self, at: float, text: str) -> None:
        assert Schedule("s", at).text == text


class TestDeclared:
    @pytest.fixture
    def app(self) -> lowq.Lowq:
        return lowq.Lowq(redis_url="memory://")

    def test_above_a_function_a_class_and_several(self, app: lowq.Lowq) -> None:
        @lowq.every("0  8 * * 1", tz="Europe/Berlin", missed="all")
        @app.worker
        def report(job_id: str, payloads: list[Any]) -> None: ...

        @lowq.every(timedelta(minutes=5), name="often")
        @lowq.every(30)
        @lowq.every(3600.0, missed="skip")
        @app.worker(queue_name="Own")
        class Sync(lowq.Worker[Any]):
            async def perform_one(self, job_id: str, payloads: list[Any], /) -> None: ...

        assert schedules_of(report) == (Schedule("report", "0 8 * * 1", "Europe/Berlin", "all"),)
        assert schedules_of(Sync) == (
            Schedule("Own", 3600, missed="skip"), Schedule("Own-2", 30), Schedule("often", 300),
        )  # fmt: skip
        assert app.workers == {"report": report, "Own": Sync}

    def test_a_subclass_has_a_queue_of_its_own_and_no_schedules(self, app: lowq.Lowq) -> None:
        @lowq.every(30)
        @app.worker
        class Base(lowq.Worker[Any]):
            def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

        @app.worker(queue_name="Derived")
        class Derived(Base): ...

        assert (len(schedules_of(Base)), len(schedules_of(Derived))) == (1, 0)

    def test_time_zones_may_be_objects(self, app: lowq.Lowq) -> None:
        @lowq.every("0 8 * * 1", tz=ZoneInfo(BERLIN))
        @app.worker
        def report(job_id: str, payloads: list[Any]) -> None: ...

        assert schedules_of(report)[0].tz == "Europe/Berlin"

    WRONG: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [  # noqa: RUF012 - nobody changes it
        (("0 8 * * *  1",), {}, r"every\('0 8 \* \* \*  1'\): a cron string has five fields.*; this has 6"),
        (("daily",), {}, r"every\('daily'\): a cron string has five fields, minute, hour.*; this has 1"),
        (("61 * * * *",), {}, r"every\('61 \* \* \* \*'\) is no cron string \(Bad minute\); write one such as \"0 8"),
        (("* * * * 8",), {}, r"every\('\* \* \* \* 8'\) is no cron string \(Bad day-of-week\)"),
        (("*/0 * * * *",), {}, "is no cron string"),
        (("* * L/2,1L * *",), {}, "is no cron string"),
        (("0 0 30 2 *",), {}, r"every\('0 0 30 2 \*'\) is no cron string \(Bad day-of-month\)"),
        (("0 0 29 2 1#5",), {"tz": "Moon/Crater"}, r"there is no time zone tz='Moon/Crater'; "),
        (("0 8 * * 1",), {"tz": "Europe/Berln"}, r"there is no time zone tz='Europe/Berln'; did you mean 'Europe/B"),
        (("0 8 * * 1",), {"tz": "../etc/passwd"}, "there is no time zone"),
        (("0 8 * * 1",), {"tz": "localtime"}, r"tz='localtime' is another zone on each machine; write its name"),
        (("0 8 * * 1",), {"tz": 2}, r"tz=2 must be the name of a time zone, such as tz=\"Europe/Berlin\""),
        ((30,), {"tz": "Europe/Berlin"}, r"tz='Europe/Berlin' is for cron strings; the ticks of every\(30\) are"),
        ((0,), {}, r"every\(0\): an interval is 1 second at least, and 366 days at most"),
        ((0.5,), {}, r"every\(0.5\): an interval is 1 second at least"),
        ((-30,), {}, r"every\(-30\): an interval is 1 second at least"),
        ((float("nan"),), {}, r"every\(nan\): an interval is 1 second at least"),
        ((float("inf"),), {}, r"every\(inf\): an interval is"),
        ((timedelta(),), {}, r"every\(datetime.timedelta\(0\)\): an interval is 1 second at least"),
        ((timedelta(days=400),), {}, "an interval is 1 second at least, and 366 days at most; for something"),
        ((True,), {}, r"every\(True\): write a cron string, such as every\(\"0 8 \* \* 1\"\), or an interval"),
        ((None,), {}, r"every\(None\): write a cron string"),
        ((["0 8 * * 1"],), {}, r"every\(\['0 8 \* \* 1'\]\): write a cron string"),
        ((30,), {"missed": "none"}, r"missed='none' must be \"one\" \(the latest.*\), \"all\" or \"skip\""),
        ((30,), {"missed": None}, "missed=None must be"),
        ((30,), {"name": ""}, "name='' must be a text of 1 to 128 characters"),
        ((30,), {"name": "a\nb"}, r"name='a\\nb' must be a text"),
        ((30,), {"name": 7}, "name=7 must be a text"),
    ]  # fmt: skip

    def test_what_makes_no_sense_is_refused(self) -> None:
        for args, options, message in self.WRONG:
            app = lowq.Lowq(redis_url="memory://")
            with case(args, options, message), pytest.raises(ConfigError, match=f"^report: .*{message}"):

                @lowq.every(*args, **options)
                @app.worker
                def report(job_id: str, payloads: list[Any]) -> None: ...

    def test_below_the_worker_it_is_refused(self, app: lowq.Lowq) -> None:
        message = r"^report: @lowq.every\(...\) goes above @lowq.worker.*write it in the line before @lowq.worker"
        with pytest.raises(ConfigError, match=message):

            @app.worker  # type: ignore[type-var]  # it is wrong
            @lowq.every(30)
            def report(job_id: str, payloads: list[Any]) -> None: ...

        with pytest.raises(ConfigError, match=r"^Sync: @lowq.every\(...\) goes above @lowq.worker"):

            @app.worker
            @lowq.every(30)
            class Sync(lowq.Worker[Any]):
                def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

        assert app.workers == {}

    @pytest.mark.parametrize("decorated", [lambda: 1, type("Report", (), {}), lowq.Worker])
    def test_without_saying_when_it_is_refused(self, decorated: Callable[..., Any]) -> None:
        with pytest.raises(ConfigError, match=rf"{decorated.__name__}: @lowq.every says when; write @lowq.every\(30\)"):
            lowq.every(decorated)  # type: ignore[arg-type]  # it is wrong

    def test_two_of_one_name_are_refused(self, app: lowq.Lowq) -> None:
        with pytest.raises(ConfigError, match=r"^report: two schedules have the name 'daily'; give one"):

            @lowq.every("0 8 * * *", name="daily")
            @lowq.every("0 9 * * *", name="daily")
            @app.worker
            def report(job_id: str, payloads: list[Any]) -> None: ...

    def test_a_queue_name_that_leaves_no_room_is_refused(self, app: lowq.Lowq) -> None:
        with pytest.raises(ConfigError, match=r"^report: the queue name 'x+' of a worker with schedules has 113 char"):

            @lowq.every(30)
            @app.worker(queue_name="x" * 114)
            def report(job_id: str, payloads: list[Any]) -> None: ...

    def test_the_names_of_internal_queues_are_lowqs_own(self, app: lowq.Lowq) -> None:
        with pytest.raises(ConfigError, match=r"^report: the queue name 'lowq:schedules:x' is one of lowq's own"):

            @app.worker(queue_name="lowq:schedules:x")
            def report(job_id: str, payloads: list[Any]) -> None: ...


class Tick(TypedDict):
    planned_at: float


class Other(TypedDict):
    version: int


def test_a_worker_whose_payloads_have_a_type_says_that_of_ticks() -> None:
    app = lowq.Lowq(redis_url="memory://")

    @lowq.every(30)
    @app.worker
    class Report(lowq.Worker[Tick]):
        def perform_one(self, job_id: str, payloads: list[Tick]) -> None:
            """Nothing."""

    assert len(schedules_of(Report)) == 1

    @app.worker
    class Wrong(lowq.Worker[Other]):
        def perform_one(self, job_id: str, payloads: list[Other]) -> None:
            """Nothing."""

    with pytest.raises(lowq.ConfigError, match=r"Wrong: a schedule pushes .* give the type a field planned_at: float"):
        lowq.every(30)(Wrong)


class WholeTick(TypedDict):
    planned_at: int


class LateTick(TypedDict):
    planned_at: Annotated[float, msgspec.Meta(gt=1e9)]


def test_a_type_is_asked_for_ticks_as_the_schedule_has_them() -> None:
    app = lowq.Lowq(redis_url="memory://")

    @app.worker
    class Whole(lowq.Worker[WholeTick]):
        def perform_one(self, job_id: str, payloads: list[WholeTick]) -> None:
            """Nothing."""

    @app.worker
    class Late(lowq.Worker[LateTick]):
        def perform_one(self, job_id: str, payloads: list[LateTick]) -> None:
            """Nothing."""

    lowq.every(30)(Whole)
    lowq.every(30)(Late)
    with pytest.raises(lowq.ConfigError, match=r"Whole: a schedule pushes .* give the type a field planned_at: float"):
        lowq.every(1.5, name="halves")(Whole)
