"""Value <-> canonical bytes, of types that msgspec knows.

::

    dump    value --to_builtins--> tree --convert--> a new value of the type --normal, encode--> bytes
    load    bytes --decode--> a value of the type

A value is converted before it is encoded, as the encoder alone writes whatever is in a field. So what is accepted is
exactly what a take makes a value of the type of, and equal values are equal bytes: fields, keys and sets are sorted, a
whole number in a ``float`` is a float, aware datetimes are in UTC, and defaults are written out.

Most values need less, as they come back equal when they are encoded and decoded; that takes a third of the time.
"""

import copy
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NamedTuple, get_origin
from uuid import UUID

import msgspec
from msgspec import inspect as types

from lowq.codec.payloads import MAX_PAYLOAD_DEPTH, check_json
from lowq.codec.structure import (
    contains,
    has_fields,
    info_of,
    is_json,
    named_in,
    parts_with_values,
    tagged_members,
    tags_of,
    type_name,
)  # fmt: skip
from lowq.errors import PayloadError
from lowq.store.untrusted import deeper_than

Codec = tuple[Callable[[Any], bytes], Callable[[bytes], Any]]

encode_sorted = msgspec.json.Encoder(order="sorted").encode


def msgspec_codec(given: Any) -> Codec | None:
    """``dump`` and ``load`` of a type; None: its values are what JSON has anyway.

    Raises:
        Unsupported: it has no form in JSON, or nothing tells the members of a union apart.
    """
    classes = tagged_members(given)
    if classes:
        return _tagged_codec(given, [_member(one) for one in classes])
    member = _member(given)
    if is_json(member.info):
        return None
    return _Dump(given, [member], lambda _: member, member.load), member.load


class _Member(NamedTuple):
    """A type that values are converted to: all there is, or a member of a union."""

    given: Any
    info: types.Type
    load: Callable[[bytes], Any]
    #: The parts, by identity, that have parts of type Any, which are checked as untyped payloads are.
    with_any: frozenset[int]
    #: Whether the encoder alone may write equal values as different bytes.
    is_plain: bool
    #: JSON has texts for keys. To read these takes twice the time, so only where it must be.
    has_other_keys: bool


def _member(given: Any) -> _Member:
    info = info_of(given)
    parts: list[types.Type] = []
    contains(info, lambda part: bool(parts.append(part)))  # type: ignore[func-returns-value]  # all are looked at
    with_any = frozenset(id(part) for part in parts if contains(part, lambda one: isinstance(one, types.AnyType)))
    has_other_keys, is_plain = any(map(_has_other_keys, parts)), not any(map(_is_rewritten, parts))
    return _Member(given, info, msgspec.json.Decoder(given).decode, with_any, is_plain, has_other_keys)


def _tagged_codec(given: Any, members: list[_Member]) -> Codec:
    """Of a union of classes that are told apart by a field which all of them have."""
    name, tags = tags_of([member.given for member in members], [member.info for member in members])
    by_tag: dict[Any, _Member] = dict(zip(tags, members, strict=True))
    by_class: dict[Any, _Member] = {get_origin(member.given) or member.given: member for member in members}
    tagged: Any = msgspec.defstruct("Tagged", [("tag", str | int)], rename=lambda _: name)
    read_tag = msgspec.json.Decoder(tagged).decode

    def with_tag(tag: Any) -> _Member:
        if not isinstance(tag, str | int) or tag not in by_tag:
            raise PayloadError(f"Invalid value {tag!r:.100} - at `$.{name}`")
        return by_tag[tag]

    def member_of(value: Any) -> _Member:
        if isinstance(value, dict):
            if name not in value:
                raise PayloadError(f"Object missing required field `{name}`")
            return with_tag(value[name])
        if type(value) not in by_class:
            raise PayloadError(f"Expected `object`, got `{type(value).__name__}`")
        return by_class[type(value)]

    def load(data: bytes) -> Any:
        return with_tag(read_tag(data).tag).load(data)

    return _Dump(given, members, member_of, load), load


