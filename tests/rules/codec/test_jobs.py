import enum
import json
import math
import zlib
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta, timezone
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

texts = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=20,
)


class Level(enum.IntEnum):
    LOW = 7


class Mixed(int, enum.Enum):
    """Its str() is its name, unlike an IntEnum's."""

    LOW = 7


class ForeignFloat(float):
    """As numpy's: a float whose repr is no number."""

    def __repr__(self) -> str:
        return f"np.float64({float(self)})"


def nested(levels: int) -> Any:
    payload: Any = 1
    for _ in range(levels):
        payload = [payload]
    return payload


def encoded(**fields: Any) -> EncodedJob:
    return encode_job({"id": 42, **fields}, dump_payload, MIB)


# --- ids ---


def test_an_id_is_a_str_an_int_or_a_uuid_and_is_kept_as_text() -> None:
    rows: list[tuple[Any, bytes]] = [
        ("42", b"42"), (-7, b"-7"), (UUID(int=1), b"00000000-0000-0000-0000-000000000001"), (" a:{b}\n", b" a:{b}\n"),
        (Level.LOW, b"7"), (Mixed.LOW, b"7"), ("\N{SNOWMAN}" * 170 + "xx", b"\xe2\x98\x83" * 170 + b"xx"),
    ]  # fmt: skip
    for given_as, kept in rows:
        with case(given_as, kept):
            assert encode_id(given_as) == kept


def test_what_is_no_id_is_refused_and_shown_in_part_only() -> None:
    rows: list[tuple[Any, str]] = [
        *(
            (other, f"is of type {type(other).__name__}; an id is a str, an int or a UUID")
            for other in (True, 1.0, None)
        ),
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


def test_what_is_no_job_is_refused() -> None:
    jobs: list[tuple[Any, str]] = [
        ({"payload": 1}, r"a job has no id: \{'payload': 1\}"), ({"id": 42, 5: 1}, "unknown field 5"),
        (1, "int.*mapping"), ("abc", "str.*mapping"), (["id", 1], "list.*mapping"),
    ]  # fmt: skip
    for job, message in jobs:
        with case(job), pytest.raises(JobError, match=message):
            encode_job(job, dump_payload, MIB)


def test_an_id_belongs_to_the_same_shard_for_good() -> None:
    rows: list[tuple[bytes, int, int]] = [
        (b"42", 5, 3), (b"1", 5, 3), (b"order-7", 24, 2), (b"\xe2\x98\x83", 5, 0), (b"x", 1, 0), (b"42", 16384, 12424),
    ]  # fmt: skip
    for job_id, shards_count, shard in rows:
        with case(job_id, shards_count, shard):
            # Fixed numbers: another formula would take the jobs of every queue in production to other shards.
            assert shard_of(job_id, shards_count) == shard == zlib.crc32(job_id) % shards_count


# --- fields ---


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53))
def test_no_digit_of_a_score_is_lost(score: float) -> None:
    assert float(encoded(score=score)[2]) == score


def test_a_field_is_sent_as_it_is_meant() -> None:
    noon = datetime(2027, 1, 15, 12, 0, 0, 250_000, tzinfo=timezone(timedelta(hours=3)))
    rows: list[tuple[dict[str, Any], tuple[bytes, ...]]] = [
        ({}, (b"", b"")),  # the server's clock is asked
        ({"perform_at": 1_800_000_000.5}, (b"", b"1800000000.5")),
        ({"perform_in": 1_800_000_000.5}, (b"", b"1800000000.5")),
        ({"perform_at": noon}, (b"", b"1800003600.25")),
        ({"perform_at": 1_000_000_000}, (b"", b"1000000000")),  # it is past: the server clamps it
        ({"delay": 0.25, "score": 3}, (b"3", b"+0.25")),
        ({"delay": timedelta(minutes=2)}, (b"", b"+120.0")),
        ({"delay": Level.LOW, "score": Mixed.LOW}, (b"7", b"+7")),
        ({"score": ForeignFloat(7)}, (b"7.0", b"")),
        ({"ttl": None, "priority": 0}, (b"", b"")),  # as short as ever
        ({"ttl": 0.5}, (b"", b"", b"0.5", b"")),
        ({"ttl": timedelta(minutes=1), "priority": 9}, (b"", b"", b"60.0", b"9")),
        ({"ttl": timedelta.max}, (b"", b"", repr(MAX_TIME).encode(), b"")),
    ]
    for fields, sent in rows:
        with case(fields, sent):
            assert encoded(**fields) == (b"42", b'""', *sent)
    assert encoded(payload={"version": 3})[1] == b'{"version":3}'


