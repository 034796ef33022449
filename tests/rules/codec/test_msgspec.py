"""Typed payloads as bytes: equal values are equal bytes, what is wrong is refused with its place, all comes back."""

import enum
import json
import math
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NamedTuple, NotRequired, TypedDict, TypeVar
from uuid import UUID

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some
from hypothesis.strategies import SearchStrategy

from lowq.codec import MAX_PAYLOAD_DEPTH
from lowq.codec.types import payload_type
from lowq.errors import ConfigError, PayloadError
from tests.rows import case
from tests.rules.codec.support import (
    CET,
    NAIVE,
    NOON,
    NOON_IN_CET,
    Refused,
    Same,
    assert_refused,
    assert_same,
    typed,
)

T = TypeVar("T")


class Status(enum.Enum):
    NEW = "new"
    PAID = "paid"


class LineDict(TypedDict):
    price: float


class OrderDict(TypedDict):
    version: int
    at: NotRequired[datetime]
    lines: NotRequired[list[LineDict]]
    more: NotRequired[dict[str, Any]]


@dataclass
class LineData:
    price: float = 0.0


@dataclass
class OrderData:
    version: int
    at: datetime = NOON
    lines: list[LineData] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


class LineStruct(msgspec.Struct):
    price: float = 0.0


class OrderStruct(msgspec.Struct):
    version: int
    at: datetime = NOON
    lines: list[LineStruct] = []
    more: dict[str, Any] = {}


@dataclass
class Numbers:
    numbers: set[int]


class Key(msgspec.Struct, frozen=True):
    name: str
    more: int | None = None


class Node(msgspec.Struct):
    """A type that is part of itself."""

    at: datetime
    children: list["Node"] = []
    parent: "Node | None" = None


class Short(msgspec.Struct, omit_defaults=True, rename="camel", tag="short"):
    some_number: int = 1
    at: datetime | None = None


class Sparse(msgspec.Struct, omit_defaults=True):
    rate: float = 1000.5
    name: str = "as always"
    at: datetime = NOON


class Listed(msgspec.Struct, array_like=True, tag="listed"):
    number: int
    at: datetime
    more: Any = None


class Sets(msgspec.Struct):
    statuses: set[Status]
    groups: frozenset[frozenset[int]] = frozenset()
    keys: set[Key] | None = None
    tags: set[str] = set()


class Times(msgspec.Struct):
    by_time: dict[datetime, int]
    pair: tuple[datetime, ...]
    in_set: set[datetime]
    either: datetime | None
    node: Node


def times_of(moment: datetime) -> Times:
    return Times({moment: 1}, (moment, moment), {moment}, moment, Node(moment, [Node(moment)], Node(moment)))


class Mixed(msgspec.Struct):
    at: datetime = NOON
    name: str = ""
    number: int = 0
    amount: Decimal = Decimal(0)
    day: date = date(2026, 1, 1)
    rates: dict[str, float | None] = {}


@dataclass
class LooseData:
    """Its defaults are of other types than its fields."""

    rate: float = 1
    amount: Decimal = "1.50"  # type: ignore[assignment]


class LooseStruct(msgspec.Struct):
    rate: float = 1
    amount: Decimal = "1.50"  # type: ignore[assignment]


@dataclass
class NoneForNumber:
    number: int = None  # type: ignore[assignment]


@dataclass
class Patch:
    name: str
    number: int | msgspec.UnsetType = msgspec.UNSET


class Tree(TypedDict):
    more: Any
    child: NotRequired["Tree"]


@attrs.define
class Price:
    amount: int
    currency: str = "EUR"


@attrs.define
class PrivatePrice:
    amount: int
    _currency: str = "EUR"


class OwnsPrivate(msgspec.Struct):
    prices: list[PrivatePrice]


#: A subclass of each, as freezegun and pendulum have one of datetime.
SUB: dict[type, Any] = {kind: type("Sub", (kind,), {}) for kind in (datetime, date, str, int, Decimal)}


class Paid(msgspec.Struct, tag=True):
    amount: int
    more: Any = None


class Shipped(msgspec.Struct, tag="shipped"):
    at: datetime


