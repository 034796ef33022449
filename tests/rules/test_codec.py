import enum
import json
import math
import zlib
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from itertools import product
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowq.codec import MAX_TIME, EncodedJob, dump_payload, encode_id, encode_job, load_payload
from lowq.errors import JobError, PayloadError
from lowq.sharding import shard_of
from tests.rows import case

MIB = 2**20
#: More digits than Python writes out by default.
HUGE = 10**5000

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=5)
    ),
    max_leaves=20,
)


class Level(enum.IntEnum):
    LOW = 7


class Mixed(int, enum.Enum):
    """Its str() is its name, unlike an IntEnum's."""

    LOW = 7


class Color(enum.StrEnum):
    RED = "red"


class ForeignFloat(float):
    """As numpy's: a float whose repr is no number."""

    def __repr__(self) -> str:
        return f"np.float64({float(self)})"


class Text(str):
    __slots__ = ()


def nested(levels: int) -> Any:
    payload: Any = 1
    for _ in range(levels):
        payload = [payload]
    return payload


def encoded(**fields: Any) -> EncodedJob:
    return encode_job({"id": 42, **fields}, dump_payload, MIB)


def score_of(value: Any) -> bytes:
    return encoded(score=value)[2]


def time_of(**fields: Any) -> bytes:
    return encoded(**fields)[3]


# --- ids ---


class TestIds:
    def test_a_str_an_int_or_a_uuid_is_kept_as_text(self) -> None:
        rows: list[tuple[Any, bytes]] = [
            ("42", b"42"), (42, b"42"), (0, b"0"), (-7, b"-7"),
            (UUID(int=1), b"00000000-0000-0000-0000-000000000001"),
            (" a:{b}\n", b" a:{b}\n"), ("\N{SNOWMAN}", b"\xe2\x98\x83"),
            (Level.LOW, b"7"), (Mixed.LOW, b"7"), (Color.RED, b"red"),
            ("\N{SNOWMAN}" * 170 + "xx", b"\xe2\x98\x83" * 170 + b"xx"),
        ]  # fmt: skip
        for given_as, kept in rows:
            with case(given_as, kept):
                assert encode_id(given_as) == kept

    def test_what_is_no_id_is_refused_and_shown_in_part_only(self) -> None:
        other_types: list[Any] = [True, False, 1.0, None, b"42", ("a",), Decimal(1), datetime.now(UTC)]
        rows: list[tuple[Any, str]] = [
            *((other, f"is of type {type(other).__name__}; an id is a str, an int or a UUID") for other in other_types),
            ("", "an id is empty"),
            ("\N{SNOWMAN}" * 171, "has 513 bytes"),  # bytes, not characters
            ("x" * 10_000, "bytes"),
            ("a\ud800", "no valid Unicode"),
            (HUGE, "an id is a number of thousands of digits"),
        ]
        for job_id, message in rows:
            with case(job_id), pytest.raises(JobError, match=message) as caught:
                encode_id(job_id)
            assert len(str(caught.value)) < 200

    def test_what_is_no_job_is_refused(self) -> None:
        with pytest.raises(JobError, match=r"a job has no id: \{'payload': 1\}"):
            encode_job({"payload": 1}, dump_payload, MIB)
        jobs: list[Any] = [1, "abc", None, ["id", 1], b"id", object()]
        for job in jobs:
            with case(job), pytest.raises(JobError, match=f"{type(job).__name__}.*mapping"):
                encode_job(job, dump_payload, MIB)


def test_an_id_belongs_to_the_same_shard_for_good() -> None:
    rows: list[tuple[bytes, int, int]] = [
        (b"42", 5, 3), (b"1", 5, 3), (b"order-7", 24, 2), (b"\xe2\x98\x83", 5, 0), (b"x", 1, 0), (b"42", 16384, 12424),
    ]  # fmt: skip
    for job_id, shards_count, shard in rows:
        with case(job_id, shards_count, shard):
            # Fixed numbers: another formula would take the jobs of every queue in production to other shards.
            assert shard_of(job_id, shards_count) == shard == zlib.crc32(job_id) % shards_count


# --- scores and times ---


class TestScores:
    def test_a_finite_number_is_sent_exactly(self) -> None:
        rows: list[tuple[float, bytes]] = [
            (3, b"3"), (-3, b"-3"), (0.1, b"0.1"), (1e300, b"1e+300"),
            (2**53, b"9007199254740992"), (-(2**53), b"-9007199254740992"),
            (1_800_000_000.123457, b"1800000000.123457"),
        ]  # fmt: skip
        for score, sent in rows:
            with case(score, sent):
                assert score_of(score) == sent
        for number in (Level.LOW, Mixed.LOW, ForeignFloat(7)):  # whatever its repr
            assert float(score_of(number)) == 7.0

    @given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53))
    def test_no_digit_of_a_score_is_lost(self, score: float) -> None:
        assert float(score_of(score)) == score


