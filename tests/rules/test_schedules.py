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
        assert (grace_of(lease_ttl=15), grace_of(lease_ttl=300)) == (GRACE_SECONDS, 600)

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


RECORD = Record({"at": "0 8 * * 1", "tz": "Europe/Berlin", "missed": "one"}, 1.5, 1, 2.5, "Zoë = b > c", 3.0, 7, 12)


def test_a_record_is_read_as_it_was_written_and_fits_into_an_option_of_a_push() -> None:
    assert Record.decode(RECORD.encode()) == RECORD
    assert Record.decode(Record({}, 0.0).encode()) == Record({}, 0.0)
    assert not set(b" =>\t\n") & set(RECORD.encode())
    assert RECORD.encode().isascii()
    again = RECORD.changed(paused_at=None).changed(paused_at=RECORD.paused_at)
    assert again.encode() != RECORD.encode(), "it never becomes again what it was"


def test_what_is_no_record_is_none() -> None:
    samples: list[bytes] = [
        b"", b"[]", b"\xff", b'{"table":[],"settled":1,"version":1}', b'{"table":{},"settled":"x","version":1}',
        b'{"table":{},"settled":1}', b'{"table":{},"settled":1e308,"version":1}', b"[" * 100_000,
        b'{"table":{},"settled":%b,"version":1}' % (b"9" * 400),
    ]  # fmt: skip
    for data in samples:
        with case(data):
            assert Record.decode(data) is None
    for table in ({"at": {"moon": "full"}}, {"at": "0 8 * * moon", "missed": "one"}):  # of another version
        assert Record(table, 0.0).schedule("s") is None


def test_a_time_table_is_checked_once_although_each_look_reads_those_of_all_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = {"at": "0 8 * * 1", "tz": "Europe/Berlin", "missed": "one"}
    found = Schedule.of("checked once", table)
    monkeypatch.setattr("lowq.schedules.ZoneInfo", None)
    assert Schedule.of("checked once", dict(table)) == found


@pytest.fixture
def app() -> lowq.Lowq:
    return lowq.Lowq(redis_url="memory://")


def test_schedules_are_declared_above_a_function_or_a_class_one_or_several(app: lowq.Lowq) -> None:
    @lowq.every("0  8 * * 1", tz=ZoneInfo(BERLIN), missed="all")
    @app.worker
    def report(job_id: str, payloads: list[Any]) -> None: ...

    @lowq.every(timedelta(minutes=5), name="often")
    @lowq.every(30)
    @lowq.every(3600.0, missed="skip")
    @app.worker(queue_name="Own")
    class Sync(lowq.Worker[Any]):
        async def perform_one(self, job_id: str, payloads: list[Any], /) -> None: ...

    @app.worker(queue_name="Derived")
    class Derived(Sync): ...

    assert schedules_of(report) == (Schedule("report", "0 8 * * 1", "Europe/Berlin", "all"),)
    assert schedules_of(Sync) == (
        Schedule("Own", 3600, missed="skip"), Schedule("Own-2", 30), Schedule("often", 300),
    )  # fmt: skip
    assert schedules_of(Derived) == ()
    assert [Schedule("s", at).text for at in (30, 1_036_800, 1.5)] == ["every 30 s", "every 1036800 s", "every 1.5 s"]


