"""The codec of a type, made once, where the worker is declared."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from lowq.errors import ConfigError
from lowq.payload_types.codec import plain_codec, tagged_codec
from lowq.payload_types.declared import is_any
from lowq.payload_types.structure import Unsupported, info_of, is_json, is_model, named_in, tagged_members, type_name


class PayloadType(NamedTuple):
    """How payloads of one type are encoded and decoded."""

    #: For people.
    name: str
    #: Value -> canonical bytes. It raises `PayloadError`, which says what is wrong, and where.
    dump: Callable[[Any], bytes]
    #: The counterpart. It raises whatever says why the bytes are no such value.
    load: Callable[[bytes], Any]


def payload_type(whose: str, given: Any) -> PayloadType | None:
    """The codec of a type; None: it needs none, as its values are what JSON has anyway (``int``, ``dict[str, Any]``).
    ``whose``: for the message.

    Raises:
        ConfigError: it has no form in JSON; the message says what to write.
    """
    while hasattr(given, "__value__"):  # type Payload = ...
        given = given.__value__
    if is_any(given):
        return None
    try:
        if _names_models(given):
            from lowq.payload_types.pydantic_codec import pydantic_codec

            return PayloadType(type_name(given), *pydantic_codec(given))
        members = tagged_members(given)
        if members:
            return PayloadType(type_name(given), *tagged_codec(given, members, [info_of(one) for one in members]))
        info = info_of(given)
        return None if is_json(info) else PayloadType(type_name(given), *plain_codec(given, info))
    except Unsupported as error:
        raise ConfigError(f"{whose}: payloads can't be {type_name(given)}: {error}") from error.__cause__


def _names_models(given: Any) -> bool:
    """Whether it is of pydantic's classes. Who has one has imported pydantic: it is not imported here."""
    return "pydantic" in sys.modules and any(map(is_model, named_in(given)))