class TestTimes:
    def test_a_time_or_a_delay_is_sent_as_it_is_meant(self) -> None:
        noon = datetime(2027, 1, 15, 12, 0, 0, 250_000, tzinfo=timezone(timedelta(hours=3)))
        rows: list[tuple[dict[str, Any], bytes]] = [
            ({}, b""),  # the server's clock is asked
            ({"perform_at": 1_800_000_000.5}, b"1800000000.5"),
            ({"perform_in": 1_800_000_000.5}, b"1800000000.5"),
            ({"perform_at": noon}, b"1800003600.25"),
            ({"perform_at": 1_000_000_000}, b"1000000000"),  # it is past: the server clamps it
            ({"delay": 60}, b"+60"),
            ({"delay": 0.25}, b"+0.25"),
            ({"delay": timedelta(minutes=2)}, b"+120.0"),
            ({"delay": 0}, b"+0"),
            ({"delay": Level.LOW}, b"+7"),
        ]
        for fields, sent in rows:
            with case(fields, sent):
                assert encoded(**fields) == (b"42", b'""', b"", sent)

    def test_what_is_centuries_away_counts_as_never(self) -> None:
        times: list[Any] = [
            datetime(9999, 12, 31, tzinfo=UTC), datetime.max.replace(tzinfo=UTC),
            datetime.max.replace(tzinfo=timezone(-timedelta(hours=12))), 2**33, 1e11,
        ]  # fmt: skip
        delays: list[Any] = [timedelta.max, timedelta(days=365_000), 2**33, 9e10]
        never = [*product(["perform_at", "perform_in"], times), *product(["delay"], delays)]
        for name, value in never:
            with case(name, value):
                assert float(time_of(**{name: value}).removeprefix(b"+")) == MAX_TIME == 2**33 - 1

    def test_more_than_one_way_to_say_when_is_refused(self) -> None:
        for first, second in (("perform_at", "delay"), ("perform_at", "perform_in"), ("perform_in", "delay")):
            with case(first, second), pytest.raises(JobError, match="three ways to say one thing"):
                encoded(**{first: 1.8e9, second: 1.8e9})


class Nowhere(tzinfo):
    """A zone that tells no offset."""

    def utcoffset(self, _: datetime | None) -> None:
        return None

    dst = tzname = utcoffset


NO_TTLS: list[Any] = [
    0, -1, -0.0, math.nan, math.inf, 1e12, "60", True, [], timedelta(0), timedelta(seconds=-1), 10**400,
]  # fmt: skip
NO_NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, True, "60", None, HUGE]
#: A field of a job, a value, and what is said of it.
WRONG: list[tuple[str, Any, str]] = [
    *(("score", score, "score") for score in (math.nan, math.inf, -math.inf, 10**400, HUGE)),
    *(("score", score, f"score .* is of type {type(score).__name__}; it must be a number")
      for score in (True, "3", None, Decimal(3), 3j, datetime.now(UTC))),
    *(("score", score, r".*beyond 2\*\*53.*collapse") for score in (2**53 + 1, -(2**53) - 1, 2**63)),
    ("perform_at", datetime(2027, 1, 1), r"perform_at .*has no time zone; .*datetime\.now\(UTC\)"),  # noqa: DTZ001
    ("perform_at", datetime(2027, 1, 1, tzinfo=Nowhere()), ".*has no time zone"),
    *((name, seconds, f"{name}={seconds!r} .* give delay={seconds!r} instead")
      for name, seconds in product(["perform_at", "perform_in"], [60, 0, 0.5, 86400 * 365])),
    ("perform_at", 1_800_000_000_000, ".*seconds, not milliseconds"),
    *(("perform_at", value, "perform_at") for value in (*NO_NUMBERS, date(2027, 1, 1))),
    *(("delay", value, ".*is negative; write max") for value in (-5, -0.001, timedelta(days=-1))),
    *(("delay", value, ".*thousands of years") for value in (1e12, 2**63, 1e300)),
    *(("delay", value, "delay") for value in NO_NUMBERS),
    *(("ttl", value, "ttl") for value in NO_TTLS),
    *(("priority", value, "priority") for value in (-1, 10, 1.0, "1", True, None, math.nan, 10**30)),
    *((name, 1, f"unknown field '{name}'; did you mean '{nearest}'") for name, nearest in (
        ("paylod", "payload"), ("Score", "score"), ("perfom_at", "perform_at"), ("delays", "delay"))),
    ("xyzzy", 1, ".*a job has delay, id, payload, perform_at, perform_in, priority, score"),
    ("payload", {1}, ".* is of type set"),
]  # fmt: skip


