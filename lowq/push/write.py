"""A write: requests that leave together, the attempts to have them answered, and the outcome of each of their parts."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from lowq import clock
from lowq.errors import LowqError, RedisRefused, RedisUnavailable, TimeLimitExceeded
from lowq.push.calls import (
    Owner,
    Part,
    Request,
    SharedCall,
    copy_of,
    is_failure,
    is_full,
    is_misrouted,
    is_misscored,
    is_out_of_turn,
)  # fmt: skip
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
)  # fmt: skip
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
#: In push_timeouts, or socket timeouts if those are longer: how long Redis remembers a call, so that it knows a repeat;
#: and after how long none is sent any more. The difference is for the way there.
KEPT, REPEATED = 3, 2
#: Seconds that a caller waits for its outcome beyond its own push_timeout, as both end at the same time.
GRACE = 0.05
R = TypeVar("R", bound=Request)


class Refused(Protocol):
    """The pushes of a queue that were refused and are sent again."""

    @property
    def by_id(self) -> Mapping[bytes, object]:
        """The pushes of each id."""
        ...


class Writer:
    """How writes are sent: the client, the time for their attempts, and the confirmation to wait for."""

    def __init__(self, client: Client, push_timeout: float, wait: Wait | None, refused: Mapping[str, Refused]) -> None:
        self.client = client
        self.timeout = push_timeout
        #: The confirmation of each write by its server, see `lowq.store.calls`; and seconds that it may take, on top of
        #: the rest.
        self.wait = wait
        self.waits_for = 0.0 if wait is None else wait.seconds
        #: Queue -> pushes that are sent again.
        self.refused = refused
        # Redis remembers calls for at least as long as connections wait by themselves.
        self.patience = max(push_timeout, SOCKET_TIMEOUT)
        self.keep = b"%d" % math.ceil(KEPT * self.patience)

    def give_up(self, request: Request) -> None:
        """The caller's time is up."""
        request.abandoned = True
        of_batch = request.missed_batch
        if request.was_taken:
            request.fail(no_answer(self.client.url, self.timeout, of_batch=of_batch))
        else:
            why = "those before it had no answer, or this process was busy with something else"
            limit = limit_in_words(self.timeout, of_batch=of_batch)
            request.fail(RedisUnavailable(f"the push waited {limit} and was not sent: {why}"))


