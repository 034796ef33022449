"""Jobs as bytes, and read again.

::

    jobs            a job as its push script gets it: id, payload, score, time, ttl, priority
    payloads        payloads without a type, canonical JSON; errors as texts
    types           the declared type of payloads, ``lowq.Worker[Order]``, and the types that Order is made of
    msgspec_codec   value <-> canonical bytes, by msgspec
    pydantic_codec  the same by pydantic, loaded only for its models
"""

from lowq.codec.jobs import (
    MAX_ID_BYTES,
    MAX_PRIORITY,
    MAX_TIME,
    EncodedJob,
    Rest,
    decode_id,
    delay_seconds,
    encode_id,
    encode_job,
    encode_priority,
    encode_ttl,
    future_delay,
    lookup_id,
    rest_words,
    score_reader,
)
from lowq.codec.payloads import APPENDED, MAX_PAYLOAD_DEPTH, dump_payload, load_payload, original_payload

__all__ = [
    "APPENDED",
    "MAX_ID_BYTES",
    "MAX_PAYLOAD_DEPTH",
    "MAX_PRIORITY",
    "MAX_TIME",
    "EncodedJob",
    "Rest",
    "decode_id",
    "delay_seconds",
    "dump_payload",
    "encode_id",
    "encode_job",
    "encode_priority",
    "encode_ttl",
    "future_delay",
    "load_payload",
    "lookup_id",
    "original_payload",
    "rest_words",
    "score_reader",
]
