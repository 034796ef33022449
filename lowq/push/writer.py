"""The writer: which requests leave together in one write, and what becomes of each of them."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from lowq import clock
from lowq.errors import LowqError, RedisRefused, RedisUnavailable, TimeLimitExceeded
from lowq.push.on_demand import release
from lowq.push.parts import Part, SentPart
from lowq.push.refused import MOST_CALLS, RefusedPush, Resenders
from lowq.push.requests import (
    Outcome,
    Request,
    Settled,
    SharedCall,
    copy_of,
    is_full,
    is_misrouted,
    is_misscored,
    is_out_of_turn,
)
from lowq.store import (
    SOCKET_TIMEOUT,
    Client,
    Deadline,
    NotConfirmed,
    Refusal,
    Wait,
    caller_deadline,
    deadlines,
    may_repeat,
)
from lowq.store.translate import without_password

#: Jobs, and bytes of payloads, of a push that others may join. A larger one has a write of its own.
PUSH_JOBS = 100
PUSH_BYTES = 2**16
#: Jobs, and bytes of payloads, of one write. More could go at once, too. But while Redis works on a write its callers
#: can do nothing: the others prepare the next one meanwhile.
WRITE_JOBS = 250
WRITE_BYTES = 2**20
#: Seconds before each repeat of a call that got no answer.
PAUSES = (0.0, 0.1)
#: How many times push_timeout, at least how many times the socket timeout, Redis remembers a call, so that it knows a
#: repeat; and after how many of them none is sent any more. What is between is for the way there.
KEPT, REPEATED = 3, 2
#: Seconds that a caller waits for its outcome beyond its own push_timeout, as both end at the same time.
GRACE = 0.05
R = TypeVar("R", bound=Request)
#: Requests, each with the position of a part that goes behind what was refused before.
Behind = list[tuple[Request, int]]


class Attempts:
    """The time of a write, from now on: for one attempt, and for repeats of what got no answer.

    ``until`` and ``is_limited_by_batch`` are those of the callers; by default those of whoever calls this.
    """

    def __init__(self, seconds: float, until: float | None = None, *, is_limited_by_batch: bool | None = None) -> None:
        self._deadlines = deadlines(seconds, 1 + len(PAUSES), until)
        self._start = clock.now()
        self._is_limited_by_batch = is_limited_by_batch
        #: Of the attempt that is under way, first of all the first one.
        self.deadline = next(self._deadlines)

    def next(self) -> Deadline:
        """The deadline of the next attempt, or of the last one."""
        self.deadline = next(self._deadlines, self.deadline)
        return self.deadline

    def age(self) -> float:
        """Seconds since the write was sent."""
        return clock.now() - self._start

    def limit_in_words(self, push_timeout: float) -> str:
        """How long the callers have waited in vain."""
        of_batch = self._is_limited_by_batch
        if of_batch is None:
            of_batch = caller_deadline() <= time.monotonic()
        return limit_in_words(push_timeout, of_batch=of_batch)


class Writer:
    """Sends requests, and parts of single pushes, on a client. Safe for threads."""

    def __init__(
        self, client: Client, push_timeout: float, wait: Wait | None = None, resenders: Resenders | None = None
    ) -> None:
        self.client = client
        #: What sends again what was refused for now.
        self.resenders = Resenders(client) if resenders is None else resenders
        self.timeout = push_timeout
        #: What servers are to confirm of each write, see `lowq.store.durability`.
        self.wait = wait
        #: Seconds that this may take, on top of the rest.
        self.waits_for = 0.0 if wait is None else wait.seconds
        # Redis remembers calls for at least as long as connections wait by themselves.
        self.patience = max(push_timeout, SOCKET_TIMEOUT)
        self.keep = b"%d" % math.ceil(KEPT * self.patience)

    # --- parts of one push ---

    def start(
        self,
        parts: Sequence[Part],
        *,
        lend: bool,
        deadline: Deadline | None,
        is_wanted: Callable[[], bool] | None = None,
    ) -> Callable[[], list[Any]]:
        """Sends parts of one push; as `Client.start`. ``is_wanted``: whether its caller still wants it."""
        calls = [part.make_call(self.keep, is_wanted) for part in parts]
        return self.client.start(calls, lend=lend, deadline=deadline, wait=self.wait)

    def send_parts(self, parts: Sequence[tuple[Part, Callable[[], bool]]], until: float) -> list[Outcome]:
        """Sends parts, each with what says whether its caller still wants it, until that monotonic time, and waits.
        Returns what became of each.
        """
        attempts = Attempts(max(min(until - time.monotonic(), self.timeout), 0.001), until, is_limited_by_batch=False)
        sent = [part for part, _ in parts]
        try:
            calls = [part.make_call(self.keep, is_wanted) for part, is_wanted in parts]
            results = self.client.start(calls, deadline=attempts.deadline, wait=self.wait)()
            self.repeat_unanswered(sent, results, attempts)
        except Exception as error:
            return [copy_of(interrupted(error)) for _ in parts]
        return [result if isinstance(result, Exception) else True for result in results]

    def repeat_unanswered(self, parts: Sequence[SentPart], results: list[Any], attempts: Attempts) -> None:
        """Repeats what got no answer, as long as Redis knows a repeat, and puts the results in its place."""
        pauses = iter(PAUSES)
        while (again := _unanswered(parts, results)) and attempts.age() <= REPEATED * self.patience:
            pause = next(pauses, None)
            if pause is None:
                break
            deadline = attempts.next()
            time.sleep(pause)  # a part of the time of that attempt
            calls = {i: call for i in again if (call := parts[i].repeated_call()) is not None}
            if not calls:
                break
            repeated = self.client.start(list(calls.values()), deadline=deadline, wait=self.wait)()
            for i, result in zip(calls, repeated, strict=True):
                results[i] = result
        if attempts.deadline.passed:
            for i, result in enumerate(results):
                if type(result) is RedisUnavailable:
                    results[i] = RedisUnavailable(f"{result}, {attempts.limit_in_words(self.timeout)}")

    # --- writes of several requests ---

    def give_up(self, request: Request) -> None:
        """The caller's time is up."""
        request.abandoned = True
        of_batch = request.is_limited_by_batch
        if request.was_taken:
            request.fail(no_answer(self.client.url, self.timeout, of_batch=of_batch))
        else:
            why = "those before it had no answer, or this process was busy with something else"
            limit = limit_in_words(self.timeout, of_batch=of_batch)
            request.fail(RedisUnavailable(f"the push waited {limit} and was not sent: {why}"))

    def take_next(self, waiting: deque[R], write: list[R]) -> None:
        """Moves the requests that leave together next from the one to the other, in their order."""
        jobs = size = 0
        while waiting:
            request = waiting[0]
            if request.is_abandoned():
                self.give_up(request)
                request.wake_caller()
            else:
                jobs += request.jobs_count
                size += request.size
                if write and (jobs > WRITE_JOBS or size > WRITE_BYTES):
                    break
                write.append(request)
            # Only now, when it is in the write: an interruption in between loses none. What is sent twice merges.
            waiting.popleft()

    def share_calls(self, write: Sequence[Request]) -> tuple[list[SharedCall], Behind]:
        """One call for each shard. Pushes that disagree about the queue's options have calls of their own, of which
        none is carried out unless the one before it was. And what would overtake something that was refused: it goes
        behind that, with `send_behind` when the write has ended, as it has ids that may be in the calls, too.
        """
        calls: list[SharedCall] = []
        last: dict[str, SharedCall] = {}
        behind: Behind = []
        ids_behind: set[tuple[str, bytes]] = set()
        for request in write:
            request.was_taken = True
            for i, part in enumerate(request.parts):
                resender = None if part.target is None else self.resenders.get(part.target.queue)
                if resender is not None and (
                    resender.has(part) or (ids_behind and not ids_behind.isdisjoint(part.keys()))
                ):
                    ids_behind.update(part.keys())
                    behind.append((request, i))
                    continue
                call = last.get(part.prefix)
                if call is None or call.words != part.words or call.shards_count != part.shards_count:
                    after = b"" if call is None else call.token
                    call = last[part.prefix] = SharedCall(part.prefix, part.shards_count, part.words, after)
                    calls.append(call)
                call.members.append((request, i))
        for call in calls:
            call.prepare(self.keep)
        return calls, behind

    def send_behind(self, behind: Behind) -> None:
        """Sends what `share_calls` has kept back."""
        for request, i in behind:
            self.send_again(request, i, {})

    def send(self, write: Sequence[Request]) -> None:
        """Sends a write and waits; then each part of each request has an outcome. It blocks.

        Raises:
            What is no Exception: somebody wants this thread to end, and not this write.
        """
        try:
            calls, behind = self.share_calls(write)
            attempts = attempts_for(write, self.waits_for)
            results = self.client.start(calls, deadline=attempts.deadline, wait=self.wait)() if calls else []
            self.set_outcomes(calls, results, attempts)
            self.send_behind(behind)
        except BaseException as error:
            fail(write, error)
            if not isinstance(error, Exception):
                raise

    def set_outcomes(self, calls: Sequence[SharedCall], results: list[Any], attempts: Attempts) -> None:
        """Repeats what got no answer, and sets the outcome of each part, or has it sent again. It blocks if there is an
        error.
        """
        self.repeat_unanswered(calls, results, attempts)
        for call, result in zip(calls, results, strict=True):
            if not isinstance(result, Exception):
                call.set_outcome(True)
            elif is_misrouted(result) or (is_full(result) and len(call.members) == 1):
                for request, i in call.members:
                    self.send_again(request, i, {request.parts[i]: result})
            elif is_out_of_turn(result) or (
                len(call.members) > 1
                and not isinstance(result, RedisUnavailable | RedisRefused | NotConfirmed)
                and (not isinstance(result, Refusal) or is_full(result) or is_misscored(result))
            ):
                # The call before it was refused, or jobs of some did not fit, or have the wrong kind of scores. Or a
                # script failed: it may have met the keys of one id that somebody else has written. What it wrote
                # before, if anything, merges with what is written now.
                for request, i in call.members:
                    self.send_again(request, i, {})
            else:
                call.set_outcome(result)

    def send_again(self, request: Request, position: int, known: dict[Part, Outcome]) -> None:
        """Has a part of a request sent again, behind what was refused before. ``known``: as of a `RefusedPush`."""
        part = request.parts[position]
        assert part.target is not None
        if not request.is_limited_by_batch:
            request.give_up_at = max(request.give_up_at, self._gives_up_at(request.room_until))
        push = RefusedPush(
            self.send_parts, [part], known, request.room_until, request.give_up_at,
            lambda: request.outcomes[position] is None and not request.is_abandoned(),
            partial(request.settle, position),
        )  # fmt: skip
        self.resenders[part.target.queue].add(push)

    def settle(
        self, parts: Sequence[Part], outcomes: Sequence[Outcome], room_until: float, is_wanted: Callable[[], bool]
    ) -> Settled:
        """Has what was refused of these parts of one push sent again, and waits until all is settled."""
        target = parts[0].target
        assert target is not None
        waiter = threading.Lock()
        waiter.acquire()
        writes = len(parts) // MOST_CALLS  # each has its time
        give_up_at = min(self._gives_up_at(room_until) + writes * self.timeout, caller_deadline())
        push = RefusedPush(
            self.send_parts, parts, dict(zip(parts, outcomes, strict=True)), room_until, give_up_at,
            is_wanted, lambda _settled: release(waiter),
        )  # fmt: skip
        # Here, not in the other thread: this one may have a lock that is needed to read the registry, and be in a
        # signal's handler.
        push.note_outcomes(clock.now())
        try:
            self.resenders[target.queue].add(push)
            if waiter.acquire(timeout=max(give_up_at - time.monotonic(), 0.0) + self.timeout):
                return push.settled
        except BaseException:
            push.is_wanted = lambda: False
            raise
        push.is_wanted = lambda: False
        reason = no_answer(self.client.url, self.timeout, of_batch=give_up_at == caller_deadline())
        return Settled([(part, reason) for part in parts])

    def _gives_up_at(self, room_until: float) -> float:
        """Until when, monotonic, the caller of a refused push waits that has until then for room."""
        return max(time.monotonic(), room_until) + self.timeout + self.waits_for