class Write(Generic[R]):
    """Requests that leave together. Calls without an answer are repeated."""

    __slots__ = ("_is_short", "_rest", "_sent_at", "calls", "deadline", "requests", "writer")

    #: Of the attempt that is under way.
    deadline: Deadline

    def __init__(self, writer: Writer, requests: list[R]) -> None:
        self.writer = writer
        self.requests = requests
        self.calls: list[SharedCall] = []

    def take_next(self, waiting: deque[R]) -> None:
        """Moves the requests that leave together next here, in their order."""
        jobs = size = 0
        while waiting:
            request = waiting[0]
            if request.is_abandoned():
                self.writer.give_up(request)
                request.wake_caller()
            else:
                jobs += request.jobs_count
                size += request.size
                if self.requests and (jobs > WRITE_JOBS or size > WRITE_BYTES):
                    break
                self.requests.append(request)
            # Only now, when it is in the write: an interruption in between loses none. Jobs that are sent twice merge.
            waiting.popleft()

    def share_calls(self) -> None:
        """Makes one call for each shard. Pushes that disagree about the queue's options, and parts of one push, have
        calls of their own, of which none is carried out unless the one before it was. A part that would overtake
        refused jobs of an id goes behind them when the write has ended, as its other ids may be in the calls.
        """
        last: dict[str, SharedCall] = {}
        behind: set[tuple[str, bytes]] = set()
        for request in self.requests:
            request.was_taken = True
            for part in request.parts:
                refused = self.writer.refused.get(part.target.queue)
                if (
                    refused is not None
                    and (refused.by_id or behind)
                    and (any(item[0] in refused.by_id for item in part.items) or not behind.isdisjoint(part.keys()))
                ):
                    behind |= part.keys()
                    request.again[part] = None
                    continue
                call = last.get(part.prefix)
                if (
                    call is None
                    or call.first.words != part.words
                    or call.first.layout.shards_count != part.layout.shards_count
                    or call.members[-1][0] is request
                ):
                    call = last[part.prefix] = SharedCall(request, part, b"" if call is None else call.token)
                    self.calls.append(call)
                else:
                    call.members.append((request, part))

    def begin(self) -> Deadline:
        """Prepares the calls, and begins the time of the write: it lasts no longer than its callers wait, with an
        attempt and its repeats. Returns the deadline of the first attempt.
        """
        writer = self.writer
        for call in self.calls:
            call.prepare(writer.keep)
        until = 0.0
        for request in self.requests:
            until = max(until, request.give_up_at)
        left = until - time.monotonic()
        # At least half of it for the answer, the rest for the confirmation, see `Wait.command`.
        seconds = max(min(max(left - writer.waits_for, left / 2), writer.timeout), 0.001)
        self._is_short = seconds < writer.timeout
        self._sent_at = clock.now()
        # As `deadlines` divide the time; those of the repeats are seldom needed.
        self._rest = seconds / 2, until
        self.deadline = Deadline(*self._rest)
        return self.deadline

    def start(self, *, lend: bool = False) -> Callable[[], list[Any]]:
        """Sends the calls; as `Client.start`."""
        return self.writer.client.start(self.calls, lend=lend, deadline=self.begin(), wait=self.writer.wait)

    def send(self) -> None:
        """Sends the calls and waits; then each part has an outcome, or is to be sent again. It blocks.

        Raises:
            Unexpected errors: parts without an outcome may be in or not, and their callers are told so.
        """
        try:
            if self.calls:
                client, wait = self.writer.client, self.writer.wait
                self.settle(client.start(self.calls, deadline=self.begin(), wait=wait)())
        except BaseException as error:
            self.fail(error)
            raise

    def settle(self, results: list[Any]) -> None:
        """Repeats calls without an answer; then sets the outcome of each part, or notes that it is to be sent again.
        Blocks if there is an error.
        """
        for result in results:
            if isinstance(result, Exception):
                self.repeat_unanswered(results)
                break
        #: Tokens of calls that were carried out.
        answered: set[bytes] = set()
        for call, result in zip(self.calls, results, strict=True):
            if not isinstance(result, Exception):
                answered.add(call.token)
                for owner, part in call.members:
                    owner.outcomes[part] = bool(result)
            elif isinstance(result, NotConfirmed):
                answered.add(call.token)
                call.fail(result)
            elif is_misrouted(result) or (is_full(result) and len(call.members) == 1):
                for owner, part in call.members:
                    _again(owner, part, result)
            elif is_out_of_turn(result):
                for owner, part in call.members:
                    if _follows_failure(owner, part, is_lost=call.after in answered):
                        owner.outcomes[part] = copy_of(result)
                    else:
                        _again(owner, part, None)
            elif _is_of_others(call, result):
                for owner, part in call.members:
                    _again(owner, part, None)
            else:
                call.fail(result)

    def fail(self, error: BaseException) -> None:
        """Ends it with an unexpected error: parts without an outcome may be in or not."""
        reason = interrupted(error)
        for request in self.requests:
            request.fail(copy_of(reason))

    def repeat_unanswered(self, results: list[Any]) -> None:
        """Repeats calls without an answer, as long as Redis knows a repeat, and replaces their results."""
        seconds, until = self._rest
        for pause, deadline in zip(PAUSES, deadlines(seconds, len(PAUSES), until), strict=True):
            again = self._unanswered(results)
            if not again or clock.now() - self._sent_at > REPEATED * self.writer.patience:
                break
            self.deadline = deadline
            time.sleep(pause)  # a part of the time of that attempt
            calls = {i: self.calls[i] for i in again if self.calls[i].members}  # others have no caller left
            if not calls:
                break
            for call in calls.values():
                call.data[2] = b"1"  # has Redis look whether it carried the call out already
            client, wait = self.writer.client, self.writer.wait
            repeated = client.start(list(calls.values()), deadline=self.deadline, wait=wait)()
            for i, result in zip(calls, repeated, strict=True):
                results[i] = result
        if self.deadline.passed:
            # Also when it ends before the batch's deadline, as there would have been something to confirm.
            of_batch = all(
                request.missed_batch or (self._is_short and request.deadline <= request.give_up_at)
                for request in self.requests
            )
            limit = limit_in_words(self.writer.timeout, of_batch=of_batch)
            for i, result in enumerate(results):
                if type(result) is RedisUnavailable:
                    results[i] = RedisUnavailable(f"{result}, {limit}")

    def _unanswered(self, results: list[Any]) -> list[int]:
        """The calls that are to be repeated: those without an answer, and those that were refused because one of them
        had to come before. Not those behind a call that was refused for good.
        """
        again: list[int] = []
        refused: set[tuple[str, int]] = set()
        for i, (call, result) in enumerate(zip(self.calls, results, strict=True)):
            if not isinstance(result, Exception) or isinstance(result, NotConfirmed):
                continue
            shard = call.key, call.first.layout.shards_count
            if call.after and shard in refused:
                continue
            if may_repeat(result) or is_out_of_turn(result):
                again.append(i)
            else:
                refused.add(shard)
        return again


