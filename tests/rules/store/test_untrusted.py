"""What others may have written: a value that is what it says, or nothing."""

import math
from typing import Any

from lowq.clock import duration
from lowq.store import untrusted
from tests.rows import case


def test_a_number_is_finite_a_figure_may_be_infinite_and_a_counter_counts_from_zero() -> None:
    rows: list[tuple[Any, float | None, int]] = [
        (b"1.5", 1.5, 1), ("-2", -2.0, 0), (b"inf", None, 0), (b"nan", None, 0), (b"x", None, 0), (b"\xff", None, 0),
        (b"9" * 400, None, 0), (None, None, 0),
    ]  # fmt: skip
    for raw, number, count in rows:
        with case(raw):
            assert untrusted.finite(raw, 7.0) == (7.0 if number is None else number)
            assert untrusted.count(raw) == count
    assert untrusted.figure(b"-inf") == -math.inf
    assert untrusted.figure(b"nan", 1.0) == 1.0


def test_what_is_no_object_or_no_whole_number_of_these_is_none() -> None:
    for data in (b"", b"[1]", b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"):
        with case(data):
            assert untrusted.json_object(data) is None
    values: list[object] = [True, "1", None, 1.5, math.nan, 2**60, -1]
    for value in values:
        with case(value):
            assert untrusted.whole(value, 0) is None


def test_plain_values_can_be_shown() -> None:
    given = {"a": [1, 2.5, None, True, "x"], "b": math.inf, "c": 10**400, "d": "\ud800", "\ud800": 1, "e": [[[[[1]]]]]}
    assert untrusted.plain(given) == {
        "a": [1, 2.5, None, True, "x"], "b": None, "c": None, "d": None, "e": [[[None]]],
    }  # fmt: skip


def test_depth_is_that_of_lists_and_dicts() -> None:
    assert not untrusted.deeper_than(1, 0)
    assert untrusted.deeper_than([], 0)
    assert not untrusted.deeper_than({"a": [1]}, 2)
    assert untrusted.deeper_than({"a": [{}]}, 2)
    same: list[Any] = []
    for _ in range(300):
        same = [same, same]  # a tree of it would have 2**300 leaves
    assert untrusted.deeper_than(same, 200)


def test_what_is_no_length_of_time_lasts_forever() -> None:
    assert [duration(seconds) for seconds in (math.inf, -math.inf, math.nan)] == ["forever"] * 3