@dataclass
class PaidData:
    amount: int
    kind: Literal["paid"] = "paid"


class ShippedDict(TypedDict):
    kind: Literal["shipped"]
    at: datetime


class CancelledStruct(msgspec.Struct, tag="cancelled", tag_field="kind"):
    why: str


ORDERS: list[tuple[Any, Any]] = [(OrderDict, LineDict), (OrderData, LineData), (OrderStruct, LineStruct)]
EVENTS = PaidData | ShippedDict | CancelledStruct
TAGS = {f"tag{number}" for number in range(30)}
SORTED_TAGS = json.dumps(sorted(TAGS), separators=(",", ":")).encode()
LATE = SUB[datetime](2026, 10, 25, 2, 30, tzinfo=CET, fold=1)

SAME: list[Same] = [
    *(
        (
            kind,
            [
                kind(version=1, at=NOON, lines=[line(price=2.0)], more={"a": 1, "b": {"c": 2, "d": 3}}),
                kind(more={"b": {"d": 3, "c": 2}, "a": 1}, lines=[line(price=2)], at=NOON_IN_CET, version=1),
                {"version": 1, "at": "2026-05-01T13:00:00+01:00", "lines": [{"price": 2}],
                 "more": {"b": {"d": 3, "c": 2}, "a": 1}},
            ],
            b'{"at":"2026-05-01T12:00:00Z","lines":[{"price":2.0}],"more":{"a":1,"b":{"c":2,"d":3}},"version":1}',
        )
        for kind, line in ORDERS
    ),
    *(
        (
            kind,
            [kind(1), kind(1, NOON_IN_CET, [], {}), {"version": 1}],
            b'{"at":"2026-05-01T12:00:00Z","lines":[],"more":{},"version":1}',
        )
        for kind, _ in ORDERS[1:]
    ),
    (OrderData, [OrderData(1, NAIVE)], b'{"at":"2026-05-01T12:00:00","lines":[],"more":{},"version":1}'),
    # What a struct says of its form.
    (Short, [Short(), {"someNumber": 1}], b'{"type":"short"}'),
    (Short, [Short(2, NOON_IN_CET)], b'{"at":"2026-05-01T12:00:00Z","someNumber":2,"type":"short"}'),
    (Sparse, [Sparse(), {"rate": 1000.5}, {"name": "as always"}, Sparse(at=NOON_IN_CET)], b"{}"),
    (Listed, [Listed(1, NOON_IN_CET, [1]), ["listed", 1, NOON, [1]]], b'["listed",1,"2026-05-01T12:00:00Z",[1]]'),
    # Sets are sorted, also of what Python has no order for.
    (set[Annotated[str, msgspec.Meta(max_length=10)]], [TAGS], SORTED_TAGS),
    (
        Sets,
        [Sets({Status.NEW, Status.PAID}, frozenset(map(frozenset, [{8}, {1, 2}])), {Key("b"), Key("a", 1)}, TAGS)],
        b'{"groups":[[1,2],[8]],"keys":[{"more":1,"name":"a"},{"more":null,"name":"b"}],"statuses":["new","paid"],'
        b'"tags":' + SORTED_TAGS + b"}",
    ),
    # Moments are the same wherever they are, decimals only with the same digits.
    (Times, [times_of(NOON), times_of(NOON_IN_CET)], None),
    (dict[str, Decimal], [{"amount": Decimal("1.50")}], b'{"amount":"1.50"}'),
    (dict[str, Decimal], [{"amount": Decimal("1.5")}], b'{"amount":"1.5"}'),
    # Values of subclasses are those of their class.
    (Mixed, [Mixed(LATE.astimezone(UTC), "a", 3, Decimal("1.50"), date(2026, 2, 3)),
             Mixed(LATE, SUB[str]("a"), SUB[int](3), SUB[Decimal]("1.50"), SUB[date](2026, 2, 3))], None),
    (Mixed, [Mixed(name="a", rates={"x": 2.0**53}), {"name": "a", "rates": {"x": 2**53}}], None),
    # Defaults are those of the field's type, fields without a value are left out.
    *((kind, [kind(1.0, Decimal("1.50")), kind(1, Decimal("1.50")), {}, {"rate": 1}], b'{"amount":"1.50","rate":1.0}')
      for kind in (LooseData, LooseStruct)),
    (list[LooseData], [[LooseData(1, Decimal("1.50"))], [{}]], b'[{"amount":"1.50","rate":1.0}]'),
    (Patch, [Patch("a"), {"name": "a"}], b'{"name":"a"}'),
    (Tree, [{"more": 1, "child": {"more": 2}}, {"child": {"more": 2}, "more": 1}], b'{"child":{"more":2},"more":1}'),
    (Patch, [Patch("a", 1), {"name": "a", "number": 1}], b'{"name":"a","number":1}'),
    (Price, [Price(2, "USD"), {"currency": "USD", "amount": 2}], b'{"amount":2,"currency":"USD"}'),
    # Unions.
    (Paid | Shipped, [Paid(2, {"a": 1})], b'{"amount":2,"more":{"a":1},"type":"Paid"}'),
    (Paid | Shipped, [Shipped(NOON), {"type": "shipped", "at": NOON_IN_CET}], None),
    (list[Paid | Shipped] | None, [None], b"null"),
    (EVENTS, [PaidData(1), {"amount": 1, "kind": "paid"}], b'{"amount":1,"kind":"paid"}'),
    (EVENTS, [{"kind": "shipped", "at": NOON}, {"at": NOON_IN_CET, "kind": "shipped"}],
     b'{"at":"2026-05-01T12:00:00Z","kind":"shipped"}'),
    (EVENTS, [CancelledStruct("why not")], b'{"kind":"cancelled","why":"why not"}'),
]  # fmt: skip


