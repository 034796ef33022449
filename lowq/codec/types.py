"""Types of payloads: where one is declared, ``Worker[Order]`` or the annotation of a worker function, and the types
that it is made of, as msgspec sees them. The codec of a type is made once, when its worker is declared.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import UnionType
from typing import Any, ForwardRef, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import inspect as types

from lowq.errors import ConfigError


class PayloadType(NamedTuple):
    """How payloads of one type are encoded and decoded."""

    #: For people.
    name: str
    #: Value -> canonical bytes. Raises `PayloadError` with what is wrong, and where.
    dump: Callable[[Any], bytes]
    #: Bytes -> value. Raises any exception, with the reason, for bytes of no such value.
    load: Callable[[bytes], Any]


class Unsupported(Exception):
    """The reason why payloads can't be of a type."""


def payload_type(whose: str, given: Any) -> PayloadType | None:
    """The codec of a type; None: it needs none, as its values are JSON's own (``int``, ``dict[str, Any]``).
    ``whose``: for the message.

    Raises:
        ConfigError: it has no form in JSON; the message says what to write.
    """
    while hasattr(given, "__value__"):  # type Payload = ...
        given = given.__value__
    if is_any(given):
        return None
    # Imported here: only a process with such a worker needs them, and pydantic may be missing.
    try:
        if any(map(is_model, named_in(given))):
            from lowq.codec.pydantic_codec import pydantic_codec

            return pydantic_codec(given)
        from lowq.codec.msgspec_codec import msgspec_codec

        return msgspec_codec(given)
    except Unsupported as error:
        raise ConfigError(f"{whose}: payloads can't be {type_name(given)}: {error}") from error.__cause__


def type_argument(worker: type, base: type) -> Any:
    """The type in the brackets of a generic base, also of a base of its bases; Any: there is none.

    Raises:
        ConfigError: a text that names no type.
    """
    found = _argument_of(worker, base)
    return Any if found is None or is_any(found) else found


def annotated_type(function: Callable[..., Any]) -> Any:
    """The type of payloads in the annotations of a worker function: ``payloads_by_id: dict[str, list[Order]]``, or with
    two arguments the second, ``payloads: list[Order]``; Any: there is none.

    Raises:
        ConfigError: a text that names no type.
    """
    parameters = [
        one
        for one in inspect.signature(function).parameters.values()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) and one.default is one.empty
    ]
    if len(parameters) not in (1, 2) or parameters[-1].annotation is inspect.Parameter.empty:
        return Any
    parameter = parameters[-1]
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        found = _evaluated(parameter.annotation, scope)
    except Exception as error:
        raise ConfigError(
            f"{function.__name__}: {parameter.name}: {parameter.annotation!r:.100} names no type that can be found: "
            f"{error}. Import it so that it is there at run time, too, or leave the annotation out"
        ) from error
    if len(parameters) == 1:
        arguments = get_args(found) if get_origin(found) is dict else ()
        found = arguments[1] if len(arguments) == 2 else None
    if get_origin(found) is not list:
        return Any
    (argument,) = get_args(found)
    return Any if is_any(argument) else argument


def is_any(given: Any) -> bool:
    """Whether it is no type in particular."""
    return given is Any or given is object or isinstance(given, TypeVar)


def _argument_of(kind: type, base: type) -> Any:
    for parent in vars(kind).get("__orig_bases__", kind.__bases__):
        origin = get_origin(parent) or parent
        if not (isinstance(origin, type) and issubclass(origin, base)):
            continue
        arguments = get_args(parent)
        if origin is base:
            return _resolved(kind, arguments[0]) if arguments else None
        return _substituted(_argument_of(origin, base), origin, arguments)
    return None


def _substituted(found: Any, origin: type, arguments: tuple[Any, ...]) -> Any:
    """A type found in a base, with the arguments for that base's own parameters."""
    named = dict(zip(getattr(origin, "__parameters__", ()), arguments, strict=False))
    if isinstance(found, TypeVar):
        return named.get(found, found)
    parameters = getattr(found, "__parameters__", ())
    return found[tuple(named.get(one, one) for one in parameters)] if parameters and named else found


def _resolved(kind: type, argument: Any) -> Any:
    if not isinstance(argument, ForwardRef):
        return argument
    module = sys.modules.get(kind.__module__)
    text = argument.__forward_arg__
    try:
        return _evaluated(text, vars(module) if module else {})
    except Exception as error:
        raise ConfigError(
            f"{kind.__name__}: {text!r} names no type that can be found: {error}. Define it above the worker, and "
            "write it without quotes"
        ) from error


def _evaluated(annotation: Any, scope: Mapping[str, Any]) -> Any:
    holder = type("Holder", (), {"__annotations__": {"type": annotation}})
    return get_type_hints(holder, dict(scope), {}, include_extras=True)["type"]


# --- the types that a type is made of ---

#: Types with fields by name.
OBJECTS = types.StructType | types.DataclassType | types.TypedDictType
#: Types without fields that are JSON's own, when they have no constraints.
_OF_JSON = (types.AnyType, types.NoneType, types.BoolType, types.IntType, types.FloatType, types.StrType)
#: Types that msgspec knows and JSON has no canonical form for.
_WITHOUT_FORM = (types.CustomType, types.RawType, types.ExtType, types.MemoryViewType)
#: Types that JSON has texts for, as keys of a dict.
_KEYS = (
    types.AnyType, types.StrType, types.IntType, types.FloatType, types.DecimalType, types.BytesType, types.UUIDType,
    types.DateTimeType, types.DateType, types.TimeType, types.TimeDeltaType, types.EnumType, types.LiteralType,
)  # fmt: skip
_TAG = (
    "Give each class of the union a tag: class Paid(msgspec.Struct, tag=True), or a field of the same name with "
    'another word in each, kind: Literal["paid"]'
)


