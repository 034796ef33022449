"""A value as JSON values, where msgspec alone would do too little.

Parts without a type are checked as untyped payloads are, aware datetimes are brought to UTC, sets of what Python has no
order for are sorted, and defaults of dataclasses are filled in, as msgspec leaves them to the class. What is no value
of its type is left as it is, for msgspec to refuse.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, get_origin
from uuid import UUID

import msgspec
from msgspec import inspect as types

from lowq.codec import check_json
from lowq.errors import PayloadError
from lowq.payload_types.structure import OBJECTS, contains, parts_of

MakeTree = Callable[[Any], Any]
#: What stays as it is, instead of becoming a text that every ``str`` would take.
_KEPT = (bytes, bytearray, datetime, date, time, timedelta, UUID, Decimal)


class Refused(Exception):
    """Why a part of a value is refused. The path to it is added on the way out."""

    path = ""


def plain_tree(value: Any) -> Any:
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


encode_sorted = msgspec.json.Encoder(order="sorted").encode


def encode_with_keys(value: Any) -> bytes:
    """JSON with sorted keys, also of dicts whose keys are no texts."""
    return encode_sorted(msgspec.to_builtins(value, str_keys=True, order="sorted"))


def is_set_without_order(info: types.Type) -> bool:
    """Whether it is a set whose items Python can't sort, or not always."""
    if not isinstance(info, types.SetType | types.FrozenSetType):
        return False
    item = info.item_type
    while isinstance(item, types.Metadata):
        item = item.type
    return not isinstance(item, _WITH_ORDER)


_WITH_ORDER = (
    types.StrType, types.IntType, types.FloatType, types.BytesType, types.UUIDType, types.DateType, types.DecimalType,
)  # fmt: skip


def tree_maker(info: types.Type) -> MakeTree:
    """What makes JSON values of the values of a type. It raises `Refused` and what `plain_tree` does."""
    return _Makers(sorts_sets=contains(info, is_set_without_order)).of(info)


def _defaults_of(info: types.Type) -> list[types.Field]:
    """The fields of a dataclass with a default that msgspec does not set."""
    if not isinstance(info, types.DataclassType):
        return []
    return [field for field in info.fields if field.default is not msgspec.NODEFAULT]


