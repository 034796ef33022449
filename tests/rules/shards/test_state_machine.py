"""Everything that can happen to a shard, in random order, against the model; and proof that this finds bugs.

A failure prints the story: one line per step, then how Redis differs from the model. Each step's reply is
compared, and after each step the whole content of the store.

`make test` runs as many stories as find the usual bugs, and shows it of every fourth bug; `make test-slow` runs as many
as find them all. They are the same ones each time: OTHER_STORIES=1 in the environment has others. Rare bugs are shown
by stories that are told step by step (`stories.py`).
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, cast

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, currently_in_test_context, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lowq.codec import APPENDED
from lowq.errors import LeaseLost, ScriptError
from lowq.operate.integrity import JobScanner, Place, read_shard_snapshots
from lowq.shards.delivery import Failure
from lowq.shards.shard import Shard
from lowq.store import Call, Client, pool
from lowq.store.calls import load_scripts
from lowq.store.translate import Refusal
from tests.mutants import MUTATIONS, Mutation, break_scripts, bug
from tests.rows import case
from tests.rules.model import JITTER, LEVEL, Model, Refused
from tests.rules.shards.stories import Step, told
from tests.rules.support import (
    NOW,
    REMAINS,
    REMEMBERED,
    TTL,
    ShardRig,
    as_redis_answers,
    expiries_of,
    job,
    jobs_of,
    report,
)
from tests.tiers import often
from tests.waiting import PATIENCE

#: Bits of the state in a reply of `ack_and_take`.
HAS_TRACES, HAS_EXPIRIES, HAS_LEVELS = 4, 16, 64
MAX_PAYLOADS = 2
#: Three short payloads fit, or a long one and a short one; the others fill a reply by themselves.
MAX_BYTES = 330
MAX_CRASH_COUNT = 2

IDS = st.sampled_from(["a", "a", "b", "c"])
#: The last is too long to be kept inline when it is alone.
PAYLOADS = st.sampled_from(
    [b'"v 1"', b'"v2"', b'"v3%s"' % (b"+" * 120), b'"v4%s"' % (b"*" * 400), b'"v5%5000s"' % b"!"]
)
JOBS = st.lists(
    st.tuples(
        IDS,
        PAYLOADS,
        st.sampled_from([None, 1e9 + 1.0, 1e9 + 2.0, 1.1e12, NOW]),  # which go with those of the clock
        st.sampled_from([None, None, None, -5.0, 3.0, 60.0, "0", "2.5"]),  # a number: relative to now
        st.sampled_from([None, None, None, 0.5, 4.0, 100.0]),  # ttl
        st.sampled_from([0, 0, 0, 3, 9]),  # priority
    ),
    min_size=1,
    max_size=4,
)
#: ``debounce`` and ``max_wait`` of stories that have them, seconds.
DEBOUNCE = 2.0, 5.0
#: Who finishes and fails in stories of a queue with `keep_finished`.
KEEPER = "host:1:abc"
#: Ids that may wait and be taken in stories that have it: of three.
CAPACITY = 2
#: What a push says: of a merge policy, of debounce, or of a capacity.
WORDS = {
    "collapse": "",
    "debounce": f" debounce={DEBOUNCE[0]} max_wait={DEBOUNCE[1]}",
    "capacity": f" capacity={CAPACITY}",
    "cancel": " cancel=1",
}
#: Jobs that one call restores: as a story must be the same whenever it is told, the time says which, not Redis.
RESTORED = 1
ONE_OF_THE_TAKEN = """\
local all, ids = real('HGETALL', key), {}
for i = 1, #all, 2 do
  ids[#ids + 1], all[all[i]] = all[i], all[i + 1]
end
table.sort(ids)
local id = ids[1 + math.floor(tonumber(ARGV[1]) * 16) % #ids]
do return id and { id, all[id] } or {} end"""
SOME_IDS = st.lists(IDS, min_size=1, max_size=3, unique=True)
#: id, payload, score, perform_at, ttl, priority.
PushedJob = tuple[str, bytes, float | None, Any, float | None, int]
#: Whether a reply gets lost, so that the call is repeated: at once, or after something was pushed.
LOST = st.sampled_from(["", "", "at once", "after a push"])
STEPS = st.sampled_from([0.0, 0.000001, 0.3, 1.0, 5.0, 61.0, -0.5, -30.0])


Run = Callable[..., None]


class Link:
    """The way to Redis. Loses the reply of the next call when told to, and repeats the call, as `Client` does."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.url = client.url
        self.command = client.command
        self.commands = client.commands
        self.on_lost: Callable[[], None] | None = None
        self.reply: Any = None
        #: The last call, as it was sent.
        self.last_call = Call[Any]("", "", [])

    def run(self, script: str, key: str, *args: str | bytes | int | float) -> Any:
        return self.call(Call[Any](script, key, args))

    def call(self, call: Call[Any]) -> Any:
        (reply,) = self.run_many([call])
        if isinstance(reply, Exception):
            raise reply
        return reply

    def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            self._client.run_many(calls)
            on_lost()
            for call in calls:
                if call.script == "push":
                    call.args[2] = "1"
        replies = self._client.run_many([as_redis_answers(call) for call in calls])
        (self.reply,), (self.last_call,) = replies, calls
        if self.last_call.script == "renew" and isinstance(self.reply, list):
            marks = [sorted(zip(flat[::3], flat[1::3], flat[2::3], strict=True)) for flat in self.reply[5:]]
            self.reply = [*self.reply[:3], *marks]
        if self.last_call.script == "ack_and_take" and isinstance(self.reply, list):
            reply = list(self.reply)
            jobs = jobs_of(reply)
            if reply[2] & HAS_LEVELS:  # which test_priority looks at
                reply.pop()
            if reply[2] & HAS_TRACES:
                reply.pop()
            expiries = expiries_of(list(self.reply))
            ends = [part for item, *_ in jobs if item in expiries for part in (item, expiries[item])]
            self.reply = [*reply[:2], reply[2] & ~(HAS_TRACES | HAS_EXPIRIES | HAS_LEVELS), reply[3], ends, *jobs]
        return [
            reply if isinstance(reply, Exception) or call.read is None else call.read(reply)
            for call, reply in zip(calls, replies, strict=True)
        ]


@dataclasses.dataclass
class Process:
    """A process that owns the shard, or believes it does, and what it knows of the delivery in its hand."""

    nonce: str
    shard: Shard
    delivery: int = 0
    hand: list[str] = dataclasses.field(default_factory=list)
    finished: list[str] = dataclasses.field(default_factory=list)

    @property
    def pending(self) -> list[str]:
        return [job_id for job_id in self.hand if job_id not in self.finished]

    @property
    def token(self) -> str:
        return "none" if self.shard.lease.current is None else self.shard.lease.token

    def lost_the_shard(self) -> None:
        self.hand.clear()
        self.finished.clear()


class ShardMachine(RuleBasedStateMachine):
    """`client` and `policies` are set by the test that runs it."""

    client: ClassVar[Client]
    #: How pushes merge: they take turns.
    policies: ClassVar[Sequence[str]]

    def __init__(self) -> None:
        super().__init__()
        self.client.command("FLUSHALL")
        self.link = Link(self.client)
        self.rig = ShardRig(
            self.client.url,
            client=cast(Client, self.link),
            max_payloads=MAX_PAYLOADS,
            max_crash_count=MAX_CRASH_COUNT,
        )
        self.model = Model(
            shards_count=self.rig.shards_count,
            max_payloads=MAX_PAYLOADS,
            max_bytes=MAX_BYTES,
            max_crash_count=MAX_CRASH_COUNT,
            lease_ttl=TTL,
            keeper=KEEPER if self._keeps else "",
        )
        self.now = NOW
        self.numbers = 0
        self.steps = 0
        self.owner = self._process()
        #: Processes that lost the shard and may not have noticed.
        self.ghosts: list[Process] = []
        #: The last outcome that was reported: the call, and what it does to the model.
        self.outcome: tuple[Call[Any], Callable[[], Any]] | None = None
        #: A call of an operator that was given up, and repeated.
        self.given_up: Call[Any] | None = None

    # --- how a step runs ---

    def _process(self) -> Process:
        self.numbers += 1
        nonce = f"process{self.numbers}"
        return Process(nonce, self.rig.owner(nonce, keeps=f"{10**9} text {KEEPER}" if self._keeps else ""))

    @property
    def _keeps(self) -> bool:
        """Whether the queue has `keep_finished`."""
        return self.policies[0].endswith("+kept")

    def _step(self, act: Callable[[], object], apply: Callable[[], Any], lost: str = "") -> Any:
        """Does it to Redis and to the model, and compares the answers. Returns that of the model; None: refused."""

        def expected() -> Any:
            try:
                return apply()
            except Refused:
                return None

        def on_lost() -> None:
            expected()
            if lost == "after a push":
                self._push([(job_id, b'"v2"', None, None, None, 0) for job_id in self.owner.hand or ["a"]])

        self.link.on_lost = on_lost if lost else None
        try:
            act()
            actual = self.link.reply
        except LeaseLost:
            actual = None
        except Refusal as refusal:
            actual = [refusal.code, *refusal.detail.split()]
        answer = expected()
        if currently_in_test_context():
            note(f"# Redis answers {actual!r} to" + (f" the repeat ({lost}) of" if lost else ""))
        self._same("the reply", answer, actual)
        return answer

    def _same(self, what: str, expected: Any, actual: Any) -> None:
        expected, actual = _plain(expected), _plain(actual)
        assert expected == actual, f"{what} differs\n  model: {expected!r}\n  Redis: {actual!r}"

    @invariant()
    def redis_holds_what_the_model_holds(self) -> None:
        actual, expected = self.rig.snapshot(), self.model.snapshot()
        self._check_traces(actual)
        for state in (actual, expected):
            for key, value in state.items():
                if "payloads:" in key or "expires:" in key:
                    state[key] = {_readable(member): score for member, score in value.items()}
        if "meta" in actual:
            actual["meta"] = {
                name: value if name in ("owner", "slot", "features", "scores") else float(value)
                for name, value in actual["meta"].items()
            }
            if "features" in actual["meta"]:  # in the order of their first use
                features = sorted(actual["meta"].pop("features").split())
                if features != ["traces"]:
                    actual["meta"]["features"] = [word for word in features if word != "traces"]
        differing = [
            f"  {key}\n    model: {expected.get(key)!r}\n    Redis: {actual.get(key)!r}"
            for key in sorted(expected.keys() | actual.keys())
            if expected.get(key) != actual.get(key)
        ]
        assert not differing, "\n".join(["what is there differs", *differing])

    def _check_traces(self, actual: dict[str, Any]) -> None:
        """Trace contexts are there of ids that wait or are in flight, and of no others. Of those that were pushed since
        and not put back or kicked they are those of their pushes, which test_traces looks at.
        """
        for name in [name for name in actual if "traces:" in name]:
            del actual[name]
            head, _, job_id = name.rpartition(":")
            assert job_id in (self.model.waiting if head == "traces" else self.model.taken), f"{name} is left behind"

    @invariant()
    def the_doctor_finds_nothing(self) -> None:
        """Nothing that a transition leaves behind looks like damage. At every third step: it takes a dozen calls."""
        self.steps += 1
        if self.steps % 3:
            return
        rig = self.rig
        place = Place(rig.queue, rig.index)
        shard_snapshots = read_shard_snapshots(self.client, "lowq", [place], repr(self.now))
        # The clock is set forward by a rule of its own.
        found = set(shard_snapshots[place].integrity_errors()) - {"clock_ahead"}
        ward = JobScanner(self.client, "lowq", repair=False, on_step=lambda _: None)
        ward.examine_sets([place], lambda _: 0)
        ward.examine_keys(None, lambda _: 0, shard_snapshots)
        found |= {f"{code} {list(tally.ids)}" for (_, code), tally in ward.tallies.items()}
        assert not found, found

    # --- time ---

    @rule(seconds=STEPS)
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self._ends())
    @rule(data=st.data())
    def something_expires(self, data: st.DataObject) -> None:
        """And nothing has swept it yet."""
        self.now = max(self.now, data.draw(st.sampled_from(sorted(self._ends()))))

    def _ends(self) -> set[float]:
        waiting, taken = self.model.waiting.values(), self.model.taken.values()
        times = [*(job.expires for job in waiting), *(flight.expires for flight in taken)]
        return {at for each in times for at in each.values()}

    @rule(
        ahead=st.sampled_from([-10.0, 0.0, 0.000002, 0.3, 2.0, 40.0, 86_400.0]),
        straight=st.sampled_from([0.0, 0.5, 10.0, 100.0]),
    )
    def the_servers_clock_had_been_there(self, ahead: float, straight: float) -> None:
        clock = self.now + ahead
        self.model.clock = self.model.server_time = clock
        self.model.server_time_since = clock - straight
        self.model.used = True
        self.rig.set_clock(clock, clock - straight)
        self.client.command("HSET", self.rig.prefix + "meta", "shards_count", self.rig.shards_count)

    # --- producing ---

    @rule(jobs=JOBS, lost=LOST)
    def push(self, jobs: list[PushedJob], lost: str) -> None:
        self._push(jobs, lost)

    @rule(jobs=JOBS)
    def push_more(self, jobs: list[PushedJob]) -> None:
        self._push(jobs)

    @precondition(lambda self: self.numbers > 10)  # from then on what has no score is refused
    @rule(jobs=JOBS)
    def push_versions(self, jobs: list[PushedJob]) -> None:
        self._push([(job[0], job[1], None if job[2] is None else 7.0, *job[3:]) for job in jobs])

    @precondition(lambda self: self.owner.hand)
    @rule(data=st.data(), payload=PAYLOADS)
    def push_for_an_id_in_flight(self, data: st.DataObject, payload: bytes) -> None:
        self._push([(data.draw(st.sampled_from(self.owner.hand)), payload, 1e9 + 2.0, None, None, 0)])

    def _push(self, jobs: list[PushedJob], lost: str = "") -> None:
        self.numbers += 1
        token = f"token{self.numbers}"
        timed = [
            (i, payload, score, self.now + at if isinstance(at, float) else at, ttl, level)
            for i, payload, score, at, ttl, level in jobs
        ]
        encoded = [
            job(i, payload, score, delay=float(at), ttl=ttl, priority=level)
            if isinstance(at, str)
            else job(i, payload, score, perform_at=at, ttl=ttl, priority=level)
            for i, payload, score, at, ttl, level in timed
        ]
        calls = 0

        def apply() -> Any:
            nonlocal calls
            calls += 1
            debounce = DEBOUNCE if policy == "debounce" else None
            capacity = CAPACITY if policy == "capacity" else None
            return self.model.push(
                self.now, token, timed, repeat=calls > 1, policy=policy, debounce=debounce, capacity=capacity,
                cancels=policy == "cancel",
            )  # fmt: skip

        policy, _, more = self.policies[self.numbers // 3 % len(self.policies)].partition("+")
        words = WORDS.get(policy, f" merge={policy}") + (f" trace=c{self.numbers}" if more == "traces" else "")
        self._step(lambda: self.rig.push(*encoded, now=self.now, token=token, words=words), apply, lost)

    # --- the lease ---

    def _acquire(self, process: Process, lost: str = "", *, charge: bool = True, is_whole: bool = True) -> None:
        """``is_whole``: as many calls as it takes until somebody has the shard."""

        def apply() -> tuple[Any, ...]:
            # Which ones a call restores is Redis's choice, and how many is not.
            before = set(self.model.taken)
            left = before & self.rig.read("taken").keys()
            answer = self.model.acquire(self.now, process.nonce, charge=charge, left=left)
            if answer[0] in ("acquired", "restoring"):
                assert len(before - left) == min(RESTORED, len(before))
            for job_id in self.model.delayed:
                earliest = self.model.waiting[job_id].perform_at
                level = self.model.waiting[job_id].level
                actual = self.rig.read("due")[job_id] - level * LEVEL
                assert earliest <= actual <= max(earliest, self.now + 0.05 + JITTER), f"{job_id}: {actual!r}"
                self.model.waiting[job_id].perform_at = actual
            return answer

        old = process.shard.lease.current
        call = process.shard.lease.acquire_call(TTL, self.now, charge=charge)
        answer = self._step(lambda: process.shard.lease.acquired(self.link.call(call), 0.0), apply, lost)
        new = process.shard.lease.current
        if new is None or (new != old and not new.resumed):
            process.lost_the_shard()
        if answer[0] == "restoring" and is_whole:
            self._acquire(process, charge=charge)
        elif answer[0] in ("resumed", "acquired") and process is not self.owner:
            self.ghosts = [*self.ghosts[-2:], self.owner]
            self.owner = process

    @initialize()
    def first_owner(self) -> None:
        self._acquire(self.owner)

    @rule(what=st.sampled_from(["is asked for again", "runs out", "is renewed", "is wanted by another"]), lost=LOST)
    def lease(self, what: str, lost: str) -> None:
        token = self.owner.token
        if what == "runs out":
            self._lease_runs_out()
        elif what == "is asked for again":
            self._acquire(self.owner, lost)
        elif what == "is renewed":
            now, args = self.now, (repr(self.now), token, int(TTL * 1000))
            self._step(lambda: self.rig.run("renew", *args)[:3], lambda: self.model.renew(token, now), lost)
        else:
            self._acquire(self._process(), lost)

    def _lease_runs_out(self) -> None:
        self.rig.lease_runs_out()
        self.model.lease = None

    @precondition(lambda self: self.owner.hand)
    @rule(lost=LOST)
    def lease_runs_out_unnoticed_and_the_same_process_resumes(self, lost: str) -> None:
        self._lease_runs_out()
        self._acquire(self.owner, lost)

    @precondition(lambda self: self.owner.hand)
    @rule(lost=LOST, charge=st.sampled_from([True, True, False]))
    def owner_dies_and_another_acquires(self, lost: str, charge: bool) -> None:
        self._lease_runs_out()
        self._acquire(self._process(), lost, charge=charge)

    @precondition(lambda self: len(self.model.taken) > RESTORED)
    @rule(lost=LOST, charge=st.sampled_from([True, True, False]))
    def whoever_restores_dies_in_the_middle(self, lost: str, charge: bool) -> None:
        self._lease_runs_out()
        self._acquire(self._process(), lost, charge=charge, is_whole=False)

    @precondition(lambda self: self.owner.hand)
    @rule(how=st.sampled_from(["in good order", "in mid-work", "in mid-work and is gone"]), lost=LOST)
    def owner_stops(self, how: str, lost: str) -> None:
        token, leave = self.owner.token, how != "in good order"
        self._step(
            lambda: self.rig.run("surrender", "", token, 60_000 if leave else ""),
            lambda: self.model.surrender(token, leave=leave),
            lost,
        )
        if how == "in mid-work and is gone":
            self._lease_runs_out()
            self._acquire(self._process())

    # --- a batch ---

    @rule(limit=st.integers(0, 3), lost=LOST)
    def take(self, limit: int, lost: str) -> None:
        self._take(limit, lost)

    @precondition(lambda self: not self.owner.hand)
    @rule(jobs=JOBS, limit=st.integers(1, 3), lost=LOST)
    def jobs_come_and_are_taken(self, jobs: list[PushedJob], limit: int, lost: str) -> None:
        self._push(jobs)
        self.now += 0.0001  # jobs of one call are due a tick apart
        self._take(limit, lost)

    @precondition(lambda self: not self.owner.hand and self.model.waiting)
    @rule(limit=st.integers(1, 3), lost=LOST)
    def all_that_waits_is_due_and_taken(self, limit: int, lost: str) -> None:
        self.now = max([self.now, *(waiting.perform_at for waiting in self.model.waiting.values())])
        self._take(limit, lost)

    def _take(self, limit: int, lost: str = "") -> int:
        process = self.owner
        if process.pending:
            limit = 0  # one delivery at a time
        last = process.delivery if process.pending else 0
        acks = [(job_id, process.delivery) for job_id in process.finished]
        token = process.token
        answer = self._step(
            lambda: process.shard.in_flight.take(limit, self.now),
            lambda: self.model.take(self.now, token, last=last, limit=limit, acks=acks),
            lost,
        )
        if answer is None:
            process.lost_the_shard()
            self._acquire(process)  # as a node would
            return 0
        process.hand = process.pending
        process.finished.clear()
        if answer.jobs:
            process.delivery = answer.delivery
            process.hand += [item[0] for item in answer.jobs]
        return len(answer.jobs)

    @precondition(lambda self: self.owner.pending)
    @rule(limit=st.integers(1, 3), lost=LOST)
    def batch_succeeds(self, limit: int, lost: str) -> None:
        self._finish_all()
        self._take(limit, lost)

    def _finish_all(self) -> None:
        self.owner.shard.in_flight.finish(self.owner.pending)
        self.owner.finished += self.owner.pending

    @precondition(lambda self: self.owner.pending)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(self.owner.pending), min_size=1, unique=True))
        self.owner.shard.in_flight.finish(ids)
        self.owner.finished += ids

    def _report(
        self, process: Process, ids: list[str], lost: str, act: Callable[[], object], apply: Callable[..., Any]
    ) -> None:
        """``apply``: given the time, and the token and the delivery that are cited."""
        cited = self.now, _token_in_hand(process.shard), process.delivery
        if self._step(act, lambda: apply(*cited), lost) is None:
            process.lost_the_shard()
        self.outcome = self.link.last_call, lambda: apply(*cited)
        process.hand = [job_id for job_id in process.hand if job_id not in ids]

    @precondition(lambda self: self.owner.pending)
    @rule(data=st.data(), lost=LOST)
    def fail(self, data: st.DataObject, lost: str) -> None:
        self._fail(self.owner, data, lost)

    @precondition(lambda self: self.owner.pending)
    @rule(data=st.data())
    def fail_some_more(self, data: st.DataObject) -> None:
        self._fail(self.owner, data)

    def _fail(self, process: Process, data: st.DataObject, lost: str = "") -> None:
        ids = data.draw(st.lists(st.sampled_from(process.pending), min_size=1, unique=True))
        failures = [
            (
                job_id,
                data.draw(st.sampled_from(["retry", "exhausted", "solo"])),
                data.draw(st.integers(0, 2)),
                data.draw(st.sampled_from([0.0, 0.5, 20.0])),
                f"error {self.numbers}",
            )
            for job_id in ids
        ]
        reported = [Failure(i, cast(Any, verdict), n, delay, text.encode()) for i, verdict, n, delay, text in failures]
        self._report(
            process,
            ids,
            lost,
            lambda: report(process.shard, "fail", reported, self.now),
            lambda now, token, delivery: self.model.fail(now, token, delivery, failures),
        )

    @precondition(lambda self: self.owner.pending)
    @rule(data=st.data(), crashed=st.booleans(), lost=LOST)
    def release(self, data: st.DataObject, crashed: bool, lost: str) -> None:
        process = self.owner
        ids = data.draw(st.lists(st.sampled_from(process.pending), min_size=1, unique=True))
        delays = [(job_id, data.draw(st.sampled_from([None, 0.0, 7.0]))) for job_id in ids]
        self._report(
            process,
            ids,
            lost,
            lambda: report(process.shard, "release", delays, self.now, crashed=crashed),
            lambda now, token, delivery: self.model.release(now, token, delivery, delays, crashed=crashed),
        )

    @precondition(lambda self: self.owner.pending)
    @rule(data=st.data(), reason=st.sampled_from(["", "bad"]), lost=LOST)
    def bury_taken(self, data: st.DataObject, reason: str, lost: str) -> None:
        process = self.owner
        job_id = data.draw(st.sampled_from(process.pending))
        flight = self.model.taken.get(job_id)
        chosen = PAYLOADS if flight is None else PAYLOADS | st.sampled_from(sorted(flight.payloads))
        payloads = data.draw(st.lists(chosen, max_size=2, unique=True))
        self._report(
            process,
            [] if payloads else [job_id],
            lost,
            lambda: report(process.shard, "bury", [(job_id, reason.encode(), payloads)], self.now),
            lambda now, token, delivery: self.model.bury_taken(now, token, delivery, job_id, reason, payloads),
        )

    @precondition(lambda self: self.outcome)
    @rule()
    def outcome_is_reported_once_more(self) -> None:
        assert self.outcome is not None
        call, apply = self.outcome
        self._step(lambda: self.link.run(call.script, call.key, *call.args), apply)

    # --- those who lost the shard go on as if nothing had happened ---

    @precondition(lambda self: any(ghost.pending for ghost in self.ghosts))
    @rule(data=st.data())
    def ghost_fails_its_batch(self, data: st.DataObject) -> None:
        self._fail(next(ghost for ghost in self.ghosts if ghost.pending), data)

    @precondition(lambda self: self.ghosts)
    @rule(limit=st.integers(0, 2))
    def ghost_takes(self, limit: int) -> None:
        ghost = self.ghosts[-1]
        token = ghost.token
        ghost.shard.in_flight.finish(ghost.hand)
        self._step(
            lambda: ghost.shard.in_flight.take(limit, self.now),
            lambda: self.model.take(self.now, token, last=0, limit=limit, acks=[]),
        )
        ghost.lost_the_shard()

    @precondition(lambda self: self.ghosts)
    @rule(lost=LOST)
    def ghost_returns(self, lost: str) -> None:
        ghost = self.ghosts.pop()
        ghost.shard.in_flight.drop_delivery()
        ghost.lost_the_shard()
        self._lease_runs_out()
        self._acquire(ghost, lost)

    # --- administering ---

    @rule(
        ids=SOME_IDS,
        what=st.sampled_from(["bury", "kick", "delete", "cancel", "perform_now"]),
        reason=st.sampled_from(["", "unwanted"]),
        where=st.sampled_from(["", "waiting", "morgue"]),
        lost=LOST,
        given_up=st.booleans(),
    )
    def somebody_administers(
        self, what: str, ids: list[str], reason: str, where: str, lost: str, *, given_up: bool
    ) -> None:
        self.numbers += 1
        first = f"attempt{self.numbers}"
        attempt = f"again{self.numbers} {first}" if given_up else first
        if given_up:
            self.model.superseded[first] = self.now
        to_bury = [part for job_id in ids for part in (job_id, reason, "0")]
        args, apply = {
            "bury": (["", "", attempt, "", *to_bury], partial(self.model.bury_waiting, self.now, ids, reason)),
            "kick": ([attempt, "", *ids], partial(self.model.kick, self.now, ids)),
            "delete": ([attempt, where, "", *ids], partial(self.model.delete, ids, where)),
            "cancel": ([attempt, "cancel", "", *ids], partial(self.model.delete, ids, "cancel")),
            "perform_now": ([attempt, "", *ids], partial(self.model.perform_now, self.now, ids)),
        }[what]
        script = "delete" if what == "cancel" else what
        self._step(lambda: self.rig.run(script, repr(self.now), *args), apply, lost)
        if given_up:
            self.given_up = Call(script, "", [first if arg == attempt else arg for arg in args])

    @precondition(lambda self: self.owner.hand)
    @rule(lost=LOST)
    def somebody_cancels_what_is_in_flight(self, lost: str) -> None:
        self.somebody_administers("cancel", list(self.owner.hand), "", "", lost, given_up=False)

    @precondition(lambda self: self.given_up)
    @rule()
    def what_was_given_up_arrives(self) -> None:
        assert self.given_up is not None
        call, self.given_up = self.given_up, None
        ids = call.args[4::3] if call.script == "bury" else call.args[3 if call.script == "delete" else 2 :]

        def apply() -> list[int]:
            if call.script in ("bury", "delete"):
                self.model.make_room()
            return [0 for _ in ids]

        self._step(lambda: self.rig.run(call.script, repr(self.now), *call.args), apply)

    @rule(what=st.sampled_from(["resume", "pause", "resume", "flush the scripts"]), lost=LOST)
    def somebody_interferes(self, what: str, lost: str) -> None:
        if what == "flush the scripts":
            self.client.command("SCRIPT", "FLUSH")
        else:
            self._pause(what == "pause", lost)

    def _pause(self, pause: bool, lost: str = "") -> None:
        self._step(
            lambda: self.rig.run("pause", repr(self.now), "", "1" if pause else ""),
            lambda: self.model.pause(self.now) if pause else self.model.resume(),
            lost,
        )

    @precondition(lambda self: not self.owner.hand)
    @rule()
    def everything_is_drained_and_no_key_is_left(self) -> None:
        self._pause(False)
        self._lease_runs_out()
        self._acquire(self._process())
        for _ in range(100):
            times = [waiting.perform_at for waiting in self.model.waiting.values()]
            self.now = max([self.now, *times])
            if not self._take(3):
                break
            self.redis_holds_what_the_model_holds()
            self._finish_all()
        ids = ["a", "b", "c"]
        self._step(lambda: self.rig.run("delete", "", "", "morgue", "", *ids), lambda: self.model.delete(ids, "morgue"))
        left = self.rig.names() - REMAINS - REMEMBERED - ({"finished"} if self._keeps else set())
        assert not left, f"keys are left: {left}"