def type_name(given: Any) -> str:
    """The name of a type, for people."""
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
    """A type, and the types that it names in brackets or as members of a union."""
    arguments = () if get_origin(given) is Literal else get_args(given)
    yield get_origin(given) or given
    for one in arguments:
        yield from named_in(one)


def is_model(kind: Any) -> bool:
    """Whether it is one of pydantic's classes."""
    return "__pydantic_validator__" in getattr(kind, "__dict__", ())


def has_fields(kind: Any) -> bool:
    """Whether it is a class whose instances are encoded as objects."""
    return any(hasattr(kind, name) for name in ("__struct_fields__", "__dataclass_fields__", "__attrs_attrs__"))


def info_of(given: Any) -> types.Type:
    """A type as msgspec sees it.

    Raises:
        Unsupported: a part of it has no form in JSON.
    """
    try:
        info = types.type_info(given)
        msgspec.json.Decoder(given)
    except RecursionError as error:
        raise Unsupported("it is made of itself, without a class between; write Any for that part") from error
    except Exception as error:
        why = str(error)
        if "union" in why:
            why = f"{why.partition(' - type')[0]}. {_TAG}"
        elif "is not supported" in why:
            why = f"{why}. Write Any for a part that may be whatever JSON has"
        raise Unsupported(why) from error
    for path, part in parts_of(info):
        _check(part, path.removeprefix("."))
    return info


def parts_of(info: types.Type, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, types.Type]]:
    """A type and all types that it is made of, once each, with their paths. ``seen``: the ids of those before."""
    seen = set() if seen is None else seen
    if id(info) in seen:  # types may be part of themselves
        return
    seen.add(id(info))
    yield path, info
    if isinstance(info, OBJECTS | types.NamedTupleType):
        for field in info.fields:
            yield from parts_of(field.type, f"{path}.{field.encode_name}", seen)
        return
    below = path if isinstance(info, types.UnionType | types.Metadata) else f"{path}[...]"
    for name in ("types", "type", "key_type", "value_type", "item_types", "item_type"):
        found = getattr(info, name, ())
        for part in found if isinstance(found, tuple) else (found,):
            yield from parts_of(part, below, seen)


def _check(info: types.Type, path: str) -> None:
    """Whether JSON has a form for a part of a type.

    Raises:
        Unsupported: it has none.
    """
    kind = getattr(info, "cls", None)
    if isinstance(info, _WITHOUT_FORM) or is_model(kind):
        raise Unsupported(_why_without_form(info, kind, path))
    if hasattr(kind, "__attrs_attrs__"):
        assert isinstance(info, types.DataclassType)
        lost = [field.name for field in info.fields if field.name.startswith("_")]  # msgspec writes none of them
        if lost:
            where = f"{path} is of type {type_name(kind)}" if path else "it is an attrs class"
            raise Unsupported(f"{where} with the private attribute {lost[0]}, which would be lost; rename it")
    if isinstance(info, types.DictType):
        where = f"{path or 'it'} is a dict with keys"
        key = without_metadata(info.key_type)
        keys = key.types if isinstance(key, types.UnionType) else (key,)
        if not all(isinstance(without_metadata(key), _KEYS) for key in keys):
            raise Unsupported(f"{where} that JSON has no text for; write str, int, UUID or an Enum")
        if len(keys) > 1 and types.StrType() in keys:
            raise Unsupported(f"{where} of str and of another type: 1 and '1' would be one key in JSON")


def _why_without_form(info: types.Type, kind: Any, path: str) -> str:
    name = type(info).__name__.removesuffix("Type") if kind is None else type_name(kind)
    what = f"{path} is of type {name}, which" if path else "it"
    if kind is object:
        return f"{what} may be anything; write Any, for whatever JSON has"
    if is_model(kind):
        return f"{what} is a pydantic model in a type that is none; make that a pydantic model, too"
    return (
        f"{what} has no form in JSON. Write a TypedDict, a dataclass, a msgspec.Struct or a pydantic model, of "
        "such classes and of str, int, float, bool, None, list, dict, set, tuple, datetime, Decimal, UUID and Enum"
    )


def without_metadata(info: types.Type) -> types.Type:
    """A type without what ``Annotated`` says of it."""
    while isinstance(info, types.Metadata):
        info = info.type
    return info


def is_json(info: types.Type) -> bool:
    """Whether the values of a type are JSON's own, so that it needs no codec."""
    if isinstance(info, _OF_JSON):
        return bool(info == type(info)())
    if type(info) is types.ListType:
        return info == types.ListType(info.item_type) and is_json(info.item_type)
    if type(info) is types.DictType:
        has_plain_keys = info.key_type in (types.StrType(), types.AnyType())
        return has_plain_keys and info == types.DictType(info.key_type, info.value_type) and is_json(info.value_type)
    return type(info) is types.UnionType and all(map(is_json, info.types))


def tagged_members(given: Any) -> list[Any]:
    """The classes of a union that a field of each tells apart; none for another type, and for a union of Structs, whose
    tags msgspec reads.

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


def _is_object(kind: Any) -> bool:
    return has_fields(kind) or (isinstance(kind, type) and issubclass(kind, dict) and hasattr(kind, "__total__"))


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
