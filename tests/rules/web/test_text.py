"""Values as words."""

from typing import Any

import pytest

from lowq_web import text
from tests.rows import case


def test_numbers_are_shortened() -> None:
    for value, words in (
        (0, "0"), (7, "7"), (999, "999"), (999.6, "1K"), (1000, "1K"), (1234, "1.2K"), (12_345, "12K"),
        (999_499, "999K"), (1_000_000, "1M"), (3_400_000, "3.4M"), (2_500_000_000, "2.5G"),
    ):  # fmt: skip
        assert text.short(value) == words
    for rate, words in ((None, "-"), (0, "0"), (0.0213, "0.021"), (4.24, "4.2"), (1234, "1.2K")):
        assert text.rate(rate) == words


def test_moments() -> None:
    rows: list[tuple[str, float]] = [
        ("1700000000", 1_700_000_000.0), ("-2h", 2_800.0), ("+30 min", 11_800.0), ("-1.5d", -119_600.0),
        ("1970-01-01T01:00", 3600.0), ("1970-01-01T01:00+01:00", 0.0),
    ]  # fmt: skip
    for typed, expected in rows:
        with case(typed, expected):
            assert text.moment(typed, 10_000.0) == expected


def test_what_is_no_moment() -> None:
    for typed in ["", "soon", "nan", "inf", "1e999", "2h", f"-{'9' * 400}d"]:
        with case(typed), pytest.raises(ValueError):  # noqa: PT011 - whatever it says
            text.moment(typed, 0.0)


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def test_a_preview_is_the_beginning_of_the_payload() -> None:
    values: list[Any] = [
        {"a": [1, None, "ä"]}, "x" * 500, ["y" * 90] * 90, list(range(1000)), {"k" * 300: 1}, 1.5, b"raw",
    ]  # fmt: skip
    for value in values:
        with case(value):
            assert text.preview(value, 160) == text.cut(text.payload(value), 160)


def test_a_preview_looks_at_hardly_more_than_it_shows() -> None:
    seen: list[int] = []

    class Watched(dict[str, Any]):
        def items(self) -> Any:
            for number in range(100_000):
                seen.append(number)
                yield str(number), number

    assert text.preview(Watched(a=1), 40).startswith('{"0": 0, "1": 1')
    assert len(seen) < 40


def test_payloads_of_any_depth_are_shown() -> None:
    for levels in (100, 5000):
        assert text.preview(deep(levels), 20)
        assert text.payload(deep(levels))


def test_ids_survive_forms() -> None:
    for job_id in ["a", "a\r\nb", "ä/%+ ", "raw\udcff", "\x00"]:
        with case(job_id):
            encoded = text.encode_id(job_id)
            assert encoded.isascii()
            assert encoded.isprintable()
            assert text.decode_id(encoded) == job_id
