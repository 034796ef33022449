"""What the API takes: queries and JSON documents, checked against the type that the endpoint names.

msgspec checks; the reasons are worded here, from the schema of the field that is wrong, so that each names the field
and what it may be. The names of fields are checked before: msgspec puts an unknown one into its message as it was sent,
where it could look like the path.
"""

import functools
import json
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import UNSET, Struct

R = TypeVar("R", bound="Received")
Schema = Mapping[str, Any]

#: Numbers are smaller: JSON knows integers of any length, and Python reads NaN and infinities, too.
_MOST, _MOST_DIGITS = 1e300, 300
_NUMBER = re.compile(r"-?[0-9]{1,310}(\.[0-9]{1,40})?([eE][-+]?[0-9]{1,4})?")
_STEP = re.compile(r"\.([^.\[]+)|\[")
_BY_MSGSPEC = ("Expected ", "Invalid enum value", "Number out of range", "Integer value out of range")


class Received(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request says. A field that may be left out is UNSET then; null is no value of any."""

    #: Fields that may have any bytes; what is no UTF-8 of them comes as surrogates. So do the items of lists.
    of_bytes: ClassVar[frozenset[str]] = frozenset()

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
    schema = _schema_of(kind)[0]
    fields = schema["properties"]
    for name in query:
        if name not in fields:
            raise ValueError(f"unknown parameter {name!r:.50}; known here: {', '.join(fields) or 'none'}")
    for name in schema["required"]:
        if name not in query:
            raise ValueError(f"the parameter {name} is missing")
    values = {name: _typed(raw, fields[name]) for name, raw in query.items()}
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        path, reason = _parsed(error)
        name = path.lstrip(".")
        if isinstance(error, UnicodeEncodeError):
            name = next(name for name, raw in query.items() if raw == error.object)
        if name in query:
            raise ValueError(f"{name}={query[name]!r:.50}: it is {_allowed(fields[name])}") from None
        raise ValueError(reason) from None


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
    _check_names(sent, *_schema_of(kind))
    try:
        return msgspec.convert(sent, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise ValueError(_reason(kind, *_parsed(error))) from None


def _check_names(sent: Any, schema: Schema, components: Mapping[str, Schema], path: str = "") -> None:
    """Whether objects have the fields that they must have, and no others.

    Raises:
        ValueError: the reason, for people.
    """
    schema = components.get(schema.get("$ref", ""), schema)
    fields, name = schema.get("properties"), path or "the document"
    if isinstance(sent, list) and "items" in schema:
        for index, item in enumerate(sent):
            _check_names(item, schema["items"], components, f"{path}[{index}]")
    if not isinstance(sent, dict) or fields is None:
        return  # msgspec says what it must be
    for field in sent:
        if field not in fields:
            raise ValueError(f"{name} has an unknown property {field!r:.50}; known: {', '.join(fields) or 'none'}")
    for field in schema["required"]:
        if field not in sent:
            raise ValueError(f"{name} lacks {field!r}")
    for field, value in sent.items():
        _check_names(value, fields[field], components, f"{path}.{field}".lstrip("."))


def _integer(digits: str) -> int | float:
    """An integer; an infinity for one that no float could be near to."""
    return int(digits) if len(digits) <= _MOST_DIGITS else math.inf


def _typed(raw: str, schema: Schema) -> Any:
    """A parameter as JSON has it, if it is written as its type must be."""
    kind = schema.get("type")
    if kind == "boolean" and raw in ("true", "false"):
        return raw == "true"
    if kind == "integer" and re.fullmatch(r"-?[0-9]{1,9}", raw):
        return int(raw)
    if kind == "number" and _NUMBER.fullmatch(raw):
        return float(raw)
    return raw


def _parsed(error: Exception) -> tuple[str, str]:
    """The path of what is wrong, and why."""
    if isinstance(error, UnicodeEncodeError):  # of one out of a few words
        return "", f"{error.object!r:.50} is no text that UTF-8 has"
    # At the last one: before it there may be a value that was sent; a path has only names that are known.
    reason, found, path = str(error).rpartition(" - at `$")
    return (path.removesuffix("`"), reason) if found else ("", path)


def _reason(kind: type[Received], path: str, reason: str) -> str:
    schema, components = _schema_of(kind)
    for step in _STEP.finditer(path):
        schema = schema["properties"][step[1]] if step[1] else schema["items"]
        schema = components.get(schema.get("$ref", ""), schema)
    name = path.lstrip(".") or "the document"
    if reason.startswith(_BY_MSGSPEC):
        return f"{name} must be {_allowed(schema)}"
    return f"{name}: {reason}" if path else reason


def _allowed(schema: Schema) -> str:
    """The values of a field, in words."""
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    kind = schema["type"]
    if kind == "boolean":
        return "true or false"
    words = {
        "integer": "an integer",
        "number": "a number",
        "string": "a text",
        "array": "a list",
        "object": "an object",
    }
    unit = {"string": " characters", "array": " items"}.get(kind, "")
    names = {"string": "Length", "array": "Items"}
    low, high = (schema.get(bound + names.get(kind, "imum")) for bound in ("min", "max"))
    if low is not None and high is not None:
        return f"{words[kind]} {'of' if unit else 'from'} {low} to {high}{unit}"
    if low is not None or high is not None:
        return f"{words[kind]} of at {'most' if low is None else 'least'} {high if low is None else low}{unit}"
    return words[kind]


@functools.cache
def _schema_of(kind: type[Received]) -> tuple[Schema, Mapping[str, Schema]]:
    """The schema of a type; and those that it refers to, by the reference."""
    ((schema,), components) = msgspec.json.schema_components([kind], ref_template="{name}")
    return components[schema["$ref"]], components
