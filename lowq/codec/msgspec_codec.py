"""Value <-> canonical bytes, of types that msgspec knows.

::

    dump    value --encode, decode--> the value that a take gets --canonical, encode--> bytes
    load    bytes --decode--> a value of the type

A push is read back before it is written. So it takes exactly what a take can read, and nothing comes back as something
else. Equal values are equal bytes: fields, keys and sets are sorted, a whole number in a ``float`` is a float, aware
datetimes are in UTC, and defaults are written out.

Most Structs come back equal; they are written as they came back, which takes a third of the time.
"""

import copy
import dataclasses
import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, get_origin
from uuid import UUID

import msgspec
from msgspec import inspect as types

from lowq.codec.payloads import MAX_PAYLOAD_DEPTH
from lowq.codec.types import (
    PayloadType,
    has_fields,
    info_of,
    is_json,
    named_in,
    parts_of,
    tagged_members,
    tags_of,
    type_name,
    without_metadata,
)
from lowq.errors import PayloadError
from lowq.store.untrusted import deeper_than


def msgspec_codec(given: Any) -> PayloadType | None:
    """The codec of a type; None: its values are JSON's own.

    Raises:
        Unsupported: it has no form in JSON, or nothing tells the members of a union apart.
    """
    members = tagged_members(given) or [given]
    infos = [info_of(member) for member in members]
    if len(members) == 1 and is_json(infos[0]):
        return None
    load = _load_by_tag(members, infos) if len(members) > 1 else msgspec.json.Decoder(given).decode
    parts = [part for info in infos for _, part in parts_of(info)]
    return PayloadType(type_name(given), _Dump(given, load, parts), load)


def _load_by_tag(members: list[Any], infos: list[types.Type]) -> Callable[[bytes], Any]:
    """``load`` of a union of classes that a field of each tells apart."""
    name, tags = tags_of(members, infos)
    decoders = [msgspec.json.Decoder(member) for member in members]
    load_tagged = dict(zip(tags, (decoder.decode for decoder in decoders), strict=True))
    tagged: Any = msgspec.defstruct("Tagged", [("tag", str | int)], rename=lambda _: name)
    read_tag = msgspec.json.Decoder(tagged).decode

    def load(data: bytes) -> Any:
        tag = read_tag(data).tag
        if tag not in load_tagged:
            raise PayloadError(f"Invalid value {tag!r:.100} - at `$.{name}`")
        return load_tagged[tag](data)

    return load


#: Classes whose sets Python, and msgspec, sort by value, when they have items of one class.
_SORTED: dict[type, type[types.Type]] = {
    str: types.StrType, int: types.IntType, float: types.FloatType, bytes: types.BytesType, UUID: types.UUIDType,
    date: types.DateType, Decimal: types.DecimalType,
}  # fmt: skip


def _is_exact(info: types.Type) -> bool:
    """Whether values of a type, apart from its parts, are the same bytes if they are equal.

    Classes may say themselves what is equal, and dataclasses leave defaults to the class. A Struct that omits defaults
    omits the very object, and not what equals it.
    """
    if isinstance(info, types.StructType):
        kind = get_origin(info.cls) or info.cls
        return kind.__eq__ is msgspec.Struct.__eq__ and not kind.__struct_config__.omit_defaults
    if isinstance(info, types.SetType | types.FrozenSetType):
        return isinstance(without_metadata(info.item_type), tuple(_SORTED.values()))
    if isinstance(info, types.DictType):
        return info.key_type == types.StrType()
    return not isinstance(info, types.AnyType | types.DataclassType)


#: The end of a datetime in another time zone than UTC, as the encoder writes it, or of what looks alike.
_OFFSET = re.compile(rb':\d\d"')


