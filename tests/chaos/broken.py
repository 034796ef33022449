"""Builds of lowq that are broken on purpose, one guarantee each: the checker has to catch every one of them.

``CHAOS_BROKEN=fencing`` in the environment of the application under test. lowq itself never looks at that: what is
changed here is changed in the process's memory, before the node starts.
"""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from lowq.consumer import ConsumerJob
from lowq.consumer.consumer import Consumer
from lowq.consumer.hand import Hand
from lowq.consumer.takes import Caller, Taker
from lowq.push.target import ANEW, Target
from lowq.shards import maintenance, scheduler
from lowq.shards.delivery import Delivery, InFlight, TakenJob
from lowq.shards.lease import ShardLease
from lowq.shards.outage import Outage
from lowq.shards.shard import Shard, Sweeper
from lowq.store import Client, sentinels
from lowq.store.calls import load_scripts
from lowq.work.loop import Loop
from tests.mutants import ACKED_STAY, ANY_DELIVERY, NEVER_PUSHED, NO_FENCE, break_scripts, having


def apply(name: str) -> None:
    """Breaks this process's lowq; '' leaves it as it is."""
    if name:
        BUILDS[name]()


def fencing() -> None:
    """Whoever had the lease once may go on writing."""
    load_scripts().update(break_scripts(having("check_lease"), function=NO_FENCE))


def exclusion() -> None:
    """A lease can be had while another holds it."""
    held = {"GET": "if string.sub(key, -5) == 'lease' then return false end"}
    load_scripts().update(break_scripts(["acquire"], function="local function restore_lease() end", calls=held))


def restore() -> None:
    """What a dead owner left in flight is forgotten."""
    forgotten = {"HRANDFIELD": "real('DEL', key) do return {} end"}
    load_scripts().update(break_scripts(["acquire"], calls=forgotten))


def order() -> None:
    """Payloads are handed over newest first."""
    decode = InFlight._decode

    def reversed_(self: InFlight, raw: Sequence[bytes], delivery: Delivery) -> TakenJob:
        job = decode(self, raw, delivery)
        return replace(job, payloads=job.payloads[::-1])

    InFlight._decode = reversed_  # type: ignore[method-assign]


def ack_by_id() -> None:
    """An acknowledgement finishes an id, whatever delivery it is of."""
    load_scripts().update(break_scripts(["ack_and_take"], function=ANY_DELIVERY))


def push_twice() -> None:
    """A repeat of a push whose reply was lost pushes again."""
    load_scripts().update(break_scripts(["push"], calls=NEVER_PUSHED))


def ticks() -> None:
    """Payloads without a score that are pushed together get one and the same."""
    one_score = """\
local given, width, time = ARGV, tonumber(ARGV[5]), redis.call('TIME')
local clock = tonumber(redis.call('HGET', KEYS[1] .. 'meta', 'clock') or '') or 0
local score = string.format('%.17g', math.max(time[1] + time[2] / 1000000, clock + 0.000001))
local ARGV = { unpack(given, 1, 7) }
ARGV[5] = tostring(math.max(width, 3))
for i = 8, #given, width do
  local its_score = width > 2 and given[i + 2] or ''
  for _, each in ipairs({ given[i], given[i + 1], its_score == '' and score or its_score }) do
    ARGV[#ARGV + 1] = each
  end
  if width > 3 then
    ARGV[#ARGV + 1] = given[i + 3]
  end
end"""
    load_scripts().update(break_scripts(["push"], front=one_score))


def claims() -> None:
    """Two threads of a node may work one shard."""

    def is_ready(_thread: int, now: float, shard: Shard) -> bool:
        state = shard.dispatch
        return state.next_due is not None and state.next_due <= now and not state.paused and now < shard.lease.deadline

    setattr(scheduler, "is_ready", is_ready)  # noqa: B010  # mypy and a function of a module


def deadline() -> None:
    """A node doesn't look whether its lease has run out, and takes much work in advance."""
    forever: Any = property(lambda self: math.inf if self.current else 0.0, lambda _self, _value: None)
    ShardLease.deadline = forever
    _take_much()


def fence() -> None:
    """The fencing token doesn't grow."""
    # It is the only number that the script writes without a fraction.
    one = """\
local text = string
local string = setmetatable({ format = function(form, ...)
  return form == '%.0f' and '1' or text.format(form, ...)
end }, { __index = text })"""
    load_scripts().update(break_scripts(["acquire"], front=one))


def leak() -> None:
    """An acknowledgement leaves the payloads in Redis."""
    load_scripts().update(break_scripts(["ack_and_take"], calls=ACKED_STAY))


def late_acks() -> None:
    """Much is performed before any of it is acknowledged."""
    _take_much()
    setattr(maintenance.MaintenanceLoop, "_acknowledge_early", lambda _self: False)  # noqa: B010  # mypy and a method's type


