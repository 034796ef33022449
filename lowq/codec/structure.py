"""What a type is made of: how msgspec sees it, its names for people, and why it has no form in JSON."""

from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import inspect as types

#: Types with fields by name.
OBJECTS = types.StructType | types.DataclassType | types.TypedDictType
_WITH_FIELDS = OBJECTS | types.NamedTupleType
#: Types without fields that are JSON's own, when nothing more is said of them.
_OF_JSON = (types.AnyType, types.NoneType, types.BoolType, types.IntType, types.FloatType, types.StrType)
#: What msgspec knows and JSON has no form for that is always the same.
_WITHOUT_FORM = (types.CustomType, types.RawType, types.ExtType, types.MemoryViewType)

#: What JSON has texts for, as keys of a dict.
_KEYS = (
    types.AnyType, types.StrType, types.IntType, types.FloatType, types.DecimalType, types.BytesType, types.UUIDType,
    types.DateTimeType, types.DateType, types.TimeType, types.TimeDeltaType, types.EnumType, types.LiteralType,
)  # fmt: skip


class Unsupported(Exception):
    """Why payloads can't be of a type."""


def type_name(given: Any) -> str:
    """A type, for people."""
    if get_origin(given) in (Union, UnionType):
        return " | ".join(map(type_name, get_args(given)))
    if hasattr(given, "__metadata__"):  # Annotated[...]
        return type_name(get_args(given)[0])
    if given is type(None):
        return "None"
    if get_origin(given) is Literal:
        return str(given).removeprefix("typing.")
    arguments = get_args(given)
    if arguments:
        return f"{type_name(get_origin(given))}[{', '.join(map(type_name, arguments))}]"
    return str(getattr(given, "__name__", given))


def named_in(given: Any) -> Iterator[Any]:
    """A type, and those that it names in brackets or as members of a union."""
    arguments = () if get_origin(given) is Literal else get_args(given)
    yield get_origin(given) or given
    for one in arguments:
        yield from named_in(one)


def is_model(kind: Any) -> bool:
    """Whether it is one of pydantic's classes."""
    return "__pydantic_validator__" in getattr(kind, "__dict__", ())


def has_fields(kind: Any) -> bool:
    """Whether it is a class whose instances are written as objects."""
    return any(hasattr(kind, name) for name in ("__struct_fields__", "__dataclass_fields__", "__attrs_attrs__"))


def info_of(given: Any) -> types.Type:
    """A type as msgspec sees it.

    Raises:
        Unsupported: it has no form in JSON; it says which part.
    """
    try:
        info = types.type_info(given)
        msgspec.json.Decoder(given)
    except RecursionError as error:
        raise Unsupported("it is made of itself, without a class between; write Any for that part") from error
    except Exception as error:
        raise Unsupported(_advice(str(error))) from error
    _check(info, "", set())
    return info


def parts_of(info: types.Type) -> Iterator[tuple[str, types.Type]]:
    """The types that a type is made of, each with what its path goes on with."""
    if isinstance(info, _WITH_FIELDS):
        for field in info.fields:
            yield f".{field.encode_name}", field.type
    elif isinstance(info, types.UnionType):
        for member in info.types:
            yield "", member
    elif isinstance(info, types.DictType):
        yield "[...]", info.key_type
        yield "[...]", info.value_type
    elif isinstance(info, types.TupleType):
        for item in info.item_types:
            yield "[...]", item
    elif isinstance(info, types.CollectionType):
        yield "[...]", info.item_type
    elif isinstance(info, types.Metadata):
        yield "", info.type


def parts_with_values(info: types.Type, value: Any) -> Iterator[tuple[types.Type, Any, str]]:
    """The types that a type is made of, with what a value has there, and what its path goes on with."""
    if isinstance(info, types.Metadata):
        yield info.type, value, ""
    elif isinstance(info, types.UnionType):
        yield from ((member, value, "") for member in info.types if _may_be(member, value))
    elif isinstance(info, OBJECTS | types.NamedTupleType):
        for number, field in enumerate(info.fields, isinstance(info, types.StructType) and info.tag is not None):
            if isinstance(value, dict):
                item = value.get(field.encode_name, msgspec.UNSET)
            elif isinstance(value, list | tuple):
                item = value[number] if number < len(value) else msgspec.UNSET
            else:
                item = getattr(value, field.name, msgspec.UNSET)
            if item is not msgspec.UNSET:  # or a type that is part of itself would have no end
                yield field.type, item, f".{field.encode_name}"
    elif isinstance(info, types.DictType) and isinstance(value, Mapping):
        yield from ((info.value_type, item, f"[{key!r:.100}]") for key, item in value.items())
    elif isinstance(info, types.TupleType | types.CollectionType) and isinstance(value, list | tuple | set | frozenset):
        parts = info.item_types if isinstance(info, types.TupleType) else repeat(info.item_type)
        yield from ((part, item, f"[{number}]") for number, (part, item) in enumerate(zip(parts, value, strict=False)))


def _may_be(info: types.Type, value: Any) -> bool:
    """Whether a value may be one of this member of a union. Those that have fields are told apart by their class, or by
    a tag.
    """
    if not isinstance(info, OBJECTS):
        return True
    if isinstance(value, dict) and isinstance(info, types.StructType) and info.tag_field is not None:
        return bool(value.get(info.tag_field) == info.tag)
    return isinstance(value, (dict, list, get_origin(info.cls) or info.cls))


