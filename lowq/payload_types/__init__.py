"""Typed payloads: what ``lowq.Worker[Order]`` says, turned into a codec of its own.

::

    declared    Worker[Order], or the annotation of a function  ->  Order
    structure   what Order is made of; refuses what JSON has no form for
    codec       value <-> canonical bytes, by msgspec;  trees: the parts of a value that need more than that
    pydantic_codec    the same by pydantic, loaded only for its models
"""

from lowq.payload_types.declared import annotated_type, type_argument
from lowq.payload_types.payload_type import PayloadType, payload_type

__all__ = ["PayloadType", "annotated_type", "payload_type", "type_argument"]
