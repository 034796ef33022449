"""The writer: which requests leave together in one write, and what becomes of each of them."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

from lowq import clock
from lowq.errors import LowqError, RedisRefused, RedisUnavailable, TimeLimitExceeded
from lowq.group_commit.parts import Part, SentPart
from lowq.group_commit.requests import Request, SharedCall, call_of_one, copy_of, without_abandoned
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

    def __init__(self, client: Client, push_timeout: float, wait: Wait | None = None) -> None:
        self.client = client
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

    def share_calls(self, write: Sequence[Request]) -> list[SharedCall]:
        """One call for each shard. Pushes that disagree about the queue's options have nothing in common."""
        calls: dict[tuple[str, int, bytes], SharedCall] = {}
        for request in write:
            request.was_taken = True
            for i, part in enumerate(request.parts):
                key = part.prefix, part.shards_count, part.words
                call = calls.get(key)
                if call is None:
                    call = calls[key] = SharedCall(*key)
                call.members.append((request, i))
        for call in calls.values():
            call.prepare(self.keep)
        return list(calls.values())

    def send(self, write: Sequence[Request]) -> None:
        """Sends a write and waits; then each part of each request has an outcome. It blocks.

        Raises:
            What is no Exception: somebody wants this thread to end, and not this write.
        """
        try:
            self._send_calls(self.share_calls(write), write)
        except BaseException as error:
            fail(write, error)
            if not isinstance(error, Exception):
                raise

    def _send_calls(self, calls: Sequence[SharedCall], requests: Sequence[Request]) -> None:
        attempts = attempts_for(requests, self.waits_for)
        results = self.client.start(calls, deadline=attempts.deadline, wait=self.wait)()
        self.set_outcomes(calls, results, attempts)

    def set_outcomes(self, calls: Sequence[SharedCall], results: list[Any], attempts: Attempts) -> None:
        """Repeats what got no answer, and sets the outcome of each part. It blocks if there is an error."""
        self.repeat_unanswered(calls, results, attempts)
        apart: list[tuple[Request, int]] = []
        for call, result in zip(calls, results, strict=True):
            if not isinstance(result, Exception):
                call.set_outcome(True)
            elif len(call.members) > 1 and (
                is_full(result) or not isinstance(result, RedisUnavailable | RedisRefused | Refusal | NotConfirmed)
            ):
                # Jobs of some did not fit. Or a script failed: it may have met the keys of one id that somebody else
                # has written. What it wrote before, if anything, merges with what is written now.
                apart += call.members
            else:
                call.set_outcome(result)
        apart = without_abandoned(apart)
        if apart:
            alone = [call_of_one(request, i) for request, i in apart]
            for call in alone:
                call.prepare(self.keep)
            self._send_calls(alone, [request for request, _ in apart])


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
    reason: Exception
    if isinstance(error, LowqError):
        reason = error
    else:
        reason = RedisUnavailable(f"the push was interrupted: {error!r:.200}")
        reason.__cause__ = error
    for request in write:
        request.fail(copy_of(reason))


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


def is_full(result: object) -> TypeGuard[Refusal]:
    """Whether jobs of the call did not fit: the queue has a capacity. Nothing was written."""
    return isinstance(result, Refusal) and result.code == "QUEUEFULL"


def is_sealed(result: object) -> TypeGuard[Refusal]:
    """Whether the jobs of the call belong to another layout of their queue by now. Nothing was written."""
    return isinstance(result, Refusal) and result.code == "SEALED"


def is_out_of_turn(result: Exception) -> bool:
    return isinstance(result, Refusal) and result.code == "OUTOFTURN"
