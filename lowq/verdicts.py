"""Rules that workers and consumers share: reading the reply to a take, and choosing the outcome of a job.

What belongs to the application is called by `Remarks.ask` alone, which catches everything: whatever it does, an outcome
is written, or its jobs would be performed for ever.
"""

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from lowq.codec.payloads import cut_error, dump_text
from lowq.errors import JobCancelled, LeaseLost, LowqError, RedisUnavailable, TimeLimitExceeded
from lowq.logs import describe, get_log, printable
from lowq.options import MergeFunction
from lowq.retry import is_exhausted
from lowq.settings import Config
from lowq.shards.delivery import Delivery, Failure, Report, Undecodable
from lowq.shards.dispatcher import Dispatcher
from lowq.shards.shard import Shard
from lowq.store import Client

log = get_log("lowq.node")

T = TypeVar("T")

#: Seconds for which a shard is left alone when its script fails.
TROUBLE_SECONDS = 1.0
#: Exceptions that end a thread, a generator or a process where nobody expects it: out of a handler, and of what of the
#: application's is called for it, it is a failure of the job.
STOPS = (asyncio.CancelledError, GeneratorExit, SystemExit)


def read_takes(
    client: Client,
    dispatcher: Dispatcher,
    takes: Iterable[tuple[Shard, int]],
    replies: Iterable[Any],
    received: Callable[[Shard, Delivery], object],
    lost: Callable[[Shard], object],
    *,
    drops_failed: bool = False,
) -> BaseException | None:
    """Reads the replies to takes of shards, each given with its wake-ups before it was sent. ``received``: called with
    each delivery. ``lost``: called with a shard whose lease was lost. A shard whose script fails, or whose reply can't
    be read, rests for a while. ``drops_failed``: nothing of it is in hand then, and any failure is the shard's own,
    as in threads that no signal handler interrupts.

    Returns what concerns all shards: Redis did not answer, or a signal handler or the application raised meanwhile.
    """
    of_shard = Exception if drops_failed else ValueError | TypeError | LookupError | ArithmeticError
    trouble: BaseException | None = None
    for (shard, wakes), reply in zip(takes, replies, strict=False):
        try:
            delivery = shard.in_flight.read_delivery(reply)
            dispatcher.note_delivery(shard, wakes, delivery)
            received(shard, delivery)
        except LeaseLost:
            lost(shard)
        except RedisUnavailable as error:
            trouble = error if trouble is None else trouble
            if client.has_several_primaries:
                dispatcher.rest_for_failover(shard)
        except BaseException as error:
            if drops_failed:
                shard.in_flight.drop_delivery()
            if error is reply or issubclass(type(error), of_shard):
                dispatcher.rest(shard, TROUBLE_SECONDS)
                log.error("%r rests for %g s: %s", shard, TROUBLE_SECONDS, error, extra={"event": "trouble"})
            else:
                trouble = error
    return trouble


class Remarks:
    """Errors beside the handler's, to be logged once the outcome is written."""

    #: A text, and what was raised.
    remarks: Sequence[tuple[str, BaseException | None]] = ()
    #: Stops the process once the outcome is written: KeyboardInterrupt and the like, of the handler or of a hook.
    stop: BaseException | None = None

    def ask(self, remark: str, function: Callable[[], T], otherwise: T) -> T:
        """Calls what belongs to the application. Whatever it raises is kept for later, with the remark."""
        try:
            return function()
        except BaseException as raised:
            self.remark(remark, raised)
            return otherwise

    def remark(self, remark: str, raised: BaseException | None) -> None:
        """Keeps what something of the application's raised, if it raised anything."""
        self.remarks = [*self.remarks, (remark, raised)]
        if self.stop is None and raised is not None and not is_failure(raised) and not issubclass(type(raised), STOPS):
            self.stop = raised

    def log(self) -> None:
        """Logs them."""
        for remark, raised in self.remarks:
            log.error("%s", printable(remark), exc_info=raised)


def is_failure(error: BaseException) -> bool:
    """Whether it says that something failed; otherwise it says that the process is to stop."""
    # By its type: isinstance also asks what an object says of its class.
    if issubclass(type(error), BaseExceptionGroup):
        group: Any = error
        return all(is_failure(one) or issubclass(type(one), STOPS) for one in group.exceptions)
    return issubclass(type(error), Exception | TimeLimitExceeded | JobCancelled)


def error_bytes(remarks: Remarks, error: BaseException | str, config: Config) -> bytes:
    """An error, or a reason, as Redis keeps it."""
    said = error if type(error) is str else None  # not isinstance: see `is_failure`

    def dump() -> bytes:
        return dump_text(config.dump_error, config.format_error(error) if said is None else said)  # type: ignore[arg-type]

    data = remarks.ask("format_error or dump_error failed; the bare error is kept", dump, None)
    if data is None:
        text = describe(error, _bare) if said is None else said
        data = cut_error(text).encode("utf-8", "backslashreplace")
    return data


def _bare(error: Any) -> str:
    return "".join(traceback.format_exception_only(error)).rstrip()


def charge(job_id: str, retry_count: int, max_retry_count: int, delay: Callable[[int], float], error: bytes) -> Failure:
    """The verdict on an id that failed: another retry, or none is left. ``retry_count``: before; -1: it has not failed
    yet. ``delay``: seconds until that retry.
    """
    retry_count += 1
    if is_exhausted(retry_count, max_retry_count):
        return Failure(job_id, "exhausted", retry_count, 0.0, error)
    return Failure(job_id, "retry", retry_count, delay(retry_count), error)


async def bury_undecodable(
    shard: Shard,
    undecodable: Sequence[Undecodable],
    config: Config,
    write: Callable[[Shard, Sequence[Report]], Awaitable[object]],
    now: float | None = None,
) -> None:
    """Payloads that can't be decoded go to the morgue as they are, and don't stop the shard.

    Raises:
        LeaseLost, RedisUnavailable: as of ``write``. What is no Exception of ``dump_error``, once they are buried.
    """
    hooks = Remarks()
    for item in undecodable:
        # One call each: they are rare, and may be large.
        burial = item.id, error_bytes(hooks, item.reason, config), (item.payload,)
        await write(shard, [shard.in_flight.bury_report([burial], now)])
    for item in undecodable:
        log.error("queue %r, id %r: %s; it is in the morgue now", shard.queue, item.id, printable(item.reason))
    hooks.log()
    if hooks.stop is not None:
        raise hooks.stop


def merged(merge: MergeFunction, payloads: list[Any]) -> list[Any]:
    """Applies a merge function to the payloads of an id, oldest first.

    Raises:
        LowqError: the result is no list. Any exception of the function.
    """
    result: object = merge(list(payloads))
    if not isinstance(result, list):
        raise LowqError(f"merge={merge!r:.100} gave {result!r:.100}; it must return the list of payloads to hand over")
    return result


def log_lost(shard: Shard) -> None:
    """The lease was found to be lost by a call about what was taken."""
    log.warning(
        "%r: the lease was lost; whoever has the shard next performs what was in flight", shard,
        extra={"event": "lease_lost", "queue": shard.queue, "shard": shard.index},
    )  # fmt: skip
