"""A write: requests that leave together, the attempts to have them answered, and what becomes of each of them."""

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


class Refused(Protocol):
    """The pushes of a queue that were refused and are sent again."""

    @property
    def by_id(self) -> Mapping[bytes, object]:
        """Those of each id."""
        ...


class Writer:
    """How writes are sent: on which client, for how long they are tried, and what servers are to confirm."""

    def __init__(self, client: Client, push_timeout: float, wait: Wait | None, refused: Mapping[str, Refused]) -> None:
        self.client = client
        self.timeout = push_timeout
        #: What servers are to confirm of each write, see `lowq.store.deadline`; and seconds that this may take, on
        #: top of the rest.
        self.wait = wait
        self.waits_for = 0.0 if wait is None else wait.seconds
        #: What is sent again, by queue.
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
    """Requests that leave together. It is sent once; what got no answer is repeated."""

    __slots__ = ("_deadlines", "_is_short", "_sent_at", "calls", "deadline", "requests", "writer")

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
            # Only now, when it is in the write: an interruption in between loses none. What is sent twice merges.
            waiting.popleft()

    def share_calls(self) -> None:
        """Makes one call for each shard. Pushes that disagree about the queue's options, and parts of one push, have
        calls of their own, of which none is carried out unless the one before it was. What would overtake something
        that was refused before goes behind that, when the write has ended: it has ids that may be in the calls, too.
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
        self._deadlines = deadlines(seconds, 1 + len(PAUSES), until)
        self.deadline = next(self._deadlines)
        return self.deadline

    def start(self, *, lend: bool = False) -> Callable[[], list[Any]]:
        """Sends the calls; as `Client.start`."""
        return self.writer.client.start(self.calls, lend=lend, deadline=self.begin(), wait=self.writer.wait)

    def send(self) -> None:
        """Sends the calls and waits; then each part has an outcome, or is to be sent again. It blocks.

        Raises:
            What nobody expected: what has no outcome yet may be in or not, and so its callers are told.
        """
        try:
            if self.calls:
                self.settle(self.start()())
        except BaseException as error:
            self.fail(error)
            raise

    def settle(self, results: list[Any]) -> None:
        """Repeats what got no answer; then sets the outcome of each part, or notes that it is to be sent again. It
        blocks if there is an error.
        """
        for result in results:
            if isinstance(result, Exception):
                self.repeat_unanswered(results)
                break
        #: Tokens of calls that were carried out.
        answered: set[bytes] = set()
        for call, result in zip(self.calls, results, strict=True):
            if not is_failure(result):
                answered.add(call.token)
            if not isinstance(result, Exception):
                for owner, part in call.members:
                    owner.outcomes[part] = bool(result)
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
        """Ends it with what nobody expected: what has no outcome yet may be in or not."""
        reason = interrupted(error)
        for request in self.requests:
            request.fail(copy_of(reason))

    def repeat_unanswered(self, results: list[Any]) -> None:
        """Repeats what got no answer, as long as Redis knows a repeat, and puts the results in its place."""
        for pause in PAUSES:
            again = self._unanswered(results)
            if not again or clock.now() - self._sent_at > REPEATED * self.writer.patience:
                break
            self.deadline = next(self._deadlines)
            time.sleep(pause)  # a part of the time of that attempt
            calls = {i: call for i in again if (call := self.calls[i].repeated_call()) is not None}
            if not calls:
                break
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
        had to come before. Not what comes after a call that was refused for good: its time has not come.
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
    the wrong kind of scores. Or a script failed: it may have met the keys of one id that somebody else has written.
    What it wrote before, if anything, merges with what is written now.
    """
    return (
        len(call.members) > 1
        and not isinstance(result, RedisUnavailable | RedisRefused | NotConfirmed)
        and (not isinstance(result, Refusal) or is_full(result) or is_misscored(result))
    )


def interrupted(error: BaseException) -> Exception:
    """What callers are told of an error that nobody expected."""
    if isinstance(error, LowqError):
        return error
    reason = RedisUnavailable(f"the push was interrupted: {error!r:.200}")
    reason.__cause__ = error
    return reason


def limit_of_caller(push_timeout: float) -> tuple[float, bool]:
    """Seconds that whoever calls this waits for its push, and whether the deadline of its batch is what limits it."""
    left = max(caller_deadline() - time.monotonic(), 0.0)
    return (left, True) if left <= push_timeout else (push_timeout, False)


def room_until(timeout: float) -> float:
    """Monotonic time until which a push waits for room that may wait for so many seconds."""
    return min(time.monotonic() + timeout, caller_deadline())


def limit_in_words(push_timeout: float, *, of_batch: bool) -> str:
    """How long somebody has waited."""
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
