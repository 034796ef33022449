"""Typed payloads as bytes: equal values are equal bytes, what is wrong is refused with its place, all comes back."""

import enum
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from itertools import product
from typing import Annotated, Any, Generic, Literal, NamedTuple, NotRequired, TypedDict, TypeVar
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some
from hypothesis.strategies import SearchStrategy

from lowq.codec import MAX_PAYLOAD_DEPTH
from lowq.errors import PayloadError
from lowq.payload_types import PayloadType, payload_type
from tests.rows import case
from tests.unit.payload_types.support import CET, NOON, NOON_IN_CET, typed

T = TypeVar("T")


def back(kind: PayloadType, value: Any) -> Any:
    return kind.load(kind.dump(value))


class Status(enum.Enum):
    NEW = "new"
    PAID = "paid"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


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


class Key(msgspec.Struct, frozen=True):
    name: str
    more: int | None = None


class Everything(msgspec.Struct):
    """Whatever may be inside of a payload."""

    status: Status
    level: Level
    at: datetime
    day: date
    amount: Decimal
    number: UUID
    tags: set[str]
    pair: tuple[int, str]
    took: timedelta
    data: bytes
    ratio: float
    count: int
    by_number: dict[int, str]
    by_time: dict[datetime, int]
    statuses: set[Status]
    mixed: set[int | str | None]
    groups: frozenset[frozenset[int]]
    keys: set["Key"]
    alarm: time | None = None
    maybe: datetime | None = None
    more: Any = None
    text: str = ""
    either: int | str = 0


class Node(msgspec.Struct):
    """A type that is part of itself."""

    at: datetime
    children: list["Node"] = []
    parent: "Node | None" = None


KINDS = pytest.mark.parametrize(
    ("kind", "make_line"),
    [(OrderDict, LineDict), (OrderData, LineData), (OrderStruct, LineStruct)],
    ids=["TypedDict", "dataclass", "Struct"],
)


# --- equal means equal ---


@KINDS
def test_two_ways_to_build_a_value_are_the_same_bytes(kind: Any, make_line: Any) -> None:
    one = kind(version=1, at=NOON, lines=[make_line(price=2.0)], more={"a": 1, "b": {"c": 2, "d": 3}})
    two = kind(more={"b": {"d": 3, "c": 2}, "a": 1}, lines=[make_line(price=2)], at=NOON_IN_CET, version=1)
    assert typed(kind).dump(one) == typed(kind).dump(two)
    assert typed(kind).dump(one) == (
        b'{"at":"2026-05-01T12:00:00Z","lines":[{"price":2.0}],"more":{"a":1,"b":{"c":2,"d":3}},"version":1}'
    )


@KINDS
def test_what_json_makes_of_a_value_is_the_same_bytes(kind: Any, make_line: Any) -> None:
    value = kind(version=1, at=NOON, lines=[make_line(price=2.5)], more={})
    given_as_json = {"version": 1, "at": "2026-05-01T13:00:00+01:00", "lines": [{"price": 2.5}], "more": {}}
    assert typed(kind).dump(given_as_json) == typed(kind).dump(value)


@pytest.mark.parametrize("kind", [OrderData, OrderStruct])
def test_a_default_that_is_left_out_is_the_default_that_is_given(kind: Any) -> None:
    assert (
        typed(kind).dump(kind(1)) == typed(kind).dump(kind(1, NOON_IN_CET, [], {})) == typed(kind).dump({"version": 1})
    )


def test_a_key_of_a_typed_dict_that_may_be_missing_is_not_made_up() -> None:
    assert typed(OrderDict).dump({"version": 1}) == b'{"version":1}'


