"""Patterns of ids: what is accepted, and how many ids are compared at once."""

import pytest

from lowq.codec import MAX_ID_BYTES
from lowq.errors import ConfigError
from lowq.inspection.pattern import MAX_BYTES, MAX_IDS, MAX_REST, MAX_STARS, check_pattern, encode_pattern, ids_per_call
from tests.rows import case

ACCEPTED = [
    "42", "4*", "order-?", "[a-c]*", "*42*", "*a*b*c*", r"100\*", "x" * MAX_ID_BYTES, "x" * (MAX_BYTES - 1) + "*",
    "*" + "x" * (MAX_REST - 1) + "*", "x" * 512 + "*" + "y" * (MAX_REST - 1), "caf\udce9*",
]  # fmt: skip


def test_what_people_type_is_accepted_but_stars_side_by_side_are_one() -> None:
    rows: list[tuple[str | None, str]] = [
        *((pattern, pattern) for pattern in ACCEPTED),
        (None, ""), ("", ""), ("*" * 5000, "*"), ("a***b**", "a*b*"), (r"\**", r"\**"), (r"\***", r"\**"),
    ]  # fmt: skip
    for pattern, accepted in rows:
        with case(pattern, accepted):
            assert check_pattern(pattern) == accepted


def test_what_is_too_dear_is_refused_with_the_limit() -> None:
    rows: list[tuple[object, str]] = [
        ("x" * (MAX_BYTES + 1), str(MAX_BYTES)),
        ("é" * (MAX_BYTES // 2 + 1), str(MAX_BYTES)),
        ("*" + "x" * MAX_REST, f"{MAX_REST} there"),
        ("x*" + "é" * (MAX_REST // 2), f"{MAX_REST} there"),
        ("*[" + "b" * 500 + "a]c", f"{MAX_REST} there"),
        ("*a" * (MAX_STARS + 1), f"at most {MAX_STARS}"),
        ("\ud800*", "Unicode"),
        (42, "a pattern of ids"),
    ]
    for pattern, limit in rows:
        with case(pattern, limit), pytest.raises(ConfigError, match=limit):
            check_pattern(pattern)


def test_the_dearer_the_fewer_ids_of_a_call() -> None:
    assert ids_per_call("") == MAX_IDS
    for pattern in [*ACCEPTED, "*[" + "b" * 95 + "a]c"]:
        with case(pattern):
            head, star, rest = encode_pattern(pattern).rstrip(b"*").partition(b"*")
            steps = len(head) + MAX_ID_BYTES * len(star + rest)
            assert 1 <= ids_per_call(pattern) <= MAX_IDS
            assert ids_per_call(pattern) * steps <= 1_000_000
            assert ids_per_call(pattern) == MAX_IDS or ids_per_call(pattern) * steps > 900_000
