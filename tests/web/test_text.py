"""Values as words."""

import pytest

from lowq_web import text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0"), (7, "7"), (999, "999"), (999.6, "1K"), (1000, "1K"), (1234, "1.2K"), (12_345, "12K"),
        (999_499, "999K"), (1_000_000, "1M"), (3_400_000, "3.4M"), (2_500_000_000, "2.5G"),
    ],
)  # fmt: skip
def test_numbers_are_shortened(value: float, words: str) -> None:
    assert text.short(value) == words


@pytest.mark.parametrize(("value", "words"), [(None, "-"), (0, "0"), (0.0213, "0.021"), (4.24, "4.2"), (1234, "1.2K")])
def test_rates(value: float | None, words: str) -> None:
    assert text.rate(value) == words


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("1700000000", 1_700_000_000.0), ("-2h", 2_800.0), ("+30 min", 11_800.0), ("-1.5d", -119_600.0),
        ("1970-01-01T01:00", 3600.0), ("1970-01-01T01:00+01:00", 0.0),
    ],
)  # fmt: skip
def test_moments(typed: str, expected: float) -> None:
    assert text.moment(typed, 10_000.0) == expected


@pytest.mark.parametrize("typed", ["", "soon", "nan", "inf", "1e999", "2h"])
def test_what_is_no_moment(typed: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
        text.moment(typed, 0.0)


@pytest.mark.parametrize("job_id", ["a", "a\r\nb", "ä/%+ ", "raw\udcff", "\x00"])
def test_ids_survive_forms(job_id: str) -> None:
    encoded = text.encode_id(job_id)
    assert encoded.isascii()
    assert encoded.isprintable()
    assert text.decode_id(encoded) == job_id
