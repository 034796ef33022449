"""Payloads that are pydantic's models: as other types, and loaded only for those who have one."""

import enum
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


class Aliased(pydantic.BaseModel):
    number: int = pydantic.Field(validation_alias="theNumber", serialization_alias="no")


class Square(pydantic.BaseModel):
    side: int
    _seen: list[int] = pydantic.PrivateAttr(default=[1])

    @pydantic.computed_field  # type: ignore[prop-decorator]  # as pydantic's documentation has it
    @property
    def area(self) -> int:
        return self.side**2


class Hex(pydantic.BaseModel):
    number: int

    @pydantic.field_serializer("number", when_used="json")
    def to_hex(self, number: int) -> str:
        return hex(number)

    @pydantic.field_validator("number", mode="before")
    @classmethod
    def from_hex(cls, given: Any) -> Any:
        return int(given, 16) if isinstance(given, str) else given


class Zoned(pydantic.BaseModel):
    at: datetime | None = None
    spans: list[tuple[datetime, datetime]] = []
    told: datetime | None = None
    amount: Annotated[Decimal, pydantic.Field(allow_inf_nan=True)] = Decimal(0)

    @pydantic.field_serializer("told", when_used="json")
    def as_told(self, told: datetime | None) -> str | None:
        return None if told is None else told.isoformat(timespec="milliseconds")


BERLIN = ZoneInfo("Europe/Berlin")
TAGS = {f"tag{number}" for number in range(50)}
LONG = Order(version=1, at=NOON, lines=[Line(price=1)], tags=TAGS, by_time={NOON: 1}, more={"a": 1, "b": 2})
#: The same, built in another way; its line is not even a float.
OTHER = Order(more={"b": 2, "a": 1}, by_time={NOON_IN_CET: 1}, tags={*sorted(TAGS)}, at=NOON_IN_CET, version=1)
OTHER.lines = [Line.model_construct(price=1)]
SORTED_TAGS = '["' + '","'.join(sorted(TAGS)) + '"]'

SAME: list[Same] = [
    (
        Order,
        [LONG, OTHER, LONG.model_dump(mode="json")],
        '{"amount":null,"at":"2026-05-01T12:00:00Z","by_time":{"2026-05-01T12:00:00Z":1},"lines":[{"price":1.0}],'
        f'"more":{{"a":1,"b":2}},"number":null,"ratio":null,"status":"new","tags":{SORTED_TAGS},"version":1}}'.encode(),
    ),
    (Order, [Order(version=1), Order(version=1, at=NOON_IN_CET, lines=[])], None),
    (OrderData, [OrderData(1, NOON), OrderData(1, NOON_IN_CET)], b'{"at":"2026-05-01T12:00:00Z","version":1}'),
    (list[Line], [[Line(price=1)], [{"price": 1}]], b'[{"price":1.0}]'),
    (Event, [Paid(amount=1)], b'{"amount":1,"kind":"paid"}'),
    (Event, [Shipped(at=NOON), {"at": NOON_IN_CET, "kind": "shipped"}], None),
    # Fields go by their names and are found by aliases too; computed and private ones are no part of a payload.
    (Aliased, [Aliased.model_validate({"theNumber": 1}), {"theNumber": 1}, {"number": 1}], b'{"number":1}'),
    (Square, [Square(side=3)], b'{"side":3}'),
    # What a serializer says stands.
    (Hex, [Hex(number=255)], b'{"number":"0xff"}'),
    (Zoned, [Zoned(told=NOON_IN_CET)], b'{"amount":"0","at":null,"spans":[],"told":"2026-05-01T13:00:00.000+01:00"}'),
    # Times in an hour that a zone repeats or leaves out are their instants.
    *(
        (
            Zoned,
            [Zoned(at=utc, spans=[(utc, utc)]), Zoned(at=local, spans=[(local, local)])],
            f'{{"amount":"0","at":"{utc:%FT%TZ}","spans":[["{utc:%FT%TZ}","{utc:%FT%TZ}"]],"told":null}}'.encode(),
        )
        for local, utc in (
            (datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1), datetime(2026, 10, 25, 1, 30, tzinfo=UTC)),
            (datetime(2026, 3, 29, 2, 30, tzinfo=BERLIN), datetime(2026, 3, 29, 1, 30, tzinfo=UTC)),
        )
    ),
]  # fmt: skip


def test_equal_values_are_the_same_bytes_and_come_back() -> None:
    assert_same(SAME)