def test_equal_values_are_the_same_bytes_and_come_back() -> None:
    assert_same(SAME)


# --- what comes back ---


class Everything(msgspec.Struct):
    """Whatever may be inside of a payload."""

    status: Status
    at: datetime
    day: date
    amount: Decimal
    number: UUID
    tags: set[str]
    pair: tuple[int, str]
    data: bytes
    ratio: float
    count: int
    by_number: dict[int, str]
    statuses: set[Status]
    mixed: set[int | str | None]
    more: Any = None


class Quick(msgspec.Struct):
    """Nothing in it needs more than msgspec does."""

    ratio: float
    at: datetime
    tags: set[str]
    amount: Decimal
    status: Status
    text: str
    inner: "Quick | None" = None


whole = some.integers(-(2**63), 2**63 - 1)
numbers = some.floats(allow_nan=False, allow_infinity=False)
json_values: SearchStrategy[Any] = some.recursive(
    some.none() | some.booleans() | whole | numbers | some.text(),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(), inner, max_size=3),
    max_leaves=8,
)
# What a zone knows of seconds, ISO 8601 doesn't.
zones = some.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
times = some.datetimes(NAIVE.replace(year=2), NAIVE.replace(year=9998), timezones=zones)
decimals = some.decimals(allow_nan=False, allow_infinity=False)
everything = some.builds(
    Everything,
    at=times,
    amount=decimals,
    tags=some.sets(some.text(), max_size=4),
    pair=some.tuples(whole, some.text()),
    ratio=numbers | some.integers(-1000, 1000),
    count=whole,
    by_number=some.dictionaries(whole, some.text(), max_size=3),
    mixed=some.sets(whole | some.text() | some.none(), max_size=4),
    more=json_values,
)
more = some.dictionaries(some.text(), json_values, max_size=2)
orders_data = some.builds(OrderData, whole, times, some.lists(some.builds(LineData, numbers)), more)
orders_dict = some.fixed_dictionaries({"version": whole}, optional={"at": times, "more": more})
nodes: SearchStrategy[Node] = some.recursive(
    some.builds(Node, times), lambda inner: some.builds(Node, times, some.lists(inner, max_size=2), inner), max_leaves=5
)