class _Dump:
    """``dump`` of a type."""

    def __init__(self, given: Any, load: Callable[[bytes], Any], parts: list[types.Type]) -> None:
        self._name = type_name(given)
        self._classes = set(named_in(given))
        self._load = load
        self._has_times = any(isinstance(part, types.DateTimeType) for part in parts)
        self._is_exact = all(map(_is_exact, parts))

    def __call__(self, value: Any) -> bytes:
        if self._is_exact:
            try:
                back = self._load(encode_sorted(value))
                if back == value:
                    data = encode_sorted(back)
                    is_in_utc = not self._has_times or not _OFFSET.search(data)
                    if is_in_utc and data.count(b"{") + data.count(b"[") <= MAX_PAYLOAD_DEPTH:
                        return data
            except (ValueError, TypeError, ArithmeticError, RecursionError, msgspec.MsgspecError):
                pass  # the reason is given below
        try:
            kind = type(value)
            if kind not in self._classes and has_fields(kind):  # which may look alike
                raise PayloadError(f"it is of type {kind.__name__}")
            return self._encode(value)
        except RecursionError:
            raise refusal(self._name, value, _TOO_DEEP) from None
        except _Lost as lost:
            raise refusal(self._name, value, f"{lost} - at `${lost.path.removeprefix('.')}`") from None
        except PayloadError as error:
            raise refusal(self._name, value, str(error)) from None
        except (ValueError, TypeError, ArithmeticError, msgspec.MsgspecError) as error:
            raise refusal(self._name, value, str(error)) from error

    def _encode(self, value: Any) -> bytes:
        given = _encode(value)
        if b"null" in given:
            refuse_nan(msgspec.to_builtins(value, str_keys=True, enc_hook=_of_subclass), "$")
        data = encode_sorted(_canonical(value, self._load(given), ""))
        back = self._load(data)
        if len(_encode(back)) != len(data):  # a default was of another type than its field, as 1 is in a float
            data = encode_sorted(_canonical(back, back, ""))
        if data.count(b"{") + data.count(b"[") > MAX_PAYLOAD_DEPTH:
            refuse_deep(msgspec.json.decode(data))
        return data


#: Classes whose subclasses are their values too, as freezegun's and pendulum's datetimes are, and how such a value is
#: made. In a tuple, as freezegun replaces names of modules.
_BASES: tuple[tuple[type, Callable[[Any, Any], Any]], ...] = (
    (str, lambda _, value: str.__str__(value)),
    (int, lambda base, value: base(value)),
    (float, lambda base, value: base(value)),
    (datetime, lambda base, v: base(*v.timetuple()[:6], v.microsecond, v.tzinfo, fold=v.fold)),
    (date, lambda base, value: base(value.year, value.month, value.day)),
    (Decimal, lambda base, value: base(value)),
)


def _of_subclass(value: Any) -> Any:
    """A value of the class itself. An object without a form is encoded as ``{}``, so that it is refused with its place:
    no such object comes back.
    """
    for base, make in _BASES:
        if isinstance(value, base):
            return make(base, value)
    return {}


_encode = msgspec.json.Encoder(enc_hook=_of_subclass).encode
encode_sorted = msgspec.json.Encoder(enc_hook=_of_subclass, order="sorted").encode


@functools.cache
def _field_names(kind: type) -> dict[str, str] | None:
    """The fields of a Struct, a dataclass or an attrs class: name -> name in JSON. None: it is no such class."""
    if issubclass(kind, msgspec.Struct):
        return dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    if dataclasses.is_dataclass(kind):
        return {field.name: field.name for field in dataclasses.fields(kind)}
    attributes = getattr(kind, "__attrs_attrs__", None)
    return None if attributes is None else {attribute.name: attribute.name for attribute in attributes}


class _Lost(Exception):
    """Why a part of a value would come back as something else. ``path``: from where it was caught."""

    path = ""


#: Classes whose values are canonical as they are.
_CANONICAL = frozenset({str, int, float, bool, type(None), Decimal, UUID, bytes, date, time, timedelta})