orders = some.builds(
    Order,
    version=some.integers(-(2**63), 2**63 - 1),
    at=some.datetimes(NAIVE.replace(year=1000), timezones=some.just(CET)),
    lines=some.lists(some.builds(Line, price=some.floats(allow_nan=False, allow_infinity=False)), max_size=3),
    tags=some.sets(some.text(), max_size=3),
    status=some.sampled_from(Status),
    amount=some.none() | some.decimals(allow_nan=False, allow_infinity=False),
    number=some.none() | some.uuids(),
)


@given(orders)
def test_what_is_pushed_comes_back_and_is_the_same_bytes_again(order: Order) -> None:
    data = typed(Order).dump(order)
    again = typed(Order).load(data)
    assert again == order
    assert typed(Order).dump(again) == data


# --- what is wrong ---


class Special(Line):
    why: str = "lost"


class Login(pydantic.BaseModel):
    password: pydantic.SecretStr


class Node(pydantic.BaseModel):
    children: "list[Node]" = []


itself = Node()
itself.children = [itself]
deep = Node()
for _ in range(101):
    deep = Node(children=[deep])


def changed(**fields: Any) -> Order:
    """Not validated."""
    return Order.model_construct(version=1, **fields)


REFUSED: list[Refused] = [
    (Order, {"version": "x"}, r"Input should be a valid integer, .* - at `\$\.version`"),
    (Order, {"version": 1, "lines": [{}, {"price": "x"}]}, r"Input should be a valid n.* `\$\.lines\[1\]\.price`"),
    (Order, Order.model_construct(version="5"), r"'5' would come back as 5 - at `\$\.version`"),
    (Order, changed(ratio=float("nan")), r"nan is no JSON number - at `\$\.ratio`"),
    (Order, changed(lines=[Line.model_construct(price="2")]),
     r"'2' would come back as 2\.0 - at `\$\.lines\[0\]\.price`"),
    (Order, changed(more={"a": {"b": NOON}}), r"datetime.* would come back as '2026.*' - at `\$\.more\.a\.b`"),
    (Order, {"version": 1, "amount": "NaN"}, r".*finite.*"),
    (Order, Line(), r"it is of type Line"),
    (Order, [], r"Input should be a valid dictionary or instance of Order - at `\$`"),
    # An instance of a subclass would lose what it has more.
    (Order, Order(version=1, lines=[Special()]), r"a Special would come back as a Line - at `\$\.lines\[0\]`"),
    (Order, Order(version=1, more={"line": Line()}), r"a Line would come back as a dict - at `\$\.more\.line`"),
    (Event, {"kind": "lost"}, r"Input tag 'lost' found using 'kind' does not match .* - at `\$`"),
    (Login, Login(password=pydantic.SecretStr("secret")),
     r"a SecretStr would not come back as it went in - at `\$\.password`"),
    (Node, itself, ".*"),
    (Node, deep, ".*"),
]  # fmt: skip


def test_what_is_wrong_is_refused_with_its_place() -> None:
    assert_refused(REFUSED)
    assert typed(Zoned).load(typed(Zoned).dump(Zoned(amount=Decimal("NaN")))).amount.is_nan(), "the model allows it"
    with pytest.raises(PayloadError, match=r"^there is no payload; the queue takes payloads of type Order$"):
        typed(Order).dump("")
    with pytest.raises(PayloadError, match=r"^Input should be a valid integer, .* - at `\$\.version`$"):
        typed(Order).load(b'{"version":"x"}')


class Unknown:
    pass


class WithUnknown(pydantic.BaseModel, arbitrary_types_allowed=True):
    unknown: Unknown


class Undefined(pydantic.BaseModel):
    later: "Later"  # type: ignore[name-defined]  # noqa: F821 - that is what is tested


class StructWithModel(msgspec.Struct):
    order: OrderData | None


def test_what_can_not_be_a_payload_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[tuple[Any, str]] = [
        (Paid | Shipped, r"Paid \| Shipped: nothing tells them apart\. .* Annotated\[Paid \| Shipped, pydantic\.Fie"),
        (WithUnknown, r"WithUnknown: a part of it is of type Unknown, which has no form in JSON"),
        (Undefined, r"Undefined: .*'?Later'? is not (fully )?defined"),
        (StructWithModel, r"StructWithModel: order is of type OrderData, which is a pydantic model in a type that"),
    ]  # fmt: skip
    for kind, message in rows:
        with case(kind, message), pytest.raises(ConfigError, match=f"^OrderSync: payloads can't be {message}"):
            payload_type("OrderSync", kind)
    monkeypatch.setattr(pydantic, "VERSION", "2.10.6")
    with pytest.raises(ConfigError, match=r"payloads can't be Order: that takes pydantic 2\.11 or newer, not 2\.10\.6"):
        payload_type("OrderSync", Order)
