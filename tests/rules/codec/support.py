"""What the tests of payload types share."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from lowq.codec.types import PayloadType, payload_type
from lowq.errors import PayloadError
from tests.rows import case

CET = timezone(timedelta(hours=1))
#: The same moment in two zones.
NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
NOON_IN_CET = datetime(2026, 5, 1, 13, tzinfo=CET)
NAIVE = datetime(2026, 5, 1, 12)  # noqa: DTZ001 - that is what is tested

#: A type, values of it that are equal, and their bytes if they are to be exactly those.
Same = tuple[Any, list[Any], bytes | None]
#: A type, what is no value of it, and what is said of that.
Refused = tuple[Any, Any, str]


def typed(kind: Any) -> PayloadType:
    """The codec of a type."""
    made = payload_type("OrderSync", kind)
    assert made is not None
    return made


def assert_same(rows: Iterable[Same]) -> None:
    for kind, values, expected in rows:
        for value in values:
            with case(kind, value):
                data = typed(kind).dump(value)
                assert data == expected or expected is None
                assert data == typed(kind).dump(values[0])
                assert typed(kind).load(data) == values[0]


def assert_refused(rows: Iterable[Refused]) -> None:
    for kind, value, message in rows:
        made = typed(kind)
        name = re.escape(made.name)
        with (
            case(kind, value),
            pytest.raises(PayloadError, match=rf"^the payload does not fit type {name}: {message}$"),
        ):
            made.dump(value)
