"""Payloads that are pydantic's models: as other types, and loaded only for those who have one."""

import enum
import subprocess
import sys
import textwrap
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as some
from pydantic.dataclasses import dataclass

from lowq.errors import ConfigError, PayloadError
from lowq.payload_types import payload_type
from tests.rows import case
from tests.unit.payload_types.support import CET, NOON, NOON_IN_CET, typed
from tests.waiting import PATIENCE


class Status(enum.Enum):
    NEW = "new"
    PAID = "paid"


class Line(pydantic.BaseModel):
    price: float = 0.0


class Order(pydantic.BaseModel):
    version: int
    at: datetime = NOON
    lines: list[Line] = []
    tags: set[str] = set()
    by_time: dict[datetime, int] = {}
    status: Status = Status.NEW
    amount: Decimal | None = None
    number: UUID | None = None
    ratio: float | None = None
    more: dict[str, Any] = {}


@dataclass
class OrderData:
    version: int
    at: datetime = NOON


class Paid(pydantic.BaseModel):
    kind: Literal["paid"] = "paid"
    amount: int


class Shipped(pydantic.BaseModel):
    kind: Literal["shipped"] = "shipped"
    at: datetime


Event = Annotated[Paid | Shipped, pydantic.Field(discriminator="kind")]


def test_two_ways_to_build_a_model_are_the_same_bytes() -> None:
    tags = {f"tag{number}" for number in range(50)}
    one = Order(version=1, at=NOON, lines=[Line(price=1)], tags=tags, by_time={NOON: 1}, more={"a": 1, "b": 2})
    two = Order(more={"b": 2, "a": 1}, by_time={NOON_IN_CET: 1}, tags={*sorted(tags)}, at=NOON_IN_CET, version=1)
    two.lines = [Line()]
    two.lines[0].price = 1
    assert one == two
    data = typed(Order).dump(one)
    assert data == typed(Order).dump(two) == typed(Order).dump(one.model_dump(mode="json"))
    assert b'"at":"2026-05-01T12:00:00Z"' in data
    assert b'"price":1.0' in data
    assert ('"tags":["' + '","'.join(sorted(tags)) + '"]').encode() in data


def test_a_default_that_is_left_out_is_the_default_that_is_given() -> None:
    assert typed(Order).dump(Order(version=1)) == typed(Order).dump(Order(version=1, at=NOON_IN_CET, lines=[]))


def test_what_is_pushed_comes_back_and_is_the_same_bytes_again() -> None:
    made = typed(Order)
    orders = some.builds(
        Order,
        version=some.integers(-(2**63), 2**63 - 1),
        at=some.datetimes(datetime(1000, 1, 1), timezones=some.just(CET)),  # noqa: DTZ001 - as hypothesis wants it
        lines=some.lists(some.builds(Line, price=some.floats(allow_nan=False, allow_infinity=False)), max_size=3),
        tags=some.sets(some.text(), max_size=3),
        status=some.sampled_from(Status),
        amount=some.none() | some.decimals(allow_nan=False, allow_infinity=False),
        number=some.none() | some.uuids(),
    )

    @given(orders)
    def check(order: Order) -> None:
        data = made.dump(order)
        again = made.load(data)
        assert again == order
        assert made.dump(again) == data

    check()


def test_a_dataclass_of_pydantics_comes_back() -> None:
    made = typed(OrderData)
    assert made.load(made.dump(OrderData(1, NOON_IN_CET))) == OrderData(1, NOON)
    with pytest.raises(PayloadError, match=r"the payload is no OrderData: Field required - at `\$\.version`"):
        made.dump({})


def test_a_list_of_models_comes_back() -> None:
    made = typed(list[Line])
    assert made.load(made.dump([Line(price=1)])) == [Line(price=1)]


def test_a_list_of_models_takes_what_json_makes_of_one() -> None:
    assert typed(list[Line]).dump([{"price": 1}]) == b'[{"price":1.0}]'


def test_an_instance_of_a_subclass_within_a_model_would_lose_what_it_has_more() -> None:
    class Special(Line):
        why: str = "lost"

    with pytest.raises(PayloadError, match=r"a Special would come back as a Line - at `\$\.lines\[0\]`"):
        typed(Order).dump(Order(version=1, lines=[Special()]))
    with pytest.raises(PayloadError, match=r"a Special would come back as a Line - at `\$\[0\]`"):
        typed(list[Line]).dump([Special()])
    with pytest.raises(PayloadError, match=r"a Line would come back as a dict - at `\$\.more\.line`"):
        typed(Order).dump(Order(version=1, more={"line": Line()}))


