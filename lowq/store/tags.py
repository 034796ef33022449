"""The hash tag of a shard: what decides which slot of a cluster, and so which primary, has the shard.

A slot is a checksum of the tag, so those of ``{Orders:0}``, ``{Orders:1}`` and so on would be random: of 24 shards and
3 primaries one has more than 10 in 40 % of all cases. So letters follow the number, with which the slot lies where the
shard is wanted: ``{Orders:3bb}``. The wanted places are a golden ratio sequence, which is spread evenly over the slots
wherever it ends. So the tag of a shard does not depend on ``shards_count``.

This is a part of the wire format: it is made of integers only, so that every language gets the same.
"""

import re
from binascii import crc_hqx
from functools import lru_cache
from itertools import product
from string import ascii_lowercase

#: How many slots a cluster has.
SLOTS = 16384
#: The slots are divided into so many stretches of the same size, and letters are chosen by the stretch. With 16 no
#: primary of 3 ever has more than 10 of 24 shards. With fewer it would; with more the letters would be more.
STRETCHES = 16
#: 2**32 divided by the golden ratio: from the place of a shard to that of the next, in 2**32nds of all slots.
_STEP = 2654435769
#: What may follow the number: the first that fits. There always is one.
_SERIES = tuple("".join(letters).encode() for length in range(3) for letters in product(ascii_lowercase, repeat=length))
_TAG = re.compile(r"(.+):(0|[1-9][0-9]*)[a-z]*", re.ASCII)


def slot_of(tag: str) -> int:
    """The slot of all keys with this tag: Redis's checksum."""
    return crc_hqx(tag.encode(), 0) % SLOTS


def slot_of_key(key: str) -> int:
    """The slot of a key: of what is between its first braces, if anything is."""
    _, brace, rest = key.partition("{")
    tag, end, _ = rest.partition("}")
    return slot_of(tag if brace and end and tag else key)


@lru_cache(maxsize=SLOTS)
def tag_of(queue: str, shard: int) -> str:
    """The tag of a shard, without braces."""
    begin = f"{queue}:{shard}"
    # Queues begin at different places, so that those of one shard each are spread, too.
    wanted = ((crc_hqx(queue.encode(), 0) << 16) + shard * _STEP) % 2**32 * STRETCHES // 2**32
    before = crc_hqx(begin.encode(), 0)  # goes on where it stopped
    return next(
        begin + letters.decode()
        for letters in _SERIES
        if crc_hqx(letters, before) % SLOTS * STRETCHES // SLOTS == wanted
    )


def place_of(tag: str) -> tuple[str, int] | None:
    """The queue and the shard that have this tag; None: lowq has no such tag."""
    found = _TAG.fullmatch(tag)
    if found is None or len(found[2]) > 9:
        return None
    place = found[1], int(found[2])
    return place if tag_of(*place) == tag else None
