"""Filters by what is in a payload."""

from typing import Any

import pytest

from lowq.errors import ConfigError
from lowq.job import MAX_NAMES, MAX_TEXT, PayloadField
from tests.rows import case


def test_a_payload_holds_a_field_or_does_not() -> None:
    rows: list[tuple[str, Any, bool]] = [
        (" customer : 7 ", {"customer": 7}, True), ("customer:7", {"customer": "7", "other": 8}, True),
        ("order.customer:7", {"order": {"customer": 7}}, True),
        ("order.customer:7", {"order": [{"customer": 6}, {"customer": 7}]}, True),
        ("order.customer:7", {"order.customer": 7}, True), ("a.b.c:x", {"a": {"b.c": "x"}}, True),
        ("tags:new", {"tags": ["old", "new"]}, True), ("customer:7", [{"customer": 7}], True),
        ("url:http://a:80/", {"url": "http://a:80/"}, True), ("paid:true", {"paid": True}, True),
        ("paid:null", {"paid": None}, True), ("price:1.5", {"price": 1.5}, True),
        ("customer:7", {"customer": 77}, False), ("customer:7", {"order": {"customer": 7}}, False),
        ("order.customer:7", {"order": 7}, False), ("order:7", {"order": {"customer": 7}}, False),
        ("paid:1", {"paid": True}, False), ("customer:7", "customer:7", False), ("tags:new", {"tags": []}, False),
    ]  # fmt: skip
    for text, payload, holds in rows:
        with case(text, payload):
            assert PayloadField.parse(text).holds(payload) is holds


def test_what_is_no_field_and_value_is_refused() -> None:
    texts: list[Any] = [
        "customer", ":7", "customer:", "a..b:7", "  ", 7, "a:" + "x" * MAX_TEXT, ".".join("a" * (MAX_NAMES + 1)) + ":7",
    ]  # fmt: skip
    for text in texts:
        with case(text), pytest.raises(ConfigError, match="payload="):
            PayloadField.parse(text)


def test_looking_ends_however_the_fields_are_nested() -> None:
    """Each name may be a part of another one: all ways through the path are tried, each place once."""
    payload: Any = "no"
    for _ in range(60):
        payload = {"a": payload, "a.a": "no"}
    assert not PayloadField.parse(".".join("a" * MAX_NAMES) + ":yes").holds(payload)