def contains(info: types.Type, is_meant: Callable[[types.Type], bool], seen: set[int] | None = None) -> bool:
    """Whether a type, or one that it is made of, is meant. ``seen``: those that were looked at, by identity."""
    seen = set() if seen is None else seen
    if id(info) in seen:  # types may be part of themselves
        return False
    seen.add(id(info))
    return is_meant(info) or any(contains(part, is_meant, seen) for _, part in parts_of(info))


def is_json(info: types.Type) -> bool:
    """Whether the values of a type are what JSON has anyway, so that it needs no codec."""
    if isinstance(info, _OF_JSON):
        return bool(info == type(info)())
    if type(info) is types.ListType:
        return info == types.ListType(info.item_type) and is_json(info.item_type)
    if type(info) is types.DictType:
        has_plain_keys = info.key_type in (types.StrType(), types.AnyType())
        return has_plain_keys and info == types.DictType(info.key_type, info.value_type) and is_json(info.value_type)
    return type(info) is types.UnionType and all(map(is_json, info.types))


def tagged_members(given: Any) -> list[Any]:
    """The classes of a union that are told apart by a field which all of them have. Of another type, and of a union of
    Structs, whose tags msgspec knows, there are none.

    Raises:
        Unsupported: something else is among them.
    """
    if get_origin(given) not in (Union, UnionType):
        return []
    members = [one for one in get_args(given) if _is_object(get_origin(one) or one)]
    if len(members) < 2 or all(issubclass(get_origin(one) or one, msgspec.Struct) for one in members):
        return []
    others = [type_name(one) for one in get_args(given) if one not in members]
    if others:
        raise Unsupported(f"beside classes that are told apart by a field there can't be {', '.join(others)}")
    return members


def tags_of(members: list[Any], infos: list[types.Type]) -> tuple[str, list[Any]]:
    """The field that tells the classes of a union apart, and its value in each.

    Raises:
        Unsupported: there is none.
    """
    found: list[dict[str, Any]] = []
    for info in infos:
        tags: dict[str, Any] = {}
        for field in info.fields if isinstance(info, OBJECTS) else ():
            if isinstance(field.type, types.LiteralType) and len(field.type.values) == 1:
                tags[field.encode_name] = field.type.values[0]
        if isinstance(info, types.StructType) and info.tag_field is not None:
            tags[info.tag_field] = info.tag
        found.append(tags)
    for name in found[0]:
        values = [tags.get(name) for tags in found]
        if None not in values and len(set(values)) == len(values):
            return name, values
    raise Unsupported(f"nothing tells {', '.join(map(type_name, members))} apart. {_TAG}")


_TAG = (
    "Give each class of the union a tag: class Paid(msgspec.Struct, tag=True), or a field of the same name with "
    'another word in each, kind: Literal["paid"]'
)


def _is_object(kind: Any) -> bool:
    return has_fields(kind) or (isinstance(kind, type) and issubclass(kind, dict) and hasattr(kind, "__total__"))


def _advice(error: str) -> str:
    if "union" in error:
        return f"{error.partition(' - type')[0]}. {_TAG}"
    return f"{error}. Write Any for a part that may be whatever JSON has" if "is not supported" in error else error


def _check(info: types.Type, path: str, seen: set[int]) -> None:
    if id(info) in seen:
        return
    seen.add(id(info))
    if isinstance(info, _WITHOUT_FORM) or is_model(getattr(info, "cls", None)):
        raise Unsupported(_why_without_form(info, path))
    if isinstance(info, types.DataclassType) and hasattr(info.cls, "__attrs_attrs__"):
        lost = [
            field.name for field in info.fields if field.name.startswith("_")
        ]  # msgspec reads them, and writes none
        if lost:
            where = f"{path.removeprefix('.')} is of type {type_name(info.cls)}" if path else "it is an attrs class"
            raise Unsupported(f"{where} with the private attribute {lost[0]}, which would be lost; rename it")
    if isinstance(info, types.DictType):
        where = f"{path.removeprefix('.')} is" if path else "it is"
        if not _is_key(info.key_type):
            raise Unsupported(f"{where} a dict with keys that JSON has no text for; write str, int, UUID or an Enum")
        if isinstance(info.key_type, types.UnionType) and types.StrType() in info.key_type.types:
            raise Unsupported(
                f"{where} a dict with keys of str and of another type: 1 and '1' would be one key in JSON"
            )
    for more, part in parts_of(info):
        _check(part, path + more, seen)


def _is_key(info: types.Type) -> bool:
    if isinstance(info, types.Metadata):
        return _is_key(info.type)
    if isinstance(info, types.UnionType):
        return all(map(_is_key, info.types))
    return isinstance(info, _KEYS)


def _why_without_form(info: types.Type, path: str) -> str:
    kind = getattr(info, "cls", None)
    name = type(info).__name__.removesuffix("Type") if kind is None else type_name(kind)
    what = f"{path.removeprefix('.')} is of type {name}, which" if path else "it"
    if kind is object:
        return f"{what} may be anything; write Any, for whatever JSON has"
    if is_model(kind):
        return f"{what} is a pydantic model in a type that is none; make that a pydantic model, too"
    return (
        f"{what} has no form in JSON. Write a TypedDict, a dataclass, a msgspec.Struct or a pydantic model, of "
        "such classes and of str, int, float, bool, None, list, dict, set, tuple, datetime, Decimal, UUID and Enum"
    )