def test_what_a_struct_says_of_its_form_holds() -> None:
    class Short(msgspec.Struct, omit_defaults=True, rename="camel", tag="short"):
        some_number: int = 1
        at: datetime | None = None

    class Listed(msgspec.Struct, array_like=True, tag="listed"):
        number: int
        at: datetime
        more: Any = None

    assert typed(Short).dump(Short()) == b'{"type":"short"}'
    assert typed(Short).dump(Short(2, NOON_IN_CET)) == b'{"at":"2026-05-01T12:00:00Z","someNumber":2,"type":"short"}'
    assert typed(Short).dump({"someNumber": 1}) == b'{"type":"short"}'
    assert typed(list[Short]).dump([{"someNumber": 1, "at": None}]) == b'[{"type":"short"}]'
    with pytest.raises(PayloadError, match=r"there is no field `some_number` - at `\$\[0\]`"):
        typed(list[Short]).dump([{"some_number": 1}])
    assert typed(Listed).dump(Listed(1, NOON_IN_CET, [1])) == b'["listed",1,"2026-05-01T12:00:00Z",[1]]'
    assert back(typed(Listed), Listed(1, NOON)) == Listed(1, NOON)
    with pytest.raises(PayloadError, match=r"there are 5 items, and 4 fields - at `\$`"):
        typed(Listed).dump(["listed", 1, NOON, None, "more"])

    class Holder(msgspec.Struct, array_like=True, tag="holder"):
        number: int
        short: Short

    assert typed(Holder).dump(["holder", 1, {"someNumber": 1}]) == b'["holder",1,{"type":"short"}]'


def test_sets_are_sorted() -> None:
    names = [f"name{number}" for number in range(50)]
    kind = typed(set[Annotated[str, msgspec.Meta(max_length=10)]])
    assert kind.dump(set(names)) == json.dumps(sorted(names), separators=(",", ":")).encode()


def test_sets_are_sorted_also_of_what_python_has_no_order_for() -> None:
    class Sets(msgspec.Struct):
        statuses: set[Status]
        groups: frozenset[frozenset[int]]
        keys: set[Key] | None = None
        tags: set[str] = set()

    tags = {f"tag{number}" for number in range(30)}
    one = Sets({Status.NEW, Status.PAID}, frozenset({frozenset({8}), frozenset({1, 2})}), {Key("b"), Key("a", 1)}, tags)
    assert typed(Sets).dump(one) == (
        b'{"groups":[[1,2],[8]],"keys":[{"more":1,"name":"a"},{"more":null,"name":"b"}],"statuses":["new","paid"],'
        b'"tags":' + json.dumps(sorted(tags), separators=(",", ":")).encode() + b"}"
    )
    assert back(typed(Sets), one) == one
    with pytest.raises(PayloadError, match=r"Invalid enum value 'lost' - at `\$\.statuses\[0\]`"):
        typed(Sets).dump({"statuses": ["lost"], "groups": []})


def test_aware_datetimes_are_equal_when_they_are_the_same_moment_wherever_they_are() -> None:
    class Times(msgspec.Struct):
        listed: list[datetime] = []
        by_time: dict[datetime, int] = {}
        pair: tuple[datetime, ...] = ()
        in_set: set[datetime] = set()
        either: datetime | None = None
        node: Node | None = None

    def times(moment: datetime) -> Times:
        inner = Node(moment, [Node(moment)], Node(moment))
        return Times([moment], {moment: 1}, (moment, moment), {moment}, moment, inner)

    assert typed(Times).dump(times(NOON)) == typed(Times).dump(times(NOON_IN_CET))
    assert b"+01:00" not in typed(Times).dump(times(NOON_IN_CET))
    assert back(typed(Times), times(NOON_IN_CET)) == times(NOON)


def test_a_datetime_without_a_zone_stays_one() -> None:
    naive = datetime(2026, 5, 1, 12)  # noqa: DTZ001 - that is what is tested
    assert typed(OrderData).dump(OrderData(1, naive)) != typed(OrderData).dump(OrderData(1, NOON))
    assert back(typed(OrderData), OrderData(1, naive)).at == naive


def test_decimals_keep_their_digits_so_others_are_other_payloads() -> None:
    class Price(msgspec.Struct):
        amount: Decimal

    assert typed(Price).dump(Price(Decimal("1.50"))) == b'{"amount":"1.50"}'
    assert typed(Price).dump(Price(Decimal("1.5"))) == b'{"amount":"1.5"}'


