"""A lease: the right to work a shard for a while, and what is answered to whoever can't have it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lease:
    """A time-limited, fenced right to work a shard."""

    token: str
    #: Grows with every change of owner.
    fence: int
    #: How it was got: anew, or resumed by the same process after it had run out unnoticed.
    resumed: bool = False
    #: Jobs of a dead owner that wait again.
    restored: int = 0
    #: Ids that were buried because their owners kept dying.
    poisoned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseDenied:
    """Somebody else has the shard, for `seconds` more unless it is renewed."""

    seconds: float