def _token_in_hand(shard: Shard) -> str:
    """The token that the outcomes of what is in hand cite, whichever lease the shard has by now."""
    return str(shard.in_flight.ack_report([], 0).call.args[1])


def _readable(member: Any) -> Any:
    """A payload, whatever form it has."""
    return json.loads(member) if isinstance(member, bytes) and not member.startswith(APPENDED) else member


def _plain(answer: Any) -> Any:
    """An answer of a script or of the model, in a form that both have in common."""
    if dataclasses.is_dataclass(answer) and not isinstance(answer, type):
        jobs = [
            [job_id, perform_at, retry_count, *(part for pair in payloads for part in pair)]
            for job_id, perform_at, retry_count, payloads in vars(answer)["jobs"]
        ]
        fields = vars(answer)
        return _plain([*(fields[n] for n in ("delivery", "delay", "state", "acknowledged", "ends")), *jobs])
    if isinstance(answer, list | tuple):
        items = [_plain(item) for item in answer]
        if items[:1] == ["held"]:
            return ["held"]  # how long is another matter
        if items[:1] in (["acquired"], ["restoring"]):
            poisoned = [name for item in items[3:] for name in (item if isinstance(item, list) else [item])]
            return [*items[:3], *sorted(poisoned)]
        return items
    if isinstance(answer, bytes):
        text = answer.decode()
        return _number(text)
    if isinstance(answer, str):
        return _number(answer)
    return None if answer is None else float(answer)


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


