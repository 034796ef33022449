"""Where the type of payloads is said, and types that can't be one."""

import functools
import types
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Any, Generic, Literal, TypedDict, TypeVar

import msgspec
import pytest

from lowq.codec.types import annotated_type, payload_type, type_argument
from lowq.errors import ConfigError
from tests.rows import case

T = TypeVar("T")
S = TypeVar("S")


class Order(msgspec.Struct):
    version: int


class Base(Generic[T]):
    pass


class Middle(Base[S]):
    pass


class Two(Base[T], Generic[S, T]):
    pass


class Said(Base[Order]):
    pass


class Quoted(Base["Order"]):
    pass


class Unsaid(Base):  # type: ignore[type-arg]
    pass


def test_the_argument_of_a_base_is_found_by_way_of_classes_between() -> None:
    def below(base: Any) -> Any:
        return types.new_class("Below", (base,))

    rows: list[tuple[type, Any]] = [
        (Said, Order), (below(Said), Order), (Quoted, Order), (Unsaid, Any), (Base, Any), (below(Middle[Order]), Order),
        (below(Two[int, list[Order]]), list[Order]), (below(Middle[T]), Any),  # type: ignore[valid-type]
    ]  # fmt: skip
    for kind, expected in rows:
        with case(kind, expected):
            assert type_argument(kind, Base) == expected


def batch(payloads_by_id: dict[str, list[Order]]) -> None: ...
def single(job_id: str, payloads: list[Order]) -> None: ...
def quoted(job_id: str, payloads: "list[Order]") -> None: ...
def with_more(job_id: str, payloads: list[Order], _cache: dict[str, Order] = {}) -> None: ...  # noqa: B006
async def awaits(payloads_by_id: dict[str, list[Order]]) -> None: ...
def bare(payloads_by_id): ...  # type: ignore[no-untyped-def]
def something_else(payloads_by_id: Any) -> None: ...
def bare_list(payloads_by_id: dict[str, list]) -> None: ...  # type: ignore[type-arg]
def wrong_way(payloads: list[Order]) -> None: ...


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        return function(*args)

    return wrapped


def test_the_annotation_of_a_function() -> None:
    rows: list[tuple[Callable[..., Any], Any]] = [
        (batch, Order), (single, Order), (quoted, Order), (with_more, Order), (awaits, Order),
        (decorated(batch), Order),
        (bare, Any), (something_else, Any), (bare_list, Any), (wrong_way, Any),
    ]  # fmt: skip
    for function, expected in rows:
        with case(function, expected):
            assert annotated_type(function) is expected


def test_a_name_that_is_not_there_at_run_time_is_refused() -> None:
    class Wrong(Base["Missing"]):  # type: ignore[name-defined]
        pass

    def missing(payloads_by_id: "dict[str, list[Missing]]") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ConfigError, match=r"^Wrong: 'Missing' names no type that can be found: name 'Missing' is"):
        type_argument(Wrong, Base)
    with pytest.raises(ConfigError, match=r"^missing: payloads_by_id: .*Missing.* names no type .* leave the annot"):
        annotated_type(missing)


# --- what can't be a payload ---


class NoFields:
    pass


class WithNoFields(msgspec.Struct):
    lines: list[NoFields]


class WithPairs(msgspec.Struct):
    prices: dict[tuple[str, str], float]


class WithObject(TypedDict):
    more: object


class Tagged(TypedDict):
    kind: Literal["tagged"]


class Untagged(TypedDict):
    version: int


class SameTag(TypedDict):
    kind: Literal["tagged"]


@dataclass
class WithInitVar:
    version: InitVar[int]


class Unresolved(msgspec.Struct):
    later: "Later"  # type: ignore[name-defined]  # noqa: F821 - that is what is tested


TAG = r"Give each class of the union a tag: class Paid\(msgspec\.Struct, tag=True\), or a field of the same name"


def test_what_can_not_be_a_payload_is_refused() -> None:
    rows: list[tuple[Any, str]] = [
        (NoFields, r"NoFields: it has no form in JSON\. Write a TypedDict, a dataclass, a msgspec\.Struct or a pyd"),
        (WithNoFields, r"WithNoFields: lines\[\.\.\.\] is of type NoFields, which has no form in JSON\. "),
        (WithObject, r"WithObject: more is of type object, which may be anything; write Any, for whatever JSON has$"),
        (msgspec.Raw, r"Raw: it has no form in JSON\. "),
        (dict[tuple[int, int], str], r"dict.* it is a dict with keys that JSON has no text for; write str, int"),
        (dict[int | str, str], r"dict.* it is a dict with keys of str and of another type"),
        (WithPairs, r"WithPairs: prices is a dict with keys that JSON has no text for"),
        (Order | Untagged, rf"Order \| Untagged: nothing tells Order, Untagged apart\. {TAG}"),
        (Tagged | Untagged, rf"Tagged \| Untagged: nothing tells Tagged, Untagged apart\. {TAG}"),
        (Tagged | SameTag, rf"Tagged \| SameTag: nothing tells Tagged, SameTag apart\. {TAG}"),
        (Order | WithNoFields, rf"Order \| WithNoFields: .* all Struct types must be tagged .*\. {TAG}"),
        (list[Tagged | Untagged], rf"list\[Tagged \| Untagged\]: .* more than one TypedDict type\. {TAG}"),
        (Tagged | Order | int, r"Tagged \| Order \| int: beside classes that are told apart by a field .* be int$"),
        (WithInitVar, r"WithInitVar: dataclasses with `InitVar` fields are not supported"),
        (Unresolved, r"Unresolved: name 'Later' is not defined"),
        (5, r"5: Type '5' is not supported\. Write Any for a part that may be whatever JSON has$"),
        (list["Later"], r"list\[Later\]: .* Write Any for a part"),  # type: ignore[name-defined]  # noqa: F821
    ]  # fmt: skip
    for kind, message in rows:
        with case(kind, message), pytest.raises(ConfigError, match=f"^OrderSync: payloads can't be {message}"):
            payload_type("OrderSync", kind)
