"""What others may have written: a value that is what it says, or nothing."""

import math
from typing import Any

import pytest

from lowq.duration import duration
from lowq.store import untrusted
from tests.rows import case


def test_numbers_are_finite() -> None:
    rows: list[tuple[Any, float | None]] = [
        (b"1.5", 1.5),
        ("-2", -2.0),
        (b"inf", None),
        (b"nan", None),
        (b"1e999", None),
        (b"x", None),
        (b"\xff", None),
        (None, None),
    ]
    for raw, expected in rows:
        with case(raw, expected):
            assert untrusted.finite(raw) == expected
            assert untrusted.finite(raw, 7.0) == (7.0 if expected is None else expected)


def test_figures_may_be_infinite_but_are_numbers() -> None:
    assert untrusted.figure(b"-inf") == -math.inf
    assert untrusted.figure(b"nan", 1.0) == 1.0


def test_counters_count_from_zero() -> None:
    rows: list[tuple[bytes | None, int]] = [
        (b"12", 12), (b"-1", 0), (b"inf", 0), (b"9" * 400, 0), (b"x", 0), (None, 0), (b"3.7", 3),
    ]  # fmt: skip
    for raw, expected in rows:
        with case(raw, expected):
            assert untrusted.count(raw) == expected


def test_what_is_no_object_is_none() -> None:
    samples: list[bytes] = [b"", b"[1]", b"1", b"\xff", b"{", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"]
    for data in samples:
        with case(data):
            assert untrusted.json_object(data) is None


def test_what_is_no_whole_number_of_these_is_none() -> None:
    values: list[object] = [True, "1", None, [1], 1.5, math.nan, 2**60, -1]
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


@pytest.mark.parametrize("seconds", [math.inf, -math.inf, math.nan])
def test_what_is_no_length_of_time_lasts_forever(seconds: float) -> None:
    assert duration(seconds) == "forever"