def test_what_is_centuries_away_counts_as_never() -> None:
    times: list[Any] = [datetime.max.replace(tzinfo=timezone(-timedelta(hours=12))), 2**33, 1e11]
    delays: list[Any] = [timedelta.max, 2**33, 9e10]
    for name, value in [*product(["perform_at", "perform_in"], times), *product(["delay"], delays)]:
        with case(name, value):
            assert float(encoded(**{name: value})[3].removeprefix(b"+")) == MAX_TIME == 2**33 - 1


#: A field of a job, a value, and what is said of it.
WRONG: list[tuple[str, Any, str]] = [
    *(("score", score, "score") for score in (math.nan, -math.inf, 10**400, HUGE)),
    *(("score", score, f"score .* is of type {type(score).__name__}; it must be a number") for score in (True, "3")),
    *(("score", score, r".*beyond 2\*\*53.*collapse") for score in (2**53 + 1, -(2**53) - 1)),
    ("perform_at", datetime(2027, 1, 1), r"perform_at .*has no time zone; .*datetime\.now\(UTC\)"),  # noqa: DTZ001
    *((name, seconds, f"{name}={seconds!r} .* give delay={seconds!r} instead")
      for name, seconds in product(["perform_at", "perform_in"], [0, 86400 * 365])),
    ("perform_at", 1_800_000_000_000, ".*seconds, not milliseconds"),
    *(("perform_at", value, "perform_at") for value in (math.nan, True, "60", HUGE, date(2027, 1, 1))),
    *(("delay", value, ".*is negative; write max") for value in (-0.001, timedelta(days=-1))),
    ("delay", 1e12, ".*thousands of years"),
    *(("delay", value, "delay") for value in (math.nan, math.inf, True, "60", HUGE)),
    *(("ttl", value, "ttl") for value in (0, -1, math.nan, 1e12, "60", True, timedelta(0), 10**400)),
    *(("priority", value, "priority") for value in (-1, 10, 1.0, "1", True, None)),
    ("paylod", 1, "unknown field 'paylod'; did you mean 'payload'"),
    ("xyzzy", 1, ".*a job has delay, id, payload, perform_at, perform_in, priority, score"),
    ("payload", {1}, ".* is of type set"),
]  # fmt: skip


def test_a_field_that_makes_no_sense_is_refused_with_the_id_of_the_job() -> None:
    for name, value, message in WRONG:
        with case(name, value), pytest.raises(JobError, match=f"^job 42: {message}"):
            encoded(**{"payload": 1, name: value})


def test_fields_that_contradict_each_other_are_refused() -> None:
    for first, second in (("perform_at", "delay"), ("perform_at", "perform_in"), ("perform_in", "delay")):
        with case(first, second), pytest.raises(JobError, match="three ways to say one thing"):
            encoded(**{first: 1.8e9, second: 1.8e9})
    rows: list[tuple[Any, Any]] = [(60, 60), (timedelta(minutes=1), 61), (60, timedelta.max)]
    for ttl, delay in rows:
        with case(ttl, delay), pytest.raises(JobError, match=r"^job 42: ttl=.* is over before delay=.* is"):
            encoded(ttl=ttl, delay=delay)
    assert encoded(ttl=60, delay=59)
    assert encoded(ttl=None, delay=61)


def test_the_queues_ttl_and_priority_count_where_the_job_says_none() -> None:
    def rest_of(job: Mapping[str, Any]) -> Any:
        return encode_job(job, dump_payload, MIB, (b"60.0", b"3"))[4:]

    assert rest_of({"id": 1}) == rest_of({"id": 1, "ttl": 60.0, "priority": 3}) == (), "the call says it once"
    assert rest_of({"id": 1, "ttl": 5}) == (b"5", b"3")
    assert rest_of({"id": 1, "ttl": None, "priority": 2}) == (b"", b"2")
    assert rest_of({"id": 1, "ttl": None, "priority": 0}) == (b"", b"")