def attempts_for(requests: Sequence[Request], waits_for: float = 0.0) -> Attempts:
    """The time of a write: no longer than its callers wait, pauses included. ``waits_for``: seconds of it that are for
    what servers are to confirm.
    """
    until = max(request.give_up_at for request in requests)
    is_limited_by_batch = all(request.is_limited_by_batch for request in requests)
    seconds = max(until - time.monotonic() - waits_for, 0.001)
    return Attempts(seconds, until, is_limited_by_batch=is_limited_by_batch)


def accept(calls: Sequence[SharedCall]) -> None:
    """All calls of a write were carried out."""
    for call in calls:
        call.set_outcome(True)


def fail(write: Sequence[Request], error: BaseException) -> None:
    """The write ended with what nobody expected: what has no outcome yet may be in or not."""
    reason = interrupted(error)
    for request in write:
        request.fail(copy_of(reason))


def interrupted(error: BaseException) -> Exception:
    """What callers are told of an error that nobody expected."""
    if isinstance(error, LowqError):
        return error
    reason = RedisUnavailable(f"the push was interrupted: {error!r:.200}")
    reason.__cause__ = error
    return reason


def limit_of_caller(push_timeout: float) -> tuple[float, bool]:
    """Seconds that whoever calls this waits for its push, and whether the deadline of its batch is what limits it."""
    deadline = caller_deadline()
    if deadline == math.inf:  # as mostly
        return push_timeout, False
    left = max(deadline - time.monotonic(), 0.0)
    return (left, True) if left <= push_timeout else (push_timeout, False)