def test_a_dataclass_with_slots_comes_back() -> None:
    @dataclass(slots=True)
    class Slim:
        number: int
        lines: list[Line]

    assert typed(Slim).load(typed(Slim).dump(Slim(1, [Line()]))) == Slim(1, [Line()])


def test_a_union_with_a_discriminator_comes_back() -> None:
    made = typed(Event)
    assert made.name == "Paid | Shipped"
    for value in Paid(amount=1), Shipped(at=NOON):
        assert made.load(made.dump(value)) == value
    assert made.dump({"at": NOON_IN_CET, "kind": "shipped"}) == made.dump(Shipped(at=NOON))
    with pytest.raises(PayloadError, match=r"Input should be a valid integer, .* - at `\$\.amount`"):
        made.dump({"kind": "paid", "amount": "x"})
    with pytest.raises(PayloadError, match=r"Input tag 'lost' found using 'kind' does not match .* - at `\$`"):
        made.dump({"kind": "lost"})


def test_fields_go_by_their_names_and_are_found_by_aliases_too() -> None:
    class Aliased(pydantic.BaseModel):
        number: int = pydantic.Field(validation_alias="theNumber", serialization_alias="no")

    made = typed(Aliased)
    assert made.dump(Aliased.model_validate({"theNumber": 1})) == b'{"number":1}'
    assert made.dump({"theNumber": 1}) == made.dump({"number": 1}) == b'{"number":1}'
    assert made.load(b'{"number":1}') == Aliased.model_validate({"theNumber": 1})


def test_computed_and_private_fields_are_no_part_of_a_payload() -> None:
    class Square(pydantic.BaseModel):
        side: int
        _seen: list[int] = pydantic.PrivateAttr(default_factory=list)

        @pydantic.computed_field  # type: ignore[prop-decorator]  # as pydantic's documentation has it
        @property
        def area(self) -> int:
            return self.side**2

    square = Square(side=3)
    square._seen.append(1)
    assert typed(Square).dump(square) == b'{"side":3}'


def test_serializers_of_a_model_hold() -> None:
    class Hex(pydantic.BaseModel):
        number: int

        @pydantic.field_serializer("number", when_used="json")
        def to_hex(self, number: int) -> str:
            return hex(number)

        @pydantic.field_validator("number", mode="before")
        @classmethod
        def from_hex(cls, given: Any) -> Any:
            return int(given, 16) if isinstance(given, str) else given

    assert typed(Hex).dump(Hex(number=255)) == b'{"number":"0xff"}'
    assert typed(Hex).load(b'{"number":"0xff"}') == Hex(number=255)


def changed(**fields: Any) -> Order:
    order = Order(version=1)
    for name, value in fields.items():
        setattr(order, name, value)
    return order


def test_what_is_wrong_is_refused_with_its_place() -> None:
    rows: list[tuple[Any, str]] = [
        ({"version": "x"}, r"Input should be a valid integer, .* - at `\$\.version`"),
        ({"version": 1, "lines": [{}, {"price": "x"}]}, r"Input should be a valid number, .* `\$\.lines\[1\]\.price`"),
        (changed(version="5"), r"'5' would come back as 5 - at `\$\.version`"),
        (changed(version="x"), r"Input should be a valid integer, .* - at `\$\.version`"),
        (changed(ratio=float("nan")), r"nan is no JSON number - at `\$\.ratio`"),
        (changed(lines=[Line.model_construct(price="2")]), r"'2' would come back as 2\.0 - at `\$\.lines\[0\]\.price`"),
        (changed(more={"a": {"b": NOON}}), r"datetime.* would come back as '2026.*' - at `\$\.more\.a\.b`"),
        (Line(), r"it is of type Line"),
        ([], r"Input should be a valid dictionary or instance of Order - at `\$`"),
    ]  # fmt: skip
    for value, message in rows:
        with case(value, message), pytest.raises(PayloadError, match=rf"^the payload is no Order: {message}$"):
            typed(Order).dump(value)


def test_no_payload_is_no_model() -> None:
    with pytest.raises(PayloadError, match=r"^there is no payload; those of the queue are Order$"):
        typed(Order).dump("")


def test_what_would_not_come_back_is_refused() -> None:
    class Login(pydantic.BaseModel):
        password: pydantic.SecretStr

    with pytest.raises(PayloadError, match=r"a SecretStr would not come back as it went in - at `\$\.password`"):
        typed(Login).dump(Login(password=pydantic.SecretStr("secret")))