def _has_other_keys(info: types.Type) -> bool:
    return isinstance(info, types.DictType) and info.key_type != types.StrType()


#: Classes that Python, and msgspec, sort by value, in sets that have nothing else.
_SORTED: dict[type, type[types.Type]] = {
    str: types.StrType, int: types.IntType, float: types.FloatType, bytes: types.BytesType, UUID: types.UUIDType,
    date: types.DateType, Decimal: types.DecimalType,
}  # fmt: skip


def _has_no_order(info: types.Type) -> bool:
    """Whether it is a set whose items Python can't sort, or not always."""
    if not isinstance(info, types.SetType | types.FrozenSetType):
        return False
    item = info.item_type
    while isinstance(item, types.Metadata):
        item = item.type
    return not isinstance(item, tuple(_SORTED.values()))


def _is_rewritten(info: types.Type) -> bool:
    """Whether `_normal` has something to do."""
    is_kind = isinstance(info, types.DataclassType | types.DateTimeType) or _omits_defaults(info)
    return is_kind or _has_other_keys(info) or _has_no_order(info)


def _omits_defaults(info: types.Type) -> bool:
    """Whether it is a Struct that leaves out defaults: msgspec leaves out the very object, and not what equals it."""
    return isinstance(info, types.StructType) and (get_origin(info.cls) or info.cls).__struct_config__.omit_defaults


def _needs_more(info: types.Type) -> bool:
    """Whether values of the type may be equal, and yet something else, or not the same bytes: those with parts that are
    checked one by one, and of classes that say themselves what is equal, or that leave defaults to the class.
    """
    if isinstance(info, types.StructType):
        return info.cls.__eq__ is not msgspec.Struct.__eq__ or _omits_defaults(info)
    return isinstance(info, types.AnyType | types.DataclassType) or _has_other_keys(info) or _has_no_order(info)


#: The end of a datetime in another time zone than UTC, as the encoder writes it, or of what looks alike.
_OFFSET = re.compile(rb':\d\d"')


class _Dump:
    """``dump`` of a type."""

    def __init__(
        self, given: Any, members: list[_Member], member_of: Callable[[Any], _Member], load: Callable[[bytes], Any]
    ) -> None:
        self._name = type_name(given)
        #: Instances of others are no values of the type, though they may look alike.
        self._classes = set(named_in(given))
        self._member_of = member_of
        self._load = load
        infos = [member.info for member in members]
        self._has_times = any(contains(info, lambda one: isinstance(one, types.DateTimeType)) for info in infos)
        self._may_be_quick = not any(contains(info, _needs_more) for info in infos)

    def __call__(self, value: Any) -> bytes:
        if self._may_be_quick:
            try:
                made = self._load(encode_sorted(value))
                if made == value:
                    data = encode_sorted(made)
                    is_in_utc = not self._has_times or not _OFFSET.search(data)
                    if is_in_utc and data.count(b"{") + data.count(b"[") <= MAX_PAYLOAD_DEPTH:
                        return data
            except (ValueError, TypeError, ArithmeticError, RecursionError, msgspec.MsgspecError):
                pass  # what is wrong is said below
        kind = type(value)
        try:
            if kind is not dict and kind not in self._classes and has_fields(kind):
                raise PayloadError(f"it is of type {kind.__name__}")
            return _encode(value, self._member_of(value))
        except RecursionError:
            raise refusal(self._name, value, _TOO_DEEP) from None
        except PayloadError as error:
            raise refusal(self._name, value, str(error)) from None
        except TypeError as error:  # of something without a form, which says its class alone
            raise refusal(self._name, value, f"{error} - at `${_path_to_formless(value)}`") from error
        except (ValueError, ArithmeticError, msgspec.MsgspecError) as error:  # of a Decimal("sNaN"), for example
            raise refusal(self._name, value, str(error)) from error


