"""Which shard an id belongs to."""

import zlib


def shard_of(job_id: bytes, shards_count: int) -> int:
    """The shard that an id belongs to, for good: ``crc32(id) % shards_count``."""
    return zlib.crc32(job_id) % shards_count