def _canonical(value: Any, back: Any, name: object) -> Any:
    """The form of a part of a value that the encoder writes canonically: datetimes in UTC, sets as sorted lists, keys
    as texts, and defaults filled in. What is canonical already is not copied. ``back``: the part as it comes back.

    Raises:
        _Lost: as something else.
    """
    kind: Any = type(back)
    if kind is type(value) and kind in _CANONICAL and _is_same(value, back):
        return back
    try:
        _refuse_other(value, back)
        if isinstance(back, datetime):
            given = value if kind is type(value) or not isinstance(value, kind) else _of_subclass(value)
            return _in_utc(given if isinstance(value, datetime) else back)
        if isinstance(back, set | frozenset):
            if isinstance(value, list | tuple):
                _refuse_other_items(value, back)
            items = [_canonical(item, item, 0) for item in back]
            kinds = {*map(type, items)}
            return sorted(items, key=None if len(kinds) == 1 and kinds <= _SORTED.keys() else encode_sorted)
        if isinstance(back, dict):
            return _canonical_dict(value, back)
        if isinstance(back, list | tuple):
            if len(value) > len(back):
                raise _Lost(f"of {len(value)} items {len(back)} would come back")
            items = [*map(_canonical, (*value, *back[len(value) :]), back, itertools.count())]
            return back if all(map(operator.is_, items, back)) else items
        names = _field_names(kind)
        return back if names is None else _canonical_object(value, back, names)
    except _Lost as lost:
        lost.path = (f"[{name}]" if isinstance(name, int) else f".{name}") + lost.path
        raise


def _refuse_other(value: Any, back: Any) -> None:
    """Refuses a value that comes back as something else, apart from its parts. JSON values come back as the type has
    them, numbers as the same number, and others as a value of their class.

    Raises:
        _Lost
    """
    kind: Any = type(value)
    if isinstance(value, int | float):
        if isinstance(back, int | float) and value != back:
            raise _Lost(f"{value} would come back as {back}")
    elif isinstance(value, str) and isinstance(back, str):
        if str.__str__(value) != back:
            raise _Lost(f"{value!r:.100} would come back as {back!r:.100}")
    elif value is None or isinstance(value, str | list | tuple | dict):
        pass
    elif kind is type(back):
        # A class may change its fields whenever it is made (`__post_init__`).
        if not has_fields(kind) and not _is_same(value, back):
            raise _Lost(f"{value!r:.100} would come back as {back!r:.100}")
    elif _field_names(kind) is not None or not (isinstance(value, type(back)) or value == back):
        raise _Lost(f"a {kind.__name__} would come back as a {type(back).__name__}")


def _refuse_other_items(value: list[Any] | tuple[Any, ...], back: set[Any] | frozenset[Any]) -> None:
    for item in value:
        if not (item is None or isinstance(item, str | int | float | list | tuple | dict) or item in back):
            raise _Lost(f"a {type(item).__name__} would come back as something else")


def _is_same(value: Any, back: Any) -> bool:
    """Whether two values of one class, which has no fields, are the same."""
    if isinstance(value, datetime) and None not in (value.utcoffset(), back.utcoffset()):
        # `==` says no to all times in an hour that a zone repeats or leaves out (PEP 495).
        return _in_utc(value) == _in_utc(back)
    return repr(value) == repr(back) if isinstance(value, Decimal) else bool(value == back)  # a Decimal("sNaN")


def _in_utc(value: datetime) -> datetime:
    try:
        return value if value.tzinfo is UTC or value.utcoffset() is None else value.astimezone(UTC)
    except OverflowError:
        raise _Lost(f"{value} is not within the years 1 to 9999 in UTC") from None


def _refuse_unknown(given: Iterable[Any], known: Container[Any]) -> None:
    for name in given:
        if name not in known:
            raise _Lost(f"there is no field `{name}`")


def _canonical_dict(value: Mapping[Any, Any], back: dict[Any, Any]) -> dict[Any, Any]:
    if len(value) == len(back):  # in the same order, as keys may be others
        given = zip(value.items(), back.items(), strict=True)
    else:  # a TypedDict's may be missing
        _refuse_unknown(value, back)
        given = zip(((key, value.get(key, item)) for key, item in back.items()), back.items(), strict=True)
    made: dict[Any, Any] = {}
    for (key, item), (key_back, item_back) in given:
        if not isinstance(key, (str, type(key_back))) and key != key_back:
            raise _Lost(f"the key {key!r:.100} would come back as {key_back!r:.100}")
        made[_canonical(key, key_back, key)] = _canonical(item, item_back, key)
    if any(type(key) is not str for key in made):
        made = dict(zip(msgspec.to_builtins(dict.fromkeys(made), str_keys=True), made.values(), strict=True))
    return made