#: The arguments of `every`, and what is said of them.
WRONG: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (("0 8 * * *  1",), {}, r"every\('0 8 \* \* \*  1'\): a cron string has five fields.*; this has 6"),
    (("61 * * * *",), {}, r"every\('61 \* \* \* \*'\) is no cron string \(Bad minute\); write one such as \"0 8"),
    (("* * L/2,1L * *",), {}, "is no cron string"),
    (("0 0 30 2 *",), {}, r"every\('0 0 30 2 \*'\) is no cron string \(Bad day-of-month\)"),
    (("0 8 * * 1",), {"tz": "Europe/Berln"}, r"there is no time zone tz='Europe/Berln'; did you mean 'Europe/B"),
    (("0 8 * * 1",), {"tz": "../etc/passwd"}, "there is no time zone"),
    (("0 8 * * 1",), {"tz": "localtime"}, r"tz='localtime' is another zone on each machine; write its name"),
    (("0 8 * * 1",), {"tz": 2}, r"tz=2 must be the name of a time zone, such as tz=\"Europe/Berlin\""),
    ((30,), {"tz": "Europe/Berlin"}, r"tz='Europe/Berlin' is for cron strings; the ticks of every\(30\) are"),
    *(((at,), {}, r"every\(.*\): an interval is 1 second at least, and 366 days at most")
      for at in (0.5, -30, float("nan"), timedelta(), timedelta(days=400))),
    *(((at,), {}, r"every\(.*\): write a cron string, such as every\(\"0 8 \* \* 1\"\), or an interval")
      for at in (True, ["0 8 * * 1"])),
    ((30,), {"missed": "none"}, r"missed='none' must be \"one\" \(the latest.*\), \"all\" or \"skip\""),
    *(((30,), {"name": name}, "name=.* must be a text of 1 to 128 characters") for name in ("", "a\nb", 7)),
]  # fmt: skip


def test_what_makes_no_sense_is_refused() -> None:
    for args, options, message in WRONG:
        app = lowq.Lowq(redis_url="memory://")
        with case(args, options, message), pytest.raises(ConfigError, match=f"^report: .*{message}"):

            @lowq.every(*args, **options)
            @app.worker
            def report(job_id: str, payloads: list[Any]) -> None: ...


def test_a_schedule_that_is_not_above_one_worker_or_has_no_name_of_its_own_is_refused(app: lowq.Lowq) -> None:
    def report(job_id: str, payloads: list[Any]) -> None: ...

    function: Any = report
    daily = lowq.every("0 8 * * *", name="daily")
    rows: list[tuple[Callable[[], Any], str]] = [
        (lambda: app.worker(lowq.every(30)(function)), r"@lowq.every\(...\) goes above @lowq.worker.*line before"),
        (lambda: lowq.every(function), r"report: @lowq.every says when; write @lowq.every\(30\)"),
        (lambda: daily(daily(app.worker(report))), r"^report: two schedules have the name 'daily'; give one"),
        (lambda: lowq.every(30)(app.worker(queue_name="x" * 114)(report)), "the queue name 'x+' .* has 113 char"),
        (lambda: app.worker(queue_name="lowq:schedules:x")(report), "name 'lowq:schedules:x' is one of lowq's own"),
    ]
    for number, (declare, message) in enumerate(rows):
        with case(number), pytest.raises(ConfigError, match=message):
            declare()


def ticked(app: lowq.Lowq, kind: Any) -> Any:
    """A worker of payloads of that type."""

    class Report(lowq.Worker[kind]):
        def perform_one(self, job_id: str, payloads: list[Any]) -> None: ...

    return app.worker(queue_name=kind.__name__)(Report)


class Tick(TypedDict):
    planned_at: float


class WholeTick(TypedDict):
    planned_at: int


class LateTick(TypedDict):
    planned_at: Annotated[float, msgspec.Meta(gt=1e9)]


class Other(TypedDict):
    version: int


def test_a_worker_whose_payloads_have_a_type_must_take_ticks_as_the_schedule_has_them(app: lowq.Lowq) -> None:
    right: list[tuple[Any, float]] = [(Tick, 1.5), (WholeTick, 30), (LateTick, 30)]
    for kind, at in right:
        assert len(schedules_of(lowq.every(at)(ticked(app, kind)))) == 1
    wrong: list[tuple[Any, float]] = [(Other, 30), (WholeTick, 1.5)]
    for kind, at in wrong:
        message = r"Report: a schedule pushes .* give the type a field planned_at: float"
        with case(kind), pytest.raises(ConfigError, match=message):
            lowq.every(at)(ticked(lowq.Lowq(redis_url="memory://"), kind))