# --- what comes back ---

whole = some.integers(-(2**63), 2**63 - 1)
json_values: SearchStrategy[Any] = some.recursive(
    some.none() | some.booleans() | whole | some.floats(allow_nan=False, allow_infinity=False) | some.text(),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(), inner, max_size=3),
    max_leaves=8,
)
# What a zone knows of seconds, ISO 8601 doesn't.
zones = some.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
times = some.datetimes(NOON.replace(year=2, tzinfo=None), NOON.replace(year=9998, tzinfo=None), timezones=zones)
everything = some.builds(
    Everything,
    status=some.sampled_from(Status),
    level=some.sampled_from(Level),
    at=times,
    day=some.dates(),
    amount=some.decimals(allow_nan=False, allow_infinity=False),
    number=some.uuids(),
    tags=some.sets(some.text(), max_size=4),
    pair=some.tuples(whole, some.text()),
    took=some.timedeltas(timedelta(days=-1000), timedelta(days=1000)),
    data=some.binary(max_size=9),
    ratio=some.floats(allow_nan=False, allow_infinity=False) | some.integers(-1000, 1000),
    count=whole,
    by_number=some.dictionaries(whole, some.text(), max_size=3),
    by_time=some.dictionaries(times, whole, max_size=3),
    statuses=some.sets(some.sampled_from(Status)),
    mixed=some.sets(whole | some.text() | some.none(), max_size=4),
    groups=some.frozensets(some.frozensets(whole, max_size=2), max_size=4),
    keys=some.sets(some.builds(Key, some.text(), some.none() | whole), max_size=3),
    maybe=some.none() | times,
    more=json_values,
    text=some.text(),
    either=whole | some.text(),
)
orders_data = some.builds(
    OrderData, whole, times, some.lists(some.builds(LineData, some.floats(allow_nan=False, allow_infinity=False))),
    some.dictionaries(some.text(), json_values, max_size=2),
)  # fmt: skip
orders_dict = some.fixed_dictionaries(
    {"version": whole}, optional={"at": times, "more": some.dictionaries(some.text(), json_values, max_size=2)}
)
nodes: SearchStrategy[Node] = some.recursive(
    some.builds(Node, times), lambda inner: some.builds(Node, times, some.lists(inner, max_size=2), inner), max_leaves=5
)


@pytest.mark.parametrize(
    ("kind", "values"),
    [(Everything, everything), (OrderData, orders_data), (OrderDict, orders_dict), (Node, nodes)],
    ids=["Everything", "dataclass", "TypedDict", "Node"],
)
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


class Quick(msgspec.Struct):
    """Nothing in it needs more than msgspec does."""

    ratio: float
    at: datetime
    tags: set[str]
    amount: Decimal
    status: Status
    text: str
    inner: "Quick | None" = None


def quick(inner: SearchStrategy[Quick | None]) -> SearchStrategy[Quick]:
    return some.builds(
        Quick,
        some.floats(allow_nan=False, allow_infinity=False) | some.integers(-1000, 1000),
        times | times.map(lambda moment: moment.astimezone(UTC)),
        some.sets(some.text(), max_size=4),
        some.decimals(allow_nan=False, allow_infinity=False),
        some.sampled_from(Status),
        some.text() | some.just('12:00"+01:00'),
        inner,
    )


@given(quick(some.none() | quick(some.none())))
def test_the_quick_way_gives_the_same_bytes(value: Quick) -> None:
    dump: Any = typed(Quick).dump
    assert dump(value) == dump._dump(value)


def test_what_says_itself_what_is_equal_does_not_go_the_quick_way() -> None:
    class Careless(msgspec.Struct):  # noqa: PLW1641 - nobody hashes it
        text: str

        def __eq__(self, other: object) -> bool:
            return True

    with pytest.raises(PayloadError, match=r"Expected `str`, got `datetime` - at `\$\.text`"):
        typed(Careless).dump(Careless(NOON))  # type: ignore[arg-type]


