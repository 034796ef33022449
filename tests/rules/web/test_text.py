"""Values as words."""

from typing import Any

import pytest

from lowq_web import text
from tests.rows import case


def test_moments() -> None:
    for typed, expected in (
        ("1700000000", 1_700_000_000.0), ("-2h", 2_800.0), ("+30 min", 11_800.0), ("-1.5d", -119_600.0),
        ("1970-01-01T01:00", 3600.0), ("1970-01-01T01:00+01:00", 0.0),
    ):  # fmt: skip
        assert text.moment(typed, 10_000.0) == expected, typed
    for typed in ("", "soon", "nan", "1e999", "2h", f"-{'9' * 400}d"):
        with case(typed), pytest.raises(ValueError):  # noqa: PT011 - whatever it says
            text.moment(typed, 0.0)


def test_a_preview_is_the_beginning_of_the_payload_and_looks_at_hardly_more_than_it_shows() -> None:
    for value in ({"a": [1, None, "ä"]}, ["y" * 90] * 90, list(range(1000)), {"k" * 300: 1}, 1.5, b"raw"):
        with case(value):
            assert text.preview(value, 160) == text.cut(text.payload(value), 160)
    seen: list[int] = []

    class Watched(dict[str, Any]):
        def items(self) -> Any:
            for number in range(100_000):
                seen.append(number)
                yield str(number), number

    assert text.preview(Watched(a=1), 40).startswith('{"0": 0, "1": 1')
    assert len(seen) < 40
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    assert text.preview(deep, 20)
    assert text.payload(deep)
