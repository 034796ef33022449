"""What the tests of payload types share."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

from lowq.payload_types import PayloadType, payload_type

CET = timezone(timedelta(hours=1))
#: The same moment in two zones.
NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
NOON_IN_CET = datetime(2026, 5, 1, 13, tzinfo=CET)


def typed(kind: Any) -> PayloadType:
    """The codec of a type."""
    made = payload_type("OrderSync", kind)
    assert made is not None
    return made