# --- the machine runs ---------------------------------------------------------------------------------------------


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small deliveries, and restores of one job."""
    monkeypatch.setattr("lowq.shards.delivery.MAX_DELIVERY_BYTES", MAX_BYTES)
    few = break_scripts(["acquire"], calls={"HRANDFIELD": ONE_OF_THE_TAKEN})["acquire"]
    monkeypatch.setitem(load_scripts(), "acquire", few)


@pytest.fixture
def run_machine(store_url: str, few_at_once: None) -> Iterator[Run]:
    """Runs the machine on a store, with as many examples as told."""
    clients = []

    def run(
        examples: int,
        phases: tuple[Phase, ...] = tuple(Phase),
        *,
        policies: Sequence[str] = ("collapse",),
        derandomize: bool = True,
    ) -> None:
        connection = Client(store_url, size=4, timeout=PATIENCE)
        clients.append(connection)

        machine = type("ShardMachine", (ShardMachine,), {"client": connection, "policies": policies})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=50,
                deadline=None,
                derandomize=derandomize,
                database=None,
                phases=[phase for phase in phases if phase is not Phase.explain],
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
                verbosity=Verbosity.normal,
            ),
        )

    yield run
    for connection in clients:
        connection.close()


#: Stories of `make test`, and of `make test-slow`.
SHORT, DEEP = 50, 500
#: Stories in which a bug is looked for, at most: the first that shows it is the last. Which one that is depends on what
#: the process has imported before, so there are many more than usual.
SEARCH = 1000


#: The merge policies that a story has, or debounce, or a capacity: one, or each of them for a while.
POLICIES = [
    ("collapse",),
    ("append",),
    ("latest",),
    ("debounce",),
    ("capacity",),
    ("cancel",),
    ("collapse", "append", "latest", "debounce", "capacity", "cancel"),
    ("collapse+traces",),
    ("collapse+kept",),
    ("collapse", "append+traces", "latest+traces", "debounce", "capacity+traces"),
]
each_policy = pytest.mark.parametrize("policies", POLICIES, ids="-".join)


@each_policy
def test_shard_does_what_the_model_does(run_machine: Run, store_url: str, policies: Sequence[str]) -> None:
    is_embedded = store_url.startswith("memory")
    run_machine(SHORT // (25 if is_embedded else 1 if policies == ("collapse",) else 2), policies=policies)


@each_policy
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_shard_does_so_in_many_stories(run_machine: Run, store_url: str, policies: Sequence[str]) -> None:
    examples = DEEP // (1 if policies == ("collapse",) else 5)
    if store_url.startswith("memory"):
        examples //= 5  # the scripts are the same, and a story takes twice as long there
    run_machine(examples, policies=policies, derandomize=not os.environ.get("OTHER_STORIES"))


# --- and it finds broken builds -----------------------------------------------------------------------------------


#: Changes nothing, in both ways in which a script can be changed.
SOUND = bug(
    "nothing",
    "push fail release acquire",
    "local function add_payload(place, ...) return sound(place, ...) end",
    ZADD="",
    EXISTS="",
)


#: What Redis says of a script that isn't Lua, or doesn't run as Lua.
LUA_SLIP = re.compile(r"compiling script|attempt to |nonexistent global variable|bad argument")


on_redis = pytest.mark.parametrize("store_url", ["redis"], indirect=True)


USUAL = [mutation for mutation in MUTATIONS if not mutation.rare]


@on_redis
@pytest.mark.parametrize("mutation", often(USUAL, USUAL[::4]), ids=attrgetter("name"))
@pytest.mark.timeout(1800)
def test_machine_finds_the_bug(mutation: Mutation, run_machine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    use_scripts(mutation, monkeypatch)
    with pytest.raises((AssertionError, ScriptError)) as found:
        run_machine(SEARCH, phases=(Phase.generate,), policies=mutation.policies)
    assert not LUA_SLIP.search(str(found.value)), "the mutation's own Lua fails, which shows nothing"


def tell(url: str, policies: Sequence[str], steps: Sequence[Step]) -> None:
    """Has the machine go these steps, and judges each of them as in a random story."""
    with closing(Client(url, size=4, timeout=PATIENCE)) as client:
        machine = type("ShardMachine", (ShardMachine,), {"client": client, "policies": policies})()
        for name, given in [("first_owner", {}), *steps]:
            getattr(machine, name)(**given)
            machine.redis_holds_what_the_model_holds()
            machine.the_doctor_finds_nothing()


@on_redis
@pytest.mark.usefixtures("few_at_once")
def test_a_story_that_is_told_shows_each_rare_bug(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rare = {mutation.name: mutation for mutation in MUTATIONS if mutation.rare}
    assert told().keys() == rare.keys()
    for name, mutation in rare.items():
        with case(name), monkeypatch.context() as patch:
            tell(store_url, mutation.policies, told()[name])
            use_scripts(mutation, patch)
            with pytest.raises((AssertionError, ScriptError)) as found:
                tell(store_url, mutation.policies, told()[name])
            assert not LUA_SLIP.search(str(found.value)), "the mutation's own Lua fails, which shows nothing"


@on_redis
@pytest.mark.slow
def test_machine_finds_no_bug_in_scripts_that_only_look_different(
    run_machine: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_scripts(SOUND, monkeypatch)
    run_machine(SHORT // 2)


def test_every_mutation_still_changes_something() -> None:
    for mutation in MUTATIONS:
        assert mutation.function or mutation.calls or mutation.front, mutation.name
        mutation.scripts_with_it()


def test_a_mutation_that_would_change_nothing_is_refused() -> None:
    rows: list[dict[str, Any]] = [{}, {"function": "local function no_such() end"}, {"calls": {"GEOADD": ""}}]
    for broken in rows:
        with pytest.raises(AssertionError, match=r"kick\.lua"):
            break_scripts(["kick"], **broken)


def use_scripts(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = mutation.scripts_with_it()
    monkeypatch.setattr(pool, "load_scripts", lambda: broken)