def test_a_model_that_contains_itself_or_is_too_deep_is_refused() -> None:
    class Node(pydantic.BaseModel):
        children: "list[Node]" = []

    node = Node()
    node.children = [node]
    deep = Node()
    for _ in range(101):
        deep = Node(children=[deep])
    for value in node, deep:
        with pytest.raises(PayloadError, match="the payload is no Node: "):
            typed(Node).dump(value)


def test_bytes_that_are_no_model_are_not_read() -> None:
    with pytest.raises(PayloadError, match=r"^Input should be a valid integer, .* - at `\$\.version`$"):
        typed(Order).load(b'{"version":"x"}')


class Unknown:
    pass


class WithUnknown(pydantic.BaseModel, arbitrary_types_allowed=True):
    unknown: Unknown


class Undefined(pydantic.BaseModel):
    later: "Later"  # type: ignore[name-defined]  # noqa: F821 - that is what is tested


class StructWithModel(msgspec.Struct):
    order: Order


class StructWithData(msgspec.Struct):
    order: OrderData | None


def test_what_can_not_be_a_payload_is_refused() -> None:
    rows: list[tuple[Any, str]] = [
        (Paid | Shipped, r"Paid \| Shipped: nothing tells them apart\. .* Annotated\[Paid \| Shipped, pydantic\.Fie"),
        (list[Paid | Shipped], r"list\[Paid \| Shipped\]: nothing tells them apart\."),
        (WithUnknown, r"WithUnknown: a part of it is of type Unknown, which has no form in JSON"),
        (Undefined, r"Undefined: .*'?Later'? is not (fully )?defined"),
        (StructWithModel, r"StructWithModel: order is of type Order, which is a pydantic model in a type that is none"),
        (StructWithData, r"StructWithData: order is of type OrderData, which is a pydantic model in a type that"),
    ]  # fmt: skip
    for kind, message in rows:
        with case(kind, message), pytest.raises(ConfigError, match=f"^OrderSync: payloads can't be {message}"):
            payload_type("OrderSync", kind)


def test_a_pydantic_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pydantic, "VERSION", "2.10.6")
    with pytest.raises(ConfigError, match=r"payloads can't be Order: that takes pydantic 2\.11 or newer, not 2\.10\.6"):
        payload_type("OrderSync", Order)


def test_pydantic_is_imported_by_nobody_but_who_has_a_model() -> None:
    code = """
        import sys
        from dataclasses import dataclass
        import lowq, lowq.testing

        @dataclass
        class Order:
            version: int

        @lowq.worker
        class OrderSync(lowq.Worker[Order]):
            def perform(self, payloads_by_id): ...

        with lowq.testing.embedded(OrderSync):
            OrderSync.push(1, Order(1))
            assert lowq.testing.drain(OrderSync).performed == 1
        print("pydantic" in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stdout == "False\n"


class Zoned(pydantic.BaseModel):
    at: datetime | None = None
    spans: list[tuple[datetime, datetime]] = []
    told: datetime | None = None
    amount: Annotated[Decimal, pydantic.Field(allow_inf_nan=True)] = Decimal(0)

    @pydantic.field_serializer("told", when_used="json")
    def as_told(self, told: datetime | None) -> str | None:
        return None if told is None else told.isoformat(timespec="milliseconds")


def test_times_in_an_hour_that_a_zone_repeats_or_leaves_out_are_their_instants() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    for local, utc in (
        (datetime(2026, 10, 25, 2, 30, tzinfo=berlin), "2026-10-25T00:30:00Z"),
        (datetime(2026, 10, 25, 2, 30, tzinfo=berlin, fold=1), "2026-10-25T01:30:00Z"),
        (datetime(2026, 3, 29, 2, 30, tzinfo=berlin), "2026-03-29T01:30:00Z"),
    ):
        data = typed(Zoned).dump(Zoned(at=local, spans=[(local, local)]))
        assert data == typed(Zoned).dump(Zoned(at=local.astimezone(UTC), spans=[(local.astimezone(UTC), local)]))
        assert f'"at":"{utc}"'.encode() in data


def test_what_a_serializer_of_a_field_says_stands() -> None:
    data = typed(Zoned).dump(Zoned(told=NOON_IN_CET))
    assert b'"told":"2026-05-01T13:00:00.000+01:00"' in data
    assert typed(Zoned).load(data).told == NOON


def test_a_decimal_that_is_not_a_number_comes_back_where_the_model_allows_it() -> None:
    assert typed(Zoned).load(typed(Zoned).dump(Zoned(amount=Decimal("NaN")))).amount.is_nan()
    with pytest.raises(PayloadError):
        typed(Zoned).dump(Zoned(amount=Decimal("sNaN")))
    with pytest.raises(PayloadError, match="finite"):
        typed(Order).dump({"version": 1, "amount": "NaN"})
