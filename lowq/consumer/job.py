"""A job that a consumer has taken, as the caller gets it."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol


class Reports(Protocol):
    """What a job needs of the consumer that has taken it."""

    def ack(self, receipt: str) -> None: ...

    def release(self, receipt: str, delay: float | timedelta | None = None) -> None: ...

    def bury(self, receipt: str, reason: str = "") -> None: ...

    def fail(self, receipt: str, error: BaseException | str = "", delay: float | timedelta | None = None) -> None: ...

    def touch(self, receipt: str, seconds: float | timedelta) -> None: ...


@dataclass(slots=True, eq=False)  # not frozen: that would cost more than all else about it
class ConsumerJob:
    """A job that a consumer has taken. Reported once, by `ack`, `release`, `bury` or `fail`; each of them raises
    `NotTaken` when the consumer has it no more, and `RedisUnavailable` when it may be called again.
    """

    id: str
    #: Oldest (lowest score) first.
    payloads: list[Any]
    #: -1 fresh, n: failed n + 1 times.
    retry_count: int
    #: What the job can be reported by, in any process that has the session: ``consumer.ack(receipt)``.
    receipt: str
    #: The fencing token: grows with every change of the shard's owner. A database that remembers the highest one it saw
    #: can refuse an owner that was replaced without noticing.
    fence: int
    _consumer: Reports = field(repr=False)
    #: It is handed over without others, so that they are not in flight should it end the process.
    _is_solo: bool = field(default=False, repr=False)

    @property
    def payload(self) -> Any:
        """The newest of the payloads; None if somebody has removed them by hand."""
        return self.payloads[-1] if self.payloads else None

    def ack(self) -> None:
        """The job is done."""
        self._consumer.ack(self.receipt)

    def release(self, delay: float | timedelta | None = None) -> None:
        """The job waits again, uncharged: for so many seconds, or as it did before."""
        self._consumer.release(self.receipt, delay)

    def bury(self, reason: str = "") -> None:
        """The job goes to the morgue."""
        self._consumer.bury(self.receipt, reason)

    def fail(self, error: BaseException | str = "", delay: float | timedelta | None = None) -> None:
        """The job is charged a retry, and waits for it; without any left its oldest payload goes to the morgue."""
        self._consumer.fail(self.receipt, error, delay)

    def touch(self, seconds: float | timedelta) -> None:
        """From now on the job has so many seconds until ``ttr`` passes."""
        self._consumer.touch(self.receipt, seconds)
