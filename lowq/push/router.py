"""Sends jobs again that Redis has refused for now: there was no room for them, or their shard is sealed.

::

    refused --> sent again -+-> in, or refused for good ---------------> its caller is told
                    ^       +-> no room: waits for it, as long as there is time, and is handed back then
                    |       +-> sealed: goes to the shards where it belongs now
                    +---------------+

One thread does so for all callers of a queue, in the order in which they pushed. As long as jobs of an id are not in,
later pushes of that id stay behind them, also those of other callers (`Write.share_calls`). A call is carried out as a
whole or not at all, so a repeat after a lost reply can't count anything twice.
"""

import _thread
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from lowq import clock
from lowq.errors import LowqError, RedisRefused, RedisUnavailable
from lowq.push.calls import (
    GIVEN_UP,
    Outcome,
    Part,
    Request,
    Settled,
    SharedCall,
    copy_of,
    is_failure,
    is_full,
    is_misrouted,
    is_out_of_turn,
)  # fmt: skip
from lowq.push.write import Write, Writer, interrupted
from lowq.store import Client, NotConfirmed, Refusal, Subscription

#: Seconds after which pushes that wait for room are sent again at the latest.
ASK_AGAIN = 1.0
#: Jobs of a shard that ask again at once: most of them won't fit.
TOGETHER = 100
#: Script calls that are sent at once.
MOST_CALLS = 250
#: Seconds that the lock of a `Resender` is waited for.
BRIEFLY = 0.05
#: Seconds for which a thread stays that has nothing more to send. Many queues may be used for the first time at once.
IDLE = 0.1
#: Layouts that a push follows at most, from one shard that was sealed to the next.
MAX_LAYOUTS = 100


class OnDemandThread:
    """A thread that exists only while it has something to do. It calls ``work`` whenever it is woken, and again after
    the seconds that ``work`` returns: 0 at once, None not before it is woken. ``idle``: seconds until it ends then.

    Nobody waits for its locks: a signal handler may wake it after interrupting any of these lines.
    """

    def __init__(self, work: Callable[[], float | None], idle: float = 5.0) -> None:
        self._work = work
        self._idle = idle
        #: Released when there is something to do.
        self._woken = threading.Lock()
        self._woken.acquire()
        #: Held by the thread that runs.
        self._running = threading.Lock()

    def start(self) -> bool:
        """Starts the thread unless it runs. False: none runs, and none can be started."""
        if not self._running.locked():
            # Not by `threading`, which waits until the thread runs: a caller that is interrupted there would not know
            # whether one was started. Of several that are started at the same moment one stays.
            try:
                _thread.start_new_thread(self._run, ())
            except RuntimeError:  # the process has too many threads
                return self._running.locked()
        return True

    def wake(self) -> bool:
        """Calls ``work`` soon, in its thread, also for work that was added just before. False: there is no thread."""
        release(self._woken)
        return self.start()  # the one that there was may have ended just before

    def _run(self) -> None:
        # Whoever adds work after `_running` was released starts a thread. What was added just before is found here:
        # this thread goes on, unless another one runs by now.
        while self._running.acquire(blocking=False):
            try:
                while True:
                    seconds = self._work()
                    if seconds == 0:
                        continue
                    was_woken = self._woken.acquire(timeout=self._idle if seconds is None else seconds)
                    if seconds is None and not was_woken:
                        break
            except BaseException:
                self._running.release()
                if not self._woken.locked():  # work that was added while this thread ends is for a successor
                    self.start()
                raise
            self._running.release()
            if not self._woken.acquire(blocking=False):
                break


def release(lock: threading.Lock) -> None:
    """Releases a lock that may have been released already."""
    try:
        lock.release()
    except RuntimeError:
        pass


