"""Patterns of ids, and what Redis has to do for them.

Redis compares a pattern with an id step by step. As far as the first ``*`` that is one step per byte. What follows is
tried at every place of the id: bytes of the id times bytes of the rest. Nobody else is served meanwhile, so a pattern
that would take long is refused, and the dearer it is, the fewer ids one call looks at.
"""

import re

from lowq.codec import MAX_ID_BYTES
from lowq.errors import ConfigError

#: Bytes of a pattern, and of its part from the first ``*`` on. Stars side by side are one; a ``*`` at the end is free.
MAX_BYTES, MAX_REST = 1024, 100
#: Stars of a pattern. Redis before 7.0.9 (and the embedded store) tries them all against each other: ``lua/scan.lua``
#: allows fewer there.
MAX_STARS = 4
#: Ids that one call looks at, at most.
MAX_IDS = 1000
#: Steps of one call, each of 1 to 2 nanoseconds: 1 to 2 ms, and three calls go out together.
_STEPS = 1_000_000


def check_pattern(pattern: object) -> str:
    """A pattern of ids, or "" for None.

    Raises:
        ConfigError: it is none, or too dear; the message names the limit.
    """
    if pattern is None or pattern == "":
        return ""
    if not isinstance(pattern, str):
        raise ConfigError(f"match={pattern!r:.100}: it is a pattern of ids, such as '42*'")
    pattern = re.sub(r"(?<!\\)\*{2,}", "*", pattern)
    try:
        encoded = encode_pattern(pattern)
    except UnicodeEncodeError:
        raise ConfigError(f"match={pattern!r:.100}: it is no valid Unicode text") from None
    rest, stars = _parts(encoded)[1], pattern.count("*")
    if len(encoded) > MAX_BYTES:
        raise ConfigError(f"match={pattern[:50]!r}... has {len(encoded)} bytes; a pattern has at most {MAX_BYTES}")
    if rest > MAX_REST:
        raise ConfigError(
            f"match={pattern[:50]!r}... has {rest} bytes from its first * on; a pattern has at most {MAX_REST} there, "
            "as Redis tries them at every place of every id"
        )
    if stars > MAX_STARS:
        raise ConfigError(f"match={pattern[:50]!r} has {stars} stars; a pattern has at most {MAX_STARS}")
    return pattern


def encode_pattern(pattern: str) -> bytes:
    """As Redis gets it: of any bytes, as ids may be."""
    return pattern.encode("utf-8", "surrogateescape")


def ids_per_call(pattern: str) -> int:
    """How many ids one call may look at, however long they are and whatever is in them."""
    head, rest = _parts(encode_pattern(pattern))
    return max(min(_STEPS // (head + MAX_ID_BYTES * rest + 1), MAX_IDS), 1)


def _parts(pattern: bytes) -> tuple[int, int]:
    """Bytes before the first ``*``, and from there on, but for stars at the end."""
    head, _, rest = pattern.rstrip(b"*").partition(b"*")
    return len(head), len(rest) + 1 if rest else 0