def _canonical_object(value: Any, back: Any, names: dict[str, str]) -> Any:
    config = back.__struct_config__ if isinstance(back, msgspec.Struct) else None
    if isinstance(value, list | tuple):
        count = len(names) + (config is not None and config.tag is not None)
        if len(value) > count:
            raise _Lost(f"there are {len(value)} items, and {count} fields")
        value = dict(zip(names.values(), value[count - len(names) :], strict=False))
    elif isinstance(value, dict):
        _refuse_unknown(value, {*names.values(), None if config is None else config.tag_field})
    fields: dict[str, Any] = {}
    for name, shown in names.items():
        item_back = getattr(back, name, msgspec.UNSET)
        item = value.get(shown, item_back) if isinstance(value, dict) else getattr(value, name, item_back)
        if item_back is not msgspec.UNSET:
            fields[name] = _canonical(item_back if item is msgspec.UNSET else item, item_back, shown)
    return fields if config is None else _struct_with(back, fields)


def _struct_with(back: msgspec.Struct, fields: dict[str, Any]) -> msgspec.Struct:
    if back.__struct_config__.omit_defaults:  # the encoder omits the very objects
        for name, default in zip(reversed(fields), reversed(back.__struct_defaults__), strict=False):
            item = fields[name]
            if type(item) is type(default) and encode_sorted(item) == encode_sorted(default):
                fields[name] = default
    changed = {name: item for name, item in fields.items() if item is not getattr(back, name)}
    made = copy.copy(back) if changed else back
    for name, item in changed.items():
        msgspec.structs.force_setattr(made, name, item)
    return made


# --- refused values ---

_TOO_DEEP = f"it is nested in more than {MAX_PAYLOAD_DEPTH} levels, or contains itself"


def refusal(name: str, value: Any, why: str) -> PayloadError:
    """The error for a value that is none of a type."""
    if type(value) is str and not value:
        return PayloadError(f"there is no payload; the queue takes payloads of type {name}")
    why = _MISMATCH.sub(lambda found: _in_python(value, *found.groups("")), why)
    return PayloadError(f"the payload does not fit type {name}: {why}")


#: What msgspec says of a part of another type, and the steps of its path.
_MISMATCH, _STEP = re.compile(r"^Expected `(.*)`, got `(\w+)`(?= - at `\$(.*)`$|$)"), re.compile(r"\.(\w+)|\[(.*?)\]")
_IN_PYTHON = {"object": "dict", "array": "list", "null": "None"}


def _in_python(part: Any, expected: str, got: str, path: str) -> str:
    """The same with the names of Python's types: msgspec sees the value as JSON."""
    with suppress(Exception):  # the path has other steps than fields and places in lists
        for name, place in _STEP.findall(path):
            part = part[int(place)] if place else part[name] if isinstance(part, dict) else getattr(part, name)
        got = "None" if part is None else type(part).__name__
    expected = " | ".join(_IN_PYTHON.get(kind, kind) for kind in expected.split(" | "))
    return f"Expected `{expected}`, got `{got}`"


def refuse_deep(tree: Any) -> None:
    """Refuses a payload that could not be read from deep inside of an application.

    Raises:
        PayloadError
    """
    if isinstance(tree, dict | list) and deeper_than(tree, MAX_PAYLOAD_DEPTH + 1):
        raise PayloadError(_TOO_DEEP)


def refuse_nan(tree: Any, path: str) -> None:
    """Refuses numbers that JSON does not have, which the encoder would write as null.

    Raises:
        PayloadError
    """
    if isinstance(tree, float) and not math.isfinite(tree):
        raise PayloadError(f"{tree!r} is no JSON number - at `{path}`")
    if isinstance(tree, dict):
        for key, item in tree.items():
            refuse_nan(item, f"{path}.{key}")
    elif isinstance(tree, list):
        for number, item in enumerate(tree):
            refuse_nan(item, f"{path}[{number}]")
