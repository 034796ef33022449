"""Value <-> canonical bytes, of types that msgspec knows.

::

    dump    value --tree--> JSON values --convert--> a new value of the type --encode--> bytes
    load    bytes --decode--> a value of the type

A value is converted before it is encoded, as the encoder alone writes whatever is in a field. So what is accepted is
exactly what a take makes a value of the type of, and equal values are equal bytes: fields, keys and sets are sorted, a
whole number in a ``float`` is a float, aware datetimes are in UTC, and defaults are written out.

Most values need less, as they come back equal when they are encoded and decoded; that takes a third of the time.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_origin

import msgspec
from msgspec import inspect as types

from lowq.codec import MAX_PAYLOAD_DEPTH
from lowq.errors import PayloadError
from lowq.payload_types.structure import contains, has_fields, named_in, tags_of, type_name
from lowq.payload_types.trees import (
    Refused,
    encode_sorted,
    encode_with_keys,
    is_set_without_order,
    plain_tree,
    tree_maker,
)
from lowq.store.untrusted import deeper_than

T = TypeVar("T")
#: What makes a value into JSON values, these into a new value of a type, and that into bytes.
_Convert = Callable[[Any], tuple[Any, Any, bytes]]

decode_json = msgspec.json.Decoder().decode


def plain_codec(given: Any, info: types.Type) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    """``dump`` and ``load`` of a type."""
    load = msgspec.json.Decoder(given).decode
    return _Dump(given, [info], _converter(given, info), load), load


def tagged_codec(
    given: Any, members: list[Any], infos: list[types.Type]
) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    """``dump`` and ``load`` of a union of classes that are told apart by a field which all of them have.

    Raises:
        Unsupported: there is no such field.
    """
    name, tags = tags_of(members, infos)
    converters = {tag: _converter(*pair) for tag, *pair in zip(tags, members, infos, strict=True)}
    loads = {tag: msgspec.json.Decoder(member).decode for tag, member in zip(tags, members, strict=True)}
    by_class = {get_origin(member) or member: tag for member, tag in zip(members, tags, strict=True)}
    tagged: Any = msgspec.defstruct("Tagged", [("tag", str | int)], rename=lambda _: name)
    read_tag = msgspec.json.Decoder(tagged).decode

    def found(tag: Any, among: dict[Any, T]) -> T:
        if not isinstance(tag, str | int) or tag not in among:
            raise PayloadError(f"Invalid value {tag!r:.100} - at `$.{name}`")
        return among[tag]

    def convert(value: Any) -> tuple[Any, Any, bytes]:
        if isinstance(value, dict):
            if name not in value:
                raise PayloadError(f"Object missing required field `{name}`")
            return found(value[name], converters)(value)
        if type(value) not in by_class:
            raise PayloadError(f"Expected `object`, got `{type(value).__name__}`")
        return converters[by_class[type(value)]](value)

    def load(data: bytes) -> Any:
        return found(read_tag(data).tag, loads)(data)

    return _Dump(given, infos, convert, load), load


def _converter(given: Any, info: types.Type) -> _Convert:
    as_tree = tree_maker(info)
    # JSON has texts for keys. That takes twice the time, so only where it must be.
    has_other_keys = contains(info, _has_other_keys)
    has_sets = contains(info, is_set_without_order)

    def convert(value: Any) -> tuple[Any, Any, bytes]:
        tree = as_tree(value)
        made = msgspec.convert(tree, given)
        return tree, made, encode_sorted(made)

    def convert_with_keys(value: Any) -> tuple[Any, Any, bytes]:
        tree = as_tree(value)
        made = msgspec.convert(tree, given, str_keys=True)
        return tree, made, encode_with_keys(as_tree(made) if has_sets else made)

    return convert_with_keys if has_other_keys or has_sets else convert


def _has_other_keys(info: types.Type) -> bool:
    return isinstance(info, types.DictType) and info.key_type != types.StrType()


def _needs_more(info: types.Type) -> bool:
    """Whether values of the type may be equal, and yet something else, or not the same bytes: those with parts that are
    checked one by one, and of classes that say themselves what is equal, or that leave defaults to the class.
    """
    if isinstance(info, types.StructType):
        return info.cls.__eq__ is not msgspec.Struct.__eq__
    return isinstance(info, types.AnyType | types.DataclassType) or _has_other_keys(info) or is_set_without_order(info)


#: The end of a datetime in another time zone than UTC, as the encoder writes it, or of what looks alike.
_OFFSET = re.compile(rb':\d\d"')


class _Dump:
    """``dump`` of a type."""

    def __init__(self, given: Any, infos: list[types.Type], convert: _Convert, load: Callable[[bytes], Any]) -> None:
        self._name = type_name(given)
        #: Instances of others are no values of the type, though they may look alike.
        self._classes = set(named_in(given))
        self._has_floats = any(contains(info, lambda one: isinstance(one, types.FloatType)) for info in infos)
        self._has_times = any(contains(info, lambda one: isinstance(one, types.DateTimeType)) for info in infos)
        self._convert = convert
        self._load = load
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
        return self._dump(value)

    def _dump(self, value: Any) -> bytes:
        kind = type(value)
        try:
            if kind is not dict and kind not in self._classes and has_fields(kind):
                raise PayloadError(f"it is of type {kind.__name__}")
            tree, made, data = self._convert(value)
            if plain_tree(made) != tree:
                _refuse_lost(decode_json(encode_with_keys(tree)), decode_json(data), made, "$")
            if self._has_floats and b"null" in data:
                refuse_nan(tree, "$")
            if data.count(b"{") + data.count(b"[") > MAX_PAYLOAD_DEPTH:
                refuse_deep(tree)
            return data
        except Refused as refused:
            raise refusal(self._name, value, f"{refused} - at `${refused.path}`") from None
        except RecursionError:
            raise refusal(self._name, value, _TOO_DEEP) from None
        except PayloadError as error:
            raise refusal(self._name, value, str(error)) from None
        except TypeError as error:  # of something without a form, which says its class alone
            raise refusal(self._name, value, f"{error} - at `${_path_to_formless(value)}`") from error
        except (ValueError, ArithmeticError, msgspec.MsgspecError) as error:  # of a Decimal("sNaN"), for example
            raise refusal(self._name, value, str(error)) from error


_TOO_DEEP = f"it is nested in more than {MAX_PAYLOAD_DEPTH} levels, or contains itself"


def refusal(name: str, value: Any, why: str) -> PayloadError:
    """That a value is none of a type."""
    if type(value) is str and not value:
        return PayloadError(f"there is no payload; those of the queue are {name}")
    return PayloadError(f"the payload is no {name}: {why}")


def _path_to_formless(value: Any) -> str:
    """Where in a value that is which has no form."""
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        items = ((f".{key}", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        items = ((f"[{number}]", item) for number, item in enumerate(value))
    elif has_fields(type(value)):
        names = [*getattr(value, "__struct_fields__", ()), *getattr(value, "__dict__", ())]
        items = ((f".{name}", getattr(value, name)) for name in names)
    for path, item in items:
        try:
            plain_tree(item)
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
    if isinstance(tree, float):
        if not math.isfinite(tree):
            raise PayloadError(f"{tree!r} is no JSON number - at `{path}`")
    elif isinstance(tree, dict):
        for name, value in tree.items():
            refuse_nan(value, f"{path}.{name}")
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            refuse_nan(value, f"{path}[{number}]")


def _refuse_lost(tree: Any, written: Any, made: Any, path: str) -> None:
    """Refuses what the type has no place for: a misspelt optional field would be left out without a word, and so would
    the last digits of a large whole number in a ``float``. ``written``: what ``made`` is in JSON, where defaults may be
    left out.

    Raises:
        PayloadError
    """
    fields = _parts_by_name(made)
    if isinstance(tree, dict) and isinstance(written, dict):
        for name, value in tree.items():
            if name in written:
                _refuse_lost(value, written[name], fields.get(name), f"{path}.{name}")
            elif name not in fields:
                raise PayloadError(f"there is no field `{name}` - at `{path}`")
    elif isinstance(tree, list) and isinstance(written, list):
        if isinstance(made, msgspec.Struct) and len(tree) > len(written):
            raise PayloadError(f"there are {len(tree)} items, and {len(written)} fields - at `{path}`")
        items = made if isinstance(made, list | tuple) else list(fields.values())
        if isinstance(made, msgspec.Struct) and len(written) > len(items):  # a tag is in front
            items = [None, *items]
        items = [*items, *[None] * len(tree)]
        for number, (value, other) in enumerate(zip(tree, written, strict=False)):
            _refuse_lost(value, other, items[number], f"{path}[{number}]")
    elif isinstance(tree, int | float) and isinstance(written, int | float) and tree != written:
        raise PayloadError(f"{tree} would come back as {written} - at `{path}`")


def _parts_by_name(made: Any) -> Mapping[str, Any]:
    """What a Struct, dataclass or dict has, by its names in JSON."""
    if isinstance(made, msgspec.Struct):
        pairs = zip(made.__struct_encode_fields__, made.__struct_fields__, strict=True)
        return {name: getattr(made, field) for name, field in pairs}
    if isinstance(made, Mapping):
        return made
    names = getattr(made, "__dataclass_fields__", ())
    return {name: getattr(made, name, None) for name in names}