def test_a_field_that_makes_no_sense_is_refused_with_the_id_of_the_job() -> None:
    for name, value, message in WRONG:
        with case(name, value), pytest.raises(JobError, match=f"^job 42: {message}"):
            encoded(**{"payload": 1, name: value})


# --- fields ---


class TestFields:
    def test_all_fields_together(self) -> None:
        job = {"id": 42, "payload": {"version": 3}, "score": 3, "delay": 1}
        assert encode_job(job, dump_payload, MIB) == (b"42", b'{"version":3}', b"3", b"+1")

    def test_a_field_whose_name_is_no_text_is_refused(self) -> None:
        job: Mapping[Any, Any] = {"id": 42, 5: 1}
        with pytest.raises(JobError, match="unknown field 5"):
            encode_job(job, dump_payload, MIB)


# --- payloads ---


class TestPayloads:
    @given(json_values)
    def test_a_json_value_comes_back_as_it_went_in(self, value: Any) -> None:
        again = load_payload(dump_payload(value))
        assert again == value
        assert repr(again) == repr(value) or isinstance(value, dict | list)  # 1, 1.0 and True stay apart

    @given(json_values)
    def test_equal_is_equal_bytes_whatever_the_order_of_the_keys(self, value: Any) -> None:
        def reversed_keys(item: Any) -> Any:
            if isinstance(item, dict):
                return {key: reversed_keys(item[key]) for key in reversed(item)}
            return [reversed_keys(element) for element in item] if isinstance(item, list) else item

        assert dump_payload(reversed_keys(value)) == dump_payload(value)

    def test_the_bytes_are_json_with_sorted_keys_and_no_spaces(self) -> None:
        assert dump_payload({"b": [1, None], "a": "\N{SNOWMAN}"}) == '{"a":"\N{SNOWMAN}","b":[1,null]}'.encode()

    @given(json_values)
    def test_any_json_library_reads_it(self, value: Any) -> None:
        assert json.loads(dump_payload(value)) == value

    def test_tuples_come_back_as_lists(self) -> None:
        assert load_payload(dump_payload((1, ("a", ()), {"k": (2,)}))) == [1, ["a", []], {"k": [2]}]

    def test_what_would_not_come_back_as_it_went_in_is_refused_by_name(self) -> None:
        values: list[Any] = [
            b"x",
            bytearray(b"x"),
            {1, 2},
            frozenset(),
            datetime.now(UTC),
            date(2027, 1, 1),
            timedelta(1),
            Decimal("1.5"),
            UUID(int=1),
            1j,
            object(),
            Level.LOW,
            Mixed.LOW,
            Color.RED,
            Text("x"),
            ForeignFloat(1),
            range(3),
            iter(()),
        ]
        for value, place in product(values, ["bare", "in a list", "in a dict"]):
            with case(value, place):
                payload = {"bare": value, "in a list": [1, [value]], "in a dict": {"k": {"l": value}}}[place]
                with pytest.raises(PayloadError, match=f"is of type {type(value).__name__}, which would not come back"):
                    dump_payload(payload)

    def test_what_has_no_form_in_json_is_refused(self) -> None:
        itself: list[Any] = []
        itself.append({"again": itself})
        keys: list[Any] = [1, None, True, 1.5, (1,), b"k", Text("k"), Color.RED]
        rows: list[tuple[Any, str]] = [
            (type("Money", (), {})(), r"others are declared: lowq.Worker\[Money\]"),
            *(({"a": [value]}, "is no JSON number") for value in (math.nan, math.inf, -math.inf)),
            *(([{key: 1}], f"is of type {type(key).__name__}; JSON keys are strings") for key in keys),
            *((value, "no JSON value") for value in ("\ud800", {"\udfff": 1}, ["a\udc80"])),
            ({"a": HUGE}, "no JSON value"),
            (itself, "contains itself"),
            # 900 levels can be read where the stack is shallow, and only there: in a node it may be another.
            (nested(900), "nested"),
            (nested(100_000), "nested"),
            ({"customer": {"born": datetime.now(UTC)}}, "in 'customer': in 'born': datetime"),
        ]
        for number, (value, message) in enumerate(rows):
            with case(number, message), pytest.raises(PayloadError, match=message):
                dump_payload(value)

    def test_nesting_in_reason_is_no_trouble(self) -> None:
        payload: Any = 1
        for level in range(100):
            payload = [payload] if level % 2 else {"k": payload}
        assert load_payload(dump_payload(payload)) == payload

    def test_none_and_large_numbers_are_payloads_too(self) -> None:
        values: list[Any] = [[1, {"a": None}], {"a": 1.5}, "text", None, True, 2**70, -(2**63)]
        for value in values:
            with case(value):
                assert load_payload(encoded(payload=value)[1]) == value