# --- unions ---


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


UNIONS = pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Paid | Shipped, [Paid(1), Paid(2, {"a": 1}), Shipped(NOON)]),
        (
            PaidData | ShippedDict | CancelledStruct,
            [PaidData(1), {"kind": "shipped", "at": NOON}, CancelledStruct("why not")],
        ),
        (list[Paid | Shipped] | None, [[Paid(1), Shipped(NOON)], None]),
    ],
)


@UNIONS
def test_a_union_comes_back_by_its_tags(kind: Any, values: list[Any]) -> None:
    assert [back(typed(kind), value) for value in values] == values


def test_members_of_a_union_are_told_apart_also_as_dicts() -> None:
    kind = typed(Paid | Shipped)
    assert kind.dump({"type": "shipped", "at": NOON_IN_CET}) == kind.dump(Shipped(NOON))
    mixed = typed(PaidData | ShippedDict)
    assert mixed.dump({"amount": 1, "kind": "paid"}) == mixed.dump(PaidData(1))
    assert mixed.dump({"at": NOON_IN_CET, "kind": "shipped"}) == b'{"at":"2026-05-01T12:00:00Z","kind":"shipped"}'


def test_what_is_no_member_of_a_union_is_refused() -> None:
    rows: list[tuple[Any, str]] = [
        ({"amount": 1}, r"Object missing required field `kind`"),
        ({"kind": "lost"}, r"Invalid value 'lost' - at `\$\.kind`"),
        ({"kind": ["paid"]}, r"Invalid value \['paid'\] - at `\$\.kind`"),
        ({"kind": "paid", "amount": "1"}, r"Expected `int`, got `str` - at `\$\.amount`"),
        (PaidData("1"), r"Expected `int`, got `str` - at `\$\.amount`"),  # type: ignore[arg-type]
        (PaidData(1, "shipped"), r"Invalid enum value 'shipped' - at `\$\.kind`"),  # type: ignore[arg-type]
        (OrderData(1), r"it is of type OrderData"),
        (7, r"Expected `object`, got `int`"),
    ]
    for value, message in rows:
        with (
            case(value, message),
            pytest.raises(PayloadError, match=rf"^the payload is no PaidData \| ShippedDict: {message}$"),
        ):
            typed(PaidData | ShippedDict).dump(value)


def test_bytes_that_are_no_member_of_a_union_are_not_read() -> None:
    for data in [b'{"kind":"lost"}', b"{}", b"7", b'{"kind":"paid"}']:
        with (
            case(data),
            pytest.raises(
                (PayloadError, msgspec.ValidationError), match=r"`\$|required field `(kind|amount)`|`object`"
            ),
        ):
            typed(PaidData | ShippedDict).load(data)


# --- what is wrong ---


def test_what_is_wrong_is_refused_with_its_place() -> None:
    rows: list[tuple[Any, str]] = [
        ({"version": "1"}, r"Expected `int`, got `str` - at `\$\.version`"),
        ({"version": True}, r"Expected `int`, got `bool` - at `\$\.version`"),
        ({}, r"Object missing required field `version`"),
        ({"version": 1, "lines": [{}, {}, {"price": ""}]}, r"Expected `float`, got `str` - at `\$\.lines\[2\]\.price`"),
        ({"version": 1, "lines": [{}, {"prise": 1}]}, r"there is no field `prise` - at `\$\.lines\[1\]`"),
        ({"versoin": 2, "version": 1}, r"there is no field `versoin` - at `\$`"),
        ({"version": 1, "more": {"a": [{1, 2}]}}, r"\{1, 2\} is of type set, .* - at `\$\.more\['a'\]`"),
        ({"version": 1, "more": {"a": math.inf}}, r"inf is no JSON number - at `\$\.more\['a'\]`"),
        ({"version": 1, "more": {1: 2}}, r"Expected `str`, got `int` - at `key` in `\$\.more`"),
        ({"version": 1, "at": "yesterday"}, r"Invalid RFC3339 encoded datetime - at `\$\.at`"),
        ({"version": 1, "at": 5}, r"Expected `datetime`, got `int` - at `\$\.at`"),
        ({"version": object()}, r"Encoding objects of type object is unsupported - at `\$\.version`"),
        ({"version": 1, "lines": [{"price": object()}]}, r"Encoding .* unsupported - at `\$\.lines\[0\]\.price`"),
        ([], r"Expected `object`, got `array`"),
        (LineStruct(1), r"it is of type LineStruct"),
    ]  # fmt: skip
    kinds: list[type] = [OrderData, OrderStruct]
    for (value, message), kind in product(rows, kinds):
        with (
            case(value, message, kind),
            pytest.raises(PayloadError, match=rf"^the payload is no {kind.__name__}: {message}$"),
        ):
            typed(kind).dump(value)