# --- payloads ---


@given(json_values)
def test_a_json_value_comes_back_as_it_went_in_and_any_library_reads_it(value: Any) -> None:
    def reversed_keys(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: reversed_keys(item[key]) for key in reversed(item)}
        return [reversed_keys(element) for element in item] if isinstance(item, list) else item

    data = dump_payload(value)
    again = load_payload(data)
    assert again == value == json.loads(data)
    assert repr(again) == repr(value) or isinstance(value, dict | list)  # 1, 1.0 and True stay apart
    assert dump_payload(reversed_keys(value)) == data


def test_the_bytes_are_json_with_sorted_keys_and_no_spaces() -> None:
    assert dump_payload({"b": [1, None], "a": "\N{SNOWMAN}"}) == '{"a":"\N{SNOWMAN}","b":[1,null]}'.encode()
    assert load_payload(dump_payload((1, ("a", ()), {"k": (2,)}))) == [1, ["a", []], {"k": [2]}]
    assert load_payload(dump_payload(nested(100))) == nested(100)


def test_what_would_not_come_back_as_it_went_in_is_refused_by_name() -> None:
    values: list[Any] = [b"x", {1, 2}, datetime.now(UTC), Decimal("1.5"), Level.LOW, ForeignFloat(1), iter(())]
    for value, place in product(values, ["bare", "in a list", "in a dict"]):
        with case(value, place):
            payload = {"bare": value, "in a list": [1, [value]], "in a dict": {"k": {"l": value}}}[place]
            with pytest.raises(PayloadError, match=f"is of type {type(value).__name__}, which would not come back"):
                dump_payload(payload)


def test_what_has_no_form_in_json_is_refused() -> None:
    itself: list[Any] = []
    itself.append({"again": itself})
    rows: list[tuple[Any, str]] = [
        (type("Money", (), {})(), r"others are declared: lowq.Worker\[Money\]"),
        *(({"a": [value]}, "is no JSON number") for value in (math.nan, -math.inf)),
        *(([{key: 1}], f"is of type {type(key).__name__}; JSON keys are strings") for key in (1, None, b"k")),
        *((value, "no JSON value") for value in ("\ud800", {"\udfff": 1}, {"a": HUGE})),
        (itself, "contains itself"),
        # 900 levels can be read where the stack is shallow, and only there: in a node it may be another.
        (nested(900), "nested"),
        (nested(100_000), "nested"),
        ({"customer": {"born": datetime.now(UTC)}}, "in 'customer': in 'born': datetime"),
    ]
    for number, (value, message) in enumerate(rows):
        with case(number, message), pytest.raises(PayloadError, match=message):
            dump_payload(value)


def test_a_payload_may_have_max_payload_bytes_and_not_one_more() -> None:
    assert len(encode_job({"id": 1, "payload": "x" * 8}, dump_payload, 10)[1]) == 10
    for payload in ("x" * 9, "\N{SNOWMAN}" * 3):  # bytes, not characters
        with pytest.raises(PayloadError, match="job 1: the payload has 11 bytes encoded; max_payload_bytes is 10"):
            encode_job({"id": 1, "payload": payload}, dump_payload, 10)


@pytest.mark.parametrize("dump", [print, json.dumps, json.loads])
def test_a_dump_of_the_applications_that_raises_or_gives_no_bytes_is_an_error_of_the_payload(
    dump: Callable[[Any], Any],
) -> None:
    with pytest.raises(PayloadError, match=r"^job 1: "):
        encode_job({"id": 1, "payload": {"a": 1}}, dump, MIB)


def test_what_a_signal_handler_raises_while_a_payload_is_encoded_is_not_taken_for_a_wrong_payload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class TookTooLong(Exception):
        pass

    def interrupted(*_: object) -> None:
        raise TookTooLong

    monkeypatch.setattr("lowq.codec.payloads.check_json", interrupted)
    with pytest.raises(TookTooLong):
        encode_job({"id": 1, "payload": [2]}, dump_payload, 100)