class RefusedPush:
    """Parts of a request that are not in yet, in order. ``known``: outcomes of some of them."""

    def __init__(self, writer: Writer, request: Request, parts: list[Part], known: Mapping[Part, Outcome]) -> None:
        self.writer = writer
        self.request = request
        self.parts = parts
        self._all_parts = tuple(parts)
        self.ids = frozenset(item[0] for part in parts for item in part.items)
        #: The outcomes of the parts that were sent last.
        self.outcomes = dict(known)
        #: Parts for which there was no room.
        self.full: set[Part] = set()
        #: Whether parts may be out of turn because something before them was refused.
        self.was_resent = False
        self.settled = Settled()
        #: Why the registry could not be read for one of the parts that were refused together.
        self._unread: RedisUnavailable | None = None

    def is_abandoned(self) -> bool:
        """Whether its caller waits for it no longer."""
        return self._all_parts[0] in self.request.outcomes or self.request.is_abandoned()

    def end(self) -> None:
        """Tells the caller the outcomes, when nothing is left to be sent."""
        outcomes = self.request.outcomes
        first, *others = self._all_parts
        if outcomes.setdefault(first, self.settled) is self.settled:  # else its caller has just given it up
            for part in others:
                outcomes[part] = Settled()  # also if it gives up just now: the first one tells of all
        if self.request.is_settled:
            self.request.wake_caller_from_thread()

    def note_outcomes(self, now: float) -> None:
        """Takes out settled parts, and divides or reroutes refused ones. Once a part has failed for good, the rest of
        the push that is for its shard is not sent: it must not overtake that part, should the caller push it again.
        """
        known, self.outcomes = self.outcomes, {}
        if not known:
            return
        failed: dict[str, bool | Exception] = {}
        refused: set[str] = set()
        self._unread = None
        parts: list[Part] = []
        for part in self.parts:
            outcome, before = known.get(part), failed.get(part.prefix)
            assert not isinstance(outcome, Settled)
            if outcome is True or isinstance(outcome, NotConfirmed):
                self.settled.pairs.append((part, outcome))
            elif before is not None:
                self.settled.pairs.append((part, before))
            elif outcome is None:
                parts.append(part)
            elif is_full(outcome):
                left, fit = part.split(sorted(map(int, outcome.detail.split())))
                self.full.add(left)
                parts += [left] if fit is None else [left, fit]
                refused.add(part.prefix)
            elif is_misrouted(outcome):
                try:
                    parts += self._reroute(part, outcome, now)
                    refused.add(part.prefix)
                except LowqError as error:  # the registry can't be read just now
                    self.settled.pairs.append((part, error))
                    failed[part.prefix] = error
            elif is_out_of_turn(outcome) and (part.prefix in refused or self.was_resent):
                parts.append(part)  # another copy of it is sent, which need come after nothing
            else:
                self.settled.pairs.append((part, outcome))
                failed[part.prefix] = outcome
        self.settled.pairs += [(part, failed[part.prefix]) for part in parts if part.prefix in failed]
        self.parts = [part for part in parts if part.prefix not in failed]

    def _reroute(self, part: Part, refusal: Refusal, now: float) -> list[Part]:
        """Parts for the shards where the jobs belong now."""
        if part.hops >= MAX_LAYOUTS:
            # A failover of the registry's primary may have lost that a reshard began or ended: it sends here and there.
            raise RedisUnavailable(
                f"queue {part.target.queue!r}: its shards and the registry disagree about their number, as after a "
                "failover that has lost something of a reshard; begin that again, with `lowq reshard`, and push again"
            )
        says_where = refusal.code == "SEALED" and refusal.detail
        if self._unread is not None and not says_where:
            raise self._unread  # each read takes as long as the caller has time
        try:
            rerouted = part.target.reroute(part, refusal, now)
        except RedisUnavailable as error:
            if not says_where:
                self._unread = error
            raise
        for other in rerouted:
            other.hops = part.hops + 1
        return rerouted

    def hand_back(self, kept: set[bytes]) -> None:
        """Ends it, as its time to wait for room is over, unless a part of it can still be sent. ``kept``: ids of
        earlier pushes that wait.
        """
        kept = set(kept)
        for part in self.parts:
            if part not in self.full and not kept.issuperset(part.ids()):
                return
            kept.update(part.ids())
        self.settled.left += [job for part in self.parts for job in part.jobs]
        self.parts = []

    def give_up(self) -> None:
        """Ends it, as its caller waits no longer."""
        self.settled.left += [job for part in self.parts if part in self.full for job in part.jobs]
        self.settled.pairs += [(part, RedisUnavailable(GIVEN_UP)) for part in self.parts if part not in self.full]
        self.parts = []


