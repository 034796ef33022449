"""Value <-> canonical bytes, of pydantic's models and dataclasses. Only this module imports pydantic.

A model's serializers, validators and settings hold. Fields are written by their names, and read by their names and
aliases. Sets are sorted and aware datetimes are in UTC, so that equal models are equal bytes. A push is read back
before it is written, and must come back as it is.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pydantic

from lowq.codec.msgspec_codec import encode_sorted, refusal, refuse_deep, refuse_nan
from lowq.codec.types import PayloadType, Unsupported, has_fields, named_in, type_name
from lowq.errors import PayloadError

#: The first in which fields are read by alias and by name.
_OLDEST = (2, 11)


def pydantic_codec(given: Any) -> PayloadType:
    """The codec of a type.

    Raises:
        Unsupported: it has no form in JSON, or pydantic is too old.
    """
    if tuple(map(int, pydantic.VERSION.split(".")[:2])) < _OLDEST:
        raise Unsupported(f"that takes pydantic {'.'.join(map(str, _OLDEST))} or newer, not {pydantic.VERSION}")
    _check_unions(given, is_told_apart=False)
    try:
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(given)
        adapter.rebuild(raise_errors=True)
    except Exception as error:
        raise Unsupported(str(error).partition("\n\nFor further")[0]) from error
    _check_schema(adapter.core_schema)
    name, is_union = type_name(given), get_origin(given) is Annotated
    classes = {one for one in named_in(given) if isinstance(one, type) and _has_fields(one)}

    def load(data: bytes) -> Any:
        try:
            return adapter.validate_json(data, by_alias=True, by_name=True)
        except pydantic.ValidationError as error:
            raise PayloadError(_first(error, is_union=is_union)) from None

    def dump(value: Any) -> bytes:
        kind = type(value)
        try:
            if kind not in classes:  # else it is dumped as it is
                if _has_fields(kind):
                    raise PayloadError(f"it is of type {kind.__name__}")
                value = adapter.validate_python(value, by_alias=True, by_name=True)
            given, parts = _encode(adapter, value)
            back = load(given)
            data, parts_back = _encode(adapter, back)
            _refuse_changed(parts, parts_back, "$")
            _refuse_others(value, back, "$")
            return data
        except PayloadError as error:
            raise refusal(name, value, str(error)) from None
        except pydantic.ValidationError as error:
            raise refusal(name, value, _first(error, is_union=is_union)) from None
        except (ValueError, TypeError, RecursionError, ArithmeticError, AttributeError) as error:
            raise refusal(name, value, str(error)) from error

    return PayloadType(name, dump, load)


def _encode(adapter: "pydantic.TypeAdapter[Any]", value: Any) -> tuple[bytes, Any]:
    """A value as bytes, and in Python's types: dicts with the fields' own values."""
    # Without a warning of parts that are no values of their fields: reading them back says so.
    parts, tree = (
        adapter.dump_python(value, mode=mode, by_alias=False, round_trip=True, warnings="none")
        for mode in ("python", "json")
    )
    tree = _ordered(tree, parts)
    data = encode_sorted(tree)
    if b"null" in data:
        refuse_nan(tree, "$")
    refuse_deep(tree)
    return data, parts


_DATETIME = pydantic.TypeAdapter(datetime)


def _ordered(tree: Any, value: Any) -> Any:
    """JSON values, with sets in order and datetimes in UTC. ``value``: the same in Python's types."""
    if isinstance(value, datetime):
        has_own_form = tree != _DATETIME.dump_python(value, mode="json")  # that of a serializer
        if value.utcoffset() is None or has_own_form:
            return tree
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(tree, dict):
        if not isinstance(value, Mapping) or len(value) != len(tree):
            return tree
        items = zip(tree.items(), value.items(), strict=True)
        return {_ordered(key, key_of): _ordered(item, item_of) for (key, item), (key_of, item_of) in items}
    if isinstance(tree, list) and isinstance(value, list | tuple | set | frozenset) and len(value) == len(tree):
        listed = [_ordered(item, item_of) for item, item_of in zip(tree, value, strict=True)]
        return sorted(listed, key=encode_sorted) if isinstance(value, set | frozenset) else listed
    return tree