def limit_in_words(push_timeout: float, *, of_batch: bool) -> str:
    """How long somebody has waited."""
    return "until the deadline of the batch" if of_batch else f"for push_timeout={push_timeout:g} s"


def no_answer(url: str, push_timeout: float, *, of_batch: bool) -> RedisUnavailable:
    """The error of a caller whose time is up."""
    limit = limit_in_words(push_timeout, of_batch=of_batch)
    return RedisUnavailable(f"Redis at {without_password(url)} does not answer: nothing was heard in time, {limit}")


def missed_deadline() -> TimeLimitExceeded | None:
    """Why the caller must not push any more, if that is so: it performs a batch whose deadline has passed."""
    if caller_deadline() > time.monotonic():
        return None
    return TimeLimitExceeded("the deadline of the batch that pushes them has passed")


def _unanswered(parts: Sequence[SentPart], results: list[Any]) -> list[int]:
    """The calls that are to be repeated: those without an answer, and those that were refused because one of them had
    to come before. Not what comes after a call that was refused for good: its time has not come.
    """
    again: list[int] = []
    refused: set[tuple[str, int]] = set()
    for i, (part, result) in enumerate(zip(parts, results, strict=True)):
        if not isinstance(result, Exception) or isinstance(result, NotConfirmed):
            continue
        if part.after and (part.prefix, part.shards_count) in refused:
            continue
        if may_repeat(result) or is_out_of_turn(result):
            again.append(i)
        else:
            refused.add((part.prefix, part.shards_count))
    return again
