"""Value <-> canonical bytes, of pydantic's models and dataclasses. Only this module imports pydantic.

What a model's fields are in JSON is the model's own affair: its serializers, validators and settings hold. Fields go by
their names, whatever their aliases are; both are read. Sets are sorted and aware datetimes in UTC, so that equal models
are equal bytes. What is pushed is read back once, and must come back as it is.
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pydantic

from lowq.codec.msgspec_codec import encode_sorted, refusal, refuse_deep, refuse_nan
from lowq.codec.structure import Unsupported, has_fields, named_in, type_name
from lowq.errors import PayloadError

#: The first in which fields are read by alias and by name.
_OLDEST = (2, 11)


def pydantic_codec(given: Any) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    """``dump`` and ``load`` of a type.

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
    name = type_name(given)
    is_union = get_origin(given) is Annotated

    def load(data: bytes) -> Any:
        try:
            return adapter.validate_json(data, by_alias=True, by_name=True)
        except pydantic.ValidationError as error:
            raise PayloadError(_first(error, is_union=is_union)) from None

    return _Dump(name, given, adapter, load, is_union=is_union), load


class _Dump:
    """``dump`` of a type."""

    def __init__(
        self, name: str, given: Any, adapter: "pydantic.TypeAdapter[Any]", load: Callable[[bytes], Any],
        *, is_union: bool,
    ) -> None:  # fmt: skip
        self._name = name
        #: Their instances are dumped as they are; whatever else is validated first.
        self._classes = {one for one in named_in(given) if isinstance(one, type) and _has_fields(one)}
        self._adapter = adapter
        self._load = load
        self._is_union = is_union

    def __call__(self, value: Any) -> bytes:
        try:
            kind = type(value)
            if kind not in self._classes:
                if _has_fields(kind):
                    raise PayloadError(f"it is of type {kind.__name__}")
                value = self._adapter.validate_python(value, by_alias=True, by_name=True)
            given, parts = self._encode(value)
            back = self._load(given)
            data, parts_back = self._encode(back)
            _refuse_changed(parts, parts_back, "$")
            _refuse_others(value, back, "$")
            return data
        except PayloadError as error:
            raise refusal(self._name, value, str(error)) from None
        except pydantic.ValidationError as error:
            raise refusal(self._name, value, _first(error, is_union=self._is_union)) from None
        except (ValueError, TypeError, RecursionError, ArithmeticError, AttributeError) as error:
            raise refusal(self._name, value, str(error)) from error

    def _encode(self, value: Any) -> tuple[bytes, Any]:
        """A value as bytes, and as what Python has in its place: dicts, with the fields' own values."""
        parts = self._dump_as("python", value)
        tree = _ordered(self._dump_as("json", value), parts)
        data = encode_sorted(tree)
        if b"null" in data:
            refuse_nan(tree, "$")
        refuse_deep(tree)
        return data, parts

    def _dump_as(self, mode: Any, value: Any) -> Any:
        # Without a warning of what is no value of its field: reading it back says so.
        return self._adapter.dump_python(value, mode=mode, by_alias=False, round_trip=True, warnings="none")


_DATETIME = pydantic.TypeAdapter(datetime)


def _ordered(tree: Any, value: Any) -> Any:
    """JSON values, with sets in order and datetimes in UTC. ``value``: the same, as Python has it."""
    if isinstance(value, datetime):
        if value.utcoffset() is None or tree != _DATETIME.dump_python(
            value, mode="json"
        ):  # or as its serializer has it
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
    """What is wrong first, and where, as msgspec says it."""
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
    """Refuses what would not come back as it went in. What is equal, as 1 is to 1.0, does.

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
    """Refuses parts that would come back as instances of another class: what a subclass has more would be lost.

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
    """Unions that the type itself names: those of a model's fields are the model's own affair."""
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