def _encode(value: Any, member: _Member) -> bytes:
    if member.with_any:
        _check_any(member.info, member.with_any, value, "$")
    tree = _plain_tree(value)
    made = msgspec.convert(tree, member.given, str_keys=member.has_other_keys)
    if _plain_tree(made) != tree:
        _refuse_lost(tree, made, "$")
    try:
        shown = made if member.is_plain else _normal(made)
        data = encode_sorted(shown)
    except OverflowError:
        _refuse_lost(tree, made, "$")  # which says where
        raise
    if b"null" in data:
        refuse_nan(tree, "$")
    if shown != tree:  # defaults were filled in, perhaps: of another type than their fields, as 1 is in a float
        made = member.load(data)
        data = encode_sorted(made if member.is_plain else _normal(made))
    if data.count(b"{") + data.count(b"[") > MAX_PAYLOAD_DEPTH:
        refuse_deep(tree)
    return data


# --- to JSON values ---

#: What stays as it is, instead of becoming a text that every ``str`` would take.
_KEPT = (bytes, bytearray, datetime, date, time, timedelta, UUID, Decimal)


def _plain_tree(value: Any) -> Any:
    """A value as JSON values, and those that have a text for a form as they are.

    Raises:
        TypeError: it has no form.
    """
    return msgspec.to_builtins(value, builtin_types=_KEPT, enc_hook=_of_subclass)


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
    """A value of the class itself.

    Raises:
        TypeError: it is of none.
    """
    for base, make in _BASES:
        if isinstance(value, base):
            return make(base, value)
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    """The names of the fields of a Struct, a dataclass or an attrs class; of others there are none."""
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return tuple(field.name for field in getattr(kind, "__attrs_attrs__", ()))


def _normal(value: Any) -> Any:
    """A value that the encoder writes canonically: with datetimes in UTC, sets as sorted lists, keys as texts, and
    defaults of dataclasses, which msgspec leaves to the class, filled in. What must change is copied.
    """
    kind: Any = type(value)
    if kind is str or kind is int or kind is float or value is None:
        return value
    if isinstance(value, datetime):
        return _in_utc(value)
    if isinstance(value, set | frozenset):
        items = [_normal(item) for item in value]
        kinds = {*map(type, items)}
        return sorted(items, key=None if len(kinds) == 1 and kinds <= _SORTED.keys() else encode_sorted)
    if isinstance(value, dict):
        keys: Iterable[Any] = value
        if not all(type(key) is str for key in keys):
            keys = msgspec.to_builtins({_normal(key): None for key in keys}, str_keys=True)
        return dict(zip(keys, map(_normal, value.values()), strict=True))
    if isinstance(value, list | tuple):
        return [_normal(item) for item in value]
    names = _field_names(kind)
    if not isinstance(value, msgspec.Struct):
        if not names:
            return value
        given = ((name, getattr(value, name, msgspec.UNSET)) for name in names)
        return {name: _normal(item) for name, item in given if item is not msgspec.UNSET}
    made = copy.copy(value)
    for name in names:
        msgspec.structs.force_setattr(made, name, _normal(getattr(value, name)))
    if kind.__struct_config__.omit_defaults:
        for name, default in zip(reversed(names), reversed(kind.__struct_defaults__), strict=False):
            item = getattr(made, name)
            if type(item) is type(default) and encode_sorted(item) == encode_sorted(default):
                msgspec.structs.force_setattr(made, name, default)
    return made


def _in_utc(value: datetime) -> datetime:
    return value if value.tzinfo is UTC or value.utcoffset() is None else value.astimezone(UTC)


# --- what is wrong ---

_TOO_DEEP = f"it is nested in more than {MAX_PAYLOAD_DEPTH} levels, or contains itself"