def _again(owner: Owner, part: Part, refusal: Refusal | None) -> None:
    assert isinstance(owner, Request)
    owner.again[part] = refusal


def _follows_failure(owner: Owner, part: Part, *, is_lost: bool) -> bool:
    """Whether a part that is out of turn comes behind one of its own push that has failed for good, which it must not
    overtake. ``is_lost``: Redis had carried out the call before it, and has forgotten that with the data.
    """
    assert isinstance(owner, Request)
    own = [other for other in owner.parts[: owner.parts.index(part)] if other.prefix == part.prefix]
    if any(is_failure(owner.outcomes.get(other)) for other in own):
        return True
    return is_lost and bool(own) and not any(other in owner.again for other in own)


def _is_of_others(call: SharedCall, result: Exception) -> bool:
    """Whether the members of a call that has failed may fare better by themselves: jobs of some did not fit, or have
    the wrong kind of scores. Or a script failed: it may have met the keys of one id that another program has written.
    Payloads that it wrote before merge with those that are written now.
    """
    return (
        len(call.members) > 1
        and not isinstance(result, RedisUnavailable | RedisRefused)
        and (not isinstance(result, Refusal) or is_full(result) or is_misscored(result))
    )


def interrupted(error: BaseException) -> Exception:
    """An unexpected error as callers get it."""
    if isinstance(error, LowqError):
        return error
    reason = RedisUnavailable(f"the push was interrupted: {error!r:.200}")
    reason.__cause__ = error
    return reason


def limit_of_caller(push_timeout: float) -> tuple[float, bool]:
    """Seconds that the caller waits for its push, and whether the deadline of its batch limits it."""
    left = max(caller_deadline() - time.monotonic(), 0.0)
    return (left, True) if left <= push_timeout else (push_timeout, False)


def room_until(timeout: float) -> float:
    """Monotonic time until which a push waits for room that may wait for so many seconds."""
    return min(time.monotonic() + timeout, caller_deadline())


def limit_in_words(push_timeout: float, *, of_batch: bool) -> str:
    """The time that a caller has waited, in words."""
    return "until the deadline of the batch" if of_batch else f"for push_timeout={push_timeout:g} s"


def no_answer(url: str, push_timeout: float, *, of_batch: bool) -> RedisUnavailable:
    """The error of a caller whose time is up."""
    limit = limit_in_words(push_timeout, of_batch=of_batch)
    return RedisUnavailable(f"Redis at {without_password(url)} does not answer: nothing was heard in time, {limit}")


def missed_deadline() -> TimeLimitExceeded | None:
    """`TimeLimitExceeded` if the caller's batch deadline has passed, else None."""
    if caller_deadline() > time.monotonic():
        return None
    return TimeLimitExceeded("the deadline of the batch that pushes them has passed")
