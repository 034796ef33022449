"""Typed payloads: where a type is said, ``Worker[Order]`` or the annotation of a worker function, and its codec, which
is made once, where the worker is declared.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, ForwardRef, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from lowq.errors import ConfigError


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
    # Only a process with such a worker loads them.
    from lowq.codec.msgspec_codec import msgspec_codec
    from lowq.codec.structure import Unsupported, is_model, named_in, type_name

    try:
        if "pydantic" in sys.modules and any(map(is_model, named_in(given))):  # who has a model has imported pydantic
            from lowq.codec.pydantic_codec import pydantic_codec

            return PayloadType(type_name(given), *pydantic_codec(given))
        made = msgspec_codec(given)
        return None if made is None else PayloadType(type_name(given), *made)
    except Unsupported as error:
        raise ConfigError(f"{whose}: payloads can't be {type_name(given)}: {error}") from error.__cause__


def type_argument(worker: type, base: type) -> Any:
    """What a class says in the brackets of a generic base, also by way of classes between; Any: nothing.

    Raises:
        ConfigError: a text that names no type.
    """
    found = _argument_of(worker, base)
    return Any if found is None or is_any(found) else found


def annotated_type(function: Callable[..., Any]) -> Any:
    """What a worker function says of its payloads: ``payloads_by_id: dict[str, list[Order]]``, or of two arguments the
    second, ``payloads: list[Order]``; Any: nothing, or something else.

    Raises:
        ConfigError: a text that names no type.
    """
    parameters = [
        one
        for one in inspect.signature(function).parameters.values()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) and one.default is one.empty
    ]
    if len(parameters) not in (1, 2) or parameters[-1].annotation is inspect.Parameter.empty:
        return Any
    parameter = parameters[-1]
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        found = _evaluated(parameter.annotation, scope)
    except Exception as error:
        raise ConfigError(
            f"{function.__name__}: {parameter.name}: {parameter.annotation!r:.100} names no type that can be found: "
            f"{error}. Import it so that it is there at run time, too, or leave the annotation out"
        ) from error
    if len(parameters) == 1:
        arguments = get_args(found) if get_origin(found) is dict else ()
        found = arguments[1] if len(arguments) == 2 else None
    if get_origin(found) is not list:
        return Any
    (argument,) = get_args(found)
    return Any if is_any(argument) else argument


def is_any(given: Any) -> bool:
    """Whether it says nothing."""
    return given is Any or given is object or isinstance(given, TypeVar)


def _argument_of(kind: type, base: type) -> Any:
    for parent in vars(kind).get("__orig_bases__", kind.__bases__):
        origin = get_origin(parent) or parent
        if not (isinstance(origin, type) and issubclass(origin, base)):
            continue
        arguments = get_args(parent)
        if origin is base:
            return _resolved(kind, arguments[0]) if arguments else None
        return _substituted(_argument_of(origin, base), origin, arguments)
    return None


def _substituted(found: Any, origin: type, arguments: tuple[Any, ...]) -> Any:
    """What a base says, with what is said of the base's own parameters."""
    named = dict(zip(getattr(origin, "__parameters__", ()), arguments, strict=False))
    if isinstance(found, TypeVar):
        return named.get(found, found)
    parameters = getattr(found, "__parameters__", ())
    return found[tuple(named.get(one, one) for one in parameters)] if parameters and named else found


def _resolved(kind: type, argument: Any) -> Any:
    if not isinstance(argument, ForwardRef):
        return argument
    module = sys.modules.get(kind.__module__)
    text = argument.__forward_arg__
    try:
        return _evaluated(text, vars(module) if module else {})
    except Exception as error:
        raise ConfigError(
            f"{kind.__name__}: {text!r} names no type that can be found: {error}. Define it above the worker, and "
            "write it without quotes"
        ) from error


def _evaluated(annotation: Any, scope: Mapping[str, Any]) -> Any:
    holder = type("Holder", (), {"__annotations__": {"type": annotation}})
    return get_type_hints(holder, dict(scope), {}, include_extras=True)["type"]