class Resender:
    """The refused pushes of a queue. Safe for threads; all but `add` is done in a thread of its own."""

    def __init__(self, client: Client) -> None:
        self._client = client
        #: Guards the next two. It is waited for briefly, and then done without: a signal handler that pushes may have
        #: interrupted its holder. At worst a set of `by_id` is dropped as it is filled.
        self._lock = threading.RLock()
        #: In the order in which they came; the values mean nothing. Others add, the thread takes out.
        self._pushes: dict[RefusedPush, None] = {}
        #: Id -> those of them that have it.
        self.by_id: dict[bytes, set[RefusedPush]] = {}
        self._thread = OnDemandThread(self._work, IDLE)
        #: Hears where there is room, while a push waits for some.
        self._listener = OnDemandThread(self._listen, IDLE)
        self._subscription: Subscription | None = None
        #: Prefixes of the shards in which room is waited for.
        self._rooms: frozenset[str] = frozenset()
        #: Of those in which there may be some.
        self._free: deque[str] = deque()

    def add(self, push: RefusedPush) -> None:
        """Adds a push, which is sent again behind those that were added before."""
        try:
            with self._locked_briefly():
                for job_id in push.ids:
                    self.by_id.setdefault(job_id, set()).add(push)
                self._pushes[push] = None
        except BaseException:  # of a signal handler
            self._remove(push)
            raise
        if not self._thread.wake():
            self._remove(push)
            no_thread = RedisUnavailable("no thread could be started to send again what Redis had refused")
            push.outcomes = dict.fromkeys(push.parts, no_thread)
            push.note_outcomes(clock.now())
            push.end()

    @contextmanager
    def _locked_briefly(self) -> Iterator[None]:
        has_lock = self._lock.acquire(timeout=BRIEFLY)
        try:
            yield
        finally:
            if has_lock:
                self._lock.release()

    def _remove(self, push: RefusedPush) -> None:
        with self._locked_briefly():
            self._pushes.pop(push, None)
            for job_id in push.ids:
                pushes = self.by_id.get(job_id, set())
                pushes.discard(push)
                if not pushes:
                    self.by_id.pop(job_id, None)

    def _work(self) -> float | None:
        pushes, now = list(self._pushes), clock.now()  # all that is known was heard before
        for push in pushes:
            push.note_outcomes(now)
        pushes = self._end_settled(pushes)
        batch = self._choose_batch(pushes)
        if batch:
            _send(batch)
            # Where all fitted there may be room for more of those that wait.
            refused = {call.key for push, call in batch if push.outcomes[call.first] is not True}
            self._free.extend({call.key for _, call in batch} - refused)
            return 0.0
        self._rooms = frozenset(part.prefix for push in pushes for part in push.full)
        if self._rooms:
            subscription = self._subscription
            if subscription is not None:
                subscription.add(f"{prefix}room" for prefix in self._rooms)
            self._listener.wake()
        if not pushes:
            return None
        until = min(min(push.request.room_until, push.request.give_up_at) for push in pushes)
        return min(max(until - time.monotonic(), 0.001), ASK_AGAIN)

    def _end_settled(self, pushes: list[RefusedPush]) -> list[RefusedPush]:
        """Tells the callers of those that need no more. Returns the others."""
        goes_on: list[RefusedPush] = []
        kept: set[bytes] = set()
        now = time.monotonic()
        for push in pushes:
            if push.parts and push.is_abandoned():
                push.give_up()
            elif push.request.room_until <= now:
                push.hand_back(kept)
            if push.parts:
                goes_on.append(push)
                for part in push.parts:
                    if part in push.full or kept.issuperset(part.ids()):
                        kept.update(part.ids())
            else:
                self._remove(push)  # first: the next push of the id need not come behind it any more
                push.end()
        return goes_on

    def _choose_batch(self, pushes: list[RefusedPush]) -> list[tuple[RefusedPush, SharedCall]]:
        """The calls that can be sent now. Where others of an id were chosen before, its jobs come after their call, or
        stay.
        """
        free = {self._free.popleft() for _ in range(len(self._free))}
        asked: Counter[str] = Counter()
        #: Ids of which jobs stay, and the call that was chosen last for each of the others.
        staying: set[bytes] = set()
        chosen: dict[bytes, tuple[Writer, SharedCall]] = {}
        batch: list[tuple[RefusedPush, SharedCall]] = []
        for push in pushes:
            parts: list[Part] = []
            for part in push.parts:
                ids = part.ids()
                going = [i for i, job_id in enumerate(ids) if job_id not in staying] if len(batch) < MOST_CALLS else []
                waits = part in push.full
                if waits:
                    going = going[: TOGETHER - asked[part.prefix]] if part.prefix in free else []
                    asked[part.prefix] += len(going)
                before = {chosen[ids[i]] for i in going if ids[i] in chosen}
                if len(before) > 1 or any((to, call.key) != (push.writer, part.prefix) for to, call in before):
                    before, going = set(), [i for i in going if ids[i] not in chosen]
                if not going:
                    staying.update(ids)
                    parts.append(part)
                    continue
                push.full.discard(part)
                sent, stays = part.split(going)
                call = SharedCall(push, sent, next((other.token for _, other in before), b""))
                batch.append((push, call))
                parts.append(sent)
                chosen.update(dict.fromkeys(sent.ids(), (push.writer, call)))
                if stays is not None:
                    staying.update(stays.ids())
                    parts.append(stays)
                    if waits:
                        push.full.add(stays)
            push.parts = parts
        return batch

    def _listen(self) -> float | None:
        rooms = self._rooms
        if not rooms:
            subscription, self._subscription = self._subscription, None
            if subscription is not None:
                subscription.close()
            return None
        if self._subscription is None:
            self._subscription = self._client.subscribe()
        try:
            self._subscription.add(f"{prefix}room" for prefix in rooms)
            event = self._subscription.get(ASK_AGAIN)
        except (RedisUnavailable, RedisRefused):
            self._free.extend(rooms)
            self._thread.wake()
            return 0.1
        if event is None:
            self._free.extend(rooms)
        elif event[0] in ("message", "subscribe"):  # room that became free before is found by asking once more
            self._free.append(event[1].removesuffix("room"))
        self._thread.wake()
        return 0.0


