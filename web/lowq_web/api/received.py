"""What the API takes: queries and JSON documents, checked against the type that the endpoint names.

msgspec checks, and says what is wrong and where.
"""

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct

from lowq import inspection
from lowq_web import text

R = TypeVar("R", bound="Received")

#: Numbers are smaller: JSON knows integers of any length, and Python reads NaN and infinities, too.
_MOST, _MOST_DIGITS = 1e300, 300
#: Characters of a reason: an unknown field is named as it was sent.
MAX_REASON = 300


class Received(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request says. A field that may be left out is UNSET then; null is no value of any."""

    #: Fields that may have any bytes; what is no UTF-8 of them comes as surrogates. So do the items of lists.
    of_bytes: ClassVar[frozenset[str]] = frozenset()
    #: A POST may come without a document, which counts as an empty one.
    body_optional: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and not abs(value) < _MOST:
                raise ValueError(f"{name} must be a finite number")
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, str):
                    _check_text(name, item, any_bytes=isinstance(value, list) or name in self.of_bytes)

    def given(self) -> dict[str, Any]:
        """The fields that were sent, or have a default."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in values.items() if value is not UNSET}


class Nothing(Received, frozen=True):
    """No parameters."""

    body_optional = True


#: Bytes that are no UTF-8 come and go as surrogates.
BYTES = {"x-bytes": True}
#: Fields of several requests.
Id = Annotated[str, Meta(min_length=1, max_length=512, description="The id: up to 512 bytes of UTF-8")]
QueuePart = Annotated[str, Meta(max_length=512, description="A part of the queue's name, in any case")]


class SpanQuery(Received, frozen=True):
    span: Annotated[inspection.Span, Meta(description="How far back")] = "hour"


class IdQuery(Received, frozen=True):
    id: Id


def _check_text(name: str, value: str, *, any_bytes: bool) -> None:
    try:
        value.encode("utf-8", "surrogateescape" if any_bytes else "strict")
    except UnicodeEncodeError:
        raise ValueError(f"{name} is no text that UTF-8 has") from None


def read_query(query: Mapping[str, str], kind: type[R]) -> R:
    """The parameters of an address.

    Raises:
        ValueError: the reason, for people.
    """
    return _converted(query, kind, strict=False)  # numbers and booleans are written as text there


def read_document(body: bytes, kind: type[R]) -> R:
    """A JSON document.

    Raises:
        ValueError: the reason, for people.
    """
    try:
        # Not by msgspec: ids may have bytes that are no UTF-8, as surrogates, which it refuses.
        sent = json.loads(body, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is no JSON: {error}") from None
    return _converted(sent, kind)


def _converted(sent: Any, kind: type[R], *, strict: bool = True) -> R:
    try:
        return msgspec.convert(sent, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise ValueError(text.cut(str(error), MAX_REASON)) from None
    except UnicodeEncodeError as error:  # of one out of a few words
        raise ValueError(f"{error.object!r:.50} is no text that UTF-8 has") from None


def _integer(digits: str) -> int | float:
    """An integer; an infinity for one that no float could be near to."""
    return int(digits) if len(digits) <= _MOST_DIGITS else math.inf