def quick(inner: SearchStrategy[Quick | None]) -> SearchStrategy[Quick]:
    moments = times | times.map(lambda moment: moment.astimezone(UTC))
    tags = some.sets(some.text(), max_size=4)
    texts = some.text() | some.just('12:00"+01:00')
    return some.builds(
        Quick, numbers | some.integers(-1000, 1000), moments, tags, decimals, some.sampled_from(Status), texts, inner
    )


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Everything, everything), (OrderData, orders_data), (OrderDict, orders_dict), (Node, nodes),
        (Quick, quick(some.none() | quick(some.none()))),
    ],
    ids=["Everything", "dataclass", "TypedDict", "Node", "Quick"],
)  # fmt: skip
def test_whatever_is_pushed_comes_back_and_is_the_same_bytes_again(kind: Any, values: SearchStrategy[Any]) -> None:
    made = typed(kind)

    @given(values)
    def check(value: Any) -> None:
        data = made.dump(value)
        again = made.load(data)
        assert again == value
        assert type(again) is type(value)
        assert made.dump(again) == data
        assert made.dump(json.loads(data)) == data  # as a command line, or another program, has it

    check()


def test_a_set_is_taken_in_whatever_order_python_keeps_it() -> None:
    for exponent in range(4, 12):
        numbers = {*range(2**exponent), 2**exponent + 1}
        numbers -= {*range(2**exponent)} - {8}  # in a table of that size, where that of a fresh set is smaller
        data = typed(Numbers).dump(Numbers(numbers))
        assert data == b'{"numbers":[8,%d]}' % (2**exponent + 1)
        assert typed(Numbers).load(data) == Numbers(numbers)


def test_a_decimal_that_can_not_be_compared_comes_back() -> None:
    data = typed(Mixed).dump(Mixed(amount=Decimal("sNaN")))
    assert b'"sNaN"' in data
    assert typed(Mixed).load(data).amount.is_snan()


class Changing(msgspec.Struct):
    """It is another one whenever it is made."""

    number: int = 1
    text: str = "A"
    times: list[datetime] = msgspec.field(default_factory=lambda: [NOON, NOON])
    what: str = ""

    def __post_init__(self) -> None:
        if self.what == "number":
            self.number *= 2
        elif self.what == "text":
            self.text += "!"
        elif self.what == "items":
            self.times = self.times[:-1]
        elif self.what == "times":
            self.times = [time + timedelta(days=1) for time in self.times]


@dataclass
class ChangingClass:
    number: int

    def __post_init__(self) -> None:
        self.number *= 2


def test_what_a_class_changes_whenever_it_is_made_is_refused() -> None:
    for what, why in [
        ("number", r"2 would come back as 4 - at `\$\.number`"),
        ("text", r"'A!' would come back as 'A!!' - at `\$\.text`"),
        ("items", r"of 1 items 0 would come back - at `\$\.times`"),
        ("times", r"would come back as .* - at `\$\.times\[0\]`"),
    ]:
        with pytest.raises(PayloadError, match=why):
            typed(Changing).dump(Changing(what=what))
    with pytest.raises(PayloadError, match=r"10 would come back as 20 - at `\$\.number`"):
        typed(ChangingClass).dump(ChangingClass(5))


def test_items_of_a_set_given_as_a_list_come_back_as_they_are() -> None:
    assert typed(set[str]).dump(["b", "a", "b"]) == b'["a","b"]'
    assert typed(set[date]).dump([date(2024, 1, 1), "2024-01-02"]) == b'["2024-01-01","2024-01-02"]'
    for item in (b"ab", Decimal(1), NOON):
        with pytest.raises(PayloadError, match="would come back as something else"):
            typed(set[str]).dump([item])


def test_keys_of_a_subclass_are_keys_too() -> None:
    class Moment(datetime):
        pass

    assert typed(dict[datetime, int]).dump({Moment(2024, 1, 1, tzinfo=UTC): 1}) == b'{"2024-01-01T00:00:00Z":1}'


# --- what is wrong ---


class Careless(msgspec.Struct):  # noqa: PLW1641 - nobody hashes it
    text: str

    def __eq__(self, other: object) -> bool:
        return True


@dataclass
class Positive:
    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("it is negative")


