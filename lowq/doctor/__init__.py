"""The doctor: what is wrong with Redis, the registries, the leases and the jobs, and what is to be done about it.

    finding      what a finding is, and what there is to say of each kind
    server       Redis itself: eviction, persistence, memory, clock
    shards       a shard's own keys, at one moment
    members      registries and leases together: who works what
    jobs         every id of every shard
    examination  all of it, in order; and repairs

Everything goes in short steps, while nodes go on working. Nothing is reported that may only be in motion: what is wrong
with an id or a shard is confirmed by one script, and who works what is looked at for a while.
"""

from lowq.doctor.examination import examine
from lowq.doctor.finding import KINDS, Finding, Severity
from lowq.doctor.server import CODES as CODES_OF_SERVERS

#: The codes that findings have.
CODES = CODES_OF_SERVERS | KINDS.keys()

__all__ = ["CODES", "KINDS", "Finding", "Severity", "examine"]
