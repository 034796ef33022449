"""What the API answers, and how it is sent."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from msgspec import Struct, structs
from starlette.responses import Response


class Answer(Struct, frozen=True):
    """An answer, or a part of one. All fields are always there."""

    #: A POST that is answered with it has begun something, which goes on: the status is 202.
    is_accepted: ClassVar[bool] = False

    @classmethod
    def of(cls, source: object, **more: Any) -> Self:
        """With these fields, and all others as the source has them."""
        same = {name: getattr(source, name) for name in cls.__struct_fields__ if name not in more}
        return cls(**same, **more)


class Error(Answer, frozen=True):
    error: str


def respond(document: Any, status: int = 200) -> Response:
    """The response with this document, in pure ASCII, so that ids of any bytes can be sent."""
    try:
        text = json.dumps(document, default=_plain, allow_nan=False)
    except ValueError:  # NaN or an infinity: JSON has none of them
        text = json.dumps(json.loads(json.dumps(document, default=_plain), parse_constant=lambda _: None))
    return Response(text, status, media_type="application/json")


def _plain(value: Any) -> Any:
    if isinstance(value, Struct):
        return structs.asdict(value)
    if dataclasses.is_dataclass(value):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    return dict(value) if isinstance(value, Mapping) else str(value)