@pytest.mark.parametrize("kind", [OrderDict, OrderData, OrderStruct])
def test_no_payload_is_none_of_a_type(kind: Any) -> None:
    with pytest.raises(PayloadError, match=rf"^there is no payload; those of the queue are {kind.__name__}$"):
        typed(kind).dump("")


def test_what_json_writes_as_a_text_is_no_text() -> None:
    wrong_values: list[Any] = [NOON, UUID(int=1), Decimal(1), b"x", 1]
    for wrong in wrong_values:
        with case(wrong):

            class Note(msgspec.Struct):
                text: str

            with pytest.raises(PayloadError, match=r"Expected `str`, got `\w+` - at `\$\.text`"):
                typed(Note).dump(Note(wrong))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_has_none_of_are_refused_and_not_made_null(number: float) -> None:
    class Ratio(msgspec.Struct):
        value: float | None = None
        other: list[float | None] = []

    assert typed(Ratio).dump(Ratio()) == b'{"other":[],"value":null}'
    for ratio, place in (Ratio(number), r"value"), (Ratio(None, [1.0, number]), r"other\[1\]"):
        with pytest.raises(PayloadError, match=rf"no JSON number - at `\$\.{place}`"):
            typed(Ratio).dump(ratio)


def test_a_decimal_that_can_not_be_compared_comes_back() -> None:
    class Amount(msgspec.Struct):
        amount: Decimal

    assert typed(Amount).dump(Amount(Decimal("sNaN"))) == b'{"amount":"sNaN"}'
    assert back(typed(Amount), Amount(Decimal("sNaN"))).amount.is_snan()


def test_a_moment_that_utc_has_no_year_for_is_refused() -> None:
    first = datetime(1, 1, 1, tzinfo=CET)
    with pytest.raises(PayloadError, match=r"is not within the years 1 to 9999 in UTC - at `\$\.at`"):
        typed(OrderData).dump(OrderData(1, first))