def _first(error: pydantic.ValidationError, *, is_union: bool) -> str:
    """The first error and its place, in msgspec's form."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = found["loc"][1:] if is_union and not found["type"].startswith("union_tag") else found["loc"]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return f"{found['msg']} - at `${path}`"


def _parts(value: Any) -> dict[Any, Any]:
    """The parts of a value by index, key or name."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return value
    return getattr(value, "__dict__", {}) if _has_fields(type(value)) else {}  # with slots there is none


def _path_to(path: str, value: Any, key: object) -> str:
    return f"{path}[{key}]" if isinstance(value, list | tuple) else f"{path}.{key}"


def _refuse_changed(value: Any, back: Any, path: str) -> None:
    """Refuses a value that would come back as another one. Equal values, as 1 and 1.0, are the same.

    Raises:
        PayloadError
    """
    if value == back or (value != value and back != back):  # a Decimal("NaN"), where the type allows it
        return
    parts, parts_back = _parts(value), _parts(back)
    if parts and parts.keys() == parts_back.keys():
        for key, item in parts.items():
            _refuse_changed(item, parts_back[key], _path_to(path, value, key))
        return
    is_aware = all(isinstance(one, datetime) and one.utcoffset() is not None for one in (value, back))
    if is_aware and value.astimezone(UTC) == back.astimezone(UTC):
        return  # `==` says no to all times in an hour that a zone repeats or leaves out (PEP 495)
    if repr(value) == repr(back):  # a secret, for example
        raise PayloadError(f"a {type(value).__name__} would not come back as it went in - at `{path}`")
    raise PayloadError(f"{value!r:.100} would come back as {back!r:.100} - at `{path}`")


def _has_fields(kind: type) -> bool:
    return has_fields(kind) or issubclass(kind, pydantic.BaseModel)


def _refuse_others(value: Any, back: Any, path: str) -> None:
    """Refuses parts that would come back as instances of another class: the further fields of a subclass would be lost.

    Raises:
        PayloadError
    """
    kind, parts_back = type(value), _parts(back)
    if _has_fields(kind) and kind is not type(back):
        raise PayloadError(f"a {kind.__name__} would come back as a {type(back).__name__} - at `{path}`")
    for key, item in _parts(value).items():
        if type(item) not in _PLAIN and key in parts_back:
            _refuse_others(item, parts_back[key], _path_to(path, value, key))


_PLAIN = frozenset({str, int, float, bool, type(None), datetime})


def _check_unions(given: Any, *, is_told_apart: bool) -> None:
    """Refuses unions without a discriminator in the type itself; those of a model's fields are the model's own.

    Raises:
        Unsupported
    """
    arguments = get_args(given)
    if get_origin(given) is Annotated:
        is_told_apart = any(getattr(one, "discriminator", None) is not None for one in given.__metadata__)
        arguments = arguments[:1]
    elif get_origin(given) in (Union, UnionType):
        classes = [one for one in arguments if one is not type(None)]
        if len(classes) > 1 and not is_told_apart:
            raise Unsupported(
                "nothing tells them apart. Give each a field with another word, such as "
                'kind: Literal["paid"], and name it: Annotated['
                f'{" | ".join(map(type_name, classes))}, pydantic.Field(discriminator="kind")]'
            )
    for one in arguments:
        if get_origin(one) is not None:
            _check_unions(one, is_told_apart=is_told_apart)


def _check_schema(schema: Any) -> None:
    for one in _nodes(schema, set()):
        if one.get("type") == "is-instance" and "serialization" not in one:
            raise Unsupported(
                f"a part of it is of type {type_name(one['cls'])}, which has no form in JSON: replace it by one of "
                "JSON's or pydantic's own types, or by a model"
            )


def _nodes(schema: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
    """The parts of a schema that concern JSON."""
    if id(schema) in seen:
        return
    seen.add(id(schema))
    if isinstance(schema, Mapping):
        if schema.get("type") in ("json-or-python", "lax-or-strict"):
            yield from _nodes(schema.get("json_schema", schema.get("lax_schema")), seen)
            return
        yield schema  # type: ignore[misc]  # a TypedDict of pydantic's
        for part in schema.values():
            yield from _nodes(part, seen)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from _nodes(part, seen)