class TestSize:
    def test_a_payload_may_have_max_payload_bytes_and_not_one_more(self) -> None:
        assert len(encode_job({"id": 1, "payload": "x" * 8}, dump_payload, 10)[1]) == 10
        with pytest.raises(PayloadError, match="job 1: the payload has 11 bytes encoded; max_payload_bytes is 10"):
            encode_job({"id": 1, "payload": "x" * 9}, dump_payload, 10)

    def test_what_counts_is_bytes_not_characters(self) -> None:
        with pytest.raises(PayloadError, match="has 11 bytes"):
            encode_job({"id": 1, "payload": "\N{SNOWMAN}" * 3}, dump_payload, 10)


class TestForeignCodec:
    def test_the_applications_dump_is_used(self) -> None:
        job = {"id": 1, "payload": {1, 2}}
        assert encode_job(job, lambda value: b",".join(b"%d" % item for item in value), MIB)[1] == b"1,2"

    @pytest.mark.parametrize("dump", [print, json.dumps, json.loads])
    def test_a_dump_that_raises_or_gives_no_bytes_is_an_error_of_the_payload(self, dump: Callable[[Any], Any]) -> None:
        with pytest.raises(PayloadError, match=r"^job 1: "):
            encode_job({"id": 1, "payload": {"a": 1}}, dump, MIB)


def test_what_a_signal_handler_raises_while_a_payload_is_encoded_is_not_taken_for_a_wrong_payload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class TookTooLong(Exception):
        pass

    def interrupted(*_: object) -> None:
        raise TookTooLong

    monkeypatch.setattr("lowq.codec.check_json", interrupted)
    with pytest.raises(TookTooLong):
        encode_job({"id": 1, "payload": 2}, dump_payload, 100)


class TestTtl:
    def test_a_job_without_one_is_as_short_as_ever(self) -> None:
        assert len(encoded(score=1)) == len(encoded(ttl=None)) == 4

    def test_seconds_or_a_timedelta(self) -> None:
        rows: list[tuple[Any, bytes]] = [
            (600, b"600"), (0.5, b"0.5"), (timedelta(minutes=1), b"60.0"), (timedelta.max, repr(MAX_TIME).encode()),
        ]  # fmt: skip
        for value, expected in rows:
            with case(value, expected):
                assert encoded(ttl=value)[4:] == (expected, b"")

    def test_one_that_is_over_before_the_job_is_due_is_refused(self) -> None:
        rows: list[tuple[Any, Any]] = [(60, 60), (timedelta(minutes=1), 61), (60, timedelta.max), (0.1, 1e6)]
        for ttl, delay in rows:
            with pytest.raises(
                JobError, match=r"^job 42: ttl=.* is over before delay=.* is: it would never be perform"
            ):
                encoded(ttl=ttl, delay=delay)
        for ttl, delay in ((60, 59), (None, 61), (60, -0.0)):
            assert encoded(ttl=ttl, delay=delay)

    def test_the_queues_counts_where_the_job_says_none(self) -> None:
        def ttl_of(job: Mapping[str, Any]) -> Any:
            return encode_job(job, dump_payload, MIB, (b"60.0", b"3"))[4:]

        assert ttl_of({"id": 1}) == ttl_of({"id": 1, "ttl": 60.0, "priority": 3}) == (), "the call says it once"
        assert ttl_of({"id": 1, "ttl": 5}) == (b"5", b"3")
        assert ttl_of({"id": 1, "ttl": None, "priority": 2}) == (b"", b"2")
        assert ttl_of({"id": 1, "ttl": None, "priority": 0}) == (b"", b"")


def test_a_priority_is_sent_unless_it_is_the_most_urgent() -> None:
    assert len(encoded(priority=0)) == 4
    assert [encoded(priority=given)[4:] for given in (1, 9)] == [(b"", b"1"), (b"", b"9")]