def test_a_value_that_contains_itself_or_is_too_deep_is_refused() -> None:
    node = Node(NOON)
    node.children = [node]
    deep = Node(NOON)
    for _ in range(MAX_PAYLOAD_DEPTH // 2 + 1):
        deep = Node(NOON, [deep])
    for value in node, deep:
        with pytest.raises(PayloadError, match="nested in more than 200 levels, or contains itself"):
            typed(Node).dump(value)
    many = Node(NOON, [Node(NOON) for _ in range(MAX_PAYLOAD_DEPTH + 5)])
    assert back(typed(Node), many) == many


def test_an_instance_of_a_subclass_would_lose_what_it_has_more() -> None:
    class Special(OrderStruct):
        why: str = ""

    with pytest.raises(PayloadError, match="it is of type Special"):
        typed(OrderStruct).dump(Special(1))

    class Holder(msgspec.Struct):
        order: OrderStruct

    with pytest.raises(PayloadError, match=r"there is no field `why` - at `\$\.order`"):
        typed(Holder).dump(Holder(Special(1)))


def test_what_a_class_itself_refuses_is_refused() -> None:
    @dataclass
    class Positive:
        number: int

        def __post_init__(self) -> None:
            if self.number < 0:
                raise ValueError("it is negative")

    wrong = Positive(1)
    wrong.number = -1
    with pytest.raises(PayloadError, match=r"the payload is no Positive: it is negative"):
        typed(Positive).dump(wrong)


def test_what_is_pushed_is_left_as_it_is() -> None:
    order = OrderData(1, NOON_IN_CET, [LineData(1)], {"a": [1]})
    typed(OrderData).dump(order)
    assert order.at.tzinfo is CET
    assert type(order.lines[0].price) is int


# --- types that need no codec, and others ---


def test_jsons_own_types_need_no_codec() -> None:
    kinds: list[Any] = [
        Any, object, int, str, None, list, dict, dict[str, Any], list[dict[str, int]], int | str | None, T,
    ]  # fmt: skip
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
        (list[OrderData], [OrderData(1)], "list[OrderData]"),
        (dict[UUID, OrderStruct], {UUID(int=1): OrderStruct(1)}, "dict[UUID, OrderStruct]"),
        (OrderStruct | None, None, "OrderStruct | None"),
        (Point, Point(1, NOON), "Point"),
        (Page[OrderStruct], Page([OrderStruct(1)]), "Page[OrderStruct]"),
        (tuple[int, datetime], (1, NOON), "tuple[int, datetime]"),
        (Literal["a", "b"], "a", "Literal['a', 'b']"),
    ]
    for kind, value, name in rows:
        with case(kind, value, name):
            made = typed(kind)
            assert back(made, value) == value
            assert made.name == name


def test_what_reads_a_type_is_msgspecs_own_function() -> None:
    """Nothing in Python is called for a payload that is taken."""
    load: Callable[[bytes], Any] = typed(OrderStruct).load
    assert type(load).__name__ == "builtin_function_or_method"


class SubDatetime(datetime):
    """As freezegun and pendulum have one."""


class SubStr(str):
    __slots__ = ()


class SubInt(int):
    pass


class SubDecimal(Decimal):
    pass


class SubDate(date):
    pass


class Mixed(msgspec.Struct):
    at: datetime = NOON
    name: str = ""
    number: int = 0
    amount: Decimal = Decimal(0)
    day: date = date(2026, 1, 1)
    rates: dict[str, float] = {}


def test_values_of_subclasses_are_those_of_their_class() -> None:
    kind = typed(Mixed)
    late = SubDatetime(2026, 10, 25, 2, 30, tzinfo=CET, fold=1)
    for value, plain in (
        (Mixed(at=SubDatetime(2026, 1, 2, 3, 4, 5, 6, UTC)), Mixed(at=datetime(2026, 1, 2, 3, 4, 5, 6, UTC))),
        (Mixed(at=late), Mixed(at=late.astimezone(UTC))),
        (Mixed(name=SubStr("a")), Mixed(name="a")),
        (Mixed(number=SubInt(3)), Mixed(number=3)),
        (Mixed(amount=SubDecimal("1.50")), Mixed(amount=Decimal("1.50"))),
        (Mixed(day=SubDate(2026, 2, 3)), Mixed(day=date(2026, 2, 3))),
        ({"name": SubStr("a"), "rates": {"x": 1}}, Mixed(name="a", rates={"x": 1.0})),
    ):
        assert kind.dump(value) == kind.dump(plain), value
        assert back(kind, value) == plain, value


def test_a_number_that_a_float_can_not_hold_is_refused() -> None:
    kind = typed(Mixed)
    assert back(kind, {"rates": {"x": 2**53}}) == Mixed(rates={"x": 2.0**53})
    for value in ({"rates": {"x": 2**53 + 1}}, Mixed(rates={"x": 2**53 + 1})):
        with pytest.raises(
            PayloadError, match=r"9007199254740993 would come back as 9007199254740992.0 - at `\$.rates.x`"
        ):
            kind.dump(value)