def expired() -> None:
    """Nobody looks whether what is handed out has expired, and nothing sweeps it."""
    never = "local function uses(features, word) return word ~= 'ttl' and sound(features, word) end"
    load_scripts().update(break_scripts(["ack_and_take"], function=never))
    setattr(Sweeper, "sweep", lambda *_: math.inf)  # noqa: B010  # mypy and a method's type


def hasty() -> None:
    """Payloads expire before their time."""
    early = "local function sweep_expired(prefix, now, most) return sound(prefix, now + 0.4, most) end"
    load_scripts().update(break_scripts(["ack_and_take"], function=early))


def capacity() -> None:
    """A push doesn't ask whether there is room."""
    boundless = """\
local given = ARGV
local ARGV = { unpack(given) }
ARGV[5] = string.gsub(given[5], ' capacity=%S+', '')"""
    load_scripts().update(break_scripts(["push"], front=boundless))


def overdue() -> None:
    """A consumer's jobs are handed out again before their ttr has passed."""
    release_due, watch = Hand.release_due, Hand.watch
    setattr(Hand, "release_due", lambda self, now, client: release_due(self, now + 0.3, client))  # noqa: B010  # mypy and a method's type
    setattr(Hand, "watch", lambda self, deadline: watch(self, deadline - 0.3))  # noqa: B010  # the same


def late_reports() -> None:
    """What a consumer acknowledges counts when its ttr has passed, too: it ends the job, whoever has that by then."""
    load_scripts().update(break_scripts(["ack_and_take"], function=ANY_DELIVERY))
    release_all = Hand.release_all

    def keeping(self: Hand, receipts: Iterable[str], client: Client | None = None, *, crashed: bool = False) -> None:
        receipts = list(receipts)
        late = {receipt: replace(self.held[receipt], deadline=math.inf) for receipt in receipts if crashed}
        release_all(self, receipts, client, crashed=crashed)
        self.held.update(late)

    Hand.release_all = keeping  # type: ignore[method-assign]


def late_takes() -> None:
    """A consumer hands out what it took without a look whether its lease has run out meanwhile."""

    def in_hand(self: Taker, jobs: Sequence[ConsumerJob]) -> list[ConsumerJob]:
        return [job for job in jobs if job.receipt in self._hand.held]

    Taker._surely_held = in_hand  # type: ignore[method-assign]


def company() -> None:
    """A consumer hands out a job whose process has died before together with others."""
    chosen = Taker._chosen

    def together(self: Taker, jobs: list[ConsumerJob], caller: Caller) -> list[ConsumerJob]:
        for job in jobs:
            job._is_solo = False
        return chosen(self, jobs, caller)

    Taker._chosen = together  # type: ignore[method-assign]


def not_ready() -> None:
    """A Redis that can't serve now is not waited for: whoever meets it ends."""
    setattr(Outage, "begin", lambda *_: os._exit(1))  # noqa: B010  # mypy and a method's type


def sessions() -> None:
    """Who comes back with a session doesn't go on with what was in hand."""
    setattr(Consumer, "_adopt", lambda *_: [])  # noqa: B010  # mypy and a method's type


def revived() -> None:
    """What was cancelled while it ran waits again."""
    load_scripts().update(break_scripts(["fail", "release", "acquire"], function="local function mark_in() end"))


def forgotten() -> None:
    """An acknowledgement keeps nothing of what finished."""
    load_scripts().update(break_scripts(["ack_and_take"], function="local function write_finished() end"))


def _take_much() -> None:
    """Deliveries of a hundred jobs, however slow they are."""
    setattr(Loop, "limit", lambda _self, _queue: 100)  # noqa: B010  # mypy and a method's type


def schedules() -> None:
    """A push of ticks does not change the record of their schedule."""
    unchanged = {"HSET": "if key == KEYS[1] .. 'schedules' then return 0 end"}
    load_scripts().update(break_scripts(["push"], calls=unchanged))


def made_shards() -> None:
    """A push makes a shard that is not there, whatever the registry says."""
    finish = Target.__post_init__

    def making(self: Target) -> None:
        finish(self)
        object.__setattr__(self, "words", self.words + ANEW)

    setattr(Target, "__post_init__", making)  # noqa: B010  # mypy and a method's type


def replaced() -> None:
    """Connections to a primary that sentinels have replaced stay."""
    setattr(sentinels, "_break", lambda _connection: None)  # noqa: B010  # mypy and a function of a module


#: name -> what breaks it
BUILDS: dict[str, Callable[[], None]] = {
    build.__name__: build
    for build in (
        fencing, exclusion, restore, order, ack_by_id, push_twice, ticks, claims, deadline, fence, leak, late_acks,
        expired, hasty, capacity, overdue, late_reports, late_takes, company, sessions, not_ready,
        schedules, made_shards, revived, forgotten, replaced,
    )
}  # fmt: skip