class Router(dict[str, Resender]):
    """Queue -> its `Resender`, made when it is needed."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client

    def __missing__(self, queue: str) -> Resender:
        return self.setdefault(queue, Resender(self._client))

    def take(self, writer: Writer, request: Request, *, by_caller: bool = False) -> None:
        """Sends parts without an outcome again, behind those that were refused before, and wakes the caller at the end.
        ``by_caller``: whether the request's own caller calls this.
        """
        parts: list[Part] = []
        failed: dict[str, Exception] = {}
        for part in request.parts:
            outcome = request.outcomes.get(part)
            if is_failure(outcome):
                failed.setdefault(part.prefix, outcome)
            elif outcome is None and part.prefix in failed:  # it must not overtake that, should it be pushed again
                request.outcomes[part] = copy_of(failed[part.prefix])
            elif outcome is None:
                parts.append(part)
        if not parts:
            request.wake_caller_from_thread()
            return
        until = max(time.monotonic(), request.room_until) + writer.timeout + writer.waits_for
        until += len(parts) // MOST_CALLS * writer.timeout  # each write has its time
        request.give_up_at = min(until, request.deadline)
        known = {part: why for part, why in request.again.items() if why is not None}
        push = RefusedPush(writer, request, parts, known)
        if by_caller:
            # Not in the other thread: this one may hold a lock that reading the registry needs, in a signal handler.
            push.note_outcomes(clock.now())
        if push.parts:
            self[parts[0].target.queue].add(push)
        else:
            push.end()


def _send(batch: Sequence[tuple[RefusedPush, SharedCall]]) -> None:
    """Sends calls and notes their outcomes."""
    by_writer: dict[Writer, list[tuple[RefusedPush, SharedCall]]] = {}
    for push, call in batch:
        by_writer.setdefault(push.writer, []).append((push, call))
    for writer, some in by_writer.items():
        write = Write(writer, [push.request for push, _ in some])
        write.calls = [call for _, call in some]
        try:
            write.repeat_unanswered(results := write.start()())
        except Exception as error:
            results = [copy_of(interrupted(error)) for _ in some]
        for (push, call), result in zip(some, results, strict=True):
            if isinstance(result, Exception):
                call.fail(result)
            else:
                push.outcomes[call.first] = True
            push.was_resent = True