class Special(OrderStruct):
    why: str = ""


class Owner(msgspec.Struct):
    order: OrderStruct


negative = Positive(1)
negative.number = -1
itself = Node(NOON)
itself.children = [itself]
deep = Node(NOON)
for _ in range(MAX_PAYLOAD_DEPTH // 2 + 1):
    deep = Node(NOON, [deep])

WRONG_ORDERS: list[tuple[Any, str]] = [
    ({"version": "1"}, r"Expected `int`, got `str` - at `\$\.version`"),
    ({}, r"Object missing required field `version`"),
    ({"version": 1, "lines": [{}, {}, {"price": ""}]}, r"Expected `float`, got `str` - at `\$\.lines\[2\]\.price`"),
    ({"version": 1, "lines": [{}, {"prise": 1}]}, r"there is no field `prise` - at `\$\.lines\[1\]`"),
    ({"versoin": 2, "version": 1}, r"there is no field `versoin` - at `\$`"),
    ({"version": 1, "more": {"a": [{1, 2}]}}, r"a set would come back as a list - at `\$\.more\.a\[0\]`"),
    ({"version": 1, "more": {"a": math.inf}}, r"inf is no JSON number - at `\$\.more\.a`"),
    ({"version": 1, "more": {1: 2}}, r"the key 1 would come back as '1' - at `\$\.more`"),
    ({"version": 1, "at": "yesterday"}, r"Invalid RFC3339 encoded datetime - at `\$\.at`"),
    ({"version": 1, "at": 5}, r"Expected `datetime`, got `int` - at `\$\.at`"),
    ({"version": 1, "lines": [{"price": object()}]}, r"Expected `float`, got `object` - at `\$\.lines\[0\]\.price`"),
    ([], r"Expected `dict`, got `list`"),
    (b"abc", r"Expected `dict`, got `bytes`"),
    (Key("a"), r"it is of type Key"),
]  # fmt: skip
TOO_DEEP = "nested in more than 200 levels, or contains itself"
TOO_LONG = r"9007199254740993 would come back as 9007199254740992\.0 - at `\$\.rates\.x`"
REFUSED: list[Refused] = [
    *((kind, value, message) for kind in (OrderData, OrderStruct) for value, message in WRONG_ORDERS),
    # Members of unions.
    (EVENTS, {"amount": 1}, r"Object missing required field `kind`"),
    (EVENTS, {"kind": "lost"}, r"Invalid value 'lost' - at `\$\.kind`"),
    (EVENTS, {"kind": ["paid"]}, r"Expected `int \| str`, got `list` - at `\$\.kind`"),
    (EVENTS, PaidData("1"), r"Expected `int`, got `str` - at `\$\.amount`"),  # type: ignore[arg-type]
    (EVENTS, PaidData(1, "shipped"), r"Object missing required field `at`"),  # type: ignore[arg-type]
    (EVENTS, OrderData(1), r"it is of type OrderData"),
    (EVENTS, 7, r"Expected `dict`, got `int`"),
    (list[Short], [{"some_number": 1}], r"there is no field `some_number` - at `\$\[0\]`"),
    (Listed, ["listed", 1, NOON, None, "more"], r"there are 5 items, and 4 fields - at `\$`"),
    # What JSON writes as a text is no text.
    (Key, Key(1), r"Expected `str`, got `int` - at `\$\.name`"),  # type: ignore[arg-type]
    (Key, Key(NOON), r"a datetime would come back as a str - at `\$\.name`"),  # type: ignore[arg-type]
    (Key, Key(Decimal(1)), r"a Decimal would come back as a str - at `\$\.name`"),  # type: ignore[arg-type]
    (Key, Key(Status.NEW), r"a Status would come back as a str - at `\$\.name`"),  # type: ignore[arg-type]
    (Careless, Careless(NOON), r"a datetime would come back as a str - at `\$\.text`"),  # type: ignore[arg-type]
    (tuple[int, ...], {1, 2}, r"a set would come back as a tuple - at `\$`"),
    (list[LineStruct], [LineData(1)], r"a LineData would come back as a LineStruct - at `\$\[0\]`"),
    # Numbers that JSON, or a float, has none of.
    (Mixed, Mixed(rates={"x": math.nan}), r".* no JSON number - at `\$\.rates\.x`"),
    (LineStruct, LineStruct(-math.inf), r".* no JSON number - at `\$\.price`"),
    (Mixed, {"rates": {"x": 2**53 + 1}}, TOO_LONG),
    (Mixed, Mixed(rates={"x": 2**53 + 1}), TOO_LONG),
    (OrderData, OrderData(1, datetime(1, 1, 1, tzinfo=CET)), r".* not within the years 1 to 9999 in UTC - at `\$\.at`"),
    (Node, itself, f".*{TOO_DEEP}.*"),
    (Node, deep, f".*{TOO_DEEP}.*"),
    # An instance of a subclass would lose what it has more.
    (OrderStruct, Special(1), "it is of type Special"),
    (Owner, Owner(Special(1)), r"a Special would come back as a OrderStruct - at `\$\.order`"),
    (Positive, negative, "it is negative.*"),
    # A default that is no value of its field.
    (NoneForNumber, NoneForNumber(), r"Expected `int`, got `None` - at `\$\.number`"),
    (NoneForNumber, {}, r"Expected `int`, got `null` - at `\$\.number`"),
]  # fmt: skip


def test_what_is_wrong_is_refused_with_its_place() -> None:
    assert_refused(REFUSED)


def test_what_is_long_but_not_deep_is_taken() -> None:
    many = Node(NOON, [Node(NOON) for _ in range(MAX_PAYLOAD_DEPTH + 5)])
    assert typed(Node).load(typed(Node).dump(many)) == many


def test_no_payload_and_bytes_that_are_no_member_of_a_union_are_refused() -> None:
    for kind in (OrderDict, OrderData, OrderStruct):
        message = rf"^there is no payload; the queue takes payloads of type {kind.__name__}$"
        with case(kind), pytest.raises(PayloadError, match=message):
            typed(kind).dump("")
    message = r"`\$|required field `(kind|amount)`|`object`"
    for data in [b'{"kind":"lost"}', b"{}", b"7", b'{"kind":"paid"}']:
        with case(data), pytest.raises((PayloadError, msgspec.ValidationError), match=message):
            typed(EVENTS).load(data)


def test_an_attribute_that_msgspec_would_lose_is_refused_where_it_is_declared() -> None:
    what = "with the private attribute _currency, which would be lost; rename it$"
    for kind, where in [
        (PrivatePrice, "it is an attrs class"),
        (OwnsPrivate, r"prices\[\.\.\.\] is of type PrivatePrice"),
    ]:
        with case(kind), pytest.raises(ConfigError, match=f"{where} {what}"):
            payload_type("OrderSync", kind)


# --- types that need no codec, and others ---


def test_jsons_own_types_need_no_codec() -> None:
    kinds: list[Any] = [Any, object, int, None, list, dict[str, Any], list[dict[str, int]], int | str | None, T]
    for kind in kinds:
        with case(kind):
            assert payload_type("OrderSync", kind) is None


class Point(NamedTuple):
    x: int
    at: datetime


class Page(msgspec.Struct, Generic[T]):
    items: list[T]


def test_other_types_come_back_as_well() -> None:
    rows: list[tuple[Any, Any, str]] = [
        (datetime, NOON, "datetime"),
        (Status, Status.PAID, "Status"),
        (Annotated[int, msgspec.Meta(gt=0)], 7, "int"),
        (dict[UUID, OrderStruct], {UUID(int=1): OrderStruct(1)}, "dict[UUID, OrderStruct]"),
        (Point, Point(1, NOON), "Point"),
        (Page[OrderStruct], Page([OrderStruct(1)]), "Page[OrderStruct]"),
        (tuple[int, datetime], (1, NOON), "tuple[int, datetime]"),
        (Literal["a", "b"], "a", "Literal['a', 'b']"),
    ]
    for kind, value, name in rows:
        with case(kind, value, name):
            assert typed(kind).load(typed(kind).dump(value)) == value
            assert typed(kind).name == name