class _Makers:
    def __init__(self, *, sorts_sets: bool) -> None:
        #: Where some sets are sorted here, msgspec sorts none.
        self._sorts_sets = sorts_sets
        #: By identity: of a type that is part of itself there is one.
        self._made: dict[int, MakeTree] = {}

    def _is_special(self, info: types.Type) -> bool:
        if isinstance(info, types.SetType | types.FrozenSetType) and self._sorts_sets:
            return True
        return isinstance(info, types.AnyType | types.DateTimeType) or bool(_defaults_of(info))

    def of(self, info: types.Type) -> MakeTree:
        if not contains(info, self._is_special):
            return plain_tree
        if id(info) not in self._made:

            def when_made(value: Any) -> Any:
                return self._made[id(info)](value)

            self._made[id(info)] = when_made  # it may be a part of itself
            self._made[id(info)] = self._build(info)
        return self._made[id(info)]

    def _build(self, info: types.Type) -> MakeTree:
        if isinstance(info, types.AnyType):
            return _checked
        if isinstance(info, types.DateTimeType):
            return _in_utc
        if isinstance(info, OBJECTS):
            return self._of_object(info)
        parts = [self.of(part) for _, part in parts_of(info)]
        if isinstance(info, types.UnionType):
            return self._of_union(info)
        if isinstance(info, types.DictType):
            return _of_dict(*parts)
        if isinstance(info, types.TupleType | types.NamedTupleType):
            return _of_items(lambda number: parts[min(number, len(parts) - 1)])
        (part,) = parts
        if isinstance(info, types.SetType | types.FrozenSetType) and self._sorts_sets:
            return _of_set(part)
        return part if isinstance(info, types.Metadata) else _of_items(lambda _: part)

    def _of_object(self, info: types.StructType | types.DataclassType | types.TypedDictType) -> MakeTree:
        is_list = isinstance(info, types.StructType) and info.array_like
        fields: list[tuple[Any, str, MakeTree]] = [
            (number if is_list else field.encode_name, field.name, self.of(field.type))
            for number, field in enumerate(info.fields, isinstance(info, types.StructType) and info.tag is not None)
            if contains(field.type, self._is_special)
        ]
        defaults = [(field.encode_name, self.of(field.type)(field.default)) for field in _defaults_of(info)]
        cls = get_origin(info.cls) or info.cls
        is_dict = isinstance(info, types.TypedDictType)

        def make(value: Any) -> Any:
            special: list[tuple[Any, Any]] = []
            is_instance = not is_dict and isinstance(value, cls)
            if not is_instance and not isinstance(value, dict):
                return plain_tree(value)
            for key, name, part in fields:
                item = getattr(value, name, msgspec.UNSET) if is_instance else value.get(key, msgspec.UNSET)
                if item is not msgspec.UNSET:
                    special.append((key, _at(f".{name if is_list else key}", part, item)))
            tree = plain_tree(value)
            for key, item in special:
                if is_list or key in tree:  # a default may be left out
                    tree[key] = item
            for key, default in defaults:
                tree.setdefault(key, default)
            return tree

        return make

    def _of_union(self, info: types.UnionType) -> MakeTree:
        members = [
            (_kinds_of(one), _tag_of(one), self.of(one)) for one in info.types if contains(one, self._is_special)
        ]

        def make(value: Any) -> Any:
            for kinds, tag, part in members:
                if isinstance(value, kinds) and (
                    tag is None or not isinstance(value, dict) or value.get(tag[0]) == tag[1]
                ):
                    return part(value)
            return plain_tree(value)

        return make


def _kinds_of(info: types.Type) -> Any:
    """The classes of what may be a value of a type."""
    if isinstance(info, types.Metadata):
        return _kinds_of(info.type)
    if isinstance(info, types.DateTimeType):
        return (datetime, str)
    if isinstance(info, types.AnyType):
        return object
    if isinstance(info, OBJECTS):
        return dict if isinstance(info, types.TypedDictType) else (get_origin(info.cls) or info.cls, dict)
    return Mapping if isinstance(info, types.DictType) else (list, tuple, set, frozenset)


def _tag_of(info: types.Type) -> tuple[str, Any] | None:
    if isinstance(info, types.StructType) and info.tag_field is not None:
        return info.tag_field, info.tag
    return None


def _at(path: str, part: MakeTree, value: Any) -> Any:
    try:
        return part(value)
    except Refused as refused:
        refused.path = path + refused.path
        raise


def _of_items(part_at: Callable[[int], MakeTree]) -> MakeTree:
    def make(value: Any) -> Any:
        if not isinstance(value, list | tuple | set | frozenset):
            return plain_tree(value)
        return [_at(f"[{number}]", part_at(number), item) for number, item in enumerate(value)]

    return make


def _of_set(part: MakeTree) -> MakeTree:
    listed = _of_items(lambda _: part)

    def make(value: Any) -> Any:
        items = listed(value)
        return sorted(items, key=encode_with_keys) if isinstance(items, list) else items

    return make


def _of_dict(key_part: MakeTree, part: MakeTree) -> MakeTree:
    def make(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return plain_tree(value)
        return {key_part(key): _at(f"[{key!r:.100}]", part, item) for key, item in value.items()}

    return make


def _checked(value: Any) -> Any:
    try:
        check_json(value)
    except PayloadError as error:
        raise Refused(str(error)) from None
    return value


def _in_utc(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = msgspec.convert(value, datetime)
        except msgspec.ValidationError:
            return value
    value = plain_tree(value)
    if not isinstance(value, datetime):
        return value
    if value.tzinfo is UTC or value.utcoffset() is None:
        return value
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise Refused(f"{value} is not within the years 1 to 9999 in UTC") from None