def refusal(name: str, value: Any, why: str) -> PayloadError:
    """That a value is none of a type."""
    if type(value) is str and not value:
        return PayloadError(f"there is no payload; those of the queue are {name}")
    return PayloadError(f"the payload is no {name}: {why}")


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value, each with what its path goes on with."""
    if isinstance(value, Mapping):
        yield from ((f".{name}", item) for name, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{number}]", item) for number, item in enumerate(value))
    else:
        yield from ((f".{name}", getattr(value, name, None)) for name in _field_names(value.__class__))


def _path_to_formless(value: Any) -> str:
    """Where in a value the part is that has no form."""
    for path, item in _items(value):
        try:
            _plain_tree(item)
        except TypeError:
            return path + _path_to_formless(item)
    return ""


def refuse_deep(tree: Any) -> None:
    """Refuses what could not be read from deep inside of an application.

    Raises:
        PayloadError
    """
    if isinstance(tree, dict | list) and deeper_than(tree, MAX_PAYLOAD_DEPTH + 1):
        raise PayloadError(_TOO_DEEP)


def refuse_nan(tree: Any, path: str) -> None:
    """Refuses numbers that JSON has none of, which the encoder would write as null.

    Raises:
        PayloadError
    """
    if isinstance(tree, float) and not math.isfinite(tree):
        raise PayloadError(f"{tree!r} is no JSON number - at `{path}`")
    for more, item in _items(tree):
        refuse_nan(item, path + more)


def _check_any(info: types.Type, with_any: frozenset[int], value: Any, path: str) -> None:
    """Checks the parts of type Any as untyped payloads are checked. What is no value of its type is left to msgspec.

    Raises:
        PayloadError
    """
    if isinstance(info, types.AnyType):
        try:
            check_json(value)
        except PayloadError as error:
            raise PayloadError(f"{error} - at `{path}`") from None
        return
    for part, item, more in parts_with_values(info, value):
        if id(part) in with_any:
            _check_any(part, with_any, item, path + more)


def _refuse_lost(tree: Any, made: Any, path: str) -> None:
    """Refuses what the type has no place for: a misspelt optional field would be left out without a word, and so would
    the last digits of a large whole number in a ``float``. ``made``: what the tree was converted to.

    Raises:
        PayloadError
    """
    if isinstance(tree, dict):
        fields = _parts_by_name(made)
        if len(fields) == len(tree) and isinstance(made, dict):  # keys may be texts of what they became
            fields = dict(zip(tree, made.values(), strict=True))
        for name, value in tree.items():
            if name in fields:
                _refuse_lost(value, fields[name], f"{path}.{name}")
            elif name != getattr(getattr(made, "__struct_config__", None), "tag_field", None):
                raise PayloadError(f"there is no field `{name}` - at `{path}`")
    elif isinstance(tree, list) and not isinstance(made, set | frozenset):
        items = list(made) if isinstance(made, list | tuple) else [*_parts_by_name(made).values()]
        if isinstance(made, msgspec.Struct):
            if made.__struct_config__.tag is not None:
                items = [None, *items]
            if len(tree) > len(items):
                raise PayloadError(f"there are {len(tree)} items, and {len(items)} fields - at `{path}`")
        for number, (value, item) in enumerate(zip(tree, items, strict=False)):
            _refuse_lost(value, item, f"{path}[{number}]")
    elif isinstance(tree, int | float) and isinstance(made, int | float) and tree != made == made:
        raise PayloadError(f"{tree} would come back as {made} - at `{path}`")
    elif isinstance(made, datetime):
        try:
            _in_utc(made)
        except OverflowError:
            raise PayloadError(f"{made} is not within the years 1 to 9999 in UTC - at `{path}`") from None


def _parts_by_name(made: Any) -> Mapping[str, Any]:
    """What a Struct, dataclass or dict has, by its names in JSON."""
    if isinstance(made, dict):
        return made
    names = _field_names(made.__class__)
    shown = made.__struct_encode_fields__ if isinstance(made, msgspec.Struct) else names
    return {name: getattr(made, field, None) for name, field in zip(shown, names, strict=True)}
